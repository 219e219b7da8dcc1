"""Screens with 16 concurrent chains: opening a page, a click, a screenshot and memory, compared with plain Playwright.

Each chain is served as in training: the environment in the worker's process, through a chain's session; all chains
share a Chromium. A chain opens a page of 320 x 240, clicks ten times on an empty place, and looks ten times; each
returns a screenshot. The chains do so at the same time, and then one chain alone, each after a warm-up round, because a
chain loads one of our pages into the tab of a chain that has ended. Plain Playwright does the same with the same
Chromium and its default start: a context and a tab for each chain, the same page from its file, a click and a
screenshot.

The last line is JSON: `p50_reset_ms`, `p95_reset_ms`, `p50_click_ms`, `p95_click_ms` (with its screenshot),
`p50_screenshot_ms`, `p95_screenshot_ms` with all chains, `mb_per_chain` (the memory that each adds to Chromium and its
driver, as proportional set size, PSS); the same for Playwright (`playwright_...`), the p50 of one chain alone
(`..._alone_ms`), and the ratios of Playwright's to ours, with all chains (`reset_speedup`,
`click_speedup`) and alone (`reset_speedup_alone`, `click_speedup_alone`).

    python benchmarks/screens.py [--quick]
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from playwright.async_api import async_playwright

from agentfactory.base.config import ToolsRecipe
from agentfactory.base.messages import ToolCall
from agentfactory.tools.sessions.toolset import open_toolset
from agentfactory.worlds.screens.browser import find_chromium
from agentfactory.worlds.screens.sites import PAGES

PAGE, WIDTH, HEIGHT = "click_button", 320, 240
BESIDE = (2, 2)
"""A point without any element."""
ACTIONS = 10


@dataclass
class Taken:
    """The seconds of each reset, click and screenshot."""

    reset: list[float] = field(default_factory=list)
    click: list[float] = field(default_factory=list)
    screenshot: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Return the p50 and p95 of each in milliseconds."""
        found = {}
        for name, seconds in vars(self).items():
            found[f"p50_{name}_ms"] = statistics.median(seconds) * 1000
            found[f"p95_{name}_ms"] = statistics.quantiles(seconds, n=20, method="inclusive")[-1] * 1000
        return found


Action = Callable[[], Awaitable[Any]]
Actions = tuple[Action, Action]
Open = Callable[[int], AbstractAsyncContextManager[Actions]]
"""Opens the page of a seed; yields two actions: a click on an empty place with a screenshot, and a screenshot alone."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 chains, once; else 16, three times")
    chains, rounds = (4, 1) if parser.parse_args().quick else (16, 3)
    plain = asyncio.run(measure_playwright(chains, rounds))
    ours = asyncio.run(measure_ours(chains, rounds))
    speedups = {
        f"{name}_speedup{where}": plain[f"p50_{name}{where}_ms"] / ours[f"p50_{name}{where}_ms"]
        for name in ("reset", "click")
        for where in ("", "_alone")
    }
    print(f"{chains} chains")
    figures = {**ours, **{f"playwright_{name}": value for name, value in plain.items()}, **speedups}
    print(json.dumps({name: float(f"{value:.3g}") for name, value in figures.items()}))


async def measure_ours(chains: int, rounds: int) -> dict[str, float]:
    """Return the figures of our screens."""
    server = {"module": "screen", "options": {"width": WIDTH, "height": HEIGHT}}
    recipe = ToolsRecipe.model_validate({"mcp_servers": {"screen": server}})
    async with open_toolset(recipe, Path.cwd()) as toolset:

        @asynccontextmanager
        async def opened(seed: int) -> Any:
            async with toolset.chain(f"chain {seed}", {"page": PAGE, "seed": seed}) as session:
                x, y = BESIDE

                async def call(tool: str, arguments: dict[str, float]) -> None:
                    result = await session.call(ToolCall("call", tool, arguments))
                    assert result.error is None, result

                yield lambda: call("click", {"x": x, "y": y}), lambda: call("wait", {"seconds": 1e-6})

        return await measure(opened, chains, rounds)


async def measure_playwright(chains: int, rounds: int) -> dict[str, float]:
    """Return the figures of plain Playwright."""
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=find_chromium(None))

        @asynccontextmanager
        async def opened(seed: int) -> Any:
            context = await chromium.new_context(viewport={"width": WIDTH, "height": HEIGHT})
            page = await context.new_page()
            await page.goto((PAGES / f"{PAGE}.html").as_uri())
            await page.evaluate(f"task.begin({seed})")
            await page.screenshot()

            async def click() -> None:
                await page.mouse.click(*BESIDE)
                await page.screenshot()

            yield click, page.screenshot
            await context.close()

        return await measure(opened, chains, rounds)


async def measure(opened: Open, chains: int, rounds: int) -> dict[str, float]:
    """Play one chain alone, then all concurrently; return the figures."""
    await play(opened, 1, Taken())  # starts Chromium
    idle, alone, taken, memory = memory_mb(), Taken(), Taken(), []
    await play(opened, chains, Taken())
    for _ in range(3):
        await play(opened, 1, alone)
    for _ in range(rounds):
        memory.append((await play(opened, chains, taken) - idle) / chains)
    figures = {**taken.figures(), "mb_per_chain": statistics.median(memory)}
    for name, seconds in vars(alone).items():
        figures[f"p50_{name}_alone_ms"] = statistics.median(seconds) * 1000
    return figures


async def play(opened: Open, chains: int, taken: Taken) -> float:
    """Play chains at the same time; return the memory of all processes in MiB when all are open."""
    async with AsyncExitStack() as stack:

        async def begin(seed: int) -> Actions:
            with timed(taken.reset):
                return await stack.enter_async_context(opened(seed))

        actions = await asyncio.gather(*(begin(seed) for seed in range(chains)))
        await asyncio.gather(*(act(click, look, taken) for click, look in actions))
        return memory_mb()


async def act(click: Action, look: Action, taken: Taken) -> None:
    """Alternate clicks and screenshots."""
    for _ in range(ACTIONS):
        with timed(taken.click):
            await click()
        with timed(taken.screenshot):
            await look()


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    """Append the seconds of the context."""
    started = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - started)


def memory_mb() -> float:
    """Return the memory of all processes that this one has started, in MiB."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it is just ending
            total += child.memory_full_info().pss
    return total / 2**20


if __name__ == "__main__":
    main()
