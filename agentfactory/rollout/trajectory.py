"""Records of chains: trajectories, groups, outcomes and times."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from agentfactory.base.messages import Message, own_copy
from agentfactory.rollout.token_row import Row


class Outcome(StrEnum):
    """The end of a chain. Failures say nothing about the policy, so they never count as a reward of 0."""

    COMPLETED = "completed"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_OVERFLOW = "context_overflow"
    TOOL_LIMIT = "tool_limit"
    TOOL_INFRASTRUCTURE = "tool_infrastructure"
    INFERENCE_ERROR = "inference_error"
    AGENT_ERROR = "agent_error"
    USER_ERROR = "user_error"
    REWARD_ERROR = "reward_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"

    @property
    def failed(self) -> bool:
        """True if the chain failed instead of ending properly."""
        ended = (Outcome.COMPLETED, Outcome.MAX_TURNS, Outcome.MAX_TOKENS, Outcome.CONTEXT_OVERFLOW, Outcome.TOOL_LIMIT)
        return self not in ended


class StopReason(StrEnum):
    """The reason why a chain ended without failing. For `Outcome.TOOL_LIMIT`, the limit that was reached."""

    ANSWER = "answer"
    FINISH = "finish"
    USER_DONE = "user_done"
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


class Activity(StrEnum):
    SETUP = "setup"
    """Reset of the environments, including the wait for instances."""
    WAIT = "wait"
    """Wait for an instance of a tool server, or of a call for a limit."""
    HELD = "held"
    """Wait of a turn for room in the servers' caches."""
    MODEL = "model"
    """Sampling, from request to response, including the server's queue and retries."""
    TOOL = "tool"
    USER = "user"
    """A message of the simulated user (`rollout.user`)."""
    REWARD = "reward"
    TEACHER = "teacher"
    """Requests to the server of the teacher (`teacher.url`), after the rewards."""


@dataclass
class Stretch:
    """An interval of a chain, in seconds since its start. Intervals overlap if calls run in parallel. `turn` is the
    number of the assistant turn, from 0; None outside turns. `name` names the tool or tool server."""

    activity: Activity
    start: float
    end: float
    turn: int | None = None
    name: str = ""


def chain_id(group_id: str, index: int, retry: bool = False) -> str:
    """Return the id of chain `index` of a group; `retry` marks the chain that replaces a failed one."""
    return f"{group_id}.{index}" + (".retry" if retry else "")


@dataclass
class Trajectory:
    """A chain: its messages, sampled rows and outcome. It has one row, unless its template rewrites history or
    `rollout.context` shortens it: each rewritten prompt starts a new row. `metrics` are numbers by name (`success`,
    `tool_calls`, `tool_errors/unknown_tool`, ...). `reward` is None if the chain failed or `rollout.on_outcome` drops
    its outcome. `turn_rewards`, if any, are credited to the assistant turns in addition to `reward`."""

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
    """Numbers of the assistant turns, from 0, whose calls could not be parsed."""
    errors: list[str] = field(default_factory=list)
    """The texts that the model got about turns that could not be parsed and about calls that failed, in order."""
    anchors: list[str | None] = field(default_factory=list)
    """Per assistant turn, the anchor of the environment's state before it (None: none); empty if none has any."""
    result: str | None = None
    """The value that an agent with its own loop returned or printed; None if there is none."""
    timeline: list[Stretch] = field(default_factory=list)
    """The activities of the chain, ordered by their ends."""

    def copied(self) -> "Trajectory":
        """Return a copy for a user's function. The rows are shared."""
        return replace(self, **{name: own_copy(value) for name, value in vars(self).items()})

    def note_turn(self, anchor: str | None = None) -> None:
        """Count an assistant turn; `anchor` identifies the environment's state before it."""
        if anchor is not None or self.anchors:
            self.anchors += [*[None] * (self.turns - len(self.anchors)), anchor]
        self.turns += 1

    def turn_spans(self) -> list[tuple[int, int, int]]:
        """Return (row, start, end) of each assistant turn: its tokens are [start, end) of `rows[row]`, from the first
        sampled one; those with mask 0 were inserted. Raise ValueError if the rows do not contain `turns` turns."""
        spans = [(index, *span) for index, row in enumerate(self.rows) for span in row.turn_spans()]
        if len(spans) == self.turns - 1 and self.rows and self.rows[-1].turn_ends is None:
            # rows of older runs have no turn_ends, and only their last turn can be empty
            length = len(self.rows[-1].mask)
            spans.append((len(self.rows) - 1, length, length))
        if len(spans) != self.turns:
            raise ValueError(f"chain {self.id} has {self.turns} turns, but its rows contain {len(spans)}")
        return spans


@dataclass
class Judged:
    """The decisions of a curriculum when a group was saved: each position below `upto` in the order of tasks had begun
    or was passed over, the `passed` ones since the group saved before."""

    upto: int
    passed: list[int]


@dataclass
class Group:
    """The chains of one task. `version` is the policy version when the group was started, `source` the name of the
    task's source if the recipe has several, and `judged` what a curriculum has decided."""

    id: str
    task: dict[str, Any]
    trajectories: list[Trajectory]
    version: int = 0
    source: str = ""
    judged: Judged | None = None
