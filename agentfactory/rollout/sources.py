"""Sources of tasks at work: the tasks of each part of a recipe, and the runners of their chains."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.rollout.chains.chain_runner import Runner
from agentfactory.rollout.config import Part, RolloutConfig, RolloutRecipe
from agentfactory.rollout.data import Task, TaskMix, TaskOrder, load_tasks, notices
from agentfactory.rollout.trajectory import Trajectory

RunnerT = TypeVar("RunnerT", bound=Runner)


class Prompts(Protocol):
    """A writer of the teacher's prompts: see TeacherContext."""

    async def add_to(self, chains: Sequence[Trajectory], task: Task) -> None:
        """Set the teacher's prompts of a group's chains that have ended."""


@dataclass(frozen=True)
class Loaded:
    part: Part[Any]
    tasks: list[Task]

    @classmethod
    def only(cls, recipe: RolloutRecipe, tasks: list[Task], section: str = "data") -> "Loaded":
        return cls(Part(section, recipe), tasks)


@dataclass(frozen=True)
class Source(Loaded, Generic[RunnerT]):
    """A source of tasks, with the runner of its chains. `context` writes the teacher's prompts of its groups."""

    runner: RunnerT
    context: Prompts | None = None

    @property
    def name(self) -> str:
        """The name of the source; empty for a recipe without sources."""
        return self.part.name

    @property
    def config(self) -> RolloutConfig:
        return self.runner.setup.config

    async def check(self) -> None:
        try:
            await self.runner.check(self.tasks, self.part.section)
        except SettingError as error:
            raise self.part.located(error) from error.__cause__
        except ToolInfrastructureError as error:
            if not self.name:
                raise
            raise ToolInfrastructureError(f"{self.part.called}: {error}") from error

    def watched(self) -> RunnerT:
        """Return the runner with a watch over the chains of this source: see Runner.watched."""
        return self.runner.watched(len(self.tasks), self.name)

    def run_by(self, sources: "Sequence[Source[RunnerT]]") -> "Source[RunnerT]":
        """Return this source with the runner of the one of `sources` with its name and settings, if there is one."""
        found = (one for one in sources if one.name == self.name and one.part.acts_like(self.part))
        return replace(self, runner=next(found, self).runner)

    async def take(self, row: int) -> Task:
        """Return a task, a row counted from 0, as chains get it: see Runner.take."""
        return await self.runner.take(self.tasks[row], self.part.section, row + 1)


def load_all(parts: Sequence[Part[Any]], tell: bool = False) -> list[Loaded]:
    return [Loaded(part, load_tasks(part.recipe.data, part.section, tell)) for part in parts]


def tell_shared_tasks(training: Sequence[Loaded], held_out: Sequence[Loaded]) -> None:
    tasks = [task for one in training for task in one.tasks]
    for one in held_out:
        notices.tell_shared_tasks(tasks, one.tasks, one.part.section)


def mix_of(loaded: Sequence[Loaded], seed: int) -> TaskMix:
    orders = [TaskOrder(one.tasks, seed, one.part.recipe.data.shuffle) for one in loaded]
    return TaskMix(orders, [1.0 if one.part.source is None else one.part.source.weight for one in loaded], seed)


@asynccontextmanager
async def open_all(
    loaded: Sequence[Loaded], opener: Callable[[RolloutRecipe], AbstractAsyncContextManager[RunnerT]]
) -> AsyncIterator[list[Source[RunnerT]]]:
    """Open the runners of all parts by `opener`, one for parts with the same settings, with one limit on chains."""
    found: list[Source[RunnerT]] = []
    async with AsyncExitStack() as stack:
        for one in loaded:
            runner = next((other.runner for other in found if other.part.acts_like(one.part)), None)
            if runner is None:
                try:
                    runner = await stack.enter_async_context(opener(one.part.recipe))
                except SettingError as error:
                    raise one.part.located(error) from error.__cause__
                if found:
                    runner.places = found[0].runner.places
            found.append(Source(one.part, one.tasks, runner))
        if found:
            found[0].runner.places.expect(max(one.part.recipe.rollout.max_total_tokens for one in loaded))
        yield found
