"""`Screen` and `MarkedScreen`: environments for acting on web pages from screenshots."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw, ImageFont

from agentfactory.tools.tool import tool
from agentfactory.worlds.screens.keyboard import boxes_in
from agentfactory.worlds.screens.page_actions import BaseScreen, Direction

if TYPE_CHECKING:  # takes a while to import
    from playwright.async_api import Page


MOST_MARKS = 500
"""Maximum numbered elements per page; more would be illegible in the screenshot."""
FIND_ELEMENTS = """() => {
  const chosen = 'a[href], button, input, select, textarea, summary, [onclick], [contenteditable=true], [tabindex], ' +
    '[draggable=true], [role=button], [role=link], [role=checkbox], [role=radio], [role=tab], [role=menuitem], ' +
    '[role=option], [role=slider]';
  const found = [];
  for (const element of document.querySelectorAll(chosen)) {
    const box = element.getBoundingClientRect();
    const left = Math.max(box.left, 0), top = Math.max(box.top, 0);
    const right = Math.min(box.right, innerWidth), bottom = Math.min(box.bottom, innerHeight);
    if (right - left < 3 || bottom - top < 3 || element.disabled) continue;
    // skip elements that are covered, or scrolled out of view in a part of the page
    if (element.contains(document.elementFromPoint((left + right) / 2, (top + bottom) / 2)))
      found.push([left, top, right, bottom]);
    if (found.length > MOST) break;
  }
  return found;
}""".replace("MOST", str(MOST_MARKS))
_COLOURS = ("#d00000", "#0050c8", "#007a33", "#9a00b0", "#b05a00", "#005f73")


@dataclass(frozen=True)
class Mark:
    """An element's box in CSS pixels."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def middle(self) -> tuple[float, float]:
        return (self.left + self.right) / 2, (self.top + self.bottom) / 2


def marks_of(boxes: Sequence[Any], width: int, height: int) -> list[Mark]:
    """Clip the first MOST_MARKS boxes to the page and drop those outside it: an untrusted page may return anything."""
    marks = []
    for given in (Mark(*box) for box in boxes[:MOST_MARKS]):
        mark = Mark(max(given.left, 0), max(given.top, 0), min(given.right, width), min(given.bottom, height))
        if mark.left < mark.right and mark.top < mark.bottom:
            marks.append(mark)
    return marks


def draw_marks(picture: Image.Image, marks: Sequence[Mark], scale: float) -> Image.Image:
    """Draw each element's frame and number, from 0, into the picture."""
    drawn = picture.copy()
    pencil = ImageDraw.Draw(drawn)
    font = ImageFont.load_default(max(10, round(11 * scale)))
    for number, mark in enumerate(marks):
        colour = _COLOURS[number % len(_COLOURS)]
        left, top, right, bottom = (round(edge * scale) for edge in (mark.left, mark.top, mark.right, mark.bottom))
        pencil.rectangle((left, top, right - 1, bottom - 1), outline=colour)
        text = str(number)
        _, _, width, height = font.getbbox(text)
        # beside the element's text if there is room, and always inside the picture
        x = min(max(round(right - width - 2), 0), drawn.width - round(width) - 2)
        y = min(max(top, 0), drawn.height - round(height) - 2)
        pencil.rectangle((x, y, x + width + 1, y + height + 1), fill=colour)
        pencil.text((x + 1, y), text, fill="white", font=font)
    return drawn


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
