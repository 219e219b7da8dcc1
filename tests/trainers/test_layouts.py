"""Servers' weight layouts: hand-made layouts of vLLM, whole and in slices, are proven; a wrong one is not."""

from hashlib import sha256
from typing import Any

import pytest
import torch
from torch import Tensor

from agentfactory.base.run_notices import notice_of
from agentfactory.rollout.inference.weight_digest import weight_digest
from agentfactory.trainers.sync.content_proof import Content
from agentfactory.trainers.sync.server_control import SyncError

ATTENTION, MLP, HIDDEN = "model.layers.0.self_attn", "model.layers.0.mlp", 16
Weights = dict[str, Tensor]


def served(weights: Weights, worker: str = "dp0:pp0:pcp0:tp0:") -> dict[str, str]:
    return {worker + name: weight_digest(weight) for name, weight in weights.items()}


def split(weight: Tensor, rank: int, count: int, dim: int = 0) -> Tensor:
    return weight.chunk(count, dim)[rank]


def check(state: Weights, checksums: dict[str, str]) -> None:
    """Assert that the layout is proven, and that it would not be if any one of the trainer's numbers differed."""
    Content(state).check(checksums)
    for name, weight in state.items():
        other = weight.clone()
        other.view(-1)[-1] += 1
        with pytest.raises(SyncError, match="differs from the trainer's"):
            Content({**state, name: other}).check(checksums)


def attention(heads: int = 4, kv_heads: int = 2, size: int = 4) -> Weights:
    rows = {"q": heads * size, "k": kv_heads * size, "v": kv_heads * size}
    state = {f"{ATTENTION}.{n}_proj.weight": torch.randn(count, HIDDEN) for n, count in rows.items()}
    return {**state, f"{ATTENTION}.o_proj.weight": torch.randn(HIDDEN, heads * size)}


def stacked(state: Weights) -> Weights:
    qkv = torch.cat([state[f"{ATTENTION}.{n}_proj.weight"] for n in "qkv"])
    return {f"{ATTENTION}.qkv_proj.weight": qkv, f"{ATTENTION}.o_proj.weight": state[f"{ATTENTION}.o_proj.weight"]}


def test_projections_are_stacked_by_the_server_or_the_checkpoint() -> None:
    state = attention()
    check(state, served(stacked(state)))
    check(stacked(state), served(stacked(state)))


def test_tensor_parallel_workers_have_slices() -> None:
    """Slices of each stacked projection by rows or columns; with fewer key heads than workers, some have the same
    slice."""
    for count, kv_heads in ((2, 2), (4, 2)):
        state = attention(kv_heads=kv_heads)
        mlp = {f"{MLP}.gate_up_proj.weight": torch.randn(32, HIDDEN), f"{MLP}.norm.weight": torch.randn(HIDDEN)}
        vocabulary = {"model.embed_tokens.weight": torch.randn(100, HIDDEN)}
        checksums = {}
        for rank in range(count):
            q, k, v = (state[f"{ATTENTION}.{n}_proj.weight"] for n in "qkv")
            copies = max(1, count // kv_heads)
            kv = [split(weight, rank // copies, count // copies) for weight in (k, v)]
            gate, up = mlp[f"{MLP}.gate_up_proj.weight"].chunk(2)
            filled = torch.cat([vocabulary["model.embed_tokens.weight"], torch.zeros(28, HIDDEN)])
            worker = {
                f"{ATTENTION}.qkv_proj.weight": torch.cat([split(q, rank, count), *kv]),
                f"{ATTENTION}.o_proj.weight": split(state[f"{ATTENTION}.o_proj.weight"], rank, count, 1),
                f"{MLP}.gate_up_proj.weight": torch.cat([split(gate, rank, count), split(up, rank, count)]),
                f"{MLP}.norm.weight": mlp[f"{MLP}.norm.weight"],
                "model.embed_tokens.weight": split(filled, rank, count),
            }
            checksums |= served(worker, f"dp0:pp0:pcp0:tp{rank}:")
        check({**state, **mlp, **vocabulary}, checksums)
        # a checkpoint with stacked projections
        check({**stacked(state), **mlp, **vocabulary}, checksums)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("swapped", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_experts(fused: bool, swapped: bool, count: int) -> None:
    gates, ups, downs = torch.randn(3, 8, HIDDEN), torch.randn(3, 8, HIDDEN), torch.randn(3, HIDDEN, 8)
    if fused:
        state = {f"{MLP}.experts.gate_up_proj": torch.cat([gates, ups], 1), f"{MLP}.experts.down_proj": downs}
    else:
        each = (("gate_proj", gates), ("up_proj", ups), ("down_proj", downs))
        state = {f"{MLP}.experts.{n}.{name}.weight": w[n].clone() for name, w in each for n in range(3)}
    first, second = (ups, gates) if swapped else (gates, ups)
    checksums = {}
    for rank in range(count):
        halves = torch.cat([split(w, rank, count, 1) for w in (first, second)], 1)
        stem = f"{MLP}.experts.routed_experts"
        worker = {f"{stem}.w13_weight": halves, f"{stem}.w2_weight": split(downs, rank, count, 2)}
        checksums |= served(worker, f"dp0:pp0:pcp0:tp{rank}:")
    check(state, checksums)


@pytest.mark.parametrize(
    ("server", "trainer"),
    [
        ("language_model.model.layers.0.mlp.down_proj.weight", "model.language_model.layers.0.mlp.down_proj.weight"),
        ("visual.blocks.0.norm1.weight", "model.visual.blocks.0.norm1.weight"),
        ("lm_head.weight", "model.embed_tokens.weight"),
    ],
)
def test_names_begin_otherwise(server: str, trainer: str) -> None:
    weight = torch.randn(64, HIDDEN)
    check({trainer: weight}, served({server: weight}))


def test_another_precision_and_the_checksums_of_vllm_without_the_plugin() -> None:
    state = attention()
    gate = {f"{MLP}.gate.e_score_correction_bias": torch.randn(8).bfloat16()}
    Content({**state, **gate}).check(served(stacked(state)) | served({n: w.float() for n, w in gate.items()}))
    vocabulary = {"model.embed_tokens.weight": torch.randn(100, HIDDEN)}
    filled = {"model.embed_tokens.weight": torch.cat([*vocabulary.values(), torch.zeros(28, HIDDEN)])}
    sums = {f"tp0:{n}": sha256(w.numpy().tobytes()).hexdigest() for n, w in {**stacked(state), **filled}.items()}
    check({**state, **vocabulary}, sums)


def test_an_unknown_layout_is_told_and_left_to_the_canary(caplog: pytest.LogCaptureFixture) -> None:
    state: Any = {**attention(), f"{MLP}.experts.down_proj": torch.randn(3, 4, 4), "model.strange": torch.randn(4)}
    checksums = {**served(stacked(attention())), "dp0:pp0:pcp0:tp0:model.odd": weight_digest(torch.randn(4))}
    checksums |= served(stacked(state)) | {f"dp0:pp0:pcp0:tp0:{MLP}.experts.w2_weight": "unknown:AITER"}
    Content(state).check(checksums)
    [notice] = [notice for record in caplog.records if (notice := notice_of(record))]
    assert "model.layers.0.mlp.experts.w2_weight, model.odd under a name or in a layout" in notice.text
    assert "of the trainer's 6 weights, only the canary proves 2" in notice.text
