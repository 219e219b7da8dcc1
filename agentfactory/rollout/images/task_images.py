"""Preparation of rows of data for the recipe's model: their images, and the boxes and points in their text."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolSpec, is_finite_number
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.images.families import view_of, why_no_images
from agentfactory.rollout.images.image_intake import Images, ShownImages
from agentfactory.rollout.images.parts import images_of_row, texts_of
from agentfactory.tools.images.coordinates import VIEW_FIELD, Coordinates, ModelView, stating
from agentfactory.tools.images.decode import size_of

Task = dict[str, Any]
Takes = Callable[[str], bool]
"""(name of a row's field) -> True if the tools, or the rewards, take it."""


class TaskImages:
    """Prepares rows and tools for a recipe's model. `view` is its coordinate system in images (None: unknown)."""

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
        if any(map(images_of_row, tasks)):
            await asyncio.to_thread(self._seeing(section).check_tasks, tasks, self._recipe.limits.images, section)
        for number, task in enumerate(tasks, 1):
            state_places(task, self.view, self._recipe.model.path, section, number)
        if self.view is None and rewards_take(VIEW_FIELD):
            raise unknown_way(self._recipe.model.path, "its rewards convert")

    async def take(self, task: Task, section: str, row: int | None = None) -> Task:
        """Prepare a row of `section` for its chains: store its images once, and convert boxes and points in its text to
        the model's coordinates. Raise SettingError, with the number `row`, for unusable ones."""
        task = state_places(task, self.view, self._recipe.model.path, section, row)
        return await self._seeing(section).take_task(task, section, row) if images_of_row(task) else task

    def for_tools(self, task: Task, tools_take: Takes) -> Task:
        """Add the coordinate system as `model_view` to a row if a reset takes it; raise SettingError if unknown."""
        if not tools_take(VIEW_FIELD):
            return task
        if self.view is None:
            raise unknown_way(self._recipe.model.path, "its tools convert")
        return {**task, VIEW_FIELD: self.view.to_json()}

    def _seeing(self, section: str) -> ShownImages:
        """Return the image intake. Raise SettingError if the model cannot get the images of `section`."""
        if isinstance(self._images, ShownImages):
            if self._images.shows:
                return self._images
            problem = "it does not render images, but rows of the data have some"
            raise SettingError("model.chat_template", problem, "set null, to use the model's own, which does")
        problem = f"its rows have images, but {why_no_images(self._recipe.model.path)}"
        raise SettingError(section, problem, "use a vision-language model, or remove the column `images`")


MARK = "<bbox>"
"""Placeholder of a box or point in the text of a row with `objects` (ms-swift)."""


def state_places(
    task: dict[str, Any], view: ModelView | None, model: str, section: str, row: int | None = None
) -> dict[str, Any]:
    """Return a row of `section` with each MARK in its text replaced by the next of `objects.bbox`, in the model's
    coordinates. An entry is a box or point in pixels (`objects.bbox_type: norm1`: fractions of the sides) of the image
    with the number in `objects.image_id`. Raise SettingError with the `row` for invalid or unknown ones."""
    objects = task.get("objects")
    if not isinstance(objects, dict) or objects.get("bbox") is None:
        return task
    if not any(MARK in text for text in texts_of(task, with_turns=True)):
        return task
    if view is None:
        raise unknown_way(model, "its rows state")
    images, places, kind = task.get("images") or [], objects["bbox"], objects.get("bbox_type") or "real"
    given = ModelView(Coordinates.RELATIVE1 if kind == "norm1" else Coordinates.PIXELS)
    try:
        if kind not in ("real", "norm1"):
            raise ValueError(f"objects.bbox_type is {kind!r}; use real for pixels, or norm1 for fractions from 0 to 1")
        numbers = objects.get("image_id") or [0] * len(places)
        if len(numbers) != len(places):
            raise ValueError(f"objects.image_id has {len(numbers)} numbers, but objects.bbox has {len(places)} places")
        said = [_said(place, number, images, given, view) for place, number in zip(places, numbers, strict=True)]
        if (marks := sum(text.count(MARK) for text in texts_of(task, with_turns=True))) != len(said):
            raise ValueError(f"objects.bbox has {len(said)} places, but its text has {MARK} {marks} times")
    except ValueError as error:
        where = "" if row is None else f"row {row}: "
        raise SettingError(section, f"{where}{error}", "correct it") from error
    field = "question" if task.get("messages") is None else "messages"
    return {**task, field: _filled(task[field], iter(said))}


def unknown_way(model: str, who: str) -> SettingError:
    """Return the error for a model with an unknown coordinate system; `who` is the subject and verb that need it."""
    problem = f"got auto, but {who} places in images, and the coordinate system of {model} is unknown"
    fix = "set relative1000, relative1, resized or pixels; `agentfactory doctor RECIPE --coordinates` tests the model"
    return SettingError("rollout.coordinates", problem, fix)


def _said(place: Any, number: Any, images: list[Any], given: ModelView, view: ModelView) -> str:
    ends = place if isinstance(place, list) else ()
    if len(ends) not in (2, 4) or not all(map(is_finite_number, ends)):
        raise ValueError(f"objects.bbox has {place!r}; use [left, top, right, bottom] for a box, [x, y] for a point")
    if len(ends) == 4 and (ends[0] > ends[2] or ends[1] > ends[3]):
        raise ValueError(f"objects.bbox has {place!r}: left must be less than right, and top less than bottom")
    if type(number) is not int or not 0 <= number < len(images):
        raise ValueError(f"objects.image_id has {number!r}, but the row has {len(images)} images, numbered from 0")
    size = size_of(images[number])
    return str(view.stated(given.to_pixels(ends, size), size))


def _filled(value: Any, said: Iterator[str]) -> Any:
    if isinstance(value, str):
        first, *rest = value.split(MARK)
        return first + "".join(next(said) + text for text in rest)
    return [_filled_message(message, said) for message in value]


def _filled_message(message: Any, said: Iterator[str]) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return {**message, "content": _filled(content, said)}
    if not isinstance(content, list):
        return message
    parts = [{**part, "text": _filled(part["text"], said)} if part["type"] == "text" else part for part in content]
    return {**message, "content": parts}
