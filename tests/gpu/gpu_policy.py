"""What only a GPU computes, against what is proven on the CPU: precision, attention kernels, layer kernels, compiled
layers, offloading, QLoRA, FP8, 8-bit optimisers."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from torch import Tensor, nn
from transformers.models.qwen3 import modeling_qwen3

from agentfactory.trainers.batches.batch import TrainingRow, make_batches
from agentfactory.trainers.config import TrainConfig, TrainRecipe
from agentfactory.trainers.networks.network import load_network
from agentfactory.trainers.networks.policy import Policy, load_policy
from agentfactory.trainers.update.optimizer import make_optimizer
from tests.gpu.models import DEVICE, NEEDS_FP8, NEEDS_GPU, VOCABULARY, needs, recipe

pytestmark = NEEDS_GPU
LORA = {"rank": 8}


def make_rows(groups: int, size: int, prompt: int, answer: int) -> list[TrainingRow]:
    """Chains that share their group's prompt, of ragged lengths."""
    draw, rows = random.Random(0), []
    for _ in range(groups):
        shared = draw.choices(range(VOCABULARY), k=prompt)
        for _ in range(size):
            own = draw.choices(range(VOCABULARY), k=draw.randint(answer // 2, answer))
            streams = dict.fromkeys(("behaviour", "advantage", "weight", "mixed"), [1.0] * len(own))
            rows.append(TrainingRow(shared + own, list(range(prompt, prompt + len(own))), streams))
    return rows


ROWS = make_rows(groups=2, size=4, prompt=70, answer=40)
MANY = make_rows(groups=4, size=8, prompt=512, answer=128)


def backward(policy: Policy, rows: list[TrainingRow], budget: int = 1024) -> Tensor:
    """Log-probabilities of all targets, row by row; their weighted mean's gradient is added to the weights'."""
    batch = make_batches(rows, policy.batching, budget)[0]
    found: dict[int, Tensor] = {}
    for part in batch.micro_batches:
        part = part.to(next(policy.parameters()).device)
        logprob, _ = policy(part.ids, part.sources, part.labels, part.positions, part.ends)
        (-(logprob * part.streams["weight"]).sum() / batch.normaliser).backward()
        for place, row in enumerate(part.rows):
            found[row] = logprob.detach()[part.sequence == place].cpu()
    return torch.cat([found[row] for row in range(len(rows))])


class Scored:
    """Log-probabilities and gradients of a recipe's policy on ROWS."""

    def __init__(self, made: TrainRecipe, device: str = DEVICE):
        policy = load_policy(made, device)
        self.logprobs = backward(policy, ROWS)
        trained = {name: weight.grad for name, weight in policy.named_parameters() if weight.requires_grad}
        self.gradients = {name: gradient.cpu() for name, gradient in trained.items() if gradient is not None}

    def check(self, expected: "Scored", tolerance: float) -> None:
        """Largest difference of log-probabilities, and each gradient's difference as a share of its length."""
        assert (self.logprobs - expected.logprobs).abs().max() < 10 * tolerance
        assert self.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            length = gradient.norm()
            if length > 0:
                assert (self.gradients[name] - gradient).norm() / length < tolerance, name


@pytest.fixture(scope="module")
def on_cpu(small: Path) -> Scored:
    return Scored(recipe(small, batching="padded"), "cpu")


@pytest.mark.parametrize("batching", ["padded", "packed", "tree"])
def test_float32_equals_the_cpu(small: Path, on_cpu: Scored, batching: str) -> None:
    Scored(recipe(small, batching=batching)).check(on_cpu, 1e-4)


def test_bfloat16_follows_float32(small: Path, on_cpu: Scored) -> None:
    Scored(recipe(small, dtype="bfloat16")).check(on_cpu, 0.05)


@pytest.mark.parametrize("batching", ["padded", "packed", "tree"])
def test_flex_attention_equals_sdpa(small: Path, on_cpu: Scored, batching: str) -> None:
    Scored(recipe(small, attention="flex_attention", batching=batching)).check(on_cpu, 2e-3)
    # weights, queries and keys are float32, values are not
    Scored(recipe(small, "bfloat16", attention="flex_attention", batching=batching)).check(on_cpu, 0.05)


def test_flex_attention_is_compiled_for_all_lengths_at_once(small: Path) -> None:
    policy = load_policy(recipe(small, "bfloat16", attention="flex_attention", batching="tree"), DEVICE)
    ragged = [make_rows(groups=1, size=4, prompt=prompt, answer=60) for prompt in (50, 300, 800, 130, 1500, 620)]
    for rows in ragged[:2]:
        backward(policy, rows, 4096)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in ragged[2:]:
            backward(policy, rows, 4096)


@needs("flash_attn")
@pytest.mark.parametrize("batching", ["padded", "packed"])
def test_flash_attention_equals_sdpa(small: Path, on_cpu: Scored, batching: str) -> None:
    Scored(recipe(small, "bfloat16", attention="flash_attention_2", batching=batching)).check(on_cpu, 0.05)


def test_large_activations_have_gradients(small: Path) -> None:
    """The case of https://github.com/pytorch/pytorch/issues/196678: cuDNN's kernel returns NaN for it."""
    load_policy(recipe(small, "bfloat16", batching="tree"), DEVICE)
    draw = torch.Generator(DEVICE).manual_seed(0)
    length, width = 704, 64
    query, key, value = (
        torch.randn(1, 1, length, width, device=DEVICE, dtype=torch.bfloat16, generator=draw) for _ in range(3)
    )
    with torch.no_grad():
        query[..., 0], key[..., 0] = 1.0, -120.0 * width**0.5
    mask = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()[None, None]
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    found = nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask)
    found.float().square().sum().backward()
    for tensor in inputs:
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_equal_plain_ones(small: Path, lora: dict[str, Any] | None, checkpointing: bool) -> None:
    torch._dynamo.reset()
    settings = {"compile": True, "gradient_checkpointing": "offload" if checkpointing else False}
    Scored(recipe(small, lora=lora, **settings)).check(Scored(recipe(small, lora=lora)), 1e-3)


@needs("liger_kernel")
@pytest.mark.parametrize("lora", [None, LORA])
def test_liger_equals_plain_layers(small: Path, monkeypatch: pytest.MonkeyPatch, lora: dict[str, Any] | None) -> None:
    # liger replaces it for all networks; it is put back
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", modeling_qwen3.apply_rotary_pos_emb)
    plain = Scored(recipe(small, lora=lora))
    Scored(recipe(small, lora=lora, liger=True)).check(plain, 2e-3)


@needs("bitsandbytes")
def test_qlora_equals_an_adapter_on_its_dequantised_base(small: Path, tmp_path: Path) -> None:
    quantised = recipe(small, "bfloat16", {**LORA, "quantization": "nf4"})
    network = load_network(quantised, DEVICE)
    assert network.get_memory_footprint() < 0.5 * load_network(recipe(small, "bfloat16", LORA)).get_memory_footprint()
    network.dequantize()
    network.save_pretrained(tmp_path / "dequantised")
    plain = recipe(tmp_path / "dequantised", "bfloat16", LORA)
    Scored(quantised).check(Scored(plain), 0.05)
    policy = load_policy(quantised, DEVICE)
    policy.save_adapter(tmp_path / "adapter", policy.gather())
    assert AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").peft_config["default"].r == LORA["rank"]


def _error(found: Scored, exact: Scored) -> float:
    """The gradient's difference as a share of its length."""
    assert found.gradients.keys() == exact.gradients.keys()
    apart = sum((found.gradients[name] - gradient).square().sum() for name, gradient in exact.gradients.items())
    return float((apart / sum(gradient.square().sum() for gradient in exact.gradients.values())) ** 0.5)


@NEEDS_FP8
@needs("torchao")
@pytest.mark.parametrize("lora", [None, {"rank": 16}])
@pytest.mark.parametrize("batching", ["packed", "tree"])
@pytest.mark.parametrize("precision", ["fp8", "fp8_rowwise"])
def test_fp8_is_as_exact_as_its_emulation(small: Path, precision: str, batching: str, lora: Any) -> None:
    """The emulation is proven in tests/trainers/test_fp8.py."""
    exact = Scored(recipe(small, lora=lora, batching=batching), "cpu")
    settings = recipe(small, "bfloat16", lora, batching=batching, precision=precision)
    real, emulated = _error(Scored(settings), exact), _error(Scored(settings, "cpu"), exact)
    plain = _error(Scored(recipe(small, "bfloat16", lora, batching=batching)), exact)
    print(f"\n{precision}: gradient {real:.3f}, emulated {emulated:.3f}; bfloat16 {plain:.3f}")
    assert 2 * plain < real < 1.5 * emulated


def optimised(name: str, steps: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A matrix before and after steps, and the gradients; the learning rate is 0.01, the betas 0.9 and 0.99."""
    torch.manual_seed(0)
    layer = nn.Linear(256, 256, bias=False, device=DEVICE)
    before = layer.weight.detach().clone()
    gradients = [torch.randn_like(before) for _ in range(steps)]
    config = TrainConfig(steps=1, learning_rate=0.01, optimizer={"name": name, "betas": (0.9, 0.99)})
    optimizer = make_optimizer(layer, config)
    for gradient in gradients:
        layer.weight.grad = gradient.clone()
        optimizer.step()
    return before, layer.weight.detach(), gradients


@needs("bitsandbytes")
def test_adamw_in_8_bits_follows_adamw() -> None:
    before, after, _ = optimised("adamw_8bit", steps=5)
    _, expected, _ = optimised("adamw", steps=5)
    assert (after - expected).norm() < 0.1 * (expected - before).norm()


@needs("bitsandbytes")
def test_lion_equals_its_formula() -> None:
    """arXiv:2302.06675, algorithm 2."""
    weight, after, gradients = optimised("lion", steps=3)
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        weight = weight - 0.01 * torch.sign(0.9 * momentum + 0.1 * gradient)
        momentum = 0.99 * momentum + 0.01 * gradient
    torch.testing.assert_close(after, weight, atol=1e-6, rtol=0)


def peak(made: TrainRecipe) -> int:
    """Bytes above those of weights and gradients in forward and backward passes on MANY."""
    policy = load_policy(made, DEVICE)
    # compiles, and allocates the gradients
    backward(policy, MANY, budget=8192)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    backward(policy, MANY, budget=8192)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - held


def test_checkpointing_and_offloading_save_memory(large: Path) -> None:
    plain, checkpointing, offloading = (
        peak(recipe(large, "bfloat16", batching="tree", gradient_checkpointing=kind))
        for kind in (False, True, "offload")
    )
    assert checkpointing < 0.7 * plain
    assert offloading < checkpointing
