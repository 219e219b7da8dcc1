"""WebShop with a thousand concurrent chains in one process: memory per chain, and the time of a click.

Each chain is served as in training: the environment in the worker's process, through a chain's session, which checks
arguments. All chains begin, and then search, look at products and click options at the same time, as fast as they can.
The shop is our catalogue of 1,200 products.

The last line is JSON: `kb_per_chain` (resident memory that a chain adds, with its session), `state_bytes` (the
environment's own state of a chain), `clicks_per_second`, `p95_click_ms` and `p95_search_ms` with all chains, and
`p95_click_alone_ms` of one chain alone.

    python benchmarks/webshop.py [--quick]
"""

import argparse
import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil

from agentfactory.base.config import ToolsRecipe
from agentfactory.base.messages import ToolCall
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.tools.sessions.toolset import open_toolset
from agentfactory.worlds.webshop.goals import Goal
from agentfactory.worlds.webshop.shop import Shop, ShopConfig, open_shop
from agentfactory.worlds.webshop.webshop import WebShop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 chains")
    chains = 100 if parser.parse_args().quick else 1000
    with tempfile.TemporaryDirectory() as cache:
        started = time.perf_counter()
        shop = open_shop(ShopConfig(cache=Path(cache)))
        print(f"shop of {shop.products} products and {shop.goals} goals: {time.perf_counter() - started:.2f} s")
        figures = asyncio.run(measure(chains, shop, cache))
    print(f"{chains} chains")
    print(json.dumps({name: float(f"{value:.3g}") for name, value in figures.items()}))


async def measure(chains: int, shop: Shop, cache: str) -> dict[str, float]:
    """Run `chains` concurrent visits and return the figures."""
    recipe = ToolsRecipe.model_validate({"mcp_servers": {"shop": {"module": "webshop", "options": {"cache": cache}}}})
    async with open_toolset(recipe, Path.cwd()) as toolset, AsyncExitStack() as stack:
        alone = Visitor(await stack.enter_async_context(toolset.chain("alone", {"goal": 0})))
        for _ in range(20):
            await alone.visit(shop.goal(0))
        before = resident()
        sessions = [
            await stack.enter_async_context(toolset.chain(f"chain {number}", {"goal": number}))
            for number in range(chains)
        ]
        per_chain = (resident() - before) / chains
        visitors = [Visitor(session) for session in sessions]
        started = time.perf_counter()
        await asyncio.gather(*(visitor.visit(shop.goal(number)) for number, visitor in enumerate(visitors)))
        seconds = time.perf_counter() - started
    clicks = [taken for visitor in visitors for taken in visitor.clicks]
    return {
        "kb_per_chain": per_chain / 1024,
        "state_bytes": state_bytes(shop, cache),
        "clicks_per_second": len(clicks) / seconds,
        "p95_click_ms": percentile(clicks),
        "p95_search_ms": percentile([taken for visitor in visitors for taken in visitor.searches]),
        "p95_click_alone_ms": percentile(alone.clicks),
    }


class Visitor:
    """One chain, with the seconds of its calls."""

    def __init__(self, session: ToolSession) -> None:
        self.session = session
        self.clicks: list[float] = []
        self.searches: list[float] = []

    async def visit(self, goal: Goal) -> None:
        """Search for the goal's title, open the first product, look at it, choose an option and go back."""
        words = (await self.call(self.searches, "search", keywords=goal.title)).split(" [SEP] ")
        first = words[words.index("Next >") + 1]
        option = next(iter(goal.options))
        for target in (first, "Description", "< Prev", option, "< Prev", "Next >", "< Prev", first):
            await self.call(self.clicks, "click", target=target)

    async def call(self, taken: list[float], tool: str, **arguments: Any) -> str:
        started = time.perf_counter()
        result = await self.session.call(ToolCall("call", tool, arguments))
        taken.append(time.perf_counter() - started)
        assert result.error is None, result
        return str(result.content)


def state_bytes(shop: Shop, cache: str) -> float:
    """Return the bytes of an instance's own objects: without objects that another instance shares, and without its
    goal, which the shop keeps."""
    one, other = WebShop(cache=cache), WebShop(cache=cache)
    for goal, environment in enumerate((one, other)):
        environment.reset(goal)
        environment.search(shop.goal(goal).title)
    assert one._shop is other._shop is shop
    shared = {id(shop), id(shop.goal(0)), id(shop.goal(1))}
    list(held(one, shared))
    return float(sum(sys.getsizeof(value) for value in held(other, shared)))


def held(value: Any, shared: set[int]) -> Iterator[Any]:
    """Yield `value` and the instances, dicts and texts that it references, each once."""
    if id(value) in shared or isinstance(value, type) or callable(value):
        return
    shared.add(id(value))
    yield value
    for inner in gc.get_referents(value):
        yield from held(inner, shared)


def resident() -> float:
    gc.collect()
    return float(psutil.Process().memory_info().rss)


def percentile(seconds: list[float]) -> float:
    """Return the 95th percentile in milliseconds."""
    return statistics.quantiles(seconds, n=20)[-1] * 1000


if __name__ == "__main__":
    main()
