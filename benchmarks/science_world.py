"""ScienceWorld with 32 concurrent chains: actions per second and memory per chain, compared with the published package.

Each chain is served as in training: the environment in the worker's process, through a chain's session, with eight
chains per Java process. The chains begin at the same time, each with one of eight tasks, and follow its gold path as
fast as they can. Before that, one chain does so alone, and the published package plays the same games by `env.step`.

The last line is JSON: with all chains, `actions_per_second`, `p50_action_ms`, `p95_action_ms`, `p50_begin_ms` (to load
a scene) and `mb_per_chain` (the Java processes' resident memory); `p50_action_alone_ms`, `published_p50_action_ms`, and
`speedup`, the ratio of these two.

    python benchmarks/science_world.py [--quick]
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from scienceworld import ScienceWorldEnv

from agentfactory.base.config import ToolsRecipe
from agentfactory.base.messages import ToolCall
from agentfactory.tools.sessions.toolset import Toolset, open_toolset

TASKS = (
    *("boil", "find-animal", "power-component", "chemistry-mix", "use-thermometer", "grow-plant", "freeze"),
    "lifespan-longest-lived",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 chains")
    chains = 8 if parser.parse_args().quick else 32
    paths, published = play_published()
    figures = asyncio.run(measure(chains, paths))
    speedup = published / figures["p50_action_alone_ms"]
    print(f"{chains} chains")
    figures |= {"published_p50_action_ms": published, "speedup": speedup}
    print(json.dumps({name: float(f"{value:.3g}") for name, value in figures.items()}))


def play_published() -> tuple[dict[str, list[str]], float]:
    """Return the gold paths, and the milliseconds of an action of the published package."""
    environment, paths, taken = ScienceWorldEnv(), {}, []
    for task in TASKS:
        environment.load(task, 0, "easy", generateGoldPath=True)
        paths[task] = environment.get_gold_action_sequence()
        for action in paths[task][:20]:
            started = time.perf_counter()
            environment.step(action)
            taken.append(time.perf_counter() - started)
    return paths, statistics.median(taken) * 1000


async def measure(chains: int, paths: dict[str, list[str]]) -> dict[str, float]:
    """Play `chains` concurrent games and return the figures."""
    recipe = ToolsRecipe.model_validate({"mcp_servers": {"world": {"module": "scienceworld"}}})
    async with open_toolset(recipe, Path.cwd()) as toolset:
        tasks = [TASKS[number % len(TASKS)] for number in range(chains)]
        await asyncio.gather(*(play(toolset, f"warm {n}", task, paths[task]) for n, task in enumerate(tasks)))
        alone = [took for task in TASKS for took in (await play(toolset, f"alone {task}", task, paths[task]))[1]]
        started = time.perf_counter()
        played = await asyncio.gather(*(play(toolset, f"{n}", task, paths[task]) for n, task in enumerate(tasks)))
        seconds = time.perf_counter() - started
        resident = sum(child.memory_info().rss for child in psutil.Process().children() if child.name() == "java")
    actions = [took for _, taken in played for took in taken]
    return {
        "actions_per_second": len(actions) / seconds,
        "p50_action_ms": statistics.median(actions) * 1000,
        "p95_action_ms": statistics.quantiles(actions, n=20)[-1] * 1000,
        "p50_begin_ms": statistics.median(began for began, _ in played) * 1000,
        "mb_per_chain": resident / chains / 2**20,
        "p50_action_alone_ms": statistics.median(alone) * 1000,
    }


async def play(toolset: Toolset, key: str, task: str, path: Sequence[str]) -> tuple[float, list[float]]:
    """Follow a path in a chain; return the seconds until it began, and the seconds of each action."""
    started = time.perf_counter()
    async with toolset.chain(key, {"task": task, "variation": 0}) as session:
        began, taken = time.perf_counter() - started, []
        for action in path:
            started = time.perf_counter()
            result = await session.call(ToolCall("call", "act", {"action": action}))
            taken.append(time.perf_counter() - started)
            if result.finish:
                break
        return began, taken


if __name__ == "__main__":
    main()
