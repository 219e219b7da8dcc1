"""Evaluation: the same chains as in training, on held-out tasks, sampled and greedy."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollout.agent import AgentHooks, load_agent
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
async def open_runner(
    recipe: RolloutRecipe,
    base: Path,
    urls: str | Sequence[str],
    *,
    objects: Sequence[Any] = (),
    rewards: Rewards | None = None,
    agent: AgentHooks | None = None,
) -> AsyncIterator[ChainRunner]:
    """Everything that chains of `recipe` need: renderer, connections to the servers at `urls`, tools and rewards.

    `objects` are tools beside the recipe's; `rewards` and `agent` stand in place of those that it names.
    """
    agent = agent or load_agent(recipe.rollout.agent, base)
    async with (
        rewards or Rewards.load(recipe.rewards, base) as used,
        InferenceClient(urls, recipe.server.api_key_env, recipe.server.retry_seconds) as client,
        open_toolset(recipe, base, logger.info, objects) as toolset,
    ):
        await client.check_routes()
        # which probes a template must pass depends on whether the chains have tools
        tools = bool(toolset.specs)
        renderer = load_renderer(recipe.model, recipe.rollout.parser, logger.info, tools=tools, base=base)
        yield ChainRunner(recipe, renderer, client, toolset, used, agent)


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

    async def run_group(mode: str, number: int) -> Group:
        temperature, samples = modes[mode]
        # the seed leaves out `name`, so that the same weights give the same figures wherever they are evaluated
        chains = [
            runner.run(
                f"{name}-{mode}-{number:05d}.{sample}",
                tasks[number],
                Sampling(model, temperature, f"eval/{mode}/{number}/{sample}", cache_salt),
            )
            for sample in range(samples)
        ]
        return await runner.run_group(f"{mode}-{number:05d}", tasks[number], chains)

    by_mode = await asyncio.gather(
        *(asyncio.gather(*(run_group(mode, number) for number in range(len(tasks)))) for mode in modes)
    )
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, float] = {}
    for mode, groups in zip(modes, by_mode, strict=True):
        with (folder / f"{name}-{mode}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(group.to_json() + "\n" for group in groups)
        figures |= {f"{mode}/{key}": value for key, value in mean_figures(groups).items()}
    return figures


def mean_figures(groups: Sequence[Group]) -> dict[str, float]:
    """Means over the chains that have a reward, and `failed`, the share of those that have none."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
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
            await runner.check(tasks[0])
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
        chains = [run_chain(runner, chain_id, tasks[number]) for chain_id in ids]
        group = await runner.run_group(f"g{number:06d}", tasks[number], chains)
        with path.open("a", encoding="utf-8") as file:
            file.write(group.to_json() + "\n")
        return group

    async def run() -> list[Group]:
        async with open_runner(recipe, base, urls) as runner:
            await runner.check(tasks[0])
            return list(await asyncio.gather(*(run_group(runner, number) for number in range(len(tasks)))))

    figures = mean_figures(asyncio.run(run()))
    log({f"rollout/{key}": value for key, value in figures.items()})
    return figures
