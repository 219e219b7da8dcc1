"""Off-policy generation ahead of training, with the real worker, engine and trainer: staleness of trained tokens, and
agreement of each span's tokens with the weights that it names."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import AutoTokenizer

from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.inference.weight_versions import Published
from agentfactory.rollout.token_row import Row
from agentfactory.rollout.trajectory import Group
from agentfactory.rollout.workers.worker_socket import Job, RolloutWorkers
from agentfactory.trainers.checkpoints.checkpoint import Checkpoints
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.loop.rl import Services, train_rl
from agentfactory.trainers.networks.gathered_weights import Weights
from agentfactory.trainers.networks.policy import Policy, load_policy
from agentfactory.trainers.sync.backends import make_sync
from agentfactory.trainers.sync.file_sync import FileSync
from agentfactory.trainers.sync.server_control import ServerControl
from agentfactory.trainers.sync.weight_sync import SyncReport, WeightSync
from tests.conftest import REPOSITORY, embedded_server

pytestmark = [pytest.mark.processes, pytest.mark.extended]

STEPS, BATCH = 6, 4
LATENCY = {"median": 0.02, "sigma": 0.5, "tail": 0.01, "factor": 20.0}

HUNT = f'''
import asyncio
from pathlib import Path
from typing import Any, Literal

from agentfactory import tool
from agentfactory.base.user_code.loading import load_object

SlowTreasureHunt = load_object("slow_treasure_hunt.py:SlowTreasureHunt", Path("{REPOSITORY / "benchmarks"}"))


class HeldTreasureHunt(SlowTreasureHunt):
    """A slow hunt in which nobody moves while the trainer is at work: its chains span the update that comes then,
    however fast they are beside it."""

    def reset(self, busy: str, **task: Any) -> None:
        super().reset(**task)
        self.busy = Path(busy)

    @tool
    async def move(self, direction: Literal["north", "east", "south", "west"]) -> str:
        """Take one step."""
        while self.busy.exists():
            await asyncio.sleep(0.005)
        return await super().move(direction)
'''


@pytest.fixture(scope="module")
def server(warm_start: Path) -> Iterator[str]:
    flags = ("--max-model-len", "512", "--max-num-seqs", "64")
    with embedded_server(warm_start, *flags) as url:
        yield url


@dataclass
class Played:
    """A run's record: the groups of each batch, the weights of each version, and the logged metrics."""

    recipe: TrainRecipe
    folder: Path
    batches: list[list[Group]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def busy(self) -> Path:
        """A file that exists while the trainer is busy, from a batch to its update."""
        return self.folder / "busy"

    def rows(self) -> Iterator[tuple[int, Row]]:
        for version, batch in enumerate(self.batches):
            for trajectory in (trajectory for group in batch for trajectory in group.trajectories):
                yield from ((version, row) for row in trajectory.rows)

    def gaps(self, mixed: bool = False) -> Iterator[tuple[int, float]]:
        """For each span: the number of versions in its row so far, and the distance of its log-probabilities from
        transformers' with the weights that it names."""
        policy = load_policy(self.recipe)
        for label, version in self.labels.items():
            for name, value in policy.gather().items():
                value.data.copy_(self.weights[version][name])
            for _, row in self.rows():
                for index, span in enumerate(row.versions):
                    if span.version == label and span.mixed == mixed:
                        expected = scored(policy, row, span.start, span.end)
                        gap = (expected - torch.tensor(row.logprobs[span.start : span.end])).abs().max().item()
                        yield len({s.version for s in row.versions[: index + 1]}), gap


@torch.no_grad()
def scored(policy: Policy, row: Row, start: int, end: int) -> Tensor:
    ids = torch.tensor([row.token_ids[:end].tolist()])
    sources = torch.arange(start - 1, end - 1)
    return policy(ids, sources, ids[0, sources + 1])[0]


class RecordingSync:
    def __init__(self, sync: WeightSync, played: Played):
        self.sync, self.played = sync, played

    def push(self, version: int, policy: Policy, state: Weights) -> SyncReport:
        report = self.sync.push(version, policy, state)
        self.played.weights.append({name: value.clone() for name, value in state.items()})
        self.played.labels[report.label] = version
        return report

    def ensure(self) -> SyncReport | None:
        return self.sync.ensure()

    def close(self) -> None:
        self.sync.close()


class RecordingSource:
    def __init__(self, worker: RolloutWorkers, played: Played):
        self.worker, self.played = worker, played
        self.figures, self.acknowledge, self.evaluate = worker.figures, worker.acknowledge, worker.evaluate

    def next_batch(self, groups: int) -> list[Group]:
        self.played.batches.append(self.worker.next_batch(groups))
        self.played.busy.touch()
        return self.played.batches[-1]

    def published(self, published: Published) -> None:
        self.worker.published(published)
        self.played.busy.unlink(missing_ok=True)


def play(
    url: str,
    model: Path,
    tasks: Path,
    folder: Path,
    lora: bool = False,
    latency: dict[str, float] = LATENCY,
    steps: int = STEPS,
    **rollout: Any,
) -> Played:
    """Run a short training on slow tools. The recipe understates the server's concurrent decodes."""
    folder.mkdir()
    rows = [json.loads(line) for line in tasks.read_text().splitlines()[:40]]
    more = {"latency": latency, "busy": str(folder / "busy")}
    (folder / "tasks.jsonl").write_text("".join(json.dumps({**row, **more}) + "\n" for row in rows))
    (folder / "hunt.py").write_text(HUNT)
    recipe = TrainRecipe.model_validate(
        {
            "model": {"path": str(model), "dtype": "float32", "lora": {"rank": 4} if lora else None},
            "data": {"path": str(folder / "tasks.jsonl")},
            "tools": [str(folder / "hunt.py:HeldTreasureHunt")],
            "rollout": {"group_size": 4, "max_turns": 6, "max_tokens": 32, "max_total_tokens": 400, **rollout},
            "server": {"engine": "embedded", "url": url, "max_num_seqs": 8},
            "train": {"steps": steps, "batch_size": BATCH, "learning_rate": 1e-2 if lora else 1e-3},
        }
    )
    played = Played(recipe, folder)
    servers = [ServerControl(url)]
    if lora:
        # an earlier run may have left its own full weights on the server
        full = recipe.model.model_copy(update={"lora": None})
        base = load_policy(recipe.model_copy(update={"model": full}))
        first = FileSync(servers, folder / "base")
        first.push(0, base, base.gather())
        first.close()
    # an adapter's run is its folder's: all runs share one server
    sync = RecordingSync(make_sync(recipe, servers, folder / "sync", folder.name), played)
    worker = RolloutWorkers(Job(recipe, folder, [url], folder, folder, BATCH, steps * BATCH), folder, lambda url: False)
    before = {card["id"] for card in servers[0].get("/v1/models")["data"]}
    try:
        train_rl(
            recipe,
            Accelerator(cpu=True),
            Checkpoints(folder / "checkpoints", AutoTokenizer.from_pretrained(model), recipe.train),
            Services(
                lambda metrics: played.steps.append(metrics) if "loss" in metrics else None,
                source=RecordingSource(worker, played),
                sync=sync,
            ),
        )
    finally:
        worker.close()
        sync.close()
        for name in {card["id"] for card in servers[0].get("/v1/models")["data"]} - before:
            servers[0].post("/v1/unload_lora_adapter", {"lora_name": name})
    return played


def bound(k: int, kind: str, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(k, kind == "lora", id=f"{k}-{kind}", marks=marks)


@pytest.mark.parametrize(
    ("k", "lora"), [bound(0, "full", pytest.mark.long), bound(1, "lora", pytest.mark.long), bound(4, "full")]
)
def test_nothing_older_than_the_bound_is_trained(
    server: str, warm_start: Path, quickstart_run: Path, tmp_path: Path, k: int, lora: bool
) -> None:
    tasks = quickstart_run / "prepared" / "train.jsonl"
    # where nothing runs ahead, every step is as the second
    steps = STEPS if k else 3
    workers = 2 if k == 1 else 1
    played = play(server, warm_start, tasks, tmp_path / f"k{k}", lora, steps=steps, max_staleness=k, workers=workers)
    ages = []
    for version, row in played.rows():
        covered = [position for span in row.versions for position in range(span.start, span.end)]
        assert covered == [position for position, sampled in enumerate(row.mask) if sampled], "a token has one version"
        ages += [version - played.labels[span.version] for span in row.versions]
    assert min(ages) >= 0
    assert max(ages) <= k
    assert max(ages) >= min(k, 2), "generation does run ahead"
    assert max(step["staleness/max"] for step in played.steps) == max(ages)
    # each trained group had been saved, and was acknowledged once
    files = sorted(played.folder.glob("train*.jsonl"))
    assert len(files) == workers
    saved = {group.id: group for file in files for group in read_groups(file)}
    trained = [group.id for batch in played.batches for group in batch]
    assert len(trained) == len(set(trained)) == steps * BATCH
    assert (played.folder / "acknowledged.txt").read_text().split() == trained
    for group in (group for batch in played.batches for group in batch):
        chains = {chain.id: chain for chain in saved[group.id].trajectories}
        assert all(chains[chain.id] == chain for chain in group.trajectories)
        assert len(group.trajectories) == 4 or len({chain.reward for chain in group.trajectories}) > 1
    # and every token was sampled by the weights that its span names, including after a weight switch
    gaps = list(played.gaps())
    assert max(gap for _, gap in gaps) <= 1e-4
    if k:
        assert sum(versions > 1 for versions, _ in gaps) >= 5, "chains span updates"


@pytest.mark.long
def test_kept_caches_mark_their_tokens(server: str, warm_start: Path, quickstart_run: Path, tmp_path: Path) -> None:
    tasks = quickstart_run / "prepared" / "train.jsonl"
    played = play(server, warm_start, tasks, tmp_path / "keep", max_staleness=2, inflight="keep")
    assert max(gap for _, gap in played.gaps()) <= 1e-4, "what is not marked is of one version"
    mixed = [gap for _, gap in played.gaps(mixed=True)]
    assert len(mixed) >= 5
    assert max(mixed) > 1e-3, "and what is marked is not"
    reported = [step for step in played.steps if "mixed_tokens" in step]
    assert reported
    assert all(0 < step["mixed_tokens"] < 1 and step["mismatch/mixed"] > 0 for step in reported)
