"""Offload: all of a learner leaves the device's memory and returns, and training is unaffected.

The device is the CPU, too; offload copies from it as from a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.offload import Offload
from tests.trainers.conftest import Make, make_groups, on_cpu, take_step

SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "full": (None, {"loss": {"kl": {"coefficient": 0.1}}}),
    "two-adapters": ({"rank": 2}, {"algorithm": "ppo"}),
    "muon": (None, {"optimizer": {"name": "muon"}}),
    "nf4": ({"rank": 2, "quantization": "nf4"}, {}),
}
"""`model.lora`, and fields of `train`."""


def kept(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    """Yield the results of training by name: trained weights and the optimiser's state."""
    for name, weight in learner.model.named_parameters():
        if weight.requires_grad:
            yield name, weight
            for key, value in learner.optimizer.state[weight].items():
                if isinstance(value, Tensor):
                    yield f"{name}: {key}", value


@pytest.mark.extended
@pytest.mark.parametrize("name", SETTINGS)
def test_training_does_not_notice(make_recipe: Make, name: str) -> None:
    lora, train = SETTINGS[name]
    recipe = make_recipe(lora, steps=3, batch_size=2, learning_rate=1e-2, **train)
    batches = [make_groups(2, 3, seed) for seed in range(3)]
    plain = Learner(recipe, on_cpu())
    for batch in batches:
        take_step(plain, recipe, batch)
    learner = Learner(recipe, on_cpu())
    offload = Offload(learner)
    for batch in batches:
        offload.to_host()
        offload.to_device()
        take_step(learner, recipe, batch)
    offload.to_host()
    torch.testing.assert_close(dict(kept(learner)), dict(kept(plain)), atol=0, rtol=0)


def memory(learner: Learner) -> dict[str, StorageWeakRef]:
    """Return the memory of a learner's tensors."""
    found: dict[str, StorageWeakRef] = {}
    for number, network in enumerate(learner.networks):
        for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
            found[f"{number}: {name}"] = StorageWeakRef(tensor.untyped_storage())
            state = getattr(tensor, "quant_state", None)
            if state is not None:
                found[f"{number}: {name}: absmax"] = StorageWeakRef(state.absmax.untyped_storage())
                found[f"{number}: {name}: nested"] = StorageWeakRef(state.state2.absmax.untyped_storage())
    for name, tensor in kept(learner):
        found[name] = StorageWeakRef(tensor.untyped_storage())
    return found


@pytest.mark.parametrize("name", ["full", "two-adapters", "nf4"])
def test_the_devices_memory_is_given_back(make_recipe: Make, name: str) -> None:
    lora, train = SETTINGS[name]
    recipe = make_recipe(lora, steps=9, batch_size=2, **train)
    learner = Learner(recipe, on_cpu())
    offload = Offload(learner)
    take_step(learner, recipe, make_groups(2, 3))
    device = memory(learner)
    assert len(device) > 20
    assert ("nf4" in name) == any(key.endswith("nested") for key in device)
    offload.to_host()
    assert [key for key, storage in device.items() if not storage.expired()] == []
    offloaded = dict(addresses(learner))
    offload.to_device()
    device = memory(learner)
    # copies of frozen tensors stay in host memory, and are not repeated
    take_step(learner, recipe, make_groups(2, 3, seed=1))
    offload.to_host()
    assert [key for key, storage in device.items() if not storage.expired()] == []
    again = dict(addresses(learner))
    assert {key: again[key] for key in offloaded} == offloaded


def addresses(learner: Learner) -> Iterator[tuple[str, int]]:
    for number, network in enumerate(learner.networks):
        yield from ((f"{number}: {name}", weight.data_ptr()) for name, weight in network.named_parameters())
