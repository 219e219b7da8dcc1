"""The interface of the checks of an audit, and the parts of a run's recipe, opened to check its chains."""

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from agentfactory.audit.record import Record, Seen
from agentfactory.audit.replay.replay_runner import ReplayRunner
from agentfactory.audit.reports import Unchecked
from agentfactory.base.findings import Evidence, Finding, Severity
from agentfactory.base.messages import ToolSpec
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.images.task_images import TaskImages
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.text.load_renderer import load_renderer
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.rollout.trajectory import Trajectory
from agentfactory.tools.sessions.toolset import open_toolset

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """A part of a recipe, as its chains had it."""

    recipe: Recipe
    renderer: Renderer
    specs: list[ToolSpec]
    rewards: Rewards
    images: TaskImages
    runner: ReplayRunner


@asynccontextmanager
async def open_part(recipe: Recipe, folder: Path, images: Path) -> AsyncIterator[Opened]:
    """Open a part of a run's recipe; `folder` is the run's, and `images` the one with its images. Starts the tool
    servers, and runs the user's code. Raises what `open_toolset` and `load_renderer` raise."""
    async with Rewards(recipe.rewards, folder) as rewards, open_toolset(recipe, folder, logger.debug) as toolset:
        renderer = load_renderer(
            recipe.model,
            recipe.rollout.parser,
            reasoning=recipe.rollout.reasoning,
            tools=bool(toolset.specs),
            base=folder,
            images=images,
        )
        runner = ReplayRunner(recipe, renderer, toolset, rewards)
        yield Opened(recipe, renderer, runner.setup.specs, rewards, runner.task_images, runner)


NEAR = 1e-6
Parts = dict[tuple[bool, str], Opened]
"""(whether for held-out tasks, name of the source) -> the part of the recipe."""


class Check(ABC):
    """A check of one topic: it sees every saved group once, in order, and then gives its findings. It must not keep
    groups, of which a long run has millions of tokens."""

    topic: ClassVar[str]
    """Name of what is checked, in a report."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Streams of a record without which there is nothing to check (record.TOKENS, ...)."""

    def __init__(self, record: Record, parts: Parts) -> None:
        """`parts` is empty if the record has no recipe that can be opened."""
        self.record = record
        self.parts = parts
        self.unchecked: list[Unchecked] = []
        """Subjects that the check could not compare, known after all groups."""
        self._counted = 0
        self.begin()

    @abstractmethod
    def begin(self) -> None:
        """Set what the check notes of groups."""

    @abstractmethod
    async def note(self, seen: Seen) -> None:
        """Look at a group."""

    @abstractmethod
    def findings(self) -> Iterator[Finding]:
        """Yield what was found, after all groups."""

    @abstractmethod
    def looked_at(self) -> str:
        """Number of compared chains, tokens or files, such as "1,200 chains"; empty if there was nothing to compare."""

    def some_of(self, seen: Seen, most: int) -> Iterator[Trajectory]:
        """Yield some chains of a group: of training about `most`, evenly over the run, and every tenth held-out one."""
        every = 10 if seen.held_out else max(1, self.record.size * len(seen.group.trajectories) // most)
        for chain in seen.group.trajectories:
            self._counted += 1
            if self._counted % every == 0:
                yield chain

    def part_of(self, seen: Seen) -> Opened:
        return self.parts[bool(seen.held_out), seen.group.source]

    def wrong(self, text: str, fix: str, evidence: Sequence[Evidence] = ()) -> Finding:
        return Finding(Severity.WRONG, self.topic, text, fix, evidence)

    def warning(self, text: str, fix: str, evidence: Sequence[Evidence] = ()) -> Finding:
        return Finding(Severity.WARNING, self.topic, text, fix, evidence)

    def remark(self, text: str, fix: str = "", evidence: Sequence[Evidence] = ()) -> Finding:
        return Finding(Severity.NOTE, self.topic, text, fix, evidence)


def differ(found: float, saved: float) -> bool:
    """Return whether two figures differ by more than rounding."""
    return abs(found - saved) > NEAR * max(1.0, abs(found))
