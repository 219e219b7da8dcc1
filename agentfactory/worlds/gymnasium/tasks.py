"""`data.gym`: a gymnasium environment's episodes, as data rows."""

from typing import Any, Literal

from pydantic import Field, field_validator

from agentfactory.base.config import Options, PositiveInt, Section
from agentfactory.base.errors import SettingError
from agentfactory.rollout.config import TaskSource
from agentfactory.worlds.gymnasium.gym import Gym


class RandomMap(Section):
    """FrozenLake's generated maps: one per task, drawn by its seed."""

    size: int = Field(default=4, ge=2)
    """Rows and columns."""
    p: float = Field(default=0.8, gt=0, le=1)
    """Probability that a cell is frozen."""


class GymSource(TaskSource):
    """Episodes of a gymnasium environment (docs/gymnasium.md)."""

    world = "gym"

    id: str
    """Registered name, such as FrozenLake-v1; MODULE:NAME for one that a module registers when it is imported."""
    options: Options = {}
    """Arguments of gymnasium.make for it, such as {is_slippery: false}."""
    random_map: RandomMap | None = None
    """For FrozenLake: a new map per task, such as {size: 4, p: 0.8}. Null: the map of the options."""
    tasks: PositiveInt = 1000
    """Number of tasks, with the seeds from first_seed on."""
    first_seed: int = Field(default=0, ge=0)
    """Seed of the first task. Ranges of training and evaluation must not overlap."""
    render_mode: Literal["ansi", "rgb_array"] | None = None
    """Observations: text that the environment draws (ansi) or images (rgb_array). Null: ansi if the environment offers
    it, else its observation space in words."""
    actions: list[str] = []
    """Names of the actions of a discrete space, in order, or of the numbers of an action. Empty: those that the
    environment documents, if any."""
    question: str | None = None
    """The task in words. Null: the environment's documentation."""
    max_steps: PositiveInt | None = None
    """Steps after which an episode is truncated. Null: the environment's registered limit."""
    success_return: float | None = None
    """Return from which an ended episode counts as success. Null: the environment's registered reward threshold, unless
    max_steps changes the limit it was registered for; without either, there is no metric success."""

    @field_validator("actions")
    @classmethod
    def _are_told_apart(cls, actions: list[str]) -> list[str]:
        if twice := [name for number, name in enumerate(actions) if name in actions[:number]]:
            raise SettingError("", f"two actions are called {twice[0]!r}", "rename one")
        return actions

    def rows(self) -> list[dict[str, Any]]:
        settings = self.model_dump(
            mode="json", include={"id", "options", "random_map", "render_mode", "actions", "max_steps"}
        )
        with Gym.checks("gym", "id", self.id) as process:
            found = process.call("check", settings, self.first_seed)
        question = found["question"] if self.question is None else self.question
        if not question:
            raise SettingError("gym.question", f"got null, and {self.id} has no description", "describe the task")
        registered = found["threshold"] if self.max_steps is None else None
        settings["success_return"] = registered if self.success_return is None else self.success_return
        seeds = range(self.first_seed, self.first_seed + self.tasks)
        return [{"question": question, "gym": settings, "seed": seed} for seed in seeds]
