"""Images and places in the rows of a recipe's data, as the recipe's model gets them."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.images.families import view_of, why_unseen
from agentfactory.rollout.images.image_intake import Images, ShownImages
from agentfactory.rollout.images.parts import has_images
from agentfactory.rollout.images.places_in_text import state_places, unknown_way
from agentfactory.tools.errors import SettingError
from agentfactory.tools.images.coordinates import VIEW_FIELD, stating
from agentfactory.tools.messages import ToolSpec

Task = dict[str, Any]
Takes = Callable[[str], bool]
"""(field of a row) -> do the tools, or the rewards, take it?"""


class TaskImages:
    """Prepares rows and tools for the model of a recipe. `view` is how it states places in images; None if it sees
    none, or its way is not known."""

    def __init__(self, recipe: RolloutRecipe, images: Images) -> None:
        self._recipe = recipe
        self._images = images
        self.view = view_of(recipe.model.path, images.vision, recipe.rollout.coordinates)

    def describe(self, specs: Sequence[ToolSpec]) -> list[ToolSpec]:
        """Return descriptions of tools with the model's way of stating places."""
        return [spec if self.view is None else stating(spec, self.view) for spec in specs]

    async def check(self, tasks: Sequence[Task], section: str, rewards_take: Takes) -> None:
        """Raise SettingError for an image that cannot be shown or a place that cannot be stated in `tasks`, the rows of
        `section`, and for rewards that need a way of stating places which is not known."""
        if any(map(has_images, tasks)):
            await asyncio.to_thread(self._seeing(section).check_tasks, tasks, self._recipe.limits.images, section)
        for number, task in enumerate(tasks, 1):
            self._stated(task, section, number)
        if self.view is None and rewards_take(VIEW_FIELD):
            raise unknown_way(self._recipe.model.path, "its rewards convert")

    async def take(self, task: Task, section: str, row: int | None = None) -> Task:
        """Return a row of `section`, the one numbered `row` if that is given, as its chains get it: its images are
        stored once for all of them, and places in its text are stated as the model does. Raises SettingError for an
        image that cannot be shown, or a place that is none."""
        task = self._stated(task, section, row)
        return await self._seeing(section).take_task(task, section, row) if has_images(task) else task

    def for_tools(self, task: Task, tools_take: Takes) -> Task:
        """Return a row, as `take` returned it, with what tools need to know of the model: `model_view`, if a reset
        names it. Raises SettingError if places cannot be converted because the model's way to state them is not
        known."""
        if not tools_take(VIEW_FIELD):
            return task
        if self.view is None:
            raise unknown_way(self._recipe.model.path, "its tools convert")
        return {**task, VIEW_FIELD: self.view.to_json()}

    def _stated(self, task: Task, section: str, row: int | None) -> Task:
        return state_places(task, self.view, self._recipe.model.path, section, row)

    def _seeing(self, section: str) -> ShownImages:
        """Raise SettingError if the model cannot be shown the images of `section`."""
        if isinstance(self._images, ShownImages):
            if self._images.shows:
                return self._images
            problem = "it has no images, and rows of the data have some"
            raise SettingError("model.chat_template", problem, "set null: the model's own has them")
        problem = f"its rows have images, and {why_unseen(self._recipe.model.path)}"
        raise SettingError(section, problem, "use a model that sees, or leave out the column `images`")
