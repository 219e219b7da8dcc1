"""The parts of a run's recipe, opened to check its chains: chat template, tools, rewards."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agentfactory.audit.replay.replay_runner import ReplayRunner
from agentfactory.base.messages import ToolSpec
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.images.task_images import TaskImages
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.text.load_renderer import load_renderer
from agentfactory.rollout.text.renderer import Renderer
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
    async with Rewards.load(recipe.rewards, folder) as rewards, open_toolset(recipe, folder, logger.debug) as toolset:
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
