"""Two replicas of a model behind one address, on real vLLM: synced and proven, with chains that keep their caches."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.trainers.sync.canary import CONTEXT_TOKENS
from agentfactory.trainers.sync.server_control import ServerControl, SyncError
from benchmarks.sabotage import Run
from tests.conftest import REPOSITORY
from tests.recording_proxy import record
from tests.rollout.test_server_contract import make_model
from tests.server_process import VLLM_PYTHON, serve

STEPS, CHAINS, TURNS = 3, 8, 6
BLOCK = 32
"""Tokens per block of vLLM's cache; by default it has 128 on a CPU, and 16 on a GPU."""

TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
USER_CODE = """
from agentfactory import Agent, reward
from agentfactory.rollout.text.renderer import Parsed


class KeepsGoing(Agent):
    def parse(self, turn, completion):
        return Parsed(turn.parse(completion).message, error="No.")


@reward
def evenness(prediction: str) -> float:
    return sum(ord(character) % 2 for character in prediction) / max(len(prediction), 1)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("replicas") / "model", tied=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    breakable = ["--worker-extension-cls", "tests.vllm.broken_replica.BreakableReplica"]
    flags = ["--block-size", str(BLOCK), "--enable-prompt-tokens-details", *breakable]
    options = {"python": VLLM_PYTHON, "data_parallel_size": 2, "args": flags}
    section = {"engine": "vllm", "max_model_len": 1536, "max_num_seqs": 16, "options": options}
    recipe = {"model": {"path": str(model), "dtype": "float32"}, "server": section}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        folder = tmp_path_factory.mktemp("server")
        with serve(recipe, folder, "file") as url:
            log = (folder / "server.log").read_text()
            assert "Started 2 API server processes" in log
            bound = [line.partition("core ids=")[2] for line in log.splitlines() if "core ids=" in line]
            assert len({*bound}) == 2, "each replica has cores of its own"
            yield url


def checksums(url: str) -> list[dict[str, str]]:
    """Of the weights of each replica, by name."""
    found = ServerControl(url).post("/weight_checker", {"action": "checksum"})["checksums"].items()
    return [{key.partition(":")[2]: value for key, value in found if key.startswith(f"dp{n}:")} for n in range(2)]


async def test_a_run_is_synced_and_its_chains_keep_their_caches(server: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(USER_CODE)
    tasks = [{"question": f"{number}: " + "Say something new about the sea. " * 30} for number in range(2 * STEPS)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    before, limits = checksums(server), {"max_tokens": 16, "max_total_tokens": 1500}
    async with record(server) as proxy:
        recipe = {
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"path": "tasks.jsonl"},
            "rewards": ["code.py:evenness"],
            "rollout": {"agent": "code.py:KeepsGoing", "group_size": CHAINS // 2, "max_turns": TURNS, **limits},
            "train": {"steps": STEPS, "batch_size": 2, "learning_rate": 1e-4, "warmup_steps": 0},
            "server": {"engine": "vllm", "url": proxy.url, "options": {"data_parallel_size": 2}},
            "output": "run",
        }
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
        command = [sys.executable, "-m", "agentfactory", "train", "recipe.yaml"]
        await asyncio.to_thread(subprocess.run, command, cwd=tmp_path, check=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == STEPS
    assert max(step["mismatch/max"] for step in steps) <= 1e-4, "both replicas sample with the trained weights"
    first, second = checksums(server)
    assert first == second
    assert first != before[0]

    later, cold = prompts_after_the_first(proxy.exchanges)
    cached, tokens = (sum(counts) for counts in zip(*later, strict=True))
    print(f"cached from the second turn on: {cached / tokens:.1%} of {tokens} prompt tokens, {cold} turns without")
    assert len(later) == STEPS * CHAINS * (TURNS - 1)
    assert cold == 0
    assert cached / tokens >= 0.9
    async with InferenceClient(server) as client:
        loads = await client.connection.loads(server)
    assert min(load.prompt_tokens for load in loads) > 0.25 * tokens, "both replicas work"


def prompts_after_the_first(
    exchanges: list[tuple[dict[str, Any], dict[str, Any]]],
) -> tuple[list[tuple[int, int]], int]:
    """Cached and all tokens of the prompts that continue another turn, and how many of these found less than its prompt
    in the cache."""
    before = {}
    for request, answer in exchanges:
        ids = request["token_ids"]
        before[(*ids, *answer["choices"][0]["token_ids"])] = len(ids)
    found, cold = [], 0
    for request, answer in exchanges:
        ids = tuple(request["token_ids"])
        if (start := max((size for whole, size in before.items() if ids[: len(whole)] == whole), default=0)) > 0:
            found.append((answer["usage"]["prompt_tokens_details"]["cached_tokens"], len(ids)))
            cold += found[-1][0] < start // BLOCK * BLOCK
    return found, cold


@pytest.fixture
def mended(server: str) -> Iterator[str]:
    """The server, whose replicas are whole again afterwards."""
    yield server
    ServerControl(server).post("/collective_rpc", {"method": "mend_replica"})


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("deaf", r"the server's dp1:.* differs from the trainer's after the update"),
        ("relapses", r", replica 1, version 2 .*it serves other weights"),
    ],
)
def test_a_replica_that_alone_keeps_old_weights_is_caught(
    mended: str, model: Path, tmp_path: Path, fault: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old.safetensors"
    shutil.copy(model / "model.safetensors", old)
    monkeypatch.setattr(Run, "tokens", CONTEXT_TOKENS["vllm"])
    run = Run("run-1", model, tmp_path, mended, adapters=False, learning_rate=1e-4)
    run.publish(0)
    run.train()
    run.publish(1)
    ServerControl(mended).post("/collective_rpc", {"method": "break_replica", "args": ["1", fault, str(old)]})
    run.train()
    with pytest.raises(SyncError, match=said):
        run.publish(2)
