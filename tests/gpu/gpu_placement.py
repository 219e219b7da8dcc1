"""Trainer and server on one GPU, by the user's command; and the memory table against what torch allocates."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM

from agentfactory.placement.server_memory import server_memory
from agentfactory.placement.trainer_memory import trainer_memory
from agentfactory.rollout.inference.embedded.engine import Engine
from agentfactory.rollout.inference.embedded.sampling import Request
from agentfactory.trainers.batches.batch import TrainingRow
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.policy_update import update_policy
from tests.conftest import QUICKSTART
from tests.gpu.models import DEVICE, NEEDS_GPU, VOCABULARY, make_model, needs

pytestmark = NEEDS_GPU
LORA = {"rank": 16}
NF4 = {"rank": 16, "quantization": "nf4"}
LENGTH, GROUP = 512, 8


# ---- by the user's command


def train(warm_start: Path, output: Path, *overrides: str) -> tuple[list[dict[str, Any]], str]:
    """Three steps of the quickstart's second stage: what each logged, and what the command said."""
    command = [sys.executable, "-m", "agentfactory", "train", str(QUICKSTART / "grpo.yaml"), f"output={output}"]
    few = ["train.steps=3", "train.warmup_steps=0", "eval.data.limit=20", f"model.path={warm_start}"]
    done = subprocess.run([*command, *few, *overrides], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line["step"] and "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    print(f"\n{' '.join(overrides)}: {[round(line['seconds/step'], 2) for line in steps]} seconds per step")
    return steps, done.stdout


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("mode", ["split", "time_share"])
def test_one_gpu_for_both(warm_start: Path, tmp_path: Path, mode: str, lora: bool) -> None:
    overrides = [f"placement.mode={mode}", "server.max_num_seqs=512"]
    overrides += ["model.lora.rank=8", "model.dtype=bfloat16"] if lora else []
    steps, said = train(warm_start, tmp_path / "run", *overrides)
    assert "KV cache" in said
    assert mode in said
    for line in steps:
        assert line["mismatch/kl"] < 0.05, "the server computes with the trainer's weights"
        moved = [line.get(f"seconds/{name}", 0.0) for name in ("sleep", "bring_in", "park", "wake")]
        assert (min(moved) > 0) == (mode == "time_share"), moved
        # full weights go through the GPU's own memory, and leave no file behind
        assert line["sync/bytes"] > 0
    assert lora or not [*(tmp_path / "run").glob("sync/**/*.safetensors")]


# ---- the memory table


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.26 billion parameters, a quarter of them in a vocabulary of 32,768."""
    return make_model(tmp_path_factory.mktemp("wide") / "model", width=2048, layers=4, vocabulary=32_768)


def make_recipe(path: Path, lora: dict[str, Any] | None, **train: Any) -> TrainRecipe:
    # full micro-batches, as the table assumes: 18 rows, or 4 trees
    settings = {"steps": 1, "batch_size": 8, "token_budget": 9216, "learning_rate": 1e-6, **train}
    rollout = {"group_size": GROUP, "max_total_tokens": LENGTH}
    model = {"path": str(path), "dtype": "bfloat16", "lora": lora}
    return TrainRecipe.model_validate({"model": model, "rollout": rollout, "train": settings})


def full_rows(made: TrainRecipe) -> list[TrainingRow]:
    """As long as rows can be; in trees the groups share the first half."""
    draw, rows = random.Random(0), []
    shared = LENGTH // 2 if made.train.batching == "tree" else 0
    targets = list(range(max(1, shared), LENGTH))
    for _ in range(made.train.batch_size):
        prompt = draw.choices(range(VOCABULARY), k=shared)
        for _ in range(GROUP):
            ids = prompt + draw.choices(range(VOCABULARY), k=LENGTH - shared)
            values = {"behaviour": 1.0, "weight": 1.0, "advantage": draw.gauss(0, 1), "mixed": 0.0}
            rows.append(TrainingRow(ids, targets, {name: [value] * len(targets) for name, value in values.items()}))
    return rows


def start_counting() -> int:
    """Bytes that are allocated now; the peak counts from here."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize(
    ("lora", "settings"),
    [
        pytest.param(None, {"batching": "packed"}, id="full-packed"),
        pytest.param(None, {"batching": "tree", "gradient_checkpointing": True}, id="full-tree-checkpointing"),
        pytest.param(None, {"batching": "tree", "optimizer": {"name": "sgd"}}, id="full-tree-sgd"),
        pytest.param(LORA, {"batching": "packed"}, id="lora-packed"),
        pytest.param(LORA, {"batching": "tree"}, id="lora-tree"),
        pytest.param(LORA, {"batching": "tree", "gradient_checkpointing": True}, id="lora-tree-checkpointing"),
        pytest.param(NF4, {"batching": "tree"}, id="qlora-tree", marks=needs("bitsandbytes")),
    ],
)
def test_the_trainers_table_is_allocated(wide: Path, lora: dict[str, Any] | None, settings: dict[str, Any]) -> None:
    made = make_recipe(wide, lora, **settings)
    table = trainer_memory(made, AutoConfig.from_pretrained(wide), "cuda")
    held = start_counting()
    learner = Learner(made, Accelerator())
    assert learner.accelerator.device.type == DEVICE
    batch = learner.deal(full_rows(made))
    assert len(batch.micro_batches) > 1
    for _ in range(2):
        # the optimiser's state is there from the second on
        torch.cuda.reset_peak_memory_stats()
        update_policy(learner, batch, made)
    peak = torch.cuda.max_memory_allocated() - held
    planned = sum(size for row, size in table.items() if row != "context")
    print(f"\n{peak / 2**20:.0f} MiB allocated, {planned / 2**20:.0f} by the table: {planned / peak:.2f}")
    assert 0.85 < planned / peak < 1.15


def test_the_servers_table_is_what_torch_allocates(wide: Path) -> None:
    made = make_recipe(wide, None)
    made.server.engine, made.server.max_model_len, made.server.max_num_seqs = "embedded", 1024, 128
    table = server_memory(made, AutoConfig.from_pretrained(wide), "cuda")
    held = start_counting()
    model = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.bfloat16).to(DEVICE)
    engine = Engine(model, max_model_len=1024, max_num_seqs=128)
    lasting = torch.cuda.memory_allocated() - held
    for _ in range(128):
        prompt = torch.randint(0, VOCABULARY, (700,)).numpy()
        engine.add(Request(prompt, 100, lambda request: None))
    while engine.busy:
        engine.step()
    peak = torch.cuda.max_memory_allocated() - held
    planned = table.parts["weights"] + table.least_cache
    whole = planned + table.parts["workspace"]
    print(f"\n{lasting / 2**20:.0f} MiB last, {planned / 2**20:.0f} by the table")
    print(f"at most {peak / 2**20:.0f} MiB, {whole / 2**20:.0f} by the table")
    assert planned == pytest.approx(lasting, rel=0.1)
    assert peak < whole
