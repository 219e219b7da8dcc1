"""The state of a running chain: its limits, counts and times."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from agentfactory.base.messages import CallError, EnvironmentReward, ToolCall, ToolResult, ToolSpec, text_of
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.chains.timeline import Timeline
from agentfactory.rollout.chains.tool_errors import ToolErrors
from agentfactory.rollout.config import RolloutConfig, RolloutRecipe
from agentfactory.rollout.data import Task
from agentfactory.rollout.images.image_intake import Images
from agentfactory.rollout.text.dialogue import Dialogue
from agentfactory.rollout.trajectory import StopReason, Trajectory
from agentfactory.tools.calls.limits import ChainLimits, Rates
from agentfactory.tools.calls.truncation import Cut


@dataclass(frozen=True)
class Setup:
    """The objects and settings that all chains of a recipe share. `cut` truncates a result to a number of tokens; None:
    results have no token limit."""

    recipe: RolloutRecipe
    dialogue: Dialogue
    images: Images
    specs: list[ToolSpec]
    cut: Cut | None
    rates: Rates
    tool_errors: ToolErrors = field(default_factory=ToolErrors)

    @property
    def config(self) -> RolloutConfig:
        """The recipe's `rollout:` section."""
        return self.recipe.rollout


class Episode:
    """A running chain, driven by a tool loop or by an agent with its own loop."""

    def __init__(self, setup: Setup, trajectory: Trajectory, task: Task, sampling: Sampling) -> None:
        self.setup = setup
        self.trajectory = trajectory
        self.task = task
        self.sampling = sampling
        self.max_turns = setup.config.max_turns
        self.limits = ChainLimits(setup.recipe.limits, setup.rates, setup.cut)
        self.timeline = Timeline(trajectory.timeline)
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)
        """Tool -> seconds spent in its calls."""
        self.sampled_tokens: int | None = 0
        """None if the count is unknown."""
        self.workspace: Path | None = None
        """The chain's folder, if it has one."""
        self.reported: EnvironmentReward | None = None
        """The reward that the agent itself reported."""

    @property
    def penalty(self) -> float:
        """The amount subtracted from the reward."""
        return self.limits.penalty + self.setup.config.outcome_penalty.get(self.trajectory.outcome, 0.0)

    def note_turn(self, sampled: int | None, anchor: str | None = None) -> None:
        """Count a turn of `sampled` tokens (None: unknown), taken in the state with this anchor."""
        before = self.sampled_tokens
        self.sampled_tokens = None if before is None or sampled is None else before + sampled
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
            **{f"tool_errors/{kind}": counts[kind] for kind in CallError},
            **{f"stop/{reason}": float(self.trajectory.stop_reason is reason) for reason in StopReason},
            **self.limits.metrics(),
            **tools,
        }
