"""A teacher's server in running training, by real engines: it dies, comes back, moves, and has other weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentfactory.rollout.trajectory import Activity
from tests.rollout.test_faults import BATCH, STEPS, Run, Server, check_whole, servers, training

pytestmark = [pytest.mark.processes, pytest.mark.extended]

DISTILL = {"steps": STEPS, "batch_size": BATCH, "learning_rate": 1e-3, "algorithm": "distill", "checkpoint_every": 1}


@pytest.fixture
def tasks(quickstart_run: Path) -> Path:
    return quickstart_run / "prepared" / "train.jsonl"


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


async def test_each_source_is_graded_by_its_own_teacher(
    tmp_path: Path, warm_start: Path, strong: Path, tasks: Path
) -> None:
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
