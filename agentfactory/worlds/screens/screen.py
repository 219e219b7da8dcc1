"""`Screen` and `MarkedScreen`: environments for acting on web pages from screenshots."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from PIL import Image

from agentfactory.tools.tool import tool
from agentfactory.worlds.screens.iframes import boxes_in
from agentfactory.worlds.screens.number_marks import FIND_ELEMENTS, MOST_MARKS, Mark, draw_marks, marks_of
from agentfactory.worlds.screens.page_actions import BaseScreen, Direction

if TYPE_CHECKING:  # takes a while to import
    from playwright.async_api import Page


class Screen(BaseScreen):
    """An environment with a browser page: the model gets a screenshot, and acts by coordinates in it.

    Coordinates are in the model's convention (`rollout.coordinates`). A chain ends when the page's task is done, or
    with the tool `done`; the reward is the page's score. A row names one of our own pages (`page`), a MiniWoB++ page
    (`miniwob`), or any `url`, with JavaScript for its score in `check`; `screens_tasks` makes rows. All chains of a
    process share a Chromium, each with its own context.

    Args:
        width: page width in CSS pixels.
        height: page height in CSS pixels.
        scale: screenshot pixels per CSS pixel.
        seconds: time limit of an action; if the page exceeds it, the chain ends as a tool infrastructure failure.
        allowed: origins that pages may reach, such as `https://en.wikipedia.org`, `*.example.org` or `localhost:8000`.
        executable: Chromium's program; null: the first of the usual names on the PATH.

    Raises:
        SettingError: an option is out of range, or Chromium is missing.
    """

    @tool
    async def click(self, x: float, y: float) -> Any:
        """Click.

        Args:
            x: Place from the left edge, {coordinates}.
            y: Place from the top, in the same way.
        """
        return await self._press(*self._at(x, y))

    @tool
    async def double_click(self, x: float, y: float) -> Any:
        """Click twice.

        Args:
            x: Place from the left edge, {coordinates}.
            y: Place from the top, in the same way.
        """
        return await self._press(*self._at(x, y), 2)

    @tool
    async def drag(self, start_x: float, start_y: float, x: float, y: float) -> Any:
        """Drag with the mouse from one place to another.

        Args:
            start_x: First place, from the left edge, {coordinates}.
            start_y: First place, from the top.
            x: Last place, from the left edge.
            y: Last place, from the top.
        """
        return await self._drag(self._at(start_x, start_y), self._at(x, y))

    @tool
    async def scroll(self, direction: Direction, x: float | None = None, y: float | None = None) -> Any:
        """Scroll what is at a place.

        Args:
            direction: Where to look.
            x: Place from the left edge, {coordinates}; where the mouse is if left out.
            y: Place from the top, in the same way.
        """
        if (x is None) != (y is None):
            raise ValueError("x, y: give both, or none")
        return await self._look_towards(direction, None if x is None or y is None else self._at(x, y))

    def _at(self, x: float, y: float) -> tuple[float, float]:
        """Convert the model's coordinates to CSS pixels."""
        size = round(self._width * self._scale), round(self._height * self._scale)
        try:
            left, top = self._view.point_in((x, y), size)
        except ValueError as error:
            raise ValueError(f"x, y: {error}") from None
        # the right and bottom edges map to the last pixel of the page
        return min(left / self._scale, self._width - 0.5), min(top / self._scale, self._height - 0.5)


class MarkedScreen(BaseScreen):
    """A `Screen` whose screenshots number each interactive element. The model acts by these numbers.

    Args:
        width: page width in CSS pixels; for all options see Screen.
        height: page height in CSS pixels.
        scale: screenshot pixels per CSS pixel.
        seconds: time limit of an action.
        allowed: origins that pages may reach.
        executable: Chromium's program.
    """

    _marks: Sequence[Mark] = ()

    @tool
    async def click(self, element: int) -> Any:
        """Click.

        Args:
            element: Its number in the picture.
        """
        return await self._press(*self._middle(element, "element"))

    @tool
    async def double_click(self, element: int) -> Any:
        """Click twice.

        Args:
            element: Its number in the picture.
        """
        return await self._press(*self._middle(element, "element"), 2)

    @tool
    async def drag(self, start: int, end: int) -> Any:
        """Drag one element to another.

        Args:
            start: Number of the one to be dragged.
            end: Number of the other one.
        """
        return await self._drag(self._middle(start, "start"), self._middle(end, "end"))

    @tool
    async def scroll(self, direction: Direction, element: int | None = None) -> Any:
        """Scroll.

        Args:
            direction: Where to look.
            element: Number of what to scroll; what is under the mouse if left out.
        """
        return await self._look_towards(direction, None if element is None else self._middle(element, "element"))

    def _middle(self, number: int, argument: str) -> tuple[float, float]:
        if not 0 <= number < len(self._marks):
            there = f"the picture has 0 to {len(self._marks) - 1}" if self._marks else "the picture has no numbers"
            raise ValueError(f"{argument}: got {number}; {there}")
        return self._marks[number].middle

    async def _drawn(self, picture: Image.Image) -> Image.Image:
        self._marks = await self._see(self._found)
        return await asyncio.to_thread(draw_marks, picture, self._marks, self._scale)

    async def _found(self, page: "Page") -> list[Mark]:
        boxes = await boxes_in(page, FIND_ELEMENTS)
        if len(boxes) > MOST_MARKS:
            self._tell_once(f"Only the first {MOST_MARKS} elements have numbers.")
        return marks_of(boxes, self._width, self._height)
