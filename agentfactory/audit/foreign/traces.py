"""Traces of verifiers, which verifiers from 0.3.1 on and prime-rl from 0.6 on save: a graph of messages, each with the
tokens that it adds to the conversation before it.

Read from the source of verifiers 0.4.0 (v1/trace.py, graph.py, episode.py: `Trace`, `MessageNode`, `Episode`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from agentfactory.audit.foreign.files import convert
from agentfactory.audit.foreign.messages import messages_of, named
from agentfactory.base.messages import Message
from agentfactory.rollout.token_row import Row, Span
from agentfactory.rollout.trajectory import Outcome, StopReason, Trajectory

_BLAME = {
    "provider_error": Outcome.INFERENCE_ERROR,
    "sandbox_error": Outcome.TOOL_INFRASTRUCTURE,
    "toolset_error": Outcome.TOOL_INFRASTRUCTURE,
    "interception_error": Outcome.TOOL_INFRASTRUCTURE,
    "tunnel_error": Outcome.TOOL_INFRASTRUCTURE,
}
"""Stop condition -> the outcome of a trace that failed; AGENT_ERROR for others: harness, environment or task."""
_LIMITS = {
    "max_turns": (Outcome.MAX_TURNS, StopReason.MAX_TURNS),
    "max_output_tokens": (Outcome.MAX_TOKENS, StopReason.MAX_TOKENS),
    "max_total_tokens": (Outcome.CONTEXT_OVERFLOW, StopReason.CONTEXT_OVERFLOW),
    "max_input_tokens": (Outcome.CONTEXT_OVERFLOW, StopReason.CONTEXT_OVERFLOW),
    "compaction_failed": (Outcome.CONTEXT_OVERFLOW, StopReason.CONTEXT_OVERFLOW),
}


class Node(msgspec.Struct):
    """A message, and the tokens that it adds. Values other than `token_ids` and `mask` are those of sampled tokens."""

    message: dict[str, Any]
    parent: int | None = None
    sampled: bool = False
    token_ids: list[int] = msgspec.field(default_factory=list)
    mask: list[bool] = msgspec.field(default_factory=list)
    logprobs: list[float] = msgspec.field(default_factory=list)
    advantages: list[float] | None = None
    trainer_logprobs: list[float] | None = None


class Error(msgspec.Struct):
    type: str = ""
    message: str = ""


class Reward(msgspec.Struct):
    score: float
    weight: float = 1.0


class Task(msgspec.Struct):
    data: dict[str, Any] = msgspec.field(default_factory=dict)
    key: str | None = None
    hash: str | None = None


class Seat(msgspec.Struct):
    """The agent of a trace."""

    name: str = "agent"
    trainable: bool = True


class Call(msgspec.Struct):
    finish_reason: str | None = None
    error: Error | None = None


class Trace(msgspec.Struct):
    """The turns of an agent in an episode. `group_id` and `reward` are of prime-rl's first files with traces."""

    id: str
    task: Task = msgspec.field(default_factory=Task)
    agent: Seat = msgspec.field(default_factory=Seat)
    nodes: list[Node] = msgspec.field(default_factory=list)
    calls: list[Call] = msgspec.field(default_factory=list)
    rewards: dict[str, Reward | float | None] = msgspec.field(default_factory=dict)
    metrics: dict[str, float | None] = msgspec.field(default_factory=dict)
    info: dict[str, Any] = msgspec.field(default_factory=dict)
    is_timeout: bool = False
    stop_condition: str | None = None
    errors: list[Error] | None = None


class _Branch(msgspec.Struct):
    index: int
    advantages: list[float | None] | None = None
    trainer_logprobs: list[float | None] | None = None


class _Update(msgspec.Struct):
    trace_id: str
    info: dict[str, Any] = msgspec.field(default_factory=dict)
    branches: list[_Branch] = msgspec.field(default_factory=list)


class Episode(msgspec.Struct):
    """The traces of all agents in a run of an environment."""

    id: str
    traces: list[Trace]
    task: Task = msgspec.field(default_factory=Task)
    env: dict[str, Any] = msgspec.field(default_factory=dict)
    group: dict[str, Any] | None = None
    run: dict[str, Any] | None = None
    errors: list[Error] = msgspec.field(default_factory=list)
    is_timeout: bool = False

    @property
    def work(self) -> dict[str, Any]:
        """Its part of a training run: `type`, `step`, `policy`; empty in an evaluation alone."""
        return (self.run or {}).get("work") or {}


@dataclass(frozen=True)
class Version:
    """The versions of the weights between which a trace was sampled."""

    first: int
    last: int

    @property
    def label(self) -> str:
        """Name of the weights in the spans of rows."""
        return f"step-{self.first}"


def is_trace(row: Mapping[str, Any]) -> bool:
    """Return whether a line holds an episode, or a trace alone."""
    return isinstance(row.get("traces"), list) or isinstance(row.get("nodes"), list)


def episode_of(row: dict[str, Any]) -> Episode:
    """Return the episode in a line. Raise ValueError if there is none."""
    if "traces" in row:
        episode: Episode = convert(row, Episode)
        return episode
    trace: Trace = convert(row, Trace)
    return Episode(trace.id, [trace], trace.task, run=row.get("run"))


def policies(episode: Episode) -> list[Trace]:
    """Return the traces of agents that are trained: not those of judges."""
    return [trace for trace in episode.traces if trace.agent.trainable]


def failed(episode: Episode) -> Trajectory:
    """Return the chain of an episode that failed before it had a trace."""
    outcome = Outcome.TIMEOUT if episode.is_timeout else Outcome.AGENT_ERROR
    return Trajectory(episode.id, [], [], outcome, error=_described(episode.errors) or "the episode has no trace")


def chain_of(trace: Trace, version: Version | None = None) -> Trajectory:
    """Return the chain of a trace, a row per branch of its graph. Raise ValueError if tokens and masks do not fit."""
    outcome, reason = _outcome(trace)
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    scores = {name: score for name, score in trace.rewards.items() if score is not None}
    for name, score in scores.items():
        metrics[f"reward/{name}"] = score.score if isinstance(score, Reward) else score
    values = [score.score * score.weight if isinstance(score, Reward) else score for score in scores.values()]
    return Trajectory(
        trace.id,
        named([_message(node) for node in trace.nodes]),
        rows_of(trace, version),
        outcome,
        reward=sum(values) if values else None,
        metrics=metrics,
        turns=sum(node.sampled for node in trace.nodes),
        error=_described(trace.errors or []) or None,
        stop_reason=reason,
    )


def _message(node: Node) -> Message:
    (message,) = messages_of([node.message], "user")
    return message


def _outcome(trace: Trace) -> tuple[Outcome, StopReason | None]:
    stop = trace.stop_condition or ""
    if trace.is_timeout or stop.endswith("_timeout"):
        return Outcome.TIMEOUT, None
    if trace.errors or stop.endswith("error"):
        return _BLAME.get(stop, Outcome.AGENT_ERROR), None
    if stop in _LIMITS:
        return _LIMITS[stop]
    last = next((call for call in reversed(trace.calls) if call.error is None), None)
    if last is not None and last.finish_reason == "length":
        return Outcome.MAX_TOKENS, StopReason.MAX_TOKENS
    return Outcome.COMPLETED, StopReason.ANSWER


def _described(errors: Sequence[Error]) -> str:
    return f"{errors[-1].type}: {errors[-1].message}" if errors else ""


def paths(nodes: Sequence[Node]) -> list[list[int]]:
    """Return the nodes of each branch, root first, by its leaf. Raise ValueError if a parent comes after its node."""
    for number, node in enumerate(nodes):
        if node.parent is not None and not 0 <= node.parent < number:
            raise ValueError(f"the parent of node {number} is {node.parent}; it has to be a node before it")
    parents = {node.parent for node in nodes}
    found = []
    for leaf in (number for number in range(len(nodes)) if number not in parents):
        path, at = [], leaf
        while True:
            path.append(at)
            above = nodes[at].parent
            if above is None:
                break
            at = above
        found.append(path[::-1])
    return found


def rows_of(trace: Trace, version: Version | None) -> list[Row]:
    """Return the row of each branch; none if the trace has no tokens."""
    rows, known = [], set[int]()
    for path in paths(trace.nodes):
        row = Row(turn_ends=[])
        for number in path:
            node = trace.nodes[number]
            _check(node, number)
            if node.sampled and number not in known:
                _add_turn(row, node, version)
            else:
                row.append_context(node.token_ids)
        known.update(path)
        if row.token_ids:
            rows.append(row)
    return rows


def _add_turn(row: Row, node: Node, version: Version | None) -> None:
    given = iter(node.logprobs)
    logprobs = [next(given, 0.0) if sampled else 0.0 for sampled in node.mask]
    first = node.mask.index(True) if True in node.mask else len(node.mask)
    spans = []
    if version is not None and first < len(node.mask):
        spans = [Span(version.label, first, len(node.mask), mixed=version.last != version.first)]
    row.append_sampled(node.token_ids, logprobs, spans, [int(sampled) for sampled in node.mask])


def _check(node: Node, number: int) -> None:
    count = sum(node.mask)
    if len(node.mask) != len(node.token_ids):
        problem = f"node {number} has {len(node.token_ids)} token ids and {len(node.mask)} values of its mask"
        raise ValueError(problem)
    for name in ("logprobs", "advantages", "trainer_logprobs"):
        values = getattr(node, name)
        if values and len(values) != count:
            raise ValueError(f"node {number} has {count} sampled tokens and {len(values)} {name}")


def credit_of(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield what the trainer noted about the sampled tokens of each row, as in Seen.credit."""
    number, known = 0, set[int]()
    for path in paths(trace.nodes):
        nodes = [trace.nodes[at] for at in path]
        starts = [0, *accumulate(len(node.token_ids) for node in nodes)]
        noted: dict[bool, dict[str, Any]] = {}
        for at, node, start in zip(path, nodes, starts, strict=False):
            if node.advantages is None or not node.sampled or at in known:
                continue
            compared = node.trainer_logprobs is not None
            mine = noted.setdefault(compared, {"row": number, "targets": [], "advantage": [], "proximal": []})
            mine["targets"] += [start + place for place, sampled in enumerate(node.mask) if sampled]
            mine["advantage"] += node.advantages
            mine["proximal"] += node.trainer_logprobs or []
        known.update(path)
        for compared, mine in noted.items():
            if mine["targets"]:
                yield mine if compared else {name: mine[name] for name in ("row", "targets", "advantage")}
        number += bool(starts[-1])


@dataclass(frozen=True)
class Update:
    """Later notes of prime-rl on a trace. `streams`: (branch, name) -> a value for each token, or NaN."""

    info: dict[str, Any]
    streams: Mapping[tuple[int, str], np.ndarray]


def update_of(row: dict[str, Any]) -> tuple[str, Update]:
    """Return the id of a trace, and what a line notes about it. Raise ValueError if the line has another form."""
    saved: _Update = convert(row, _Update)
    streams = {
        (branch.index, name): np.asarray([np.nan if value is None else value for value in values], dtype=np.float32)
        for branch in saved.branches
        for name in ("advantages", "trainer_logprobs")
        if (values := getattr(branch, name))
    }
    return saved.trace_id, Update(saved.info, streams)


def fold(trace: Trace, update: Update) -> None:
    """Add an update to its trace: to each message the values of all its sampled tokens, as prime-rl does."""
    trace.info = _merged(trace.info, update.info)
    branches = paths(trace.nodes)
    for (index, name), stream in update.streams.items():
        start = 0
        for node in (trace.nodes[at] for at in (branches[index] if 0 <= index < len(branches) else ())):
            span = stream[start : start + len(node.token_ids)]
            start += len(node.token_ids)
            if len(span) < len(node.token_ids) or len(node.mask) != len(span):
                break
            values = span[np.asarray(node.mask, dtype=bool)]
            if values.size and not np.isnan(values).any():
                setattr(node, name, values.tolist())


def _merged(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}
