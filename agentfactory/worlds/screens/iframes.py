"""Nested `<iframe>`s: find the frame at a point, and map its elements' boxes to the page."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # takes a while to import
    from playwright.async_api import Frame, Page

AT = "([x, y]) => document.elementFromPoint(x, y)"
"""JavaScript: the element at a point."""
FOCUSED = "() => document.activeElement"
"""JavaScript: the element with the keyboard focus."""
_WAY = """(frame) => {
  const box = frame.getBoundingClientRect(), style = getComputedStyle(frame);
  // CSS transforms may scale a frame
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
"""JavaScript: map a frame's boxes to its parent document, without boxes that are covered there."""


async def frame_with(page: "Page", element: str, place: Sequence[float] = (0, 0)) -> "tuple[Frame, list[float]]":
    """Return the innermost frame that contains the element found by the JavaScript `element` at `place` (CSS pixels),
    and the place relative to that frame."""
    frame, inside = page.main_frame, [*place]
    while frame.child_frames:
        found = (await frame.evaluate_handle(element, inside)).as_element()
        inner = None if found is None else await found.content_frame()
        if found is None or inner is None:
            break
        frame, inside = inner, await found.evaluate(_INTO, inside)
    return frame, inside


async def boxes_in(page: "Page", boxes: str) -> list[list[float]]:
    """Return the boxes found by the JavaScript `boxes` in the document and all its frames, as left, top, right, bottom
    in CSS pixels of the page."""
    from playwright.async_api import Error

    found: list[list[float]] = []
    for frame in page.frames:
        try:
            found += await _out_of(frame, await frame.evaluate(boxes))
        except Error:
            if not frame.is_detached():  # the page has removed the frame in the meantime
                raise
    return found


async def _out_of(frame: "Frame", boxes: Any) -> list[list[float]]:
    """Map a frame's boxes to the page."""
    inner: Frame | None = frame
    while boxes and inner is not None and inner.parent_frame is not None:
        boxes = await (await inner.frame_element()).evaluate(_OUT_OF, boxes)
        inner = inner.parent_frame
    return list(boxes)
