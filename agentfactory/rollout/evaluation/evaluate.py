"""Evaluation of a policy on held-out tasks, by chains as in training, and a trial of its rewards on dummy answers."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentfactory.base.http.proxies import Proxy
from agentfactory.base.messages import EnvironmentReward
from agentfactory.base.processes.interruption import run_interruptibly
from agentfactory.base.user_code.entry_points import load_named
from agentfactory.rollout.chains.agent_hooks import AgentHooks, has_own_loop, load_agent
from agentfactory.rollout.chains.chain_counts import follow_server
from agentfactory.rollout.chains.chain_runner import ChainRunner, Runner
from agentfactory.rollout.chains.outcome_warnings import commonest_ending
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.chains.simulated_user import open_users
from agentfactory.rollout.config import OutcomePolicy, RolloutRecipe, distinct
from agentfactory.rollout.data import Place, Task
from agentfactory.rollout.evaluation.first_look import Look, Offer, look_at
from agentfactory.rollout.evaluation.pass_at_k import Estimate, by_source, estimates, mean_figures, sample_figures
from agentfactory.rollout.groups.group_files import append_group, delete_groups, keep_unfinished
from agentfactory.rollout.inference.inference_client import ROUTES_SECONDS, InferenceClient
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.sources import Loaded, Source, mix_of, open_all
from agentfactory.rollout.text.load_renderer import load_renderer
from agentfactory.rollout.trajectory import Group, Trajectory, chain_id
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
    images: Path | None = None,
) -> AsyncIterator[ChainRunner]:
    """Open a runner for chains of `recipe` with the servers at `urls`. `objects` are further tools; `rewards` and
    `agent` replace the recipe's; `images` is the folder for images."""
    async with (
        _connected(recipe, urls, images) as (client, folder),
        _open_chains(recipe, base, client, folder, objects=objects, rewards=rewards, agent=agent) as runner,
    ):
        await client.check_routes()
        yield runner


@asynccontextmanager
async def open_sources(
    recipe: RolloutRecipe,
    loaded: Sequence[Loaded],
    base: Path,
    urls: str | Sequence[str],
    *,
    processes: int = 1,
    images: Path | None = None,
    proxy: Proxy | None = None,
    routes_seconds: float = ROUTES_SECONDS,
) -> AsyncIterator[list[Source[ChainRunner]]]:
    """Open the runners of the parts in `loaded`, as open_runner and open_all do; `processes` share the memory.
    Servers get `routes_seconds` to describe their routes."""
    # all tools share the machine's memory
    processes *= len(distinct([one.part for one in loaded]))
    async with _connected(recipe, urls, images, proxy) as (client, folder):

        def opener(part: RolloutRecipe) -> AbstractAsyncContextManager[ChainRunner]:
            return _open_chains(part, base, client, folder, processes=processes)

        async with open_all(loaded, opener) as sources:
            # last, because they may still be loading their model
            await client.check_routes(routes_seconds)
            yield sources


@asynccontextmanager
async def _connected(
    recipe: RolloutRecipe, urls: str | Sequence[str], images: Path | None, proxy: Proxy | None = None
) -> AsyncIterator[tuple[InferenceClient, Path]]:
    """Connect to the servers at `urls`, and open the folder for images (None: a temporary one)."""
    server = recipe.server
    opened: AbstractContextManager[str | Path]
    opened = TemporaryDirectory(prefix="agentfactory-images-") if images is None else nullcontext(images)
    with opened as folder:
        async with InferenceClient(urls, server.api_key_env, server.retry_seconds, proxy) as client:
            following = asyncio.create_task(follow_server(client))
            try:
                yield client, Path(folder)
            finally:
                following.cancel()


@asynccontextmanager
async def _open_chains(
    recipe: RolloutRecipe,
    base: Path,
    client: InferenceClient,
    images: Path,
    *,
    objects: Sequence[Any] = (),
    rewards: Rewards | None = None,
    agent: AgentHooks | None = None,
    processes: int = 1,
) -> AsyncIterator[ChainRunner]:
    acting: Any = agent or load_agent(recipe.rollout.agent, base)
    rollout = recipe.rollout
    async with (
        rewards or Rewards(recipe.rewards, base) as used,
        open_users(rollout.user, base) as users,
        open_toolset(recipe, base, logger.info, objects, processes) as toolset,
    ):
        # chains with tools need more template probes; an agent may bring its own tools
        tools = bool(toolset.specs) or has_own_loop(acting)
        renderer = load_renderer(
            recipe.model,
            rollout.parser,
            logger.info,
            reasoning=rollout.reasoning,
            tools=tools,
            base=base,
            images=images,
        )
        if has_own_loop(acting):
            kind = load_named("agentfactory.rollout.gateway.gateway_runner:GatewayRunner")
            async with acting, acting.gateway() as gateway:
                yield kind(recipe, renderer, client, toolset, used, acting, gateway)
        else:
            yield ChainRunner(recipe, renderer, client, toolset, used, acting, users)


@asynccontextmanager
async def _watched(opened: AbstractAsyncContextManager[Sequence[Source[Any]]]) -> AsyncIterator[list[Source[Any]]]:
    """Open sources, check that their chains can run, and watch these. At the end, tell the errors of their tools."""
    async with opened as sources:
        for source in sources:
            await source.check()
        yield [replace(source, runner=source.watched()) for source in sources]
        for source in sources:
            source.runner.setup.tool_errors.report()


async def evaluate(
    sources: Sequence[Source[Any]],
    recipe: RolloutRecipe,
    model: str,
    folder: Path,
    name: str,
    cache_salt: str | None = None,
) -> tuple[dict[str, float], dict[str, str], dict[str, Look]]:
    """Run `recipe.eval` on the tasks of `sources` with the weights called `model`, and save trajectories to `folder`.
    For `cache_salt` see Sampling. Return means over the chains that did not fail, under `sampled/...`, `greedy/...` and
    `sampled/source/<source>/...` (`reward`, metrics, `failed`, avg@k, pass@k); descriptions of the failures of modes in
    which no chain has a reward; and the looks of the sampled chains."""
    played = await _play(sources, recipe, model, folder, name, cache_salt)
    failures = {}
    for mode, groups in played.items():
        chains = _chains(groups)
        if all(chain.reward is None for chain in chains):
            endings = Counter((chain.outcome.value, chain.error or "") for chain in chains)
            failures[mode] = f"held-out tasks, {mode}: {commonest_ending(endings, len(chains))}"
    return _means(recipe, played), failures, looks_at(played["sampled"], sources)


def _chains(groups: Sequence[Group]) -> list[Trajectory]:
    return [chain for group in groups for chain in group.trajectories]


def looks_at(groups: Sequence[Group], sources: Sequence[Source[Any]]) -> dict[str, Look]:
    parts = [(source, [group for group in groups if group.source == source.name]) for source in sources]
    return {source.name: look_at(part, offer_of(source.runner)) for source, part in parts if part}


def offer_of(runner: Runner) -> Offer:
    setup = runner.setup
    judged, waits = setup.recipe.needs_rewards, runner.toolset.why_chains_wait
    return Offer(setup.config, setup.specs, setup.dialogue.parser, waits, runner.own_loop, judged)


async def _play(
    sources: Sequence[Source[Any]],
    recipe: RolloutRecipe,
    model: str,
    folder: Path,
    name: str,
    cache_salt: str | None = None,
) -> dict[str, list[Group]]:
    """Run the chains of each mode, saving each group at its end, and return the groups in the order of the tasks."""
    modes = {"sampled": (recipe.rollout.temperature, recipe.eval.samples)}
    if recipe.eval.greedy:
        modes["greedy"] = (0.0, 1)
    folder.mkdir(parents=True, exist_ok=True)
    for mode in modes:
        delete_groups(folder / f"{name}-{mode}.jsonl")
    rows = [(source, row) for source in sources for row in range(len(source.tasks))]

    async def run_group(mode: str, number: int) -> Group:
        temperature, samples = modes[mode]
        source, row = rows[number]
        task = await source.take(row)
        path, begun = folder / f"{name}-{mode}.jsonl", list[Trajectory]()
        # the seed does not depend on `name`, so the same weights give the same metrics in every evaluation
        chains = [
            source.runner.run(
                chain_id(f"{name}-{mode}-{number:05d}", sample),
                task,
                Sampling(model, temperature, f"eval/{mode}/{number}/{sample}", cache_salt),
                begun=begun,
            )
            for sample in range(samples)
        ]
        return await _run_group(source, f"{mode}-{number:05d}", task, chains, begun, path)

    by_mode = await asyncio.gather(
        *(asyncio.gather(*(run_group(mode, number) for number in range(len(rows)))) for mode in modes)
    )
    return {mode: list(groups) for mode, groups in zip(modes, by_mode, strict=True)}


async def _run_group(
    source: Source[Any],
    group_id: str,
    task: Task,
    chains: Sequence[Awaitable[Trajectory]],
    begun: list[Trajectory],
    path: Path,
) -> Group:
    """Run a group and append it to `path`. If it is cancelled, keep what its chains, as far as `begun`, sampled."""
    try:
        group: Group = await source.runner.run_group(group_id, task, chains, source.name)
    except asyncio.CancelledError:
        keep_unfinished(path, Group(group_id, task, begun, source=source.name))
        raise
    append_group(path, group)
    return group


def _means(recipe: RolloutRecipe, played: dict[str, list[Group]]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for mode, groups in played.items():
        named = sorted({group.source for group in groups} - {""})
        parts = {f"source/{name}/": [group for group in groups if group.source == name] for name in named}
        for prefix, part in {"": groups, **parts}.items():
            means = mean_figures(_chains(part))
            if mode == "sampled":
                means |= sample_figures(part, recipe.eval.samples)
            metrics |= {f"{mode}/{prefix}{key}": value for key, value in means.items()}
    return metrics


@dataclass(frozen=True)
class Evaluation:
    means: dict[str, float]
    """Means as returned by `evaluate`; training logs them too."""
    estimates: dict[str, dict[str, dict[str, Estimate]]]
    """Mode -> value of the tasks' `source` field ("" for all tasks) -> metric -> estimate."""
    failures: Counter[str]
    chains: int
    looks: dict[str, Look]

    def figures(self) -> dict[str, float]:
        """Return the means and the bounds of intervals (`<mode>/<figure>/low`), also `<mode>/source/<source>/...`."""
        metrics = dict(self.means)
        for mode, sources in self.estimates.items():
            for source, found in sources.items():
                prefix = f"{mode}/source/{source}/" if source else f"{mode}/"
                for name, estimate in found.items():
                    metrics.setdefault(prefix + name, estimate.value)
                    if estimate.low is not None and estimate.high is not None:
                        metrics |= {f"{prefix}{name}/low": estimate.low, f"{prefix}{name}/high": estimate.high}
        return metrics


def run_eval(
    recipe: RolloutRecipe,
    folder: Path,
    log: Callable[[dict[str, Any]], None],
    opened: AbstractAsyncContextManager[Sequence[Source[Any]]],
    model: str = "policy",
) -> Evaluation:
    """Evaluate on the tasks of the sources `opened` the weights called `model` on the server of their runners. Save
    each group to `folder` when it has ended, and pass all metrics to `log` as `eval/...`. Blocking."""

    async def run() -> tuple[dict[str, list[Group]], dict[str, Look]]:
        async with _watched(opened) as sources:
            played = await _play(sources, recipe, model, folder, "final")
        return played, looks_at(played["sampled"], sources)

    played, looks = run_interruptibly(run())
    chains = [chain for groups in played.values() for chain in _chains(groups)]
    found: dict[str, dict[str, dict[str, Estimate]]] = {}
    for mode, groups in played.items():
        samples = recipe.eval.samples if mode == "sampled" else 1
        found[mode] = {source: estimates(part, samples) for source, part in ({"": groups} | by_source(groups)).items()}
    failures = Counter(f"{chain.outcome}: {chain.error}" for chain in chains if chain.reward is None)
    evaluation = Evaluation(_means(recipe, played), found, failures, len(chains), looks)
    log({f"eval/{key}": value for key, value in evaluation.figures().items()})
    return evaluation


def run_rollout(
    recipe: RolloutRecipe,
    folder: Path,
    log: Callable[[dict[str, Any]], None],
    opened: AbstractAsyncContextManager[Sequence[Source[Any]]],
    model: str = "policy",
    sizes: Sequence[int] | None = None,
) -> tuple[dict[str, float], dict[str, Look]]:
    """Run a group of sampled chains on each task of `opened`, and save the groups. Return the mean metrics, and the
    looks by source. Blocking. `sizes`: run only so many groups, the first of training, of these sizes."""
    path = folder / "rollout.jsonl"

    async def run_chain(
        source: Source[ChainRunner],
        group_id: str,
        index: int,
        task: Task,
        begun: list[Trajectory],
        retry: bool = False,
    ) -> Trajectory:
        name = chain_id(group_id, index, retry)
        sampling = Sampling(model, recipe.rollout.temperature, seed=name)
        chain = await source.runner.run(name, task, sampling, recipe.rollout.scored, begun)
        if recipe.rollout.outcome_policy(chain.outcome) is OutcomePolicy.RETRY and not retry:
            return await run_chain(source, group_id, index, task, begun, retry=True)
        return chain

    async def run_group(source: Source[ChainRunner], row: int, number: int, size: int) -> Group:
        group_id, task, begun = Place(number).group_id, await source.take(row), list[Trajectory]()
        chains = [run_chain(source, group_id, index, task, begun) for index in range(size)]
        return await _run_group(source, group_id, task, chains, begun, path)

    async def run() -> tuple[list[Group], dict[str, Look]]:
        async with _watched(opened) as watched:
            if sizes is None:
                chosen = [(one, row, one.config.group_size) for one in watched for row in range(len(one.tasks))]
            else:
                order = mix_of(watched, recipe.seed)
                places = [order.place(position) for position in range(len(sizes))]
                chosen = [(watched[one], row, size) for (one, row), size in zip(places, sizes, strict=True)]
            groups = await asyncio.gather(
                *(run_group(source, row, number, size) for number, (source, row, size) in enumerate(chosen))
            )
        return list(groups), looks_at(groups, watched)

    groups, looks = run_interruptibly(run())
    metrics = mean_figures(_chains(groups))
    log({f"rollout/{key}": value for key, value in metrics.items()})
    return metrics, looks


async def try_rewards(
    recipe: RolloutRecipe, base: Path, tasks: Sequence[Task], environment: EnvironmentReward | None
) -> list[str]:
    """Call every reward of the recipe on a dummy answer to each task, and return the problems; see Rewards.try_on. If
    the agent is a program, `workspace` is a folder as its chains begin with, removed after the call."""
    faults, agent = [], recipe.rollout.agent
    async with Rewards(recipe.rewards, base) as rewards:
        folder_of = None
        if rewards.takes("workspace") and agent is not None and agent.command:
            folder_of = load_agent(agent, base).first_folder
        for number, task in enumerate(tasks, 1):
            async with folder_of(task) if folder_of is not None else nullcontext() as workspace:
                faults += await rewards.try_on(number, task, environment, workspace)
    return faults
