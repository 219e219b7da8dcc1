"""Passes and steps of the Tinker service against float64: the base with merged adapters, and the formulas of
agentfactory/tinker/losses.py and of AdamW written out."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from agentfactory.tinker.bodies import Adam, Lora
from agentfactory.tinker.messages import PassRequest, RequestError, message
from agentfactory.tinker.training import ALPHA, Model, Trainer
from agentfactory.trainers.sync.canary import Canary, canary_rows
from agentfactory.trainers.update.learner import Learner
from tests.trainers.conftest import VOCABULARY, Make, make_recipe, model_folder, on_cpu  # noqa: F401

pytestmark = pytest.mark.numbers

RANK = 3
BOUNDS = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}
OPTIONS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    **dict.fromkeys(("ppo", "cispo", "gspo"), BOUNDS),
    "dro": {"beta": 0.3},
}
_TYPES = {"f": ("<f4", 1), "i": ("<i8", 2)}
Data = list[tuple[list[int], dict[str, Any]]]


def request(loss: str, data: Data, options: dict[str, float] | None = None, forward_only: bool = False) -> PassRequest:
    told = message("ForwardBackwardRequest")(loss_fn=loss, forward_only=forward_only, model_id="m", seq_id=1)
    for name, value in (options or {}).items():
        told.loss_fn_config_v2[name].number = value
    for ids, inputs in data:
        datum = told.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(ids, "<i4").tobytes()
        for name, values in inputs.items():
            kind, number = _TYPES[np.asarray(values).dtype.kind]
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = np.asarray(values, kind).tobytes(), number
            tensor.shape.extend(np.shape(values))
    return PassRequest(told.SerializeToString())


def result_of(answer: bytes) -> tuple[float, list[np.ndarray]]:
    """Return the loss, and each datum's log-probabilities."""
    told = message("ForwardBackwardOutput").FromString(answer)
    tensor = told.loss_fn_outputs[0].fields["logprobs"]
    offsets, shape = np.frombuffer(tensor.offsets, "<i8") // 4, list(tensor.trailing_shape)
    parts = np.split(np.frombuffer(tensor.data, "<f4"), offsets[1:-1])
    return told.metrics["loss:sum"], [part.reshape(-1, *shape) for part in parts]


@pytest.fixture(scope="module", params=["padded", "packed", "tree"])
def trainer(request: pytest.FixtureRequest, make_recipe: Make) -> Trainer:  # noqa: F811
    learner = Learner(make_recipe(lora={"rank": 1}, batching=request.param, token_budget=40), on_cpu())
    return Trainer(learner, Canary([], canary_rows(range(VOCABULARY), 20), "float32"), largest_rank=8)


class Reference:
    """The base in float64, with a head of its own, and a model's adapter as leaves."""

    def __init__(self, folder: Any, model: Model) -> None:
        self.network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self.network.lm_head.weight = torch.nn.Parameter(self.network.lm_head.weight.detach().clone())
        self.leaves = {
            name.removeprefix("base_model.model.").removesuffix(".weight"): weight.detach().double().requires_grad_()
            for name, weight in model.weights.items()
        }

    def logprobs(self, ids: list[int], labels: Tensor) -> Tensor:
        merged = {}
        for module in {name.rpartition(".lora_")[0] for name in self.leaves}:
            a, b = (self.leaves[f"{module}.lora_{factor}"] for factor in "AB")
            merged[f"{module}.weight"] = self.network.get_submodule(module).weight.detach() + ALPHA / len(a) * (b @ a)
        logits = functional_call(self.network, merged, (torch.tensor([ids]),), tie_weights=False).logits[0]
        chosen = logits.log_softmax(-1).gather(1, labels.reshape(len(ids), -1))
        return chosen.reshape(labels.shape)


def expected_loss(name: str, p: Tensor, inputs: dict[str, Tensor], low: float, high: float, beta: float) -> Tensor:
    """Return one datum's loss, token by token."""
    if name == "cross_entropy":
        return -(inputs["weights"] * p).sum()
    q, advantage = inputs["logprobs"], inputs["advantages"]
    ratio = (p - q).exp()
    if name == "gspo":
        chosen = inputs["sequence_ratio_mask"] > 0
        mean = (p - q)[chosen].mean().detach() if chosen.any() else torch.tensor(0.0)
        ratio = mean.exp() * (p - p.detach()).exp()
    terms = []
    for r, lp, old, a in zip(ratio, p, q, advantage, strict=True):
        bounded = torch.clamp(r, low, high)
        match name:
            case "importance_sampling":
                terms.append(-r * a)
            case "ppo" | "gspo":
                terms.append(-torch.minimum(r * a, bounded * a))
            case "cispo":
                terms.append(-bounded.detach() * lp * a)
            case "dro":
                terms.append(-(lp * a - beta / 2 * (lp - old) ** 2))
    return torch.stack(terms).sum()


def make_data(rng: np.random.Generator, loss: str, several: bool) -> Data:
    """Return data that share prefixes, with targets that are not the next tokens."""
    prefix, data = rng.integers(0, VOCABULARY, 5).tolist(), []
    for _ in range(rng.integers(1, 5)):
        ids = prefix[: rng.integers(1, 6)] + rng.integers(0, VOCABULARY, rng.integers(1, 12)).tolist()
        shape = (len(ids), int(rng.integers(1, 4))) if several else (len(ids),)
        inputs: dict[str, Any] = {"target_tokens": rng.integers(0, VOCABULARY, shape)}
        if loss == "cross_entropy":
            inputs["weights"] = rng.normal(size=shape)
        else:
            inputs |= {"logprobs": rng.normal(-4.0, 0.5, shape), "advantages": rng.normal(size=shape)}
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = rng.integers(0, 2, shape).astype(float)
        data.append((ids, inputs))
    return data


def test_50_batches_and_their_steps_are_those_of_float64(trainer: Trainer, model_folder: Any) -> None:  # noqa: F811
    rng = np.random.default_rng(0)
    model = trainer.create("checked", Lora(rank=RANK, seed=1))
    with torch.no_grad():
        for weight in model.weights.values():
            weight.normal_(std=0.1, generator=torch.Generator().manual_seed(2))
    for number in range(17):
        loss = list(OPTIONS)[number % len(OPTIONS)]
        data = make_data(rng, loss, several=loss == "cross_entropy" and number > 6)
        reference = Reference(model_folder, model)
        total, scored = torch.zeros((), dtype=torch.float64), []
        for ids, inputs in data:
            tensors = {name: torch.from_numpy(np.asarray(np.asarray(v, "f4"), "f8")) for name, v in inputs.items()}
            scored.append(reference.logprobs(ids, torch.from_numpy(inputs["target_tokens"])))
            low, high = BOUNDS.values()
            total = total + expected_loss(loss, scored[-1], tensors, low, high, OPTIONS["dro"]["beta"])
        total.backward()

        # by chunks, as clients send large calls
        found = [
            result_of(trainer.run_pass(model, request(loss, part, OPTIONS[loss])))
            for part in (data[:1], data[1:])
            if part
        ]
        assert sum(part for part, _ in found) == pytest.approx(float(total.detach()), rel=1e-5, abs=1e-4)
        made = [array for _, arrays in found for array in arrays]
        for own, wanted in zip(made, scored, strict=True):
            np.testing.assert_allclose(own, wanted.detach().numpy(), atol=2e-5)
        gradients = {name: leaf.grad for name, leaf in reference.leaves.items()}
        largest = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient is not None)
        states = {name: dict(model.optimizer.state.get(weight, {})) for name, weight in model.weights.items()}
        before = {name: weight.detach().double().clone() for name, weight in model.weights.items()}
        before_moments = {
            name: {slot: v.double().clone() for slot, v in state.items()} for name, state in states.items()
        }
        own_gradients = {}
        for name, weight in model.weights.items():
            wanted_gradient = gradients[name.removeprefix("base_model.model.").removesuffix(".weight")]
            torch.testing.assert_close(weight.grad.double(), wanted_gradient, atol=1e-5 * max(1.0, largest), rtol=1e-5)
            own_gradients[name] = weight.grad.double().clone()

        settings = Adam(learning_rate=1e-3, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5)
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in own_gradients.values()))
        assert trainer.step(model, settings)["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
        for name, weight in model.weights.items():
            moments = before_moments[name]
            gradient = own_gradients[name] * min(1.0, 0.5 / (norm + 1e-6))
            first = 0.8 * moments.get("exp_avg", 0.0) + 0.2 * gradient
            second = 0.9 * moments.get("exp_avg_sq", 0.0) + 0.1 * gradient.square()
            step = number + 1
            change = (first / (1 - 0.8**step)) / ((second / (1 - 0.9**step)).sqrt() + 1e-6)
            wanted_weight = before[name] * (1 - 1e-3 * 0.1) - 1e-3 * change
            torch.testing.assert_close(weight.detach().double(), wanted_weight, atol=1e-6, rtol=1e-5)
            assert weight.grad is None
    trainer.drop(model)


def test_models_do_not_touch_each_other(trainer: Trainer) -> None:
    """Not by passes, steps, creation or dropping; a forward pass adds no gradient."""
    data: Data = [([3, 4, 5], {"target_tokens": [4, 5, 6]})]
    alone = trainer.create("alone", Lora(rank=2, seed=5))
    trainer.run_pass(alone, request("cross_entropy", data))
    gradient = {name: weight.grad.clone() for name, weight in alone.weights.items()}
    other = trainer.create("other", Lora(rank=4, seed=6, train_attn=False, train_unembed=False))
    assert not [name for name in other.weights if "attn" in name or "lm_head" in name]
    for _ in range(3):
        trainer.run_pass(other, request("cross_entropy", data))
        trainer.step(other, Adam(learning_rate=0.1))
    trainer.run_pass(alone, request("cross_entropy", data, forward_only=True))
    trainer.drop(other)
    assert all(torch.equal(weight.grad, gradient[name]) for name, weight in alone.weights.items())
    before = [weight.detach().clone() for weight in alone.weights.values()]
    trainer.step(alone, Adam(learning_rate=0.1))
    # B begins as 0, so A has no gradient yet
    moved = [not torch.equal(*pair) for pair in zip(before, alone.weights.values(), strict=True)]
    assert sum(moved) == len(moved) // 2
    trainer.drop(alone)


def test_a_step_after_a_failed_pass_fails_and_drops_the_gradients(trainer: Trainer) -> None:
    model = trainer.create("failing", Lora(rank=2, seed=5))
    good: Data = [([3, 4], {"target_tokens": [4, 5]})]
    trainer.run_pass(model, request("cross_entropy", good))
    with pytest.raises(RequestError, match=r"data\[0\].loss_fn_inputs.target_tokens: has other values than ids"):
        trainer.run_pass(model, request("cross_entropy", [([3, 4], {"target_tokens": [4, VOCABULARY]})]))
    with pytest.raises(RequestError, match="no step was made, because a pass before it failed"):
        trainer.step(model, Adam())
    assert model.steps == 0
    assert all(weight.grad is None for weight in model.weights.values())
    trainer.run_pass(model, request("cross_entropy", good))
    trainer.step(model, Adam())
    trainer.drop(model)


def test_loading_drops_pending_gradients(trainer: Trainer, tmp_path: Path) -> None:
    model = trainer.create("loaded", Lora(rank=2, seed=5))
    trainer.save(model, tmp_path / "adapter")
    trainer.run_pass(model, request("cross_entropy", [([3, 4], {"target_tokens": [4, 5]})]))
    trainer.load(model, tmp_path / "adapter", None)
    assert trainer.step(model, Adam())["metrics"]["grad_norm"] == 0.0
    trainer.drop(model)


def test_a_model_that_diverged_is_not_saved(trainer: Trainer, tmp_path: Path) -> None:
    model = trainer.create("diverged", Lora(rank=2, seed=5))
    with torch.no_grad():
        next(iter(model.weights.values())).fill_(torch.nan)
    with pytest.raises(RequestError, match="weights that are not finite since one of its steps; load an earlier"):
        trainer.save(model, tmp_path / "adapter")
    trainer.drop(model)


def test_sparse_targets_are_bounded(trainer: Trainer) -> None:
    """A few bytes stand for many zeros, in each of many data."""
    model = trainer.create("sparse", Lora(rank=2, seed=5))
    told = message("ForwardBackwardRequest")(loss_fn="cross_entropy", model_id="m", seq_id=1)
    for _ in range(3):
        datum = told.data.add()
        datum.model_input.add().encoded_text.tokens = np.zeros(64, "<i4").tobytes()
        tensor = datum.loss_fn_inputs["target_tokens"]
        tensor.dtype = 2
        tensor.shape.extend((64, 1 << 16))
        tensor.sparse_csr.crow_indices = np.zeros(65, "<i8").tobytes()
    with pytest.raises(RequestError, match="data: has more than 8,388,608 values in loss_fn_inputs; send fewer"):
        trainer.run_pass(model, PassRequest(told.SerializeToString()))
    trainer.drop(model)


WRONG = {
    "loss_fn: got 'stable_reinforce': its formula is not published": ("stable_reinforce", {}, {}),
    "loss_fn: got 'mse': use one of cross_entropy": ("mse", {}, {}),
    "loss_fn_config.beta: ppo has no such option; it takes clip_low": ("ppo", {}, {"beta": 1.0}),
    "loss_fn_inputs.target_tokens: missing": ("cross_entropy", {"target_tokens": None}, {}),
    r"loss_fn_inputs.target_tokens: its shape is \[2, 0\]": (
        "cross_entropy",
        {"target_tokens": np.zeros((2, 0), int)},
        {},
    ),
    "loss_fn_inputs.advantages: missing": ("ppo", {"logprobs": [0.0, 0.0]}, {}),
    "loss_fn_inputs.mask: this loss does not read it": ("cross_entropy", {"mask": [1.0, 1.0]}, {}),
    r"loss_fn_inputs.weights: has shape \[3\], for 2 tokens": ("cross_entropy", {"weights": [1.0, 1.0, 1.0]}, {}),
    "loss_fn_inputs.weights: has values that are not finite": ("cross_entropy", {"weights": [1.0, math.inf]}, {}),
    "only cross_entropy takes several": (
        "ppo",
        {"target_tokens": [[1], [2]], "logprobs": [0.0] * 2, "advantages": [0.0] * 2},
        {},
    ),
}


@pytest.mark.parametrize("told", WRONG)
def test_a_wrong_pass_names_the_field(trainer: Trainer, told: str) -> None:
    loss, given, options = WRONG[told]
    inputs = {name: value for name, value in {"target_tokens": [1, 2], **given}.items() if value is not None}
    model = trainer.create("wrong", Lora(rank=2))
    with pytest.raises(RequestError, match=told):
        trainer.run_pass(model, request(loss, [([3, 4], inputs)], options))
    trainer.drop(model)
