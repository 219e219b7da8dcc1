"""Rounded weights: equal to torch's own fake quantisation, and a server that computes with them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from agentfactory.rollout.inference.embedded.packed_linear import Int8Linear, largest_step, quantize
from agentfactory.rollout.inference.embedded.sampling import UnsupportedModel
from agentfactory.trainers.sync.server_control import ServerControl, SyncError
from tests.conftest import embedded_server
from tests.engine_runs import make_adapter
from tests.placement.shapes import sizes

pytestmark = [pytest.mark.processes, pytest.mark.numbers]

PROMPT = [7 * i % 97 for i in range(40)]


def make_model(**changes: Any) -> Qwen3ForCausalLM:
    """A model with input widths 96 (less than a group), 160 (a group and a remainder) and 128."""
    torch.manual_seed(0)
    own = {"head_dim": 32, "initializer_range": 0.1, "tie_word_embeddings": False}
    return Qwen3ForCausalLM(Qwen3Config(**{**sizes(96, 160, 2, 4, 2, 97), **own, **changes})).eval()


def rounded(weight: Tensor, kind: str) -> Tensor:
    """Quantise with torch's own operator, given only the scales and zero points of the definition."""
    if kind == "int8":
        scale = weight.abs().amax(1) / 127
        return torch.fake_quantize_per_channel_affine(weight, scale, torch.zeros(len(scale)), 0, -127, 127)
    parts = []
    for part in weight.split(128, 1):
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scale = (high - low) / 15
        zero = (-low / scale).round().int()
        parts.append(torch.fake_quantize_per_channel_affine(part.contiguous(), scale, zero, 0, 0, 15))
    return torch.cat(parts, 1)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_linear_weights_are_rounded_to_nearest_and_nothing_else(kind: Any, tied: bool) -> None:
    plain, model = make_model(tie_word_embeddings=tied), make_model(tie_word_embeddings=tied)
    quantize(model, kind)
    weights = dict(model.named_parameters())
    changed = set()
    for name, before in plain.named_parameters():
        if name.endswith("_proj.weight"):
            changed.add(name)
            # a quotient's last bit may decide rounding at a half
            off = (weights[name] - rounded(before.detach(), kind)).abs() > 1e-6
            assert off.float().mean() < 1e-3, name
            assert (weights[name] - before).abs().max() > 1e-4
        else:
            assert torch.equal(weights[name], before), name
    assert len(changed) == 2 * 7
    row = weights["model.layers.1.mlp.down_proj.weight"][3]
    levels = [len(part.unique()) for part in (row.split(128) if kind == "int4" else [row])]
    assert max(levels) <= (16 if kind == "int4" else 255)


@pytest.mark.parametrize("most", [largest_step(), 63])
def test_products_of_integers_are_those_of_the_rounded_values(most: int) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 40), torch.randn(1, 5, 64)
    layer.weight.data[3], x[0, 2] = 0.0, 0.0
    weight, bias = layer.weight.detach().clone(), layer.bias.detach()
    product = Int8Linear(layer, most)
    scale = weight.abs().amax(1, keepdim=True) / most
    levels = (weight / scale.where(scale > 0, 1.0)).round()
    assert torch.equal(product.read(), levels * scale)
    steps = x.abs().amax(2, keepdim=True) / 127
    expected = (x / steps.where(steps > 0, 1.0)).round() * steps @ (levels * scale).T + bias
    assert torch.allclose(product(x), expected, atol=1e-6)
    assert torch.equal(product(x)[:, 1:2], product(x[:, 1:2]))  # a row depends on no other


def test_weights_of_0_stay_so_and_bfloat16_is_rounded_once() -> None:
    model = make_model()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[5] = 0.0
    exact = make_model()
    quantize(model, "int4")
    assert not model.model.layers[0].mlp.up_proj.weight[5].any()
    exact.bfloat16()
    quantize(exact, "int8")
    weight = exact.model.layers[1].self_attn.q_proj.weight
    expected = rounded(make_model().bfloat16().model.layers[1].self_attn.q_proj.weight.detach().float(), "int8")
    assert (weight != expected.bfloat16()).float().mean() < 1e-3


def test_a_model_that_would_be_rounded_in_part_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=4, n_positions=64))
    with pytest.raises(UnsupportedModel, match=r"linear modules only, and h\.0\.attn\.c_attn\.weight"):
        quantize(model, "int8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a non-trivial adapter for it."""
    folder = tmp_path_factory.mktemp("quantised") / "model"
    make_model(eos_token_id=96).save_pretrained(folder)
    make_adapter(make_model(eos_token_id=96), folder.parent / "adapter", 1, 0.1)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerControl]:
    flags = ("--quantization", "int4", "--adapter", f"tuned={folder.parent / 'adapter'}")
    with embedded_server(folder, "--max-model-len", "128", "--max-num-seqs", "4", *flags) as url:
        yield ServerControl(url)


@torch.no_grad()
def expected_logprobs(model: nn.Module, tokens: list[int]) -> Tensor:
    logits = model(input_ids=torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("name", ["policy", "tuned"])
def test_weights_are_rounded_under_adapters_that_are_not(server: ServerControl, folder: Path, name: str) -> None:
    def load(rounds: bool) -> nn.Module:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if key.endswith("_proj.weight") and rounds:
                    weight.copy_(rounded(weight, "int4"))
        return model if name == "policy" else peft.PeftModel.from_pretrained(model, folder.parent / "adapter")

    params = {"temperature": 1.0, "max_tokens": 30, "logprobs": 0, "ignore_eos": True, "seed": 1}
    answer = server.post("/inference/v1/generate", {"token_ids": PROMPT, "model": name, "sampling_params": params})
    content = answer["choices"][0]["logprobs"]["content"]
    tokens, given = [entry["token_id"] for entry in content], torch.tensor([entry["logprob"] for entry in content])
    torch.testing.assert_close(given, expected_logprobs(load(True), tokens), atol=2e-3, rtol=0)
    assert (given - expected_logprobs(load(False), tokens)).abs().mean() > 0.02


def test_full_weights_are_refused_with_the_fix(server: ServerControl) -> None:
    for path in ("/init_weight_transfer_engine", "/start_weight_update"):
        with pytest.raises(SyncError, match=r"\(--quantization int4\).*train an adapter \(model\.lora\.rank\)"):
            server.post(path, {})
