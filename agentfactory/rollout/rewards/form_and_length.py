"""Rewards for the format and length of an agent's messages."""

import re
from typing import Annotated

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from agentfactory.base.messages import text_of
from agentfactory.rollout.rewards.reward_spec import RewardError, reward
from agentfactory.rollout.rewards.text import OPTIONS, Pattern, matches
from agentfactory.rollout.trajectory import Trajectory


@reward
@dataclass(config=OPTIONS)
class Format:
    """The fraction of messages with the required format; if only the last assistant message is checked, 0 or 1."""

    pattern: Pattern | None = None
    """Regular expression that must match the whole message, ignoring surrounding whitespace."""
    tags: tuple[str, ...] = ()
    """Tag names, such as think, answer, that the message must open and close exactly once, in this order."""
    every_turn: bool = False
    """Check every assistant message. Tool calls written by the chat template are not part of its text."""

    @model_validator(mode="after")
    def _one_form(self) -> "Format":
        if (self.pattern is None) == (not self.tags):
            raise ValueError("set either pattern or tags")
        return self

    def __call__(self, trajectory: Trajectory) -> float:
        said = [text_of(m.get("content") or "") for m in trajectory.messages if m["role"] == "assistant"]
        said = said if self.every_turn else said[-1:]
        return sum(map(self._fits, said)) / len(said) if said else 0.0

    def _fits(self, text: str) -> bool:
        if self.pattern is not None:
            return matches(self.pattern, text)
        expected = [tag for name in self.tags for tag in (f"<{name}>", f"</{name}>")]
        return re.findall("|".join(map(re.escape, expected)), text) == expected


@reward
@dataclass(config=OPTIONS)
class Length:
    """Soft penalty for long chains (DAPO, arXiv:2503.14476, equation 13): 0 up to `longest - buffer`, then falling
    linearly to -1 at `longest`, and -1 beyond."""

    longest: Annotated[int, Field(gt=0)]
    """Length at which the penalty reaches -1."""
    buffer: Annotated[int, Field(ge=0)] = 0
    turns: bool = False
    """Count assistant turns instead of sampled tokens."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> "Length":
        if self.buffer > self.longest:
            raise ValueError(f"buffer={self.buffer} must not exceed longest={self.longest}")
        return self

    def __call__(self, trajectory: Trajectory) -> float:
        if trajectory.turns and not trajectory.rows and not self.turns:
            raise RewardError("the chain has no tokens to count; set turns: true, or name another reward")
        length = trajectory.turns if self.turns else sum(sum(row.mask) for row in trajectory.rows)
        if length > self.longest:
            return -1.0
        return -max(0, length - (self.longest - self.buffer)) / max(self.buffer, 1)
