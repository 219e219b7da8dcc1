"""Set-of-marks: number the elements of a page in its screenshot."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw, ImageFont

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
"""JavaScript: the boxes of visible interactive elements as left, top, right, bottom in CSS pixels."""
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
