"""Sharded weights that are sent to servers while they are gathered: no process holds all of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from agentfactory.rollout.inference.weight_digest import weight_digest
from agentfactory.trainers.networks.gathered_weights import Weights
from agentfactory.trainers.sync.content_proof import Content, served_checksums
from agentfactory.trainers.sync.server_control import ServerControl
from tests.forked import start_engine, start_ranks
from tests.trainers.test_nccl import receiving
from tests.trainers.test_sharding import save_network

pytestmark = pytest.mark.processes


@pytest.mark.extended
def test_three_ranks_send_what_none_of_them_holds(tmp_path: Path) -> None:
    # sent with half of the file's bytes
    size = save_network(tmp_path / "model", 24, 256) / 2
    network = Qwen3ForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    state = {name: value for name, value in network.state_dict().items() if name != "lm_head.weight"}
    save_file({name: torch.zeros_like(value) for name, value in state.items()}, tmp_path / "zeros.safetensors")
    flags = ("--dtype", "bfloat16", "--max-num-seqs", "1", "--max-model-len", "64")
    engine, url = start_engine(tmp_path / "model", *flags, log=tmp_path / "engine.log")
    recipe: dict[str, Any] = {"model": {"path": str(tmp_path / "model"), "dtype": "bfloat16"}}
    recipe["train"] = {"steps": 1, "strategy": "fsdp2", "processes": 3}
    log = tmp_path / "ranks.log"
    try:
        with receiving(tmp_path / "zeros.safetensors") as receiver:
            arguments = (json.dumps(recipe), receiver.url, url, str(tmp_path))
            ranks = start_ranks("tests.trainers.launched_sending", *arguments, log=log, strategy="fsdp2", count=3)
            assert [rank.wait() for rank in ranks] == [0, 0, 0], log.read_text()
            received = served_checksums(receiver)
        served = served_checksums(ServerControl(url))
    finally:
        engine.kill()
        engine.wait()
    found = json.loads((tmp_path / "found.json").read_text())
    whole = load_file(tmp_path / "whole.safetensors")
    assert whole.keys() == state.keys()
    assert found["begun"] == list(network.state_dict())[:2]
    Content(whole).check(received)
    Content(whole).check(served)
    largest = max(value.nbytes for value in whole.values()) / 1e6
    print(f"{size:.0f} MB of weights, the largest {largest:.0f} MB; {found}")
    for name in ("nccl", "file"):
        for version in range(3):
            assert found[f"{name} {version}"]["bytes"] >= 1e6 * size
            assert found[f"{name} {version}"]["peak"] < 6 * largest < 0.6 * size


def test_a_weight_is_held_until_the_layouts_that_need_it_are_digested() -> None:
    stem = "model.layers.0.self_attn."
    state = {f"{stem}{part}_proj.weight": torch.randn(4, 8) for part in "qkv"}
    state["model.norm.weight"] = torch.randn(8)
    served = {
        f"{stem}qkv_proj.weight": weight_digest(torch.cat(list(state.values())[:3])),
        "model.norm.weight": weight_digest(state["model.norm.weight"]),
    }
    weights = Weights(state.items())
    content = Content(weights.meta, {"http://server": served}, keep=False)
    read = dict(content.passing(weights.stream()))
    assert read.keys() == state.keys()
    content.check(served)
    assert all(value.is_meta for value in content.state.values())
    # a layout that no server had before can no longer be computed
    apart = {name: weight_digest(value) for name, value in state.items()}
    with pytest.raises(Exception, match=r"in another layout than before the update: .* resume the run"):
        content.check(apart)
    wrong = served | {"model.norm.weight": weight_digest(torch.zeros(8))}
    with pytest.raises(Exception, match=r"model\.norm\.weight differs from the trainer's"):
        content.check(wrong)
