"""`Keyboard`: a chain's key presses and clipboard."""

import re
from contextlib import suppress
from typing import TYPE_CHECKING

from agentfactory.worlds.screens.iframes import FOCUSED, frame_with
from agentfactory.worlds.screens.page_scripts import SELECTED

if TYPE_CHECKING:  # takes a while to import
    from playwright.async_api import Page

_MODIFIERS = {"control", "shift", "alt", "meta"}


def _chord(keys: str) -> frozenset[str]:
    """Normalize a key combination without left and right variants: ControlLeft+KeyV becomes control and v.

    Raises ValueError if a key other than modifiers is held: Chromium would act on each key as it is pressed.
    """
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
