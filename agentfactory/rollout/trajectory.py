"""The records of chains: trajectories and groups, outcomes and times."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from agentfactory.rollout.token_row import Row
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
