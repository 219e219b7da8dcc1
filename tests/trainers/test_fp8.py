"""FP8 training, emulated on the CPU: products against float64 by hand, errors against float32, and plain weights
everywhere else."""

import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentfactory.base.errors import SettingError
from agentfactory.trainers.batches.batch import TrainingRow, make_batches
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks.fp8 import fp8_linears, in_high_precision, use_fp8
from agentfactory.trainers.networks.policy import load_policy
from agentfactory.trainers.update.learner import Learner
from tests.placement.shapes import sizes
from tests.trainers.conftest import Make
from tests.trainers.ranks import on_ranks

pytestmark = pytest.mark.numbers
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao (extra fp8)")

CPU = torch.device("cpu")
RECIPES = ["fp8", "fp8_rowwise"]
LORA = {"rank": 16}
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)
"""Bits of the mantissa, the smallest normal exponent, the largest value."""


def quantised(x: Tensor, kind: tuple[int, int, float], axis: int | None, powers: bool) -> Tensor:
    """Round float64 values to FP8 and back, by the definition of its numbers: one scale for all values, or one along
    `axis`, which may be a power of two."""
    bits, smallest, largest = kind
    amax = x.abs().amax() if axis is None else x.abs().amax(axis, keepdim=True)
    scale = (largest / amax).float().double()
    if powers:
        scale = 2.0 ** torch.floor(torch.log2(scale))
    scaled = (x * scale).clamp(-largest, largest)
    exponent = torch.floor(torch.log2(scaled.abs())).clamp(min=smallest)
    step = 2.0 ** (exponent - bits)
    return torch.round(scaled / step) * step / scale


@needs_torchao
@pytest.mark.parametrize("precision", RECIPES)
def test_a_linear_layer_equals_its_rounded_operands_in_float64(precision: Any) -> None:
    torch.manual_seed(0)
    # 24 tokens: torchao pads them to 32 for the sum of the weight's gradient
    layer, x, g = nn.Sequential(nn.Linear(48, 32)), torch.randn(24, 48, requires_grad=True), torch.randn(24, 32)
    use_fp8([layer], precision, CPU)
    y = layer(x)
    y.backward(g)
    weight, bias = (part.detach().double() for part in (layer[0].weight, layer[0].bias))
    rows = precision == "fp8_rowwise"

    def rounded(values: Tensor, axis: int, kind: tuple[int, int, float] = E4M3) -> Tensor:
        return quantised(values.double(), kind, axis if rows else None, powers=rows)

    of_gradients = E4M3 if rows else E5M2
    a = x.detach()
    products = {
        # scales are along the dimension that is summed
        "output": (rounded(a, 1), rounded(weight, 1).T, y.detach().double() - bias),
        "gradient of the input": (rounded(g, 1, of_gradients), rounded(weight, 0), x.grad),
        "gradient of the weight": (rounded(g, 0, of_gradients).T, rounded(a, 0), layer[0].weight.grad),
    }
    for name, (left, right, found) in products.items():
        # each of the summed products is rounded to float32, once in each operand, and once per addition
        bound = 2.0**-24 * (left.shape[1] + 4) * (left.abs() @ right.abs()) + 2.0**-23
        assert ((found.double() - left @ right).abs() <= bound).all(), name
    torch.testing.assert_close(layer[0].bias.grad, g.sum(0))


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("network")
    torch.manual_seed(0)
    config = Qwen3Config(**sizes(64, 128, 2, 4, 2, 64), head_dim=16, tie_word_embeddings=True, initializer_range=0.15)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def made(network: Path) -> Make:
    def make(dtype: str = "float32", lora: Any = None, **train: Any) -> TrainRecipe:
        model = {"path": str(network), "dtype": dtype, "lora": lora}
        return TrainRecipe.model_validate({"model": model, "train": {"steps": 1, **train}})

    return make


class Scored:
    """Log-probabilities and the gradient of their mean, on four rows that share a prompt in pairs."""

    def __init__(self, recipe: TrainRecipe) -> None:
        self.policy = load_policy(recipe)
        draw = torch.Generator().manual_seed(1)
        prompts, answers = (torch.randint(64, (count, 12), generator=draw).tolist() for count in (2, 4))
        whole = [prompts[number // 2] + answer for number, answer in enumerate(answers)]
        rows = [TrainingRow(ids, list(range(12, 24)), {"weight": [1.0] * 12}) for ids in whole]
        found: dict[int, Tensor] = {}
        for part in make_batches(rows, self.policy.batching, 4096)[0].micro_batches:
            logprob, _ = self.policy(part.ids, part.sources, part.labels, part.positions, part.ends)
            (-logprob.sum() / 48).backward()
            found |= {row: logprob.detach()[part.sequence == place] for place, row in enumerate(part.rows)}
        self.logprobs = torch.cat([found[row] for row in range(4)])
        self.gradients = {name: w.grad for name, w in self.policy.named_parameters() if w.grad is not None}

    def errors(self, expected: "Scored") -> tuple[float, float, float]:
        assert self.gradients.keys() == expected.gradients.keys()
        ours, theirs = (torch.cat([g.flatten() for g in one.gradients.values()]) for one in (self, expected))
        loss = self.logprobs.mean() / expected.logprobs.mean() - 1
        apart = (self.logprobs - expected.logprobs).abs().mean()
        return abs(float(loss)), float((ours - theirs).norm() / theirs.norm()), float(apart)


ROUNDING = ((2 * 8 * 2**-8 + 8 * (2**-6 + 2**-8)) / 3) ** 0.5
"""Two layers of four products, one after the other, round two operands to e4m3, by 2**-4 at most and evenly
distributed. Backward, one of the operands is a gradient in e5m2, by 2**-3. The errors are independent."""


@needs_torchao
@pytest.mark.parametrize(
    ("lora", "train"),
    [(None, {"batching": "tree", "gradient_checkpointing": True}), (LORA, {"batching": "packed"})],
    ids=["tree", "packed-lora"],
)
def test_loss_and_gradient_are_as_far_from_float32_as_rounding(made: Make, lora: Any, train: dict[str, Any]) -> None:
    exact = Scored(made(lora=lora, **train))
    half = Scored(made("bfloat16", lora, **train)).errors(exact)
    print(f"\nloss, gradient, log-probabilities: bfloat16 {half}")
    for precision in RECIPES:
        for dtype in ("float32", "bfloat16"):
            errors = Scored(made(dtype, lora, precision=precision, **train)).errors(exact)
            print(f"{precision} in {dtype}: {errors}")
            assert max(errors[:2]) < ROUNDING
            # 8 bits less 4 of the mantissa: a layer that was left out would show
            assert errors[1] > 4 * half[1]


@needs_torchao
def test_everything_else_finds_plain_weights(made: Make, caplog: pytest.LogCaptureFixture) -> None:
    plain = load_policy(made())
    with caplog.at_level(logging.INFO, "agentfactory"):
        policy = load_policy(made(precision="fp8"))
    assert "train.precision=fp8 is emulated on this CPU" in caplog.text
    linear = [module for module in policy.modules() if type(module).__name__ == "Float8Linear"]
    assert len(linear) == 14
    for name, weight in plain.state_dict().items():
        found = policy.state_dict()[name]
        assert type(found) is type(weight)
        assert torch.equal(found, weight)
    assert list(policy.gather()) == list(plain.gather())
    assert type(policy.network.get_output_embeddings()) is nn.Linear
    # the canary follows changes that FP8 would round away
    ids, sources = torch.arange(24).reshape(2, 12), torch.arange(0, 20, 2)
    inputs = ids, sources, ids.flatten()[sources + 1]
    rounded = policy(*inputs)[0]
    with in_high_precision(policy):
        assert torch.equal(policy(*inputs)[0], plain(*inputs)[0])
    assert torch.equal(policy(*inputs)[0], rounded)
    assert not torch.equal(rounded, plain(*inputs)[0])


@needs_torchao
def test_the_base_of_an_adapter_uses_them_and_the_adapter_does_not(made: Make) -> None:
    policy = Scored(made(lora=LORA, precision="fp8")).policy
    kinds = {name: type(module).__name__ for name, module in policy.named_modules() if isinstance(module, nn.Linear)}
    assert {kind for name, kind in kinds.items() if name.endswith("base_layer")} == {"Float8Linear"}
    assert {kind for name, kind in kinds.items() if "lora_" in name} == {"Linear"}
    for name, weight in policy.named_parameters():
        assert (weight.grad is not None) == ("lora_" in name)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.down_proj = nn.Linear(32, 48), nn.Linear(32, 8)
        self.mlp = nn.ModuleDict({"gate": nn.Linear(32, 16), "gate_proj": nn.Linear(32, 16)})
        self.shared_expert_gate = nn.Linear(32, 1)


def test_routers_and_narrow_layers_stay_out() -> None:
    assert [name for _, name, _ in fp8_linears([Layer()])] == ["q_proj", "mlp.gate_proj"]


def test_refusals(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfactory.trainers.networks.fp8.is_installed", lambda package: False)
    with pytest.raises(SettingError, match=r"fp8 needs torchao, which is not installed; fix: run `pip install"):
        load_policy(made(precision="fp8"))
    monkeypatch.setattr("agentfactory.trainers.networks.fp8.is_installed", lambda package: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(SettingError, match=r"A100 has compute capability 8\.0, and FP8 needs 8\.9; fix: use auto"):
        use_fp8([Layer()], "fp8", torch.device("cuda"))
    with pytest.raises(SettingError, match=r"no linear layer has sizes that are multiples of 16"):
        use_fp8([nn.Sequential(nn.Linear(8, 24))], "fp8", CPU)


@needs_torchao
@pytest.mark.processes
@pytest.mark.extended
@pytest.mark.parametrize(
    ("sharding", "count", "machines"), [("fsdp2", 2, 1), pytest.param("hsdp", 4, 2, marks=pytest.mark.long)]
)
def test_several_ranks_train_what_one_process_does(
    network: Path, tmp_path: Path, sharding: str, count: int, machines: int
) -> None:
    """Tensorwise weights are gathered in FP8, with the scale of the whole weight."""
    # imports torchao
    from tests.trainers.launched_fp8 import train, train_and_resume

    def recipe(strategy: str, lora: Any) -> TrainRecipe:
        settings = {"steps": 1, "learning_rate": 1e-2, "precision": "fp8", "strategy": strategy}
        model = {"path": str(network), "dtype": "float32", "lora": lora}
        settings["processes"] = 1 if strategy == "single" else count
        return TrainRecipe.model_validate({"model": model, "train": settings})

    adapters = (None, LORA)
    recipes = [recipe(sharding, lora) for lora in adapters]
    found, *_ = on_ranks(train_and_resume, recipes, tmp_path, sharding, tmp_path, count=count, machines=machines)
    for lora, (sharded, resumed) in zip(adapters, found, strict=True):
        assert sharded["gathered"] == {True}
        # bit by bit: weights are plain in states
        assert resumed["second"]["loss"] == sharded["second"]["loss"]
        for name, weight in sharded["weights"].items():
            assert type(weight) is Tensor
            assert torch.equal(resumed["weights"][name], weight)
        alone = train(Learner(recipe("single", lora), Accelerator(cpu=True)))
        assert alone["weights"].keys() == sharded["weights"].keys()
        # the canary's pass is exact also where weights are gathered in FP8
        torch.testing.assert_close(sharded["plain"], alone["plain"], atol=1e-5, rtol=0)
        for step in ("first", "second"):
            given, expected = sharded[step], alone[step]
            ours, theirs = (torch.cat([g.flatten() for g in one["gradients"].values()]) for one in (given, expected))
            # sums differ in their order, which takes few values across a border of FP8
            assert (ours - theirs).norm() / theirs.norm() < 1e-3
            assert float(given["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-3)
