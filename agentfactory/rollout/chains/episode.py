"""The state of a running chain: its limits, counts, times and tool errors."""

import logging
import re
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from agentfactory.base.messages import CallError, EnvironmentReward, ToolCall, ToolResult, ToolSpec, text_of
from agentfactory.base.run_notices import notify
from agentfactory.rollout.chains.chain_counts import COUNTS
from agentfactory.rollout.chains.concurrency import Place
from agentfactory.rollout.chains.sampling import Sampling, TurnBudget
from agentfactory.rollout.config import RolloutConfig, RolloutRecipe
from agentfactory.rollout.data import Task
from agentfactory.rollout.images.image_intake import Images
from agentfactory.rollout.text.dialogue import Dialogue
from agentfactory.rollout.trajectory import Activity, StopReason, Stretch, Trajectory
from agentfactory.tools.calls.limits import ChainLimits, Rates
from agentfactory.tools.calls.truncation import Cut

logger = logging.getLogger(__name__)

ENOUGH_CALLS = 16
"""Minimum number of calls before a tool is reported, since a few may raise by chance."""
NEARLY_ALL = 0.9
"""Share of failed calls, of all tools together, at which a step is reported."""
_LOOKS_FAILED = re.compile(
    r"\W*(?:[\w.]*(?:error|exception|traceback)\b|(?:[\w.]+ ){1,3}[\w.]*(?:error|exception)\s*:|"
    r"(?:failed|unable|cannot|could not)\b)",
    re.IGNORECASE,
)
"""The beginning of a result that reports an error. Many servers do not mark such results as errors."""


class ToolErrors:
    """A counter of the errors of each tool, until a warning about the tool."""

    def __init__(self) -> None:
        self._raised: dict[str, Counter[str]] = defaultdict(Counter)
        """Tool -> error, or result that reads like one ("" for none), -> calls since the tool was last checked."""
        self._failed: Counter[str] = Counter()
        """Tool -> calls since it was last checked that raised or timed out."""
        self._told: set[str] = set()
        self._step_calls = self._step_failed = 0
        """Calls since the last report, of all tools: a step's, or those of several steps if it had too few."""
        self._first = ""
        """The first error of the step, with its tool."""

    def note(self, tool: str, result: ToolResult) -> None:
        self.note_cut(tool, result.left_out)
        if result.error is CallError.UNKNOWN_TOOL:
            return
        text = text_of(result.content)[:300] or "an error without text"
        raised = result.error in (CallError.TOOL_ERROR, CallError.TIMEOUT)
        failed = raised or (result.error is None and _LOOKS_FAILED.match(text) is not None)
        self._step_calls += 1
        self._step_failed += failed
        if failed and not self._first:
            self._first = f"{tool}: {text}"
        if tool in self._told:
            return
        self._raised[tool][text if failed else ""] += 1
        self._failed[tool] += raised

    def note_cut(self, tool: str, left_out: int) -> None:
        """Warn if `limits.result_bytes` truncated a result by `left_out` bytes."""
        if left_out:
            text = f"tool {tool}: a result exceeded limits.result_bytes by {left_out:,} bytes and was truncated"
            notify(logger, f"tool {tool} is cut", text)

    def report(self) -> None:
        """Warn about each tool, once, if at least half of its calls since the last check failed, or nearly all returned
        what reads like an error; and about a step whose calls nearly all failed."""
        for tool in [tool for tool, found in self._raised.items() if found.total() >= ENOUGH_CALLS]:
            found, raised = self._raised.pop(tool), self._failed.pop(tool, 0)
            calls = found.total()
            failed = calls - found.pop("", 0)
            if raised >= calls - raised or failed >= NEARLY_ALL * calls:
                self._told.add(tool)
                text = f"tool {tool}: {failed} of {calls} calls failed, such as: {found.most_common(1)[0][0]}"
                notify(logger, f"tool {tool} raises", text, times=0)
        if self._step_calls < ENOUGH_CALLS:
            return
        calls, failed, first = self._step_calls, self._step_failed, self._first
        self._step_calls, self._step_failed, self._first = 0, 0, ""
        if failed >= NEARLY_ALL * calls and not self._told:
            fix = "try it by `agentfactory tools call RECIPE TOOL key=value`"
            text = f"{failed} of the last {calls} tool calls ended in errors, the first one of {first}; fix: {fix}"
            notify(logger, "tool calls fail", text, times=0)


_LEAST_WAIT = 0.001

Call = Callable[[ToolCall, float | None], Awaitable[ToolResult]]
"""(call, time limit in seconds) -> the result."""


class Timeline:
    """A recorder that appends to a trajectory's `timeline`, whose clock starts at 0 when this object is created."""

    def __init__(self, stretches: list[Stretch]) -> None:
        self._stretches = stretches
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def note(self, activity: Activity, start: float, end: float, turn: int | None = None, name: str = "") -> None:
        """Append an interval between two times of `time.monotonic()`."""
        since, until = (round(moment - self._began, 4) for moment in (start, end))
        self._stretches.append(Stretch(activity, since, until, turn, name))

    def note_setup(self, waits: Sequence[tuple[str, float, float]]) -> None:
        """Append the time until now as the chain's setup; `waits` are (server, start, end) of each wait in it."""
        for server, start, end in waits:
            self.note(Activity.WAIT, start, end, name=server)
        self.note(Activity.SETUP, self._began, time.monotonic())

    @contextmanager
    def measure(self, activity: Activity, turn: int | None = None, name: str = "") -> Iterator[None]:
        """Append the time of the `with` block, even if it raises or is cancelled."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.note(activity, start, time.monotonic(), turn, name)

    def running_at(self, moment: float) -> tuple[Stretch, float] | None:
        """Return the activity that ran longest at this `time.monotonic()`, and its seconds until then, or None."""
        at = moment - self._began
        running = [stretch for stretch in self._stretches if stretch.start <= at <= stretch.end + _LEAST_WAIT]
        first = min(running, key=lambda stretch: stretch.start, default=None)
        return None if first is None else (first, at - first.start)

    def calls(self, make: Call, turn: int | None) -> Call:
        """Wrap `make`, which runs one call, to record its times. A call's wait lasts from now until `make` starts."""
        asked = time.monotonic()

        async def measured(call: ToolCall, seconds: float | None) -> ToolResult:
            if (began := time.monotonic()) - asked >= _LEAST_WAIT:
                self.note(Activity.WAIT, asked, began, turn, call.name)
            with self.measure(Activity.TOOL, turn, call.name):
                return await make(call, seconds)

        return measured


@dataclass(frozen=True)
class Setup:
    """The parts that all chains of a recipe share. `cut` truncates a result to a number of tokens; None: no limit."""

    recipe: RolloutRecipe
    dialogue: Dialogue
    images: Images
    specs: list[ToolSpec]
    cut: Cut | None
    rates: Rates
    tool_errors: ToolErrors = field(default_factory=ToolErrors)

    @property
    def config(self) -> RolloutConfig:
        return self.recipe.rollout


class Episode:
    """A running chain, driven by a tool loop or by an agent with its own loop."""

    def __init__(self, setup: Setup, trajectory: Trajectory, task: Task, sampling: Sampling) -> None:
        self.setup = setup
        self.trajectory = trajectory
        self.task = task
        self.sampling = sampling
        self.max_turns = setup.config.max_turns
        self.budget = TurnBudget(setup.config.max_tokens, setup.config.max_total_tokens)
        self.limits = ChainLimits(setup.recipe.limits, setup.rates, setup.cut)
        self.timeline = Timeline(trajectory.timeline)
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self.sampled_tokens: int | None = 0
        self.workspace: Path | None = None
        self.reported: EnvironmentReward | None = None
        """The reward that the agent itself reported."""
        self.own_metrics: Callable[[], dict[str, float]] = dict
        self.place: Place | None = None
        """The chain's place, by which its turns are held; None: they never are."""

    def turn(self, ids: Sequence[int]) -> AbstractAsyncContextManager[None]:
        """See Place."""
        return nullcontext() if self.place is None else self.place.turn(ids)

    def note_held(self, start: float, end: float) -> None:
        """Record that the next turn was held between two times of `time.monotonic()`."""
        self.timeline.note(Activity.HELD, start, end, self.trajectory.turns)

    @property
    def penalty(self) -> float:
        return self.setup.config.outcome_penalty.get(self.trajectory.outcome, 0.0)

    def note_turn(self, sampled: int | None, anchor: str | None = None) -> None:
        """Count a turn of `sampled` tokens (None: unknown), taken in the state with this anchor."""
        before = self.sampled_tokens
        self.sampled_tokens = None if before is None or sampled is None else before + sampled
        COUNTS.turns += 1
        COUNTS.tokens += sampled or 0
        self.trajectory.note_turn(anchor)

    def note_malformed(self, turn: int, error: str) -> None:
        """Record that the turn with this number could not be parsed, with the text that the model gets."""
        self.trajectory.errors.append(error)
        self.counts[CallError.MALFORMED_CALL] += 1
        self.trajectory.malformed_turns.append(turn)

    def note_results(self, calls: list[ToolCall], results: list[ToolResult]) -> StopReason | None:
        """Count calls, and return the reason why their results end the chain, or None."""
        self.counts["tool_calls"] += len(calls)
        for call, result in zip(calls, results, strict=True):
            self.counts[f"tool/{call.name}/calls"] += 1
            self.seconds[call.name] += result.seconds
            self.setup.tool_errors.note(call.name, result)
            if result.error is not None:
                self.counts[result.error] += 1
                self.counts[f"tool/{call.name}/errors"] += 1
                self.trajectory.errors.append(f"{call.name}: {text_of(result.content)}")
        if any(result.finish for result in results):
            return StopReason.FINISH
        return None if self.limits.stopped is None else StopReason(self.limits.stopped)

    def metrics(self) -> dict[str, float]:
        """Return all metrics of the chain by name, including zeros, so that means over chains are right."""
        counts, rows = self.counts, self.trajectory.rows
        tools: dict[str, float] = {}
        for name in (spec.name for spec in self.setup.specs):
            tools[f"tool/{name}/calls"] = counts[f"tool/{name}/calls"]
            tools[f"tool/{name}/errors"] = counts[f"tool/{name}/errors"]
            tools[f"tool/{name}/seconds"] = self.seconds[name]
        return {
            "tool_calls": counts["tool_calls"],
            "truncated_turns": counts["truncated_turns"],
            **({} if self.sampled_tokens is None else {"sampled_tokens": self.sampled_tokens}),
            "rows": len(rows),
            "row_tokens": sum(len(row.token_ids) for row in rows),
            "penalty": self.penalty,
            "held_seconds": 0.0 if self.place is None else self.place.held_seconds,
            **{f"tool_errors/{kind}": counts[kind] for kind in CallError},
            **{f"stop/{reason}": float(self.trajectory.stop_reason is reason) for reason in StopReason},
            **self.limits.metrics(),
            **tools,
            **self.own_metrics(),
        }
