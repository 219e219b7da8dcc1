"""Fault injection in running training: servers are killed, fail or overflow. Training continues or reports why not.

In every case, all of the run's chains are recorded, no group is trained twice, a fault is never a reward, and trained
tokens were sampled by the weights that they name (the trainer's log-probabilities agree with the server's)."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.trajectory import Activity, Group
from tests.conftest import QUICKSTART
from tests.forked import TRAINER, Forked, start_engine

pytestmark = [pytest.mark.processes, pytest.mark.extended]

STEPS, BATCH, MEMBERS = 6, 4, 4
START_SECONDS = 2.0


class Server:
    def __init__(self, model: Path, log: Path, supervised: bool = False, max_model_len: int = 512):
        self._model, self._log = model, log
        self._flags = ("--max-model-len", str(max_model_len), "--max-num-seqs", "64")
        self._process, self.url = start_engine(model, *self._flags, log=log)
        self.starts = 1
        self._ended = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise) if supervised else None
        if self._supervisor:
            self._supervisor.start()

    def _supervise(self) -> None:
        port = self.url.rpartition(":")[2]
        while not self._ended.wait(0.05):
            if not self._process.is_running():
                # the time of a start with its own imports
                time.sleep(START_SECONDS)
                self._process, _ = start_engine(self._model, *self._flags, "--port", port, log=self._log)
                self.starts += 1

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self._ended.set()
        if self._supervisor:
            self._supervisor.join()
        self.kill()


@contextmanager
def servers(folder: Path, model: Path, count: int = 1, **options: Any) -> Iterator[list[Server]]:
    started: list[Server] = []
    try:
        for number in range(count):
            started.append(Server(model, folder / f"server-{number}.log", **options))
        yield started
    finally:
        for server in started:
            server.end()


class Run:
    def __init__(self, process: Forked, output: Path):
        self.process = process
        self.output = output

    def metrics(self) -> list[dict[str, Any]]:
        path = self.output / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last may not be whole yet
        return [entry for entry in map(json.loads, lines) if "loss" in entry]

    async def steps(self, number: int) -> None:
        while len(self.metrics()) < number:
            assert self.process.is_running(), self.said()
            await asyncio.sleep(0.05)

    async def end(self) -> int:
        return await asyncio.to_thread(self.process.wait)

    def said(self) -> str:
        return self.process.log.read_text()

    def groups(self) -> list[Group]:
        return list(read_groups(self.output / "trajectories" / "train.jsonl"))


@contextmanager
def training(folder: Path, start: Path, tasks: Path, urls: list[str], **fields: Any) -> Iterator[Run]:
    recipe = {
        "model": {"path": str(start), "dtype": "float32", **fields.pop("model", {})},
        "data": {"path": str(tasks)},
        "tools": [str(QUICKSTART / "treasure_hunt.py:TreasureHunt")],
        "rollout": {"group_size": MEMBERS, "max_turns": 8, "max_tokens": 32, "max_total_tokens": 512}
        | fields.pop("rollout", {}),
        "server": {"engine": "embedded", "max_model_len": 512, "url": urls, **fields.pop("server", {})},
        # large steps, so that log-probabilities of other weights differ clearly from the trainer's
        "train": {"steps": STEPS, "batch_size": BATCH, "learning_rate": 1e-3, **fields.pop("train", {})},
        **fields,
    }
    # JSON is YAML
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    output = folder / "run"
    process = Forked(TRAINER, str(folder / "recipe.yaml"), f"output={output}", log=folder / "train.log")
    try:
        yield Run(process, output)
    finally:
        process.kill()


async def check_whole(run: Run) -> None:
    assert await run.end() == 0, run.said()
    metrics, groups = run.metrics(), run.groups()
    assert [entry["step"] for entry in metrics] == list(range(1, STEPS + 1))
    assert max(entry["mismatch/max"] for entry in metrics) < 1e-3, "trained tokens come from the weights they name"
    trained = (run.output / "trajectories" / "acknowledged.txt").read_text().split()
    assert len(trained) == len(set(trained)) == STEPS * BATCH, "none twice"
    ids = [group.id for group in groups]
    assert len(ids) == len(set(ids))
    assert set(trained) <= set(ids), "nothing is trained that is not on record"
    positions = {int(group.id.removeprefix("g")[:6]) for group in groups}
    assert positions == set(range(len(positions))), "no task is passed over"
    for group in groups:
        assert len(group.trajectories) == MEMBERS, "no chain is lost silently"
        for chain in group.trajectories:
            assert (chain.reward is None) == chain.outcome.failed, "a fault is no reward"
            for row in chain.rows:
                # spans cover every sampled token once: resampled attempts are in no row
                covered = [i for span in row.versions for i in range(span.start, span.end)]
                assert covered == [i for i, sampled in enumerate(row.mask) if sampled]


@pytest.fixture
def tasks(quickstart_run: Path) -> Path:
    return quickstart_run / "prepared" / "train.jsonl"


@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 4}, marks=pytest.mark.long)])
async def test_a_server_that_is_killed_comes_back_with_the_current_weights(
    tmp_path: Path, warm_start: Path, tasks: Path, lora: dict[str, int] | None
) -> None:
    with servers(tmp_path, warm_start, supervised=True) as (server,):
        with training(tmp_path, warm_start, tasks, [server.url], model={"lora": lora}) as run:
            for step in (1, 3):
                await run.steps(step)
                server.kill()
            await check_whole(run)
        assert server.starts == 3
    log = run.said()
    assert log.count("has proven that it holds version") + log.count("waits for a server") >= 2


async def test_when_no_server_is_left_the_run_stops_and_says_so(tmp_path: Path, warm_start: Path, tasks: Path) -> None:
    fields = {"server": {"retry_seconds": 3}, "train": {"steps": 500}}
    with (
        servers(tmp_path, warm_start) as (server,),
        training(tmp_path, warm_start, tasks, [server.url], **fields) as run,
    ):
        await run.steps(2)
        killed = time.monotonic()
        server.kill()
        assert await run.end() == 1
    assert time.monotonic() - killed < 15
    last = run.said().strip().splitlines()[-1]
    assert server.url in last
    assert "for 3 s" in last
    assert all(chain.reward is None for group in run.groups() for chain in group.trajectories if chain.outcome.failed)


# ---- a teacher's server dies, comes back, moves, and has other weights


DISTILL = {"steps": STEPS, "batch_size": BATCH, "learning_rate": 1e-3, "algorithm": "distill", "checkpoint_every": 1}


@pytest.fixture
def strong(quickstart_run: Path) -> Path:
    """Another checkpoint of the policy's network."""
    return next((quickstart_run / "grpo" / "checkpoints").iterdir())


@contextmanager
def distilling(
    folder: Path, start: Path, tasks: Path, policy: Server, url: str, steps: int = STEPS, **fields: Any
) -> Iterator[Run]:
    """Run train.py against two servers that it did not start, with a teacher at `url`."""
    fields = {"train": {**DISTILL, "steps": steps}, "server": {"retry_seconds": 4}, **fields}
    fields["teacher"] = {"url": url, **fields.get("teacher", {})}
    with training(folder, start, tasks, [policy.url], **fields) as run:
        yield run


@pytest.mark.parametrize(
    "teacher", [{}, pytest.param({"divergence": "reverse_kl", "top_k": 8}, marks=pytest.mark.long)]
)
async def test_a_killed_teacher_comes_back_and_every_trained_chain_is_graded(
    tmp_path: Path, warm_start: Path, strong: Path, tasks: Path, teacher: dict[str, Any]
) -> None:
    (tmp_path / "teacher").mkdir()
    with (
        servers(tmp_path, warm_start) as (policy,),
        servers(tmp_path / "teacher", strong, supervised=True, max_model_len=513) as (server,),
    ):
        more = {"server": {"retry_seconds": 60}, "teacher": teacher}
        with distilling(tmp_path, warm_start, tasks, policy, server.url, **more) as run:
            await run.steps(2)
            server.kill()
            await check_whole(run)
        assert server.starts == 2
    count = teacher.get("top_k", 1)
    for group in run.groups():
        for chain in (chain for chain in group.trajectories if not chain.outcome.failed):
            graded = sum(len(row.graded()) for row in chain.rows)
            assert sum(len(row.teacher_logprobs) for row in chain.rows) == count * graded  # type: ignore[arg-type]
            assert chain.metrics["teacher_tokens"] >= graded
            *_, last = chain.timeline
            assert last.activity is Activity.TEACHER
            assert last.end <= chain.seconds + 1e-3
    assert all(entry["trajectory/teacher_tokens"] > 50 for entry in run.metrics())
    assert all(entry["trajectory/teacher_seconds"] > 0 for entry in run.metrics())
    # no forward pass in the trainer
    assert not any("seconds/teacher" in entry for entry in run.metrics())


async def test_each_source_has_its_own_teacher(tmp_path: Path, warm_start: Path, strong: Path, tasks: Path) -> None:
    for name in ("weak", "strong"):
        (tmp_path / name).mkdir()
    with (
        servers(tmp_path, warm_start) as (policy,),
        servers(tmp_path / "weak", warm_start, max_model_len=513) as (weak,),
        servers(tmp_path / "strong", strong, max_model_len=513) as (teacher,),
    ):
        sources = [{"name": "others", "path": str(tasks)}]
        sources.append({"name": "own", "path": str(tasks), "teacher_url": teacher.url})
        with distilling(tmp_path, warm_start, tasks, policy, weak.url, data={"sources": sources}) as run:
            await check_whole(run)
        files = (run.output / "trajectories").glob("teacher*")
        assert {file.name for file in files} == {"teacher.json", "teacher-own.json"}
    networks = {"others": warm_start, "own": strong}
    for name, folder in networks.items():
        network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        groups = [group for group in run.groups() if group.source == name]
        assert groups
        for row in (row for group in groups for chain in group.trajectories for row in chain.rows):
            ids = torch.tensor([*row.token_ids])
            with torch.no_grad():
                logprobs = network(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            expected = logprobs[torch.from_numpy(row.graded()) - 1]
            torch.testing.assert_close(torch.tensor([*row.teacher_logprobs]), expected, atol=1e-3, rtol=0)  # type: ignore[misc]
