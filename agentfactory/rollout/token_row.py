"""A row of tokens: what the model saw and sampled, with the mask, log-probabilities and versions of each token."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

Stream = Any
"""One value per token: a list while its chain grows, an array once its group was saved or delivered (group_files)."""

NO_ROLE = "."
"""In Row.roles: a token that was not sampled."""


@dataclass
class Span:
    """Tokens [start, end) of a row, sampled by the weights labelled `version`.

    `mixed` marks tokens whose cached context may come from older weights (`rollout.inflight: keep`): their
    log-probabilities belong to no single version.
    """

    version: str
    start: int
    end: int
    mixed: bool = False


@dataclass(frozen=True)
class ImageSpan:
    """An image in a row: the tokens [offset, offset + length) stand for it. `digest` is that of its pixels, under which
    the run's images are stored (images.store); `grid` is the number of its patches in time, height and width."""

    offset: int
    length: int
    digest: str
    grid: tuple[int, int, int]


@dataclass
class Row:
    """One token sequence with its streams, all of length `len(token_ids)`.

    `mask` is 1 where the server sampled the token and 0 elsewhere: nothing else is ever trained by RL.
    `logprobs` are the server's, of the sampled token after temperature (0.0 where the mask is 0).
    `weights` scale a token's loss (SFT; None means 1 on the mask).
    `turn_ends`: the end of each assistant turn, after its last token (None: each run of 1s in the mask is a turn).
    `images`: where images are in the row, in their order; none of their tokens is sampled.
    `roles`: a letter per token; sampled tokens have a role (token_roles.ROLES), context at the end has none, and the
    whole is empty if nothing is known.
    """

    token_ids: Stream = field(default_factory=list)
    mask: Stream = field(default_factory=list)
    logprobs: Stream = field(default_factory=list)
    versions: list[Span] = field(default_factory=list)
    weights: Stream | None = None
    turn_ends: list[int] | None = None
    roles: str = ""
    images: list[ImageSpan] = field(default_factory=list)

    def append_context(self, token_ids: list[int], images: Sequence[ImageSpan] = ()) -> None:
        """Add tokens that were not sampled: prompts, tool results, closing tokens. The offsets of `images` count from
        the first of them."""
        start = len(self.token_ids)
        self.images += [replace(image, offset=start + image.offset) for image in images]
        self.token_ids += token_ids
        self.mask += [0] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)

    def append_sampled(
        self, token_ids: list[int], logprobs: list[float], versions: list[Span], mask: list[int] | None = None
    ) -> None:
        """Add a turn; `versions` count from its first token. `mask` is 0 for tokens that were inserted, not sampled
        (None: all were sampled)."""
        if len(token_ids) != len(logprobs):
            raise ValueError(f"{len(token_ids)} sampled tokens came with {len(logprobs)} log-probabilities")
        start = len(self.token_ids)
        self.token_ids += token_ids
        self.mask += [1] * len(token_ids) if mask is None else mask
        self.logprobs += logprobs
        self.versions += [replace(span, start=start + span.start, end=start + span.end) for span in versions]
        self.turn_ends = [*(self.turn_ends or []), len(self.token_ids)]

    def note_roles(self, roles: str) -> None:
        """Set the roles of the last tokens, which are those of a turn."""
        self.roles = self.roles.ljust(len(self.token_ids) - len(roles), NO_ROLE) + roles

    def turn_spans(self) -> list[tuple[int, int]]:
        """Return [start, end) of each assistant turn, from its first sampled token; an empty span if nothing was
        sampled."""
        mask = np.asarray(self.mask, dtype=bool)
        if self.turn_ends is None:
            edges: list[int] = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
            return list(zip(edges[::2], edges[1::2], strict=True))
        spans = []
        for before, end in pairwise([0, *self.turn_ends]):
            sampled = np.flatnonzero(mask[before:end])
            spans.append((before + int(sampled[0]) if sampled.size else end, end))
        return spans

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Row):
            return NotImplemented
        return all(np.array_equal(value, getattr(other, name)) for name, value in vars(self).items())
