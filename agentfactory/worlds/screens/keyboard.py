"""`Keyboard`: keys that a model presses, and what it copies."""

import re
from contextlib import suppress
from typing import TYPE_CHECKING

from agentfactory.worlds.screens.iframes import FOCUSED, frame_with
from agentfactory.worlds.screens.page_scripts import SELECTED

if TYPE_CHECKING:  # takes a while to import
    from playwright.async_api import Page

_MODIFIERS = {"control", "shift", "alt", "meta"}


def _chord(keys: str) -> frozenset[str]:
    """Return the keys that are pressed together, without their sides: ControlLeft+KeyV is Control+v.

    Raises ValueError if more is held than modifiers: Chromium would act on each key while it is pressed.
    """
    names = re.split(r"(?<!^)(?<!\+)\+", keys.lower())  # the second + of Shift++ is a key
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
    """A chain's keyboard. What is copied is only pasted in the same chain, for Chromium has one clipboard for all."""

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
        for name in keys.split("+"):  # Playwright holds those before an unknown one
            with suppress(Error):
                await page.keyboard.up(name)
        raise ValueError(f"keys: got {keys[:100]!r}; use names such as Enter or Control+A") from None
