"""Groups that grow too old: closed, cancelled, queued again; and turns that ask for the newest weights."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout.chain import ChainRunner
from rollout.client import InferenceClient
from rollout.config import RolloutRecipe
from rollout.data import TaskOrder
from rollout.producer import GroupProducer, Published
from rollout.renderer import load_tokenizer, make_renderer
from rollout.rewards import Rewards
from rollout.scheduler import Admission
from rollout.trajectory import Group, Outcome, read_groups
from tests.scripted_server import ScriptedServer, serve_script
from tools.toolset import open_toolset

TOOLS = """
import asyncio
from collections import Counter
from agentfactory import Environment, tool

begun = Counter()
closed = Counter()


class Waiting(Environment):
    def reset(self, name, seconds, **task):
        self.name, self.number = name, begun[name] % len(seconds)
        self.seconds = seconds[self.number]
        begun[name] += 1

    @tool
    async def wait(self) -> str:
        \"\"\"Wait.\"\"\"
        await asyncio.sleep(self.seconds)
        return "waited"

    def reward(self):
        return {"reward": float(self.number), "begun": begun[self.name], "closed": closed[self.name]}

    def close(self):
        closed[self.name] += 1
"""
CALL = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call><|im_end|>'


class Trainer:
    """Takes batches and publishes versions when the test says so."""

    def __init__(self, producer: GroupProducer, server: ScriptedServer):
        self.producer, self.server = producer, server
        self.batches: asyncio.Queue[tuple[list[Group], dict[str, float]]] = asyncio.Queue()
        producer.deliver = self._take

    async def _take(self, batch: list[Group], figures: dict[str, float]) -> None:
        self.batches.put_nowait((batch, figures))

    async def next_batch(self) -> tuple[list[str], dict[str, float]]:
        """Ids of the next batch's chains, and what was counted meanwhile."""
        async with asyncio.timeout(10):
            batch, figures = await self.batches.get()
        return [chain.id for group in batch for chain in group.trajectories], figures

    def publish(self, version: int) -> None:
        self.producer.publish(Published(version, f"m{version}"))


@asynccontextmanager
async def training(
    quickstart_run: Path, folder: Path, tasks: list[dict[str, Any]], steps: int, max_staleness: int, size: int = 3
) -> AsyncIterator[Trainer]:
    """Batches of one group; each chain waits once, as its task says, and then is done."""
    tokenizer = load_tokenizer(str(quickstart_run / "prepared" / "model"))

    def script(prompt: list[int]) -> list[int]:
        begun = tokenizer.decode(prompt).count("<|im_start|>assistant") > 1
        return tokenizer.encode("done<|im_end|>" if begun else CALL, add_special_tokens=False)

    (folder / "waiting.py").write_text(TOOLS)
    recipe = RolloutRecipe.model_validate(
        {
            "model": {"path": "x"},
            "tools": ["waiting.py:Waiting"],
            "rollout": {"group_size": size, "max_staleness": max_staleness},
        }
    )
    async with (
        serve_script(script) as server,
        InferenceClient(server.url) as client,
        open_toolset(recipe, folder) as toolset,
    ):
        runner = ChainRunner(recipe, make_renderer(tokenizer), client, toolset, Rewards.load([], folder))
        order = TaskOrder([{"question": "go", **task} for task in tasks], seed=0, shuffle=False)
        admission = Admission(1, max_staleness, total=steps)
        path = folder / "train.jsonl"

        async def unset(batch: list[Group], figures: dict[str, float]) -> None:
            raise AssertionError

        producer = GroupProducer(recipe.rollout, runner, order, admission, Published(0, "m0"), path, unset)
        trainer = Trainer(producer, server)
        running = asyncio.create_task(producer.run())
        try:
            yield trainer
        finally:
            running.cancel()
            await asyncio.wait([running])


FAST = {"seconds": [0.0, 0.0, 0.0]}


async def test_a_group_that_grows_too_old_is_trained_with_the_chains_that_have_ended(
    quickstart_run: Path, tmp_path: Path
) -> None:
    tasks = [{"name": "a", "seconds": [0.0, 0.0, 60.0]}, {"name": "b", **FAST}, {"name": "c", **FAST}]
    async with training(quickstart_run, tmp_path, tasks, steps=3, max_staleness=1) as trainer:
        chains, figures = await trainer.next_batch()
        assert chains == ["g000001.0", "g000001.1", "g000001.2"], "the younger group overtakes"
        assert figures == {"cancelled/groups": 0, "cancelled/chains": 0, "cancelled/tokens": 0}
        trainer.publish(1)
        chains, figures = await trainer.next_batch()
        assert chains == ["g000000.0", "g000000.1"]
        assert figures["cancelled/groups"] == 0
        assert figures["cancelled/chains"] == 1
        trainer.publish(2)
        assert (await trainer.next_batch())[0] == ["g000002.0", "g000002.1", "g000002.2"]
    saved = {group.id: group.trajectories for group in read_groups(tmp_path / "train.jsonl")}
    assert len(saved) == 3
    cut = saved["g000000"][2]
    assert cut.outcome is Outcome.CANCELLED
    assert cut.error == "its group reached rollout.max_staleness=1"
    assert cut.reward is None
    assert figures["cancelled/tokens"] == len(cut.rows[0].token_ids) > 0, "what it had is kept"
    assert saved["g000000"][0].outcome is Outcome.COMPLETED


async def test_a_group_with_too_little_is_queued_again_once_and_a_hopeless_task_is_told(
    quickstart_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = [{"name": "slow", "seconds": [0.0, 60.0, 60.0]}, *({"name": f"t{n}", **FAST} for n in range(9))]
    with caplog.at_level(logging.WARNING, "rollout.producer"):
        async with training(quickstart_run, tmp_path, tasks, steps=6, max_staleness=1) as trainer:
            taken, cancelled = [], 0.0
            for version in range(6):
                if version:
                    trainer.publish(version)
                chains, figures = await trainer.next_batch()
                taken.append(chains[0].partition(".")[0])
                cancelled += figures["cancelled/groups"]
    saved = [group.id for group in read_groups(tmp_path / "train.jsonl")]
    assert [name for name in saved if name.startswith("g000000")] == ["g000000", "g000000-1"]
    assert cancelled == 2
    assert not any(name.startswith("g000000") for name in taken)
    assert len(set(taken)) == 6, "another task takes its place"
    (warning,) = [record.getMessage() for record in caplog.records if "each time" in record.getMessage()]
    assert warning.startswith("task 0 was cancelled each time, with chains of [")


async def test_a_chain_asks_for_the_newest_weights_at_each_turn(quickstart_run: Path, tmp_path: Path) -> None:
    tasks = [{"name": name, "seconds": [0.3, 0.3]} for name in "ab"]
    async with training(quickstart_run, tmp_path, tasks, steps=2, max_staleness=1, size=2) as trainer:
        while len(trainer.server.requests) < 4:  # noqa: ASYNC110 - the server has no event to wait for
            await asyncio.sleep(0.01)
        trainer.publish(1)
        await trainer.next_batch()
        assert [request["model"] for request in trainer.server.requests] == ["m0"] * 4 + ["m1"] * 4
    (line, *_) = (tmp_path / "train.jsonl").read_text().splitlines()
    assert json.loads(line)["version"] == 0
