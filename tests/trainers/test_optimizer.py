"""Optimisers and schedules compared with torch's and the libraries' own, on the same weights and gradients."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Adafactor

from agentfactory.trainers.config import TrainConfig
from agentfactory.trainers.networks.critic import Role, make_actor_critic, role_of
from agentfactory.trainers.networks.policy import Policy, load_policy
from agentfactory.trainers.update.optimizer import make_optimizer, make_schedule
from tests.trainers.conftest import Make

pytestmark = pytest.mark.numbers


def updated(policy: Policy, optimizer: torch.optim.Optimizer, steps: int = 2) -> dict[str, Tensor]:
    """Return the weights after steps with gradients that depend only on the weight's name and the step."""
    trainable = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    for step in range(steps):
        for number, weight in enumerate(trainable.values()):
            generator = torch.Generator().manual_seed(1000 * step + number)
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return {name: weight.detach().clone() for name, weight in trainable.items()}


def config(name: str, **settings: Any) -> TrainConfig:
    return TrainConfig(steps=1, learning_rate=0.01, optimizer={"name": name, "weight_decay": 0.1, **settings})


def references(name: str, decays: list[nn.Parameter], others: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Create the reference optimiser directly: norms do not decay."""
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9))
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.01, momentum=0.8)
    return Adafactor(groups, lr=0.01, scale_parameter=False, relative_step=False)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_equals_the_librarys_own(make_recipe: Make, name: str) -> None:
    given, expected = (load_policy(make_recipe()) for _ in range(2))
    settings = {"adafactor": {}, "sgd": {"betas": (0.8, 0.9)}}.get(name, {"betas": (0.8, 0.9)})
    optimizer = make_optimizer(given, config(name, **settings))
    trainable = [weight for weight in expected.parameters() if weight.requires_grad]
    decays, others = [w for w in trainable if w.ndim > 1], [w for w in trainable if w.ndim == 1]
    before = {name: weight.clone() for name, weight in given.named_parameters()}
    moved = updated(given, optimizer)
    torch.testing.assert_close(moved, updated(expected, references(name, decays, others)), atol=1e-7, rtol=1e-5)
    assert all(not torch.equal(moved[name], before[name]) for name in moved)


def test_muon_updates_the_matrices_within_layers_and_adamw_all_else(make_recipe: Make) -> None:
    given, by_muon, by_adamw = (load_policy(make_recipe()) for _ in range(3))
    found = updated(given, make_optimizer(given, config("muon")))
    matrices = [w for name, w in by_muon.named_parameters() if "layers" in name and "norm" not in name]
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    tables = [w for name, w in by_adamw.named_parameters() if "embed_tokens" in name]
    norms = [w for name, w in by_adamw.named_parameters() if "norm" in name]
    groups = [{"params": tables, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    first, second = updated(by_muon, muon), updated(by_adamw, adamw)
    assert len(matrices) == 2 * 7
    assert len(matrices) + len(tables) + len(norms) == len(found)
    for name, value in found.items():
        expected = first[name] if "layers" in name and "norm" not in name else second[name]
        torch.testing.assert_close(value, expected, atol=1e-7, rtol=1e-5)


def test_the_critics_weights_get_its_learning_rate(make_recipe: Make) -> None:
    for lora in (None, {"rank": 2}):
        options = {"options": {"critic_learning_rate": 0.02}}
        recipe = make_recipe(lora=lora, algorithm="ppo", learning_rate=0.01, advantage=options)
        model = make_actor_critic(recipe, load_policy(recipe))
        groups = make_optimizer(model, recipe.train).param_groups
        rates = {id(weight): group["lr"] for group in groups for weight in group["params"]}
        trainable = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        assert len(rates) == len(trainable)
        assert {role_of(name) for name, _ in trainable} == set(Role)
        for name, weight in trainable:
            assert rates[id(weight)] == (0.02 if role_of(name) == Role.CRITIC else 0.01), name


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "constant"}, [0.5, 1.0, 1, 1, 1, 1, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [0.5, 1.0, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        ({"schedule": "cosine"}, [0.5, 1.0, *(0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(8))]),
        ({"schedule": "wsd", "decay_steps": 4}, [0.5, 1.0, 1, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4]),
    ],
)
def test_schedules(make_recipe: Make, settings: dict[str, Any], expected: list[float]) -> None:
    """Ten steps, two of them warm-up; every group follows, with its own rate. No step has a rate of 0."""
    train = TrainConfig(steps=10, learning_rate=0.01, warmup_steps=2, optimizer={"name": "muon"}, **settings)
    optimizer = make_optimizer(load_policy(make_recipe()), train)
    optimizer.param_groups[0]["lr"] = 0.5
    schedule = make_schedule(optimizer, train)
    peaks = [group["initial_lr"] for group in optimizer.param_groups]
    assert set(peaks) == {0.01, 0.5}
    assert min(expected) > 0
    for factor in expected:
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([factor * peak for peak in peaks])
        optimizer.step()
        schedule.step()
