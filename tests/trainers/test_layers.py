"""Layers and head of our own against torch's autograd, peft and transformers."""

import copy
import functools
import gc
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from agentfactory.trainers.config import TrainConfig, TrainRecipe
from agentfactory.trainers.networks import network
from agentfactory.trainers.networks.head import Scores
from agentfactory.trainers.networks.layers import use_ours, weights_kept
from agentfactory.trainers.networks.policy import load_policy

pytestmark = pytest.mark.numbers


def pair(module: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Return a module with random weights, and a copy with our layers."""
    torch.manual_seed(0)
    for weight in module.parameters():
        weight.data = torch.randn(weight.shape, dtype=dtype)
    ours = copy.deepcopy(module)
    use_ours(ours)
    return module, ours


def results(module: nn.Module, inputs: Tensor) -> list[Tensor]:
    """Return outputs, and the gradients of a random function of them."""
    inputs = inputs.clone().requires_grad_()
    output = module(inputs)
    torch.manual_seed(1)
    (output * torch.randn_like(output)).sum().backward()
    return [output, inputs.grad, *(w.grad for w in module.parameters() if w.requires_grad)]  # type: ignore[list-item]


def assert_close(given: Iterable[Tensor], expected: Iterable[Tensor], error: float) -> None:
    for one, other in zip(given, expected, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).norm() <= error * other.norm()


def adapted() -> nn.Module:
    config = LoraConfig(r=2, lora_alpha=3, target_modules=["0", "2"])
    return get_peft_model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4, bias=False)), config)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_linear_layers_and_adapters_are_the_same(dtype: torch.dtype) -> None:
    error = 1e-13 if dtype == torch.float64 else 1e-5
    for module in (nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3, bias=False)), adapted()):
        plain, ours = pair(module, dtype)
        inputs = torch.randn(2, 5, 6, dtype=dtype)
        assert_close(results(ours, inputs), results(plain, inputs), error)
    with ours.disable_adapter(), plain.disable_adapter():  # type: ignore[operator]
        assert torch.equal(ours(inputs), plain(inputs))


@pytest.mark.parametrize("kept", [False, True])
def test_under_autocast_they_differ_by_rounding(kept: bool) -> None:
    for module in (nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 32)), adapted()):
        plain, ours = pair(module, torch.float32)
        inputs = torch.randn(2, 5, next(plain.parameters()).shape[1])
        with torch.autocast("cpu", torch.bfloat16):
            expected = results(plain, inputs)
            if kept:
                with weights_kept(ours, torch.bfloat16):
                    given = results(ours, inputs)
            else:
                given = results(ours, inputs)
            assert_close(given, expected, 0.03)
            # no copy outlives the context
            nn.init.zeros_(next(ours.parameters()))
            assert not torch.equal(ours(inputs), given[0])


def test_peft_computes_what_is_not_plain_lora() -> None:
    plain, ours = pair(adapted(), torch.float32)
    inputs = torch.randn(3, 6)
    for model in (plain, ours):
        model.merge_adapter()  # type: ignore[operator]
    assert torch.equal(ours(inputs), plain(inputs))
    for model in (plain, ours):
        model.unmerge_adapter()  # type: ignore[operator]
        for name, module in model.named_modules():
            if name.endswith("lora_dropout"):
                module["default"] = nn.Dropout(1.0)  # type: ignore[index, operator]
    assert torch.equal(ours.train()(inputs), plain.train()(inputs))


def test_a_layer_without_rows() -> None:
    assert pair(nn.Linear(4, 3), torch.float32)[1](torch.randn(2, 0, 4)).shape == (2, 0, 3)


@pytest.mark.extended
def test_layers_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=3)
    config.num_attention_heads = config.num_key_value_heads = 1
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    train = {"steps": 1, "compile": True}
    recipe = TrainRecipe.model_validate({"model": {"path": str(tmp_path), "dtype": "float32"}, "train": train})
    torch._dynamo.reset()
    policy = load_policy(recipe)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    policy(torch.ones(2, 12, dtype=torch.long), torch.arange(4), torch.arange(4))[0].sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.parametrize(
    ("batching", "heads", "kind"), [("tree", 1, "flex_attention"), ("padded", 1, "auto"), ("packed", 2, "auto")]
)
def test_attention_on_a_gpu(monkeypatch: pytest.MonkeyPatch, batching: Any, heads: int, kind: str) -> None:
    # triton is only with torch's builds for a GPU
    monkeypatch.setattr(network, "is_installed", lambda package: True)
    config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    config.num_attention_heads = config.num_key_value_heads = heads
    model, train = Qwen2ForCausalLM(config), TrainConfig(steps=1)
    assert network._attention_of(model, train, torch.device("cuda"), batching) == kind
    assert network._attention_of(model, train, torch.device("cpu"), batching) == "auto"


def test_a_layers_inputs_do_not_outlive_it() -> None:
    ours = pair(nn.Linear(4, 4), torch.float32)[1]
    gc.disable()
    try:
        for dtype in (torch.float32, torch.bfloat16):
            inputs = torch.randn(3, 4, requires_grad=True) * 2
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                ours(inputs).sum().backward()
            alive = weakref.ref(inputs)
            del inputs
            assert alive() is None
    finally:
        gc.enable()


def test_the_norm_is_llamas() -> None:
    plain, ours = pair(LlamaRMSNorm(48), torch.float32)
    assert "forward" in vars(ours)
    inputs = 3 * torch.randn(2, 5, 48)
    given, expected = results(ours, inputs), results(plain, inputs)
    assert torch.equal(given[0], expected[0])
    assert_close(given, expected, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trained", [True, False])
def test_scores_of_the_head(dtype: torch.dtype, trained: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(50, 16, dtype=dtype, requires_grad=trained)
    labels, constant = torch.randint(0, 50, (7,)), torch.zeros(50, dtype=dtype).index_fill(0, torch.tensor([3]), -9.0)
    # gradients of both signs, and none
    upstream = torch.tensor([1.0, -2.0, 0.0, 0.5, -0.1, 3.0, 1e-12], dtype=torch.promote_types(dtype, torch.float32))
    logits = ((hidden.double() @ weight.double().T + constant.double()) / 0.7).log_softmax(-1)
    chosen = logits.gather(-1, labels[:, None])[:, 0]
    inputs = [hidden, weight] if trained else [hidden]
    expected = [chosen, -(logits.exp() * logits).sum(-1), *torch.autograd.grad(chosen, inputs, upstream.double())]
    error = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    for size in (1, 3, 7, 100):
        logprob, entropy = Scores.apply(hidden, weight, labels, 0.7, lambda x: (x + constant).to(upstream) / 0.7, size)
        assert logprob.dtype == upstream.dtype
        assert not entropy.requires_grad
        given = [logprob, entropy, *torch.autograd.grad(logprob, inputs, upstream)]
        assert_close([one.double() for one in given], [one.double() for one in expected], error)
