"""A player that solves all of our own pages: it reads the DOM, and acts by coordinates in the screenshot."""

import re
import shutil
from calendar import month_name
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentfactory.tools.tool import Finish
from agentfactory.worlds.screens.screen import Screen

NAMED = """(name) => {
  const all = [...document.querySelectorAll('button, a, div, label')].filter((element) => element.textContent === name);
  const box = all[all.length - 1].getBoundingClientRect();
  return [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
}"""
CHOSEN = """([selector, index]) => {
  const box = document.querySelectorAll(selector)[index].getBoundingClientRect();
  return [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
}"""
needs_chromium = [
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium: apt install chromium"),
]
MOST_ACTIONS = 30
"""Maximum actions of a player; a slider takes 13."""


class Player:
    """A player of one chain, with at most MOST_ACTIONS actions."""

    def __init__(self, screen: Screen, instruction: str) -> None:
        self.screen, self.instruction = screen, instruction
        self.ended = False
        self.actions = 0

    async def ask(self, script: str, argument: Any = None) -> Any:
        return await self.screen._page.evaluate(script, argument)

    async def do(self, action: Awaitable[Any]) -> None:
        self.actions += 1
        assert self.actions <= MOST_ACTIONS, self.instruction
        self.ended = isinstance(await action, Finish)

    async def click(self, selector: str, index: int = 0) -> None:
        await self.do(self.screen.click(*await self.ask(CHOSEN, [selector, index])))

    async def click_named(self, name: str) -> None:
        await self.do(self.screen.click(*await self.ask(NAMED, name)))

    async def fill(self, selector: str, index: int, text: str) -> None:
        await self.click(selector, index)
        await self.do(self.screen.type(text))

    async def fields(self) -> list[str]:
        """The names of the fields, in the page's order."""
        return await self.ask("() => [...document.querySelectorAll('label')].map(one => one.textContent.trim())")

    def told(self, pattern: str) -> str:
        found = re.search(pattern, self.instruction)
        assert found is not None, self.instruction
        return found[1]


async def click_button(player: Player) -> None:
    await player.click_named(player.told(r'"(\w+)"'))


async def click_color(player: Player) -> None:
    colours = await player.ask("() => [...document.querySelectorAll('div')].map(one => one.style.background)")
    await player.click("div", colours.index(player.told(r"the (\w+) box")))


async def checkboxes(player: Player) -> None:
    for word in player.told("Choose (.*), nothing").split(", "):
        await player.click("input", (await player.fields()).index(word))
    await player.click_named("Submit")


async def radio(player: Player) -> None:
    await player.click("input", (await player.fields()).index(player.told(r"Choose (\w+)")))
    await player.click_named("Submit")


async def text_field(player: Player) -> None:
    await player.fill(
        "input", (await player.fields()).index(player.told(r"field (\w+)") + ":"), player.told(r"Type (\w+)")
    )
    await player.click_named("Save")


async def form(player: Player) -> None:
    for field in ("name", "city", "word"):
        await player.fill("input", (await player.fields()).index(f"{field.title()}:"), player.told(rf"{field} (\w+)"))
    await player.click("input[type=checkbox]")
    await player.click_named("Send")


async def login(player: Player) -> None:
    await player.fill("input", 0, player.told(r"as (\w+)"))
    await player.do(player.screen.key("Tab"))
    await player.do(player.screen.type(player.told(r"password (\w+)")))
    await player.click_named("Log in")


async def slider(player: Player) -> None:
    await player.click("input")
    await player.do(player.screen.key("Home"))
    for _ in range(int(player.told(r"to (\d+)"))):
        await player.do(player.screen.key("ArrowRight"))
    await player.click_named("Submit")


async def select(player: Player) -> None:
    await player.fill("select", 0, player.told(r"Choose (\w+)"))
    await player.click_named("Submit")


async def menu(player: Player) -> None:
    await player.click_named(player.told(r"menu (\w+)"))
    await player.click_named(player.told(r"Choose (\w+)"))


async def date(player: Player) -> None:
    wanted = month_name[1:].index(player.told(r"Pick (\w+)"))
    shown = "() => document.querySelector('span').textContent"
    while (now := month_name[1:].index(await player.ask(shown))) != wanted:
        await player.click_named(">" if now < wanted else "<")
    await player.click_named(player.told(r" (\d+)\."))


async def table(player: Player) -> None:
    rows = await player.ask(
        "() => [...document.querySelectorAll('tr')].map(row => [...row.children].map(one => one.textContent))"
    )
    column = rows[0].index(player.told(r"the (\w+) of").title())
    (cell,) = (row[column] for row in rows if row[0] == player.told(r"of (\w+)"))
    await player.fill("input", 0, cell)
    await player.click_named("Submit")


async def drag(player: Player) -> None:
    colours = await player.ask("() => [...document.querySelectorAll('div')].map(one => one.style.borderColor)")
    start = await player.ask(NAMED, player.told(r"Drag (\w+)"))
    end = await player.ask(CHOSEN, ["div", colours.index(player.told(r"the (\w+) box"))])
    await player.do(player.screen.drag(*start, *end))


async def scroll(player: Player) -> None:
    wanted = player.told(r"Click (\w+)")
    edges = "() => { const box = document.querySelector('div').getBoundingClientRect(); return [box.top, box.bottom]; }"
    top, bottom = await player.ask(edges)
    while not top < (place := (await player.ask(NAMED, wanted))[1]) < bottom:
        await player.do(player.screen.scroll("down" if place > bottom else "up", 50, (top + bottom) / 2))
    await player.click_named(wanted)


async def tabs(player: Player) -> None:
    wanted = player.told(r"link (\w+)")
    for tab in ("Tab 1", "Tab 2", "Tab 3"):
        await player.click_named(tab)
        if wanted in await player.ask("() => [...document.querySelectorAll('a')].map(one => one.textContent)"):
            await player.click_named(wanted)
            return


async def double_click(player: Player) -> None:
    await player.do(player.screen.double_click(*await player.ask(NAMED, player.told(r"Open (\w+)"))))


async def dialog(player: Player) -> None:
    await player.click_named("Delete " + player.told(r"elete (\w+)"))
    await player.click_named("Cancel" if "cancel" in player.instruction else "Delete")


PLAYERS: dict[str, Callable[[Player], Awaitable[None]]] = {
    one.__name__: one
    for one in (
        click_button, click_color, checkboxes, radio, text_field, form, login, slider, select, menu, date, table, drag,
        scroll, tabs, double_click, dialog,
    )
}  # fmt: skip
"""Page -> how it is solved."""
