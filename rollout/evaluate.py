"""Evaluation: the same chains as in training, on held-out tasks, sampled and greedy."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollout.chain import ChainRunner, Sampling
from rollout.client import InferenceClient
from rollout.config import DataConfig, OutcomePolicy, RolloutRecipe
from rollout.data import Task, load_tasks
from rollout.renderer import load_renderer
from rollout.rewards import Rewards
from rollout.trajectory import Group, Trajectory
from tools.toolset import open_toolset

logger = logging.getLogger(__name__)


@asynccontextmanager
async def open_runner(recipe: RolloutRecipe, base: Path, urls: str | Sequence[str]) -> AsyncIterator[ChainRunner]:
    """Everything that chains of `recipe` need: renderer, connections to the servers at `urls`, tools and rewards."""
    rewards = Rewards.load(recipe.rewards, base)
    async with (
        InferenceClient(urls, recipe.server.api_key_env, recipe.server.retry_seconds) as client,
        open_toolset(recipe, base, logger.info) as toolset,
    ):
        await client.check_routes()
        # which probes a template must pass depends on whether the chains have tools
        tools = bool(toolset.specs)
        renderer = load_renderer(recipe.model, recipe.rollout.parser, logger.info, tools=tools)
        yield ChainRunner(recipe, renderer, client, toolset, rewards)


async def evaluate(
    runner: ChainRunner,
    recipe: RolloutRecipe,
    tasks: list[Task],
    model: str,
    folder: Path,
    name: str,
    cache_salt: str | None = None,
) -> dict[str, float]:
    """Run `recipe.eval` on `tasks` with the weights called `model`; trajectories go to `folder`. For `cache_salt` see
    Sampling.

    Returns means over the chains that did not fail, by `sampled/...` and `greedy/...`: `reward`, every metric of
    the trajectories, and `failed`, the share of chains that broke.
    """
    modes = {"sampled": (recipe.rollout.temperature, recipe.eval.samples)}
    if recipe.eval.greedy:
        modes["greedy"] = (0.0, 1)

    async def run(mode: str, number: int, sample: int) -> Trajectory:
        chain_id = f"{name}-{mode}-{number:05d}.{sample}"
        # the seed leaves out `name`, so that the same weights give the same figures wherever they are evaluated
        seed = f"eval/{mode}/{number}/{sample}"
        return await runner.run(chain_id, tasks[number], Sampling(model, modes[mode][0], seed, cache_salt))

    numbers = range(len(tasks))
    by_mode = await asyncio.gather(
        *(
            asyncio.gather(*(run(mode, number, sample) for number in numbers for sample in range(samples)))
            for mode, (_, samples) in modes.items()
        )
    )
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, float] = {}
    for (mode, (_, samples)), trajectories in zip(modes.items(), by_mode, strict=True):
        with (folder / f"{name}-{mode}.jsonl").open("w", encoding="utf-8") as file:
            for number in numbers:
                members = trajectories[number * samples : (number + 1) * samples]
                file.write(Group(f"{mode}-{number:05d}", tasks[number], members).to_json() + "\n")
        figures |= {f"{mode}/{key}": value for key, value in mean_figures(trajectories).items()}
    return figures


def mean_figures(trajectories: list[Trajectory]) -> dict[str, float]:
    scored = [t for t in trajectories if t.reward is not None]
    means = {"failed": 1 - len(scored) / len(trajectories)}
    if scored:
        means["reward"] = sum(t.reward for t in scored if t.reward is not None) / len(scored)
        names = sorted({name for t in scored for name in t.metrics})
        means |= {name: sum(t.metrics.get(name, 0.0) for t in scored) / len(scored) for name in names}
    return means


def run_eval(
    recipe: RolloutRecipe,
    base: Path,
    urls: str | Sequence[str],
    folder: Path,
    log: Callable[[dict[str, Any]], None],
    model: str = "policy",
) -> dict[str, float]:
    """Evaluate the weights that the servers at `urls` call `model` on `recipe.eval.data`; blocking."""
    if recipe.eval.data is None:
        raise ValueError("eval.data: nothing to evaluate on; name a file, such as eval.data.path=heldout.jsonl")
    tasks = load_tasks(recipe.eval.data)

    async def run() -> dict[str, float]:
        async with open_runner(recipe, base, urls) as runner:
            return await evaluate(runner, recipe, tasks, model, folder, "final")

    figures = asyncio.run(run())
    log({f"eval/{key}": value for key, value in figures.items()})
    return figures


def run_rollout(
    recipe: RolloutRecipe,
    base: Path,
    urls: str | Sequence[str],
    folder: Path,
    log: Callable[[dict[str, Any]], None],
    model: str = "policy",
) -> dict[str, float]:
    """Run one group of sampled chains for every task of `recipe.data` and save them, ready for
    `train.from_trajectories`; blocking."""
    data: DataConfig | None = recipe.data
    if data is None:
        raise ValueError("data: nothing to roll out on; name a file, such as data.path=tasks.jsonl")
    tasks = load_tasks(data)
    path = folder / "rollout.jsonl"

    async def run_chain(runner: ChainRunner, chain_id: str, task: Task, retried: bool = False) -> Trajectory:
        sampling = Sampling(model, recipe.rollout.temperature, seed=chain_id)
        chain = await runner.run(chain_id, task, sampling, recipe.rollout.scored)
        if recipe.rollout.outcome_policy(chain.outcome) is OutcomePolicy.RETRY and not retried:
            return await run_chain(runner, f"{chain_id}.retry", task, retried=True)
        return chain

    async def run_group(runner: ChainRunner, number: int) -> Group:
        ids = [f"g{number:06d}.{member}" for member in range(recipe.rollout.group_size)]
        chains = (run_chain(runner, i, tasks[number]) for i in ids)
        group = Group(f"g{number:06d}", tasks[number], list(await asyncio.gather(*chains)))
        with path.open("a", encoding="utf-8") as file:
            file.write(group.to_json() + "\n")
        return group

    async def run() -> list[Group]:
        async with open_runner(recipe, base, urls) as runner:
            return list(await asyncio.gather(*(run_group(runner, number) for number in range(len(tasks)))))

    figures = mean_figures([t for group in asyncio.run(run()) for t in group.trajectories])
    log({f"rollout/{key}": value for key, value in figures.items()})
    return figures
