"""Frames in a page, `<iframe>` in `<iframe>`: which one is at a place, and where in the page its elements are."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # takes a while to import
    from playwright.async_api import Frame, Page

AT = "([x, y]) => document.elementFromPoint(x, y)"
"""JavaScript: the element at a place."""
FOCUSED = "() => document.activeElement"
"""JavaScript: the element that gets what is typed."""
_WAY = """(frame) => {
  const box = frame.getBoundingClientRect(), style = getComputedStyle(frame);
  // a frame may be drawn larger or smaller than it is
  const across = box.width / frame.offsetWidth, down = box.height / frame.offsetHeight;
  const left = box.left + (frame.clientLeft + parseFloat(style.paddingLeft)) * across;
  const top = box.top + (frame.clientTop + parseFloat(style.paddingTop)) * down;
  return { across, down, left, top };
}"""
_INTO = f"""(frame, [x, y]) => {{
  const way = ({_WAY})(frame);
  return [(x - way.left) / way.across, (y - way.top) / way.down];
}}"""
_OUT_OF = f"""(frame, boxes) => {{
  const way = ({_WAY})(frame);
  const seen = [];
  for (const [left, top, right, bottom] of boxes) {{
    const box = [
      Math.max(left * way.across + way.left, 0), Math.max(top * way.down + way.top, 0),
      Math.min(right * way.across + way.left, innerWidth), Math.min(bottom * way.down + way.top, innerHeight),
    ];
    if (box[2] - box[0] < 3 || box[3] - box[1] < 3) continue;
    if (document.elementFromPoint((box[0] + box[2]) / 2, (box[1] + box[3]) / 2) === frame) seen.push(box);
  }}
  return seen;
}}"""
"""Boxes of a frame as those of the document that it stands in, without what is covered there."""


async def frame_with(page: "Page", element: str, place: Sequence[float] = (0, 0)) -> "tuple[Frame, list[float]]":
    """Return the innermost frame that has the element which JavaScript gives for a place in CSS pixels, and the place
    in that frame."""
    frame, inside = page.main_frame, [*place]
    while frame.child_frames:
        found = (await frame.evaluate_handle(element, inside)).as_element()
        inner = None if found is None else await found.content_frame()
        if found is None or inner is None:
            break
        frame, inside = inner, await found.evaluate(_INTO, inside)
    return frame, inside


async def boxes_in(page: "Page", boxes: str) -> list[list[float]]:
    """Return the boxes that JavaScript gives for the document and for each frame in it, in CSS pixels of the page:
    left, top, right, bottom."""
    from playwright.async_api import Error

    found: list[list[float]] = []
    for frame in page.frames:
        try:
            found += await _out_of(frame, await frame.evaluate(boxes))
        except Error:
            if not frame.is_detached():  # the page has removed it meanwhile
                raise
    return found


async def _out_of(frame: "Frame", boxes: Any) -> list[list[float]]:
    """Return boxes in a frame as those of the page."""
    inner: Frame | None = frame
    while boxes and inner is not None and inner.parent_frame is not None:
        boxes = await (await inner.frame_element()).evaluate(_OUT_OF, boxes)
        inner = inner.parent_frame
    return list(boxes)
