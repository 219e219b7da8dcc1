"""Evaluation of a policy on held-out tasks, by the same chains as in training, sampled and greedy."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from agentfactory.rollout.chains.agent_hooks import AgentHooks
from agentfactory.rollout.chains.chain_runner import ChainRunner, Runner
from agentfactory.rollout.chains.outcome_warnings import commonest_ending
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.config import OutcomePolicy, RolloutRecipe
from agentfactory.rollout.data import Place, Task
from agentfactory.rollout.evaluation.first_look import Look, Offer, look_at
from agentfactory.rollout.evaluation.pass_at_k import Estimate, by_source, estimates, sample_figures
from agentfactory.rollout.gateway.client_agents import ClientAgent
from agentfactory.rollout.gateway.gateway_runner import GatewayRunner
from agentfactory.rollout.gateway.load_agent import load_agent
from agentfactory.rollout.groups.group_files import append_group, delete_groups
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.text.load_renderer import load_renderer
from agentfactory.rollout.trajectory import Group, Trajectory, chain_id
from agentfactory.tools.http.proxies import Proxy
from agentfactory.tools.processes.interruption import run_interruptibly
from agentfactory.tools.sessions.toolset import open_toolset

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
    processes: int = 1,
    images: Path | None = None,
    proxy: Proxy | None = None,
) -> AsyncIterator[ChainRunner]:
    """Open a runner for chains of `recipe`: renderer, connections to the servers at `urls`, tools and rewards.

    `objects` are tools in addition to the recipe's; `rewards` and `agent` replace the recipe's. `processes` is the
    number of processes like this one that share the machine's memory. `images` is the folder for the chains' images;
    None: a temporary one. `proxy`: see InferenceClient.
    """
    acting = agent or load_agent(recipe.rollout.agent, base)
    async with (
        _folder_of(images) as seen,
        rewards or Rewards.load(recipe.rewards, base) as used,
        InferenceClient(urls, recipe.server.api_key_env, recipe.server.retry_seconds, proxy) as client,
        open_toolset(recipe, base, logger.info, objects, processes) as toolset,
    ):
        await client.check_routes()
        # chains with tools need more template probes; an agent may bring its own tools
        tools = bool(toolset.specs) or isinstance(acting, ClientAgent)
        renderer = load_renderer(
            recipe.model,
            recipe.rollout.parser,
            logger.info,
            reasoning=recipe.rollout.reasoning,
            tools=tools,
            base=base,
            images=seen,
        )
        if isinstance(acting, ClientAgent):
            async with acting, acting.gateway() as gateway:
                yield GatewayRunner(recipe, renderer, client, toolset, used, acting, gateway)
        else:
            yield ChainRunner(recipe, renderer, client, toolset, used, acting)


@asynccontextmanager
async def _folder_of(images: Path | None) -> AsyncIterator[Path]:
    if images is not None:
        yield images
        return
    with TemporaryDirectory(prefix="agentfactory-images-") as folder:
        yield Path(folder)


async def evaluate(
    runner: Runner,
    recipe: RolloutRecipe,
    tasks: list[Task],
    model: str,
    folder: Path,
    name: str,
    cache_salt: str | None = None,
) -> tuple[dict[str, float], dict[str, str], Look]:
    """Run `recipe.eval` on `tasks` with the weights called `model`, and save trajectories to `folder`. For `cache_salt`
    see Sampling.

    Return three values. The first has means over the chains that did not fail, under `sampled/...` and `greedy/...`:
    `reward`, every metric of the trajectories, `failed` (the share of failed chains), and with several samples per task
    also avg@k and pass@k. The second has a description of the failures for each mode in which no chain has a reward.
    The third is the look of the sampled chains.
    """
    played = await _play(runner, recipe, tasks, model, folder, name, cache_salt)
    failures = {
        mode: _failure(mode, groups) for mode, groups in played.items() if mean_figures(groups)["failed"] == 1.0
    }
    return _means(recipe, played), failures, look_at(played["sampled"], offer_of(runner))


def offer_of(runner: Runner) -> Offer:
    """Return what the chains of a runner get."""
    setup = runner.setup
    own_loop = isinstance(runner, GatewayRunner)
    judged = setup.recipe.needs_rewards
    return Offer(setup.config, setup.specs, setup.dialogue.parser, runner.toolset.why_chains_wait, own_loop, judged)


def _failure(mode: str, groups: list[Group]) -> str:
    """Describe the failures of a mode whose chains all failed."""
    chains = [chain for group in groups for chain in group.trajectories]
    endings = Counter((chain.outcome.value, chain.error or "") for chain in chains)
    return f"held-out tasks, {mode}: {commonest_ending(endings, len(chains))}"


async def _play(
    runner: Runner,
    recipe: RolloutRecipe,
    tasks: list[Task],
    model: str,
    folder: Path,
    name: str,
    cache_salt: str | None = None,
) -> dict[str, list[Group]]:
    """Run the chains of each mode and return its groups in the order of the tasks. Save each group when its chains have
    ended."""
    modes = {"sampled": (recipe.rollout.temperature, recipe.eval.samples)}
    if recipe.eval.greedy:
        modes["greedy"] = (0.0, 1)
    folder.mkdir(parents=True, exist_ok=True)
    for mode in modes:
        delete_groups(folder / f"{name}-{mode}.jsonl")

    async def run_group(mode: str, number: int) -> Group:
        temperature, samples = modes[mode]
        task = await runner.take(tasks[number], "eval.data", number + 1)
        # the seed does not depend on `name`, so the same weights give the same metrics in every evaluation
        chains = [
            runner.run(
                chain_id(f"{name}-{mode}-{number:05d}", sample),
                task,
                Sampling(model, temperature, f"eval/{mode}/{number}/{sample}", cache_salt),
            )
            for sample in range(samples)
        ]
        group = await runner.run_group(f"{mode}-{number:05d}", task, chains)
        append_group(folder / f"{name}-{mode}.jsonl", group)
        return group

    by_mode = await asyncio.gather(
        *(asyncio.gather(*(run_group(mode, number) for number in range(len(tasks)))) for mode in modes)
    )
    return {mode: list(groups) for mode, groups in zip(modes, by_mode, strict=True)}


def _means(recipe: RolloutRecipe, played: dict[str, list[Group]]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for mode, groups in played.items():
        means = mean_figures(groups)
        if mode == "sampled":
            means |= sample_figures(groups, recipe.eval.samples)
        metrics |= {f"{mode}/{key}": value for key, value in means.items()}
    return metrics


@dataclass(frozen=True)
class Evaluation:
    """The results of `run_eval`."""

    means: dict[str, float]
    """Means as returned by `evaluate`; training logs them too."""
    estimates: dict[str, dict[str, dict[str, Estimate]]]
    """Mode -> value of the tasks' `source` field ("" for all tasks) -> metric -> estimate."""
    failures: Counter[str]
    """Cause of failure -> number of chains."""
    chains: int
    """Number of chains in both modes."""
    look: Look
    """The look of the sampled chains."""

    def figures(self) -> dict[str, float]:
        """Return all results by name: the means, the bounds of intervals as `<mode>/<figure>/low` and `/high`, and the
        same for each source under `<mode>/source/<source>/`."""
        metrics = dict(self.means)
        for mode, sources in self.estimates.items():
            for source, found in sources.items():
                prefix = f"{mode}/source/{source}/" if source else f"{mode}/"
                for name, estimate in found.items():
                    metrics.setdefault(prefix + name, estimate.value)
                    if estimate.low is not None and estimate.high is not None:
                        metrics |= {f"{prefix}{name}/low": estimate.low, f"{prefix}{name}/high": estimate.high}
        return metrics


def mean_figures(groups: Sequence[Group]) -> dict[str, float]:
    """Return means over the chains with a reward that have the value, and `failed`, the share of chains without one."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    scored = [t for t in trajectories if t.reward is not None]
    means = {"failed": 1 - len(scored) / len(trajectories)}
    if scored:
        means["reward"] = sum(t.reward for t in scored if t.reward is not None) / len(scored)
        names = sorted({name for t in scored for name in t.metrics})
        means |= {name: fmean(t.metrics[name] for t in scored if name in t.metrics) for name in names}
    return means


def run_eval(
    recipe: RolloutRecipe,
    tasks: list[Task],
    folder: Path,
    log: Callable[[dict[str, Any]], None],
    opened: AbstractAsyncContextManager[Runner],
    model: str = "policy",
) -> Evaluation:
    """Evaluate on `tasks` the weights called `model` on the server of the runner `opened`. Blocking.

    Save each group to `folder` when it has ended, and pass all metrics to `log` as `eval/...`.
    """

    async def run() -> tuple[dict[str, list[Group]], Look]:
        async with opened as runner:
            await runner.check(tasks, "eval.data")
            played = await _play(runner.watched(len(tasks)), recipe, tasks, model, folder, "final")
            runner.setup.tool_errors.report()
            return played, look_at(played["sampled"], offer_of(runner))

    played, look = run_interruptibly(run())
    chains = [chain for groups in played.values() for group in groups for chain in group.trajectories]
    found = Evaluation(
        _means(recipe, played),
        {mode: _estimates(recipe, mode, groups) for mode, groups in played.items()},
        Counter(f"{chain.outcome}: {chain.error}" for chain in chains if chain.reward is None),
        len(chains),
        look,
    )
    log({f"eval/{key}": value for key, value in found.figures().items()})
    return found


def _estimates(recipe: RolloutRecipe, mode: str, groups: list[Group]) -> dict[str, dict[str, Estimate]]:
    samples = recipe.eval.samples if mode == "sampled" else 1
    parts = {"": groups} | by_source(groups)
    return {source: estimates(part, samples) for source, part in parts.items()}


def run_rollout(
    recipe: RolloutRecipe,
    tasks: list[Task],
    base: Path,
    urls: str | Sequence[str],
    folder: Path,
    log: Callable[[dict[str, Any]], None],
    model: str = "policy",
    images: Path | None = None,
    sizes: Sequence[int] | None = None,
) -> tuple[dict[str, float], Look]:
    """Run a group of sampled chains on each of `tasks`, and save the groups for `train.from_trajectories`. Return the
    mean metrics, and the look of the chains. Blocking. `sizes` are the groups' numbers of chains; None: each has
    rollout.group_size. For `images` see open_runner."""
    path = folder / "rollout.jsonl"

    async def run_chain(runner: ChainRunner, group_id: str, index: int, task: Task, retry: bool = False) -> Trajectory:
        name = chain_id(group_id, index, retry)
        sampling = Sampling(model, recipe.rollout.temperature, seed=name)
        chain = await runner.run(name, task, sampling, recipe.rollout.scored)
        if recipe.rollout.outcome_policy(chain.outcome) is OutcomePolicy.RETRY and not retry:
            return await run_chain(runner, group_id, index, task, retry=True)
        return chain

    async def run_group(runner: ChainRunner, number: int) -> Group:
        group_id, task = Place(number).group_id, await runner.take(tasks[number], row=number + 1)
        size = recipe.rollout.group_size if sizes is None else sizes[number]
        chains = [run_chain(runner, group_id, index, task) for index in range(size)]
        group = await runner.run_group(group_id, task, chains)
        append_group(path, group)
        return group

    async def run() -> tuple[list[Group], Look]:
        async with open_runner(recipe, base, urls, images=images) as runner:
            await runner.check(tasks)
            watched = runner.watched(len(tasks))
            groups = await asyncio.gather(*(run_group(watched, number) for number in range(len(tasks))))
            runner.setup.tool_errors.report()
            return list(groups), look_at(groups, offer_of(runner))

    groups, look = run_interruptibly(run())
    metrics = mean_figures(groups)
    log({f"rollout/{key}": value for key, value in metrics.items()})
    return metrics, look
