"""`Keyboard`: a chain's key presses and clipboard."""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # takes a while to import
    from playwright.async_api import Frame, Page

if TYPE_CHECKING:  # takes a while to import
    from playwright.async_api import Page


AT = "([x, y]) => document.elementFromPoint(x, y)"
FOCUSED = "() => document.activeElement"
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
    """Return the innermost frame with the element at `place` (CSS pixels), and the place relative to it."""
    frame, inside = page.main_frame, [*place]
    while frame.child_frames:
        found = (await frame.evaluate_handle(element, inside)).as_element()
        inner = None if found is None else await found.content_frame()
        if found is None or inner is None:
            break
        frame, inside = inner, await found.evaluate(_INTO, inside)
    return frame, inside


async def boxes_in(page: "Page", boxes: str) -> list[list[float]]:
    """Return the boxes that the JavaScript `boxes` finds in the page and all its frames, in its CSS pixels."""
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
    inner: Frame | None = frame
    while boxes and inner is not None and inner.parent_frame is not None:
        boxes = await (await inner.frame_element()).evaluate(_OUT_OF, boxes)
        inner = inner.parent_frame
    return list(boxes)


SETTLED = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
REFUSE_PASTES = """addEventListener('paste', event => {
  if (!event.isTrusted) return;
  event.preventDefault();
  event.stopImmediatePropagation();
}, true)"""
"""Block pastes by Chromium itself, from keys or the middle button: all chains share its clipboards."""
OPTIONS_AT = """([x, y]) => {
  const found = document.elementFromPoint(x, y);
  if (!(found instanceof HTMLSelectElement) || found.disabled) return null;
  found.focus();
  return [...found.options].slice(0, 50).map(option => option.label.slice(0, 100));
}"""
"""Focus the <select> at a point; return its first 50 entries, which no screenshot shows. null if there is none."""
CHOOSE = """(text) => {
  const menu = document.activeElement;
  if (!(menu instanceof HTMLSelectElement)) return null;
  const wanted = text.trim().toLowerCase();
  const labels = [...menu.options].map(option => option.label.trim().toLowerCase());
  const index = labels.includes(wanted) ? labels.indexOf(wanted) : labels.findIndex(label => label.startsWith(wanted));
  if (index < 0) return false;
  menu.selectedIndex = index;
  for (const kind of ['input', 'change']) menu.dispatchEvent(new Event(kind, {bubbles: true}));
  return true;
}"""
"""Choose an entry of the focused <select> by name; false if there is no such entry, null if no <select> is focused."""
SELECTED = """() => {
  const field = document.activeElement;
  const isField = field instanceof HTMLTextAreaElement || field instanceof HTMLInputElement;
  if (!isField || field.selectionStart === null) return String(getSelection());
  return field.type === 'password' ? '' : field.value.slice(field.selectionStart, field.selectionEnd);
}"""
"""The selected text; empty in a password field."""
SCROLLS_AT = """([x, y, across]) => {
  let found = document.elementFromPoint(x, y);
  for (; found && found !== document.body && found !== document.documentElement; found = found.parentElement) {
    if (found instanceof HTMLIFrameElement) break;
    const style = getComputedStyle(found), way = across ? style.overflowX : style.overflowY;
    const more = across ? found.scrollWidth > found.clientWidth : found.scrollHeight > found.clientHeight;
    if (more && (way === 'auto' || way === 'scroll')) break;
  }
  if (!found || found === document.body || found === document.documentElement) return [innerWidth, innerHeight];
  return [Math.min(found.clientWidth, innerWidth), Math.min(found.clientHeight, innerHeight)];
}"""
"""Width and height in CSS pixels of the area that a wheel scrolls at a point: an element, or the whole page."""


_MODIFIERS = {"control", "shift", "alt", "meta"}


def _chord(keys: str) -> frozenset[str]:
    """Normalize a key combination without left and right variants: ControlLeft+KeyV becomes control and v."""
    names = re.split(r"(?<!^)(?<!\+)\+", keys.lower())  # in Shift++ the second + is the key
    *held, last = (re.sub("^key(?=.$)|(?<=.)(left|right|ormeta)$", "", name) for name in names)
    if len(set(held) & _MODIFIERS) < len(held):
        raise ValueError(f"keys: got {keys[:100]!r}; hold Control, Shift, Alt or Meta, and press one key")
    return frozenset((*held, last))


_COPIES, _CUTS, _PASTES = (
    {_chord(keys) for keys in chords}
    for chords in (
        ("Control+C", "Control+Insert"),
        ("Control+X", "Shift+Delete"),
        ("Control+V", "Control+Shift+V", "Shift+Insert"),
    )
)


class Keyboard:
    """A chain's keyboard with its own clipboard, because all chains share Chromium's."""

    def __init__(self) -> None:
        self._clipboard = ""

    async def press(self, page: "Page", keys: str) -> None:
        """Press a key, or modifiers and a key, such as Control+A. Raises ValueError if there is no such key."""
        keyboard, pressed = page.keyboard, _chord(keys)
        if pressed in _PASTES:
            await keyboard.insert_text(self._clipboard)
        elif pressed in _COPIES | _CUTS:
            frame, _ = await frame_with(page, FOCUSED)
            if selected := await frame.evaluate(SELECTED):
                self._clipboard = str(selected)
                if pressed in _CUTS:
                    await keyboard.press("Delete")
        else:
            await _press_known(page, keys)


async def _press_known(page: "Page", keys: str) -> None:
    from playwright.async_api import Error

    try:
        await page.keyboard.press(keys)
    except Error as error:
        if "Unknown key" not in error.message:
            raise
        for name in keys.split("+"):  # Playwright leaves the keys before an unknown one pressed
            with suppress(Error):
                await page.keyboard.up(name)
        raise ValueError(f"keys: got {keys[:100]!r}; use names such as Enter or Control+A") from None
