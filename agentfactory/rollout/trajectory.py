"""The records of a chain: token rows, trajectories and groups."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np

from agentfactory.tools.messages import Message


class Outcome(StrEnum):
    """How a chain ended. Failures say nothing about the policy: they are never a reward of 0."""

    COMPLETED = "completed"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_OVERFLOW = "context_overflow"
    TOOL_LIMIT = "tool_limit"
    TOOL_INFRASTRUCTURE = "tool_infrastructure"
    INFERENCE_ERROR = "inference_error"
    AGENT_ERROR = "agent_error"
    REWARD_ERROR = "reward_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"

    @property
    def failed(self) -> bool:
        """Whether the chain broke instead of ending."""
        return self in _FAILURES


class StopReason(StrEnum):
    """What ended a chain that did not break. For `Outcome.TOOL_LIMIT`, the limit that was reached."""

    ANSWER = "answer"
    """The model gave its final answer."""
    FINISH = "finish"
    """A tool ended the chain."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_OVERFLOW = "context_overflow"
    CALLS_PER_TURN = "calls_per_turn"
    CALLS = "calls"
    CALLS_PER_TOOL = "calls_per_tool"
    COST = "cost"
    TOOL_SECONDS = "tool_seconds"
    CALLS_PER_SECOND = "calls_per_second"
    SECONDS_PER_CALL = "seconds_per_call"
    RESULT_BYTES = "result_bytes"
    RESULT_TOKENS = "result_tokens"
    IMAGES = "images"


_FAILURES = frozenset(
    {
        Outcome.TOOL_INFRASTRUCTURE,
        Outcome.INFERENCE_ERROR,
        Outcome.AGENT_ERROR,
        Outcome.REWARD_ERROR,
        Outcome.TIMEOUT,
        Outcome.CANCELLED,
    }
)


class Activity(StrEnum):
    """What a chain spends time on."""

    SETUP = "setup"
    """Its environments are reset; this includes the wait for instances."""
    WAIT = "wait"
    """It waits for an instance of a tool server, or a call waits for `limits.calls_per_second` or `parallel_calls`."""
    MODEL = "model"
    """The server samples, from the request to the answer; this includes the server's queue and repeated requests."""
    TOOL = "tool"
    """A call runs."""
    REWARD = "reward"
    """The rewards judge the chain."""


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


Stream = Any
"""One value per token: a list while its chain grows, an array once its group was saved or delivered (group_files)."""


@dataclass
class Row:
    """One token sequence with its streams, all of length `len(token_ids)`.

    `mask` is 1 where the server sampled the token and 0 elsewhere: nothing else is ever trained by RL.
    `logprobs` are the server's, of the sampled token after temperature (0.0 where the mask is 0).
    `weights` scale a token's loss (SFT; None means 1 on the mask).
    `turn_ends`: the end of each assistant turn, after its last token (None: each run of 1s in the mask is a turn).
    `images`: where images are in the row, in their order; none of their tokens is sampled.
    `roles`: a letter per token; sampled tokens have a role (roles.ROLES), context at the end has none, and the whole is
    empty if nothing is known.
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


@dataclass
class Stretch:
    """Seconds `start` to `end` of a chain, counted from its beginning. Stretches overlap if calls run in parallel.

    `turn` is the number of the assistant turn, from 0; None outside turns. `name` is the tool's, or the tool server's.
    """

    activity: Activity
    start: float
    end: float
    turn: int | None = None
    name: str = ""


def chain_id(group_id: str, index: int, retry: bool = False) -> str:
    """Return the id of a group's chain; `retry`: of the chain that takes its place after a failure. No code takes ids
    apart."""
    return f"{group_id}.{index}" + (".retry" if retry else "")


@dataclass
class Trajectory:
    """One chain: its messages, the sampled rows, and how it ended.

    A chain has one row, unless its template rewrites history or `rollout.context` shortens it: each rewritten prompt
    begins a new one.
    `metrics` are numbers by name (`success`, `tool_calls`, `tool_errors/unknown_tool`, ...). `reward` is None if the
    chain does not count: it failed, or `rollout.on_outcome` drops its outcome. `turn_rewards`, if the reward gives any,
    are credited to the assistant turns, in addition to `reward`.
    """

    id: str
    messages: list[Message]
    rows: list[Row]
    outcome: Outcome
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    turns: int = 0
    seconds: float = 0.0
    error: str | None = None
    turn_rewards: list[float] | None = None
    stop_reason: StopReason | None = None
    malformed_turns: list[int] = field(default_factory=list)
    """Numbers of the assistant turns, from 0, whose calls could not be read."""
    anchors: list[str | None] = field(default_factory=list)
    """Per assistant turn, the anchor of the state that its environment was in before it (None: it had none); empty if
    no environment gives any."""
    result: str | None = None
    """What an agent with its own loop returned or printed; None if it did not."""
    workspaces: list[str] = field(default_factory=list)
    """Where the folders of its programs are when they have ended, if the recipe keeps them (`keep_workspaces`)."""
    timeline: list[Stretch] = field(default_factory=list)
    """Where the `seconds` went, in the order in which the stretches ended."""

    def note_turn(self, anchor: str | None = None) -> None:
        """Count an assistant turn, which was taken in the state with this anchor."""
        if anchor is not None or self.anchors:
            self.anchors += [*[None] * (self.turns - len(self.anchors)), anchor]
        self.turns += 1

    def turn_spans(self) -> list[tuple[int, int, int]]:
        """Return (row, start, end) of each assistant turn: its tokens are [start, end) of `rows[row]`, starting at the
        first sampled one. Those with mask 0 were inserted. A turn in which nothing was sampled is an empty span.

        Raises ValueError if the rows do not contain `turns` turns.
        """
        spans = [(index, *span) for index, row in enumerate(self.rows) for span in row.turn_spans()]
        if len(spans) == self.turns - 1 and self.rows and self.rows[-1].turn_ends is None:
            # rows saved before they recorded their turns' ends: only the last turn can be empty
            length = len(self.rows[-1].mask)
            spans.append((len(self.rows) - 1, length, length))
        if len(spans) != self.turns:
            raise ValueError(f"chain {self.id} has {self.turns} turns, and its rows hold {len(spans)}")
        return spans


@dataclass
class Group:
    """The chains of one task. `version` is the number of the newest weights when the group was started."""

    id: str
    task: dict[str, Any]
    trajectories: list[Trajectory]
    version: int = 0
