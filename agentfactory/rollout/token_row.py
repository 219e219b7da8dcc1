"""A token row: context and sampled tokens, with the mask, logprob and policy version of each token."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

Stream = Any
"""One value per token: a list while its chain runs, an array once its group was saved or delivered (group_files)."""

NO_ROLE = "."
"""The letter in Row.roles of tokens that were not sampled."""


@dataclass
class Span:
    """Tokens [start, end) of a row, sampled by the weights labelled `version`. `mixed`: their KV cache may come from
    older weights (`rollout.inflight: keep`), so their logprobs belong to no single version."""

    version: str
    start: int
    end: int
    mixed: bool = False


@dataclass(frozen=True)
class ImageSpan:
    """An image in a row, with image tokens [offset, offset + length). `digest` is the hash of its pixels and its key in
    the run's image store (images.store); `grid` is its number of patches in time, height and width."""

    offset: int
    length: int
    digest: str
    grid: tuple[int, int, int]


LEAST_LOGPROB, LARGEST_LOGPROB = -float(np.finfo(np.float32).max), 1e-3
"""Range of a sampled token's log-probability in float32; rounding can make it positive. Others would give NaN."""


@dataclass
class Row:
    """A token sequence with its streams, all of length `len(token_ids)`. `mask` is 1 where the server sampled the token
    and 0 elsewhere; RL trains only tokens with mask 1. `logprobs` are the server's logprobs of the sampled tokens,
    after temperature (0.0 where the mask is 0). `weights` scale the loss of each token (SFT; None means 1 on the mask).
    `turn_ends` has the end of each assistant turn, exclusive (None: each run of 1s in the mask is a turn). `images` has
    the images of the row, in order; image tokens are never sampled. `roles` has a letter per token (token_roles.ROLES
    for sampled tokens, NO_ROLE for others). Context at the end has no letters; the string is empty if no roles are
    known. `teacher_logprobs` and `teacher_tokens` are the grades of a teacher behind a server, along `graded()` and not
    along all tokens: its log-probability of each, or for top_k, flat, those of its k most likely tokens there, and
    these tokens (-1: missing). `teacher_prompt` replaces the tokens before the first sampled one where a teacher grades
    the row with more in its context (see groups.teacher_context); None if it does not."""

    token_ids: Stream = field(default_factory=list)
    mask: Stream = field(default_factory=list)
    logprobs: Stream = field(default_factory=list)
    versions: list[Span] = field(default_factory=list)
    weights: Stream | None = None
    turn_ends: list[int] | None = None
    roles: str = ""
    images: list[ImageSpan] = field(default_factory=list)
    teacher_logprobs: Stream | None = None
    teacher_tokens: Stream | None = None
    teacher_prompt: Stream | None = None

    def graded(self) -> np.ndarray:
        """Return the positions that are trained: the sampled tokens, except a first one, which nothing predicts."""
        sampled = np.flatnonzero(self.mask)
        return sampled[sampled > 0]

    def check_logprobs(self) -> None:
        """Raise ValueError if the log-probability of a sampled token is NaN, infinite or positive."""
        if len(self.logprobs) != len(self.mask):
            raise ValueError(f"a row of {len(self.mask)} tokens has {len(self.logprobs)} logprobs")
        logprobs = np.asarray(self.logprobs, dtype=np.float64)
        within = (logprobs >= LEAST_LOGPROB) & (logprobs <= LARGEST_LOGPROB)
        if (wrong := np.flatnonzero(np.asarray(self.mask, dtype=bool) & ~within)).size:
            problem = f"token {wrong[0]} of a row has the log-probability {logprobs[wrong[0]]:g}"
            raise ValueError(f"{problem}; fix: it must be a number of at most 0")

    def append_context(self, token_ids: list[int], images: Sequence[ImageSpan] = ()) -> None:
        """Append tokens that were not sampled. The offsets of `images` are relative to the first new token."""
        start = len(self.token_ids)
        self.images += [replace(image, offset=start + image.offset) for image in images]
        self.token_ids += token_ids
        self.mask += [0] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)

    def append_sampled(
        self, token_ids: list[int], logprobs: list[float], versions: list[Span], mask: list[int] | None = None
    ) -> None:
        """Append a turn; `versions` are relative to its first token. `mask` is 0 for tokens that were inserted, not
        sampled (None: all were sampled). Raise ValueError if there is not one logprob per token."""
        if len(token_ids) != len(logprobs):
            raise ValueError(f"{len(token_ids)} sampled tokens came with {len(logprobs)} log-probabilities")
        start = len(self.token_ids)
        self.token_ids += token_ids
        self.mask += [1] * len(token_ids) if mask is None else mask
        self.logprobs += logprobs
        self.versions += [replace(span, start=start + span.start, end=start + span.end) for span in versions]
        self.turn_ends = [*(self.turn_ends or []), len(self.token_ids)]

    def note_roles(self, roles: str) -> None:
        """Set the roles of the last `len(roles)` tokens, the tokens of a turn."""
        self.roles = self.roles.ljust(len(self.token_ids) - len(roles), NO_ROLE) + roles

    def turn_spans(self) -> list[tuple[int, int]]:
        """Return [start, end) of each assistant turn, from its first sampled token; empty if it has none."""
        mask = np.asarray(self.mask, dtype=bool)
        if self.turn_ends is None:
            edges: list[int] = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
            return list(zip(edges[::2], edges[1::2], strict=True))
        spans = []
        for before, end in pairwise([0, *self.turn_ends]):
            sampled = np.flatnonzero(mask[before:end])
            spans.append((before + int(sampled[0]) if sampled.size else end, end))
        return spans

    def images_for_teacher(self) -> list[ImageSpan]:
        """Return the images of the teacher's row, which begins with `teacher_prompt`: moved by the added text."""
        own, prompt = np.asarray(self.token_ids), np.asarray(self.teacher_prompt)
        size = min(len(own), len(prompt))
        same = int(np.append(own[:size] == prompt[:size], False).argmin())
        added = len(prompt) - int(np.asarray(self.mask, dtype=bool).argmax())
        return [replace(image, offset=image.offset + added * (image.offset >= same)) for image in self.images]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Row):
            return NotImplemented
        return all(np.array_equal(value, getattr(other, name)) for name, value in vars(self).items())
