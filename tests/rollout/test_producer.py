"""Groups that are too stale, give no signal or were left by an earlier run; turns that need the newest weights."""

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from agentfactory.rollout.chains.chain_runner import ChainRunner, RolloutStoppedError
from agentfactory.rollout.config import Part, RolloutConfig, RolloutRecipe
from agentfactory.rollout.data import Place, TaskMix, TaskOrder
from agentfactory.rollout.groups import producer
from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.groups.group_filter import Worth, worth
from agentfactory.rollout.groups.producer import GroupProducer
from agentfactory.rollout.groups.resumed_positions import Resumed
from agentfactory.rollout.groups.staleness import Admission
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.inference.weight_versions import Published
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.sources import Source
from agentfactory.rollout.text.load_renderer import make_renderer
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.rollout.text.tokenizer import load_tokenizer
from agentfactory.rollout.trajectory import Outcome, Trajectory
from agentfactory.rollout.workers.worker_socket import Delivered
from agentfactory.tools.sessions.toolset import open_toolset
from tests.scripted_server import ScriptedServer, serve_script

TOOLS = """
import asyncio
from collections import Counter
from agentfactory import Environment, tool

begun = Counter()
closed = Counter()


class Waiting(Environment):
    def reset(self, name, seconds, rewards=None, talks=(), **task):
        self.name, self.number = name, begun[name] % len(seconds)
        self.seconds = seconds[self.number]
        self.earned = float(self.number) if rewards is None else rewards[self.number]
        nth, begun[name] = begun[name], begun[name] + 1
        return "Talk!" if nth in talks else None

    @tool
    async def wait(self) -> str:
        \"\"\"Wait.\"\"\"
        await asyncio.sleep(self.seconds)
        return "waited"

    def reward(self):
        success = self.earned > 0
        return {"reward": self.earned, "success": success, "begun": begun[self.name], "closed": closed[self.name]}

    def close(self):
        closed[self.name] += 1
"""
CALL = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call><|im_end|>'


class Trainer:
    """A trainer that takes batches and publishes versions on command. `running` is the producer's task."""

    running: asyncio.Task[None]

    def __init__(self, producer: GroupProducer, server: ScriptedServer):
        self.producer, self.server = producer, server
        self.batches: asyncio.Queue[tuple[list[Delivered], dict[str, float]]] = asyncio.Queue()
        producer.deliver = self._take

    async def _take(self, batch: list[Delivered], figures: dict[str, float]) -> None:
        self.batches.put_nowait((batch, figures))

    async def next_batch(self) -> tuple[list[str], dict[str, float]]:
        async with asyncio.timeout(30):
            batch, figures = await self.batches.get()
        return [chain for group in batch for chain in group.chains], figures

    def publish(self, version: int) -> None:
        self.producer.publish(Published(version, f"m{version}", f"m{version}"))


@cache
def renderer_of(model: Path) -> Renderer:
    return make_renderer(load_tokenizer(str(model)))


@asynccontextmanager
async def training(
    quickstart_run: Path,
    folder: Path,
    tasks: list[dict[str, Any]],
    steps: int,
    max_staleness: int = 0,
    batch: int = 1,
    version: int = 0,
    resumed: Resumed | None = None,
    source: str = TOOLS,
    rewards: tuple[str, ...] = (),
    **rollout: Any,
) -> AsyncIterator[Trainer]:
    """Each chain waits once, as set by its task, and then ends; or it keeps talking until it is truncated."""
    renderer = renderer_of(quickstart_run / "prepared" / "model")
    tokenizer = renderer.tokenizer

    def script(prompt: list[int]) -> list[int]:
        text = tokenizer.decode(prompt)
        begun = text.count("<|im_start|>assistant") > 1
        said = "talk " * 100 if "Talk!" in text else "done<|im_end|>" if begun else CALL
        return tokenizer.encode(said, add_special_tokens=False)

    (folder / "waiting.py").write_text(source)
    settings = {"group_size": 3, "max_staleness": max_staleness, "max_tokens": 80, **rollout}
    sections = {"model": {"path": "x"}, "tools": ["waiting.py:Waiting"], "rewards": list(rewards), "rollout": settings}
    recipe = RolloutRecipe.model_validate(sections)
    async with (
        serve_script(script, tells_model=True) as server,
        InferenceClient(server.url) as client,
        open_toolset(recipe, folder) as toolset,
        Rewards(recipe.rewards, folder) as judges,
    ):
        runner = ChainRunner(recipe, renderer, client, toolset, judges)
        rows = [{"question": "go", **task} for task in tasks]
        order = TaskMix([TaskOrder(rows, seed=0, shuffle=False)], [1.0], seed=0)
        sources = [Source(Part("data", recipe), rows, runner)]
        admission = Admission(batch, max_staleness, total=steps * batch, version=version, started=version * batch)
        published, path = Published(version, f"m{version}", f"m{version}"), folder / "train.jsonl"
        versions = {f"m{number}": number for number in range(version)}
        producer = GroupProducer(
            recipe.rollout, sources, order, admission, published, path, AsyncMock(), resumed, versions=versions
        )
        trainer = Trainer(producer, server)
        trainer.running = asyncio.create_task(producer.run())
        try:
            yield trainer
        finally:
            trainer.running.cancel()
            await asyncio.wait([trainer.running])


FAST = {"seconds": [0.0, 0.0, 0.0]}
WAIT = [{"name": "slow", "seconds": [0.0, 0.0, 60.0]}, *({"name": f"t{n}", **FAST} for n in range(9))]
"""A task with a chain that does not end, and nine that end at once."""


async def test_a_group_that_is_too_old_is_trained_with_the_ended_chains(quickstart_run: Path, tmp_path: Path) -> None:
    async with training(quickstart_run, tmp_path, WAIT, steps=3, max_staleness=1, late_chains="drop") as trainer:
        chains, figures = await trainer.next_batch()
        assert chains == ["g000001.0", "g000001.1", "g000001.2"], "the younger group overtakes"
        gauges = {name: value for name, value in figures.items() if name.startswith("environments/Waiting/")}
        assert gauges["environments/Waiting/made"] >= 6
        assert gauges["environments/Waiting/in_use"] >= 1, "the third chain still holds its own"
        assert {name: value for name, value in figures.items() if name not in gauges} == {
            "chains": 5,
            "cancelled/groups": 0,
            "cancelled/chains": 0,
            "cancelled/tokens": 0,
            "filtered/groups": 0,
        }
        trainer.publish(1)
        chains, figures = await trainer.next_batch()
        assert chains == ["g000000.0", "g000000.1"]
        assert figures["cancelled/groups"] == 0
        assert figures["cancelled/chains"] == 1
        trainer.publish(2)
        assert (await trainer.next_batch())[0] == ["g000002.0", "g000002.1", "g000002.2"]
    saved = saved_in(tmp_path)
    assert len(saved) == 3
    cut = saved["g000000"][2]
    assert (cut.outcome, cut.reward) == (Outcome.CANCELLED, None)
    assert cut.error == "its group reached rollout.max_staleness=1"
    assert figures["cancelled/tokens"] == len(cut.rows[0].token_ids) > 0, "what it had is kept"
    assert saved["g000000"][0].outcome is Outcome.COMPLETED


def slow_and_fast(seconds: float) -> list[dict[str, Any]]:
    return [{"name": "a", "seconds": [0.0, 0.0, seconds, *[0.0] * 3]}, *({"name": name, **FAST} for name in "bcd")]


async def test_a_batch_waits_for_the_running_chains_of_an_old_group(
    quickstart_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(producer, "LATE_SECONDS", 0.5)
    async with training(quickstart_run, tmp_path, slow_and_fast(2.0), 4, max_staleness=1, late_chains="wait") as run:
        assert (await run.next_batch())[0] == ["g000001.0", "g000001.1", "g000001.2"]
        assert "late chains" not in caplog.text
        run.publish(1)
        chains, figures = await run.next_batch()
        told = "waited 0.5 s for late chains: 1 of 3 chains of group g000000 (row 1 of data) still run; fix: "
        assert caplog.text.count(told) == 1
        assert chains == ["g000000.0", "g000000.1", "g000000.2"], "and not g000002, which is complete"
        assert figures["cancelled/chains"] == 0
        assert [group.id for group in read_groups(tmp_path / "train.jsonl")] == ["g000001", "g000002", "g000000"]
        for version, group in ((2, "g000002"), (3, "g000003")):
            run.publish(version)
            assert groups_of((await run.next_batch())[0]) == {group}


async def batch_after_the_fast_groups(trainer: Trainer) -> tuple[list[str], dict[str, float]]:
    for version, group in enumerate(("g000001", "g000002", "g000003")):
        assert groups_of((await trainer.next_batch())[0]) == {group}
        trainer.publish(version + 1)
    return await trainer.next_batch()


async def test_a_late_group_is_trained_after_others_when_its_chains_end(quickstart_run: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_staleness": 1, "late_chains": "baseline"}
    async with training(quickstart_run, tmp_path, slow_and_fast(2.0), 4, **options) as trainer:
        chains, figures = await batch_after_the_fast_groups(trainer)
    assert chains == ["g000000.0", "g000000.1", "g000000.2"]
    assert figures["cancelled/chains"] == figures["cancelled/groups"] == 0
    versions = [[span.version for span in chain.rows[0].versions] for chain in saved_in(tmp_path)["g000000"]]
    # at version 3, only the last turn of the slow chain is trained
    assert versions == [["m0", "m0"], ["m0", "m0"], ["m0", "m3"]]


async def test_a_group_with_too_little_is_queued_again_once_and_a_hopeless_task_is_told(
    quickstart_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = [{"name": "slow", "seconds": [0.0, 60.0, 60.0]}, *({"name": f"t{n}", **FAST} for n in range(9))]
    with caplog.at_level(logging.WARNING, "agentfactory.rollout.groups.producer"):
        async with training(quickstart_run, tmp_path, tasks, steps=6, max_staleness=1, late_chains="drop") as trainer:
            taken, cancelled = [], 0.0
            for version in range(6):
                if version:
                    trainer.publish(version)
                chains, figures = await trainer.next_batch()
                taken.append(chains[0].partition(".")[0])
                cancelled += figures["cancelled/groups"]
    saved = [group.id for group in read_groups(tmp_path / "train.jsonl")]
    assert [name for name in saved if name.startswith("g000000")] == ["g000000", "g000000-1"]
    assert (cancelled, len(set(taken))) == (2, 6), "another task takes its place"
    assert not any(name.startswith("g000000") for name in taken)
    (warning,) = [record.getMessage() for record in caplog.records if "each time" in record.getMessage()]
    assert warning.startswith("task 0 was cancelled each time, with chains of [")


async def test_a_chain_asks_for_the_newest_weights_at_each_turn(quickstart_run: Path, tmp_path: Path) -> None:
    tasks = [{"name": name, "seconds": [1.0, 1.0]} for name in "ab"]
    async with training(quickstart_run, tmp_path, tasks, 1, max_staleness=1, group_size=2, batch=2) as trainer:
        while len(trainer.server.requests) < 4:  # noqa: ASYNC110 - the server has no event to wait for
            await asyncio.sleep(0.01)
        trainer.publish(1)
        await trainer.next_batch()
        assert [request["model"] for request in trainer.server.requests] == ["m0"] * 4 + ["m1"] * 4
    (line, *_) = (tmp_path / "train.jsonl").read_text().splitlines()
    assert json.loads(line)["version"] == 0


def task(name: str, *rewards: float, **fields: Any) -> dict[str, Any]:
    return {"name": name, "seconds": [0.0] * len(rewards), "rewards": list(rewards), **fields}


def groups_of(chains: list[str]) -> set[str]:
    return {name.partition(".")[0] for name in chains}


def saved_in(folder: Path) -> dict[str, list[Trajectory]]:
    return {group.id: group.trajectories for group in read_groups(folder / "train.jsonl")}


async def test_what_becomes_of_a_chain_follows_from_how_it_ended(quickstart_run: Path, tmp_path: Path) -> None:
    """The second chain talks until it is truncated, unless it is retried."""
    tasks = [task("a", 0.0, 0.5, 1.0, talks=[1])]
    for policy, trained, rewards in (
        ("keep", ["g000000.0", "g000000.1", "g000000.2"], [0.0, 0.5, 1.0]),
        ("mask", ["g000000.0", "g000000.1", "g000000.2"], [0.0, 0.5, 1.0]),
        ("drop", ["g000000.0", "g000000.2"], [0.0, None, 1.0]),
        ("retry", ["g000000.0", "g000000.1.retry", "g000000.2"], [0.0, 0.0, 1.0]),
    ):
        folder = tmp_path / policy
        folder.mkdir()
        async with training(quickstart_run, folder, tasks, 1, on_outcome={"max_tokens": policy}) as trainer:
            chains, figures = await trainer.next_batch()
        assert chains == trained
        assert figures.get("filtered/max_tokens", 0) == (policy in ("drop", "retry"))
        chains = saved_in(folder)["g000000"]
        assert [chain.reward for chain in chains] == rewards
        cut = [chain.outcome is Outcome.MAX_TOKENS for chain in chains]
        assert cut == [False, policy != "retry", False]


RANKS = """
from agentfactory import reward


@reward
def base(environment):
    return environment.reward


@reward(group=True)
def rank(trajectories, name):
    if name == "incomparable":
        raise RuntimeError("nobody is first")
    rewards = [chain.reward for chain in trajectories]
    return [10.0 * sorted(rewards).index(own) for own in rewards]
"""
RANKED: dict[str, Any] = {"source": TOOLS + RANKS, "rewards": ("waiting.py:base", "waiting.py:rank")}


async def test_chains_are_compared_when_their_group_is_complete(quickstart_run: Path, tmp_path: Path) -> None:
    tasks = [task("incomparable", 0.0, 0.5, 1.0), task("b", 0.0, 0.5, 1.0, talks=[1])]
    options: dict[str, Any] = {**RANKED, "on_outcome": {"max_tokens": "drop"}}
    async with training(quickstart_run, tmp_path, tasks, 1, **options) as trainer:
        chains, figures = await trainer.next_batch()
    saved = saved_in(tmp_path)
    assert chains == ["g000001.0", "g000001.2"], "a group without its comparison is not trained"
    assert [chain.reward for chain in saved["g000001"]] == [0.0, None, 11.0], "only what is scored is compared"
    assert figures["filtered/reward_error"] >= 3
    for chain in saved["g000000"]:
        assert (chain.outcome, chain.reward) == (Outcome.REWARD_ERROR, None)
        assert "nobody is first" in (chain.error or "")


async def test_what_is_compared_is_trained_whole_or_not_at_all(quickstart_run: Path, tmp_path: Path) -> None:
    async with training(quickstart_run, tmp_path, WAIT, 3, max_staleness=1, late_chains="drop", **RANKED) as trainer:
        assert groups_of((await trainer.next_batch())[0]) == {"g000001"}
        trainer.publish(1)
        chains, figures = await trainer.next_batch()
    assert groups_of(chains) == {"g000002"}
    assert figures["cancelled/groups"] == 1, "two of its chains have ended, and that is not enough"
    left = saved_in(tmp_path)["g000000"]
    assert [chain.outcome for chain in left] == [Outcome.COMPLETED, Outcome.COMPLETED, Outcome.CANCELLED]
    assert [chain.reward for chain in left] == [None, None, None], "half a reward is none, for a resumed run either"


EASY, HARD = [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]


async def test_equal_rewards_are_refilled_with_other_tasks(quickstart_run: Path, tmp_path: Path) -> None:
    tasks = [task("a", *EASY), task("b", *HARD), task("c", 0.0, 0.0, 1.0), task("d", *EASY), task("e", 0.0, 1.0, 1.0)]
    async with training(quickstart_run, tmp_path, tasks, 1, batch=2, equal_rewards="refill") as trainer:
        chains, figures = await trainer.next_batch()
        assert groups_of(chains) == {"g000002", "g000004"}
        assert figures["filtered/groups"] == 3
    assert len(saved_in(tmp_path)) == 5, "what is left out is on record"


async def test_where_all_rewards_are_equal_the_run_stops_and_says_why(
    quickstart_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentfactory.rollout.groups.group_filter.MAX_EQUAL_IN_A_ROW", 20)
    tasks = [task("a", *EASY), task("b", *HARD), task("c", *HARD)]
    async with training(quickstart_run, tmp_path, tasks, 1, batch=2, equal_rewards="refill") as trainer:
        await asyncio.wait([trainer.running], timeout=20)
        with pytest.raises(ExceptionGroup) as stopped:
            trainer.running.result()
    reason, *_ = (error for error in stopped.value.exceptions if isinstance(error, RolloutStoppedError))
    assert "20 groups in a row had chains of equal rewards" in str(reason)
    assert "too easy or too hard" in str(reason)
    assert str(tmp_path / "train.jsonl") in str(reason)


async def test_a_curriculum_passes_over_solved_tasks(quickstart_run: Path, tmp_path: Path) -> None:
    tasks = [task("a", *EASY), task("b", 0.0, 0.0, 1.0), task("c", *HARD), task("d", 0.0, 1.0, 1.0)]
    async with training(quickstart_run, tmp_path, tasks, 8, curriculum={"visit": 0.01}) as trainer:
        taken, figures = [], {}
        for version in range(8):
            if version:
                trainer.publish(version)
            chains, figures = await trainer.next_batch()
            taken.append(int(chains[0][1:7]))
    assert taken == [0, 1, 2, 3, 5, 7, 9, 11], "each task once, then those that teach; a position for each turn"
    assert figures["curriculum/passed_over"] == 1
    assert (figures["curriculum/solved"], figures["curriculum/hopeless"]) == (1, 1)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("max_staleness", "late"), [(0, "wait"), (2, "wait"), (2, "baseline"), (2, "drop")])
async def test_however_often_a_run_is_stopped_no_place_is_trained_twice_or_forgotten(
    quickstart_run: Path, tmp_path: Path, seed: int, max_staleness: int, late: str
) -> None:
    """Runs are stopped at random moments, and each resumes from the last checkpoint, with the trajectories as they
    were then."""
    draw = random.Random(seed)
    tasks = [
        task(
            str(n), *(float(draw.random() < 0.6) for _ in range(3)), talks=draw.sample(range(6), draw.choice([0, 0, 3]))
        )
        for n in range(60)
    ]
    for each in tasks:
        each["seconds"] = [draw.choice([0.0, 0.01, 0.1]) for _ in range(3)]
    path, train_state = tmp_path / "train.jsonl", list[list[str]]()
    steps, version, size, stops = 6, 0, 0, 0
    while version < steps:
        if path.exists():
            path.write_bytes(path.read_bytes()[:size])
        trained = [name for batch in train_state for name in batch]
        resumed = None
        options: dict[str, Any] = {"batch": 2, "max_staleness": max_staleness, "equal_rewards": "drop"}
        options |= {"on_outcome": {"max_tokens": "drop"}, "late_chains": late}
        if version:
            config = RolloutConfig.model_validate({name: options[name] for name in options if name != "batch"})
            resumed = Resumed.from_saved(
                read_groups(path), trained, {f"m{n}": n for n in range(version + 1)}, version, config
            )
        async with training(quickstart_run, tmp_path, tasks, steps, version=version, resumed=resumed, **options) as run:
            with suppress(TimeoutError):
                stops += 1
                async with asyncio.timeout(draw.uniform(0.05, 0.1 * stops)):
                    while version < steps:
                        batch, _ = await run.batches.get()
                        version += 1
                        if version < steps:
                            run.publish(version)
                        train_state.append([one.chains[0].partition(".")[0] for one in batch])
                        # the moment of the checkpoint
                        size = path.stat().st_size
    assert len(train_state) == steps
    assert all(1 <= len(batch) <= 2 for batch in train_state)
    places = [Place.of(name) for batch in train_state for name in batch]
    assert len({place.position for place in places}) == len(places), "none twice"
    saved = {group.id: group.trajectories for group in read_groups(path)}
    assert len(saved) == sum(1 for _ in read_groups(path))
    for position in range(max(places).position):
        if position not in {place.position for place in places}:
            first, second = (saved.get(Place(position, attempt).group_id) for attempt in (0, 1))
            assert first, "no place is forgotten"
            assert worth(first, run.producer.config) is Worth.EQUAL or second, "nor given up at once"
