"""Other architectures on real vLLM, trained, synced and proven: stacked projections in the checkpoint, experts, Gemma,
and a server of two tensor-parallel workers."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentfactory.base.run_notices import notice_of
from agentfactory.trainers.batches.batch import TrainingRow
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.sync.canary import Canary, canary_rows
from agentfactory.trainers.sync.content_proof import Content
from agentfactory.trainers.sync.file_sync import FileSync
from agentfactory.trainers.sync.proven_push import push_proven
from agentfactory.trainers.sync.server_control import ServerControl, SyncError
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.policy_update import update_policy
from tests.chat_tokenizers import make_tokenizer
from tests.placement.shapes import sizes
from tests.server_process import VLLM_PYTHON, serve

STEPS = 2

MODELS: dict[str, tuple[type[PreTrainedModel], Any, dict[str, Any]]] = {
    "phi3": (Phi3ForCausalLM, Phi3Config, {}),
    "glm4": (Glm4ForCausalLM, Glm4Config, {"head_dim": 32}),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
}
TENSOR_PARALLEL = {"qwen3": 2}
"""Servers of several workers, each of which has a slice of most weights."""
WRONG = {
    "phi3": ("self_attn.qkv_proj", "mlp.gate_up_proj", "lm_head"),
    "glm4": ("self_attn.k_proj.bias", "mlp.gate_up_proj", "post_mlp_layernorm"),
    "qwen3_moe": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate."),
    "gemma3": ("self_attn.v_proj", "mlp.up_proj", "embed_tokens"),
    "qwen3": ("self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj", "embed_tokens", "q_norm"),
}
"""Weights of which one number is changed on the way to the server."""


def make_model(kind: str, folder: Path) -> Path:
    tokenizer = make_tokenizer()
    network, config, own = MODELS[kind]
    torch.manual_seed(0)
    shape = {**sizes(128, 96, 2, 4, 2, len(tokenizer)), "max_position_embeddings": 1024, "initializer_range": 0.1}
    shape |= {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": None}
    network(config(**shape, **own)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass
class Run:
    kind: str
    learner: Learner
    recipe: TrainRecipe
    server: ServerControl
    folder: Path

    def train(self) -> None:
        ids = list(range(4, 52))
        streams = {"behaviour": [-5.0] * 40, "weight": [1.0] * 40, "mixed": [0.0] * 40}
        rows = [TrainingRow(ids, list(range(8, 48)), {**streams, "advantage": [sign] * 40}) for sign in (1.0, -1.0)]
        update_policy(self.learner, self.learner.deal(rows), self.recipe)


# of tensor parallelism; the others are long
PARAMS = ["qwen3", *(pytest.param(kind, marks=pytest.mark.long) for kind in MODELS if kind != "qwen3")]


@pytest.fixture(scope="module", params=PARAMS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp(request.param)
    model = {"path": str(make_model(request.param, folder / "model")), "dtype": "float32"}
    recipe = TrainRecipe.model_validate({"model": model, "train": {"steps": STEPS, "learning_rate": 1e-3}})
    server = {"engine": "vllm", "options": {"python": VLLM_PYTHON}, "max_model_len": 512}
    server["options"]["tensor_parallel_size"] = TENSOR_PARALLEL.get(request.param, 1)
    with serve({"model": model, "server": server}, folder, "file") as url:
        yield Run(request.param, Learner(recipe, Accelerator(cpu=True)), recipe, ServerControl(url), folder)


def test_vllm_is_trained_synced_and_proven(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    sync = FileSync([run.server], run.folder / "sync")
    canary = Canary([run.server], canary_rows(range(4, 300), longest=144), "float32")
    digests = set()
    for version in range(STEPS + 1):
        policy = run.learner.policy
        scores = canary.trainer_scores(policy)
        report, proof = push_proven(sync, canary, version, policy, policy.gather(), scores)
        digests.add(report.digest)
        run.train()
    assert len(digests) == STEPS + 1
    checksums = run.server.post("/weight_checker", {"action": "checksum"})["checksums"]
    workers = {key.rsplit(":", 1)[0] for key in checksums}
    assert len(workers) == TENSOR_PARALLEL.get(run.kind, 1)
    assert proof["sync/canary_slope"] == pytest.approx(1.0, abs=0.01)
    assert not [record for record in caplog.records if notice_of(record)], "every weight is proven by its content"


def test_vllm_with_a_wrong_weight_is_caught(run: Run) -> None:
    state = {name: value.clone() for name, value in run.learner.policy.gather().items()}
    file = run.folder / "wrong.safetensors"
    for part in WRONG[run.kind]:
        name = next(name for name in reversed(state) if part in name)
        wrong = {**state, name: state[name].clone()}
        wrong[name].view(-1)[-1] += 1e-3
        save_file(wrong, file)
        run.server.post("/init_weight_transfer_engine", {"init_info": {}})
        run.server.post("/start_weight_update", {})
        run.server.post("/update_weights", {"update_info": {"path": str(file)}})
        run.server.post("/finish_weight_update", {"weight_version": part})
        with pytest.raises(SyncError, match=r"server's dp0:\S+ differs from the trainer's"):
            Content(state).prove(run.server, part)
        Content(wrong).prove(run.server, part)
