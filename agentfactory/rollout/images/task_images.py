"""Preparation of images and coordinates in rows of data for the recipe's model."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.images.families import view_of, why_no_images
from agentfactory.rollout.images.image_intake import Images, ShownImages
from agentfactory.rollout.images.parts import has_images
from agentfactory.rollout.images.places_in_text import state_places, unknown_way
from agentfactory.tools.images.coordinates import VIEW_FIELD, stating

Task = dict[str, Any]
Takes = Callable[[str], bool]
"""(name of a row's field) -> True if the tools, or the rewards, take it."""


class TaskImages:
    """A preparer of rows and tools for a recipe's model. `view` is the model's coordinate system in images; None if it
    accepts only text, or if the system is unknown."""

    def __init__(self, recipe: RolloutRecipe, images: Images) -> None:
        self._recipe = recipe
        self._images = images
        self.view = view_of(recipe.model.path, images.vision, recipe.rollout.coordinates)

    def describe(self, specs: Sequence[ToolSpec]) -> list[ToolSpec]:
        """Return descriptions of tools that name the model's coordinate system."""
        return [spec if self.view is None else stating(spec, self.view) for spec in specs]

    async def check(self, tasks: Sequence[Task], section: str, rewards_take: Takes) -> None:
        """Check `tasks`, the rows of `section`. Raise SettingError for an unusable image, for a box or point that
        cannot be converted, and for rewards that need an unknown coordinate system."""
        if any(map(has_images, tasks)):
            await asyncio.to_thread(self._seeing(section).check_tasks, tasks, self._recipe.limits.images, section)
        for number, task in enumerate(tasks, 1):
            self._stated(task, section, number)
        if self.view is None and rewards_take(VIEW_FIELD):
            raise unknown_way(self._recipe.model.path, "its rewards convert")

    async def take(self, task: Task, section: str, row: int | None = None) -> Task:
        """Prepare a row of `section`, with number `row` if it is given, for its chains: store its images once, and
        convert boxes and points in its text to the model's coordinates. Raise SettingError for an unusable image or an
        invalid box or point."""
        task = self._stated(task, section, row)
        return await self._seeing(section).take_task(task, section, row) if has_images(task) else task

    def for_tools(self, task: Task, tools_take: Takes) -> Task:
        """Add the model's coordinate system as `model_view` to a row that `take` returned, if a tool's reset takes it.
        Raise SettingError if it is unknown."""
        if not tools_take(VIEW_FIELD):
            return task
        if self.view is None:
            raise unknown_way(self._recipe.model.path, "its tools convert")
        return {**task, VIEW_FIELD: self.view.to_json()}

    def _stated(self, task: Task, section: str, row: int | None) -> Task:
        return state_places(task, self.view, self._recipe.model.path, section, row)

    def _seeing(self, section: str) -> ShownImages:
        """Return the image intake. Raise SettingError if the model cannot get the images of `section`."""
        if isinstance(self._images, ShownImages):
            if self._images.shows:
                return self._images
            problem = "it does not render images, but rows of the data have some"
            raise SettingError("model.chat_template", problem, "set null, to use the model's own, which does")
        problem = f"its rows have images, but {why_no_images(self._recipe.model.path)}"
        raise SettingError(section, problem, "use a vision-language model, or remove the column `images`")
