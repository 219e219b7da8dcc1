"""Selects the adapter that the next forward pass uses."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer

POLICY_ADAPTER = "default"
"""peft's own name, so that an exported adapter looks like any other."""
CRITIC_ADAPTER = "critic"


def use_adapter(model: PeftModel, name: str) -> None:
    """Makes later forward passes use only this adapter.

    peft's `set_adapter` also freezes the other adapters. Here `requires_grad` does not change: both adapters are
    trained in one step, and DDP and FSDP2 must always find the same trainable weights.
    """
    if model.active_adapter == name:
        return
    if name not in model.peft_config:
        raise ValueError(f"the model has no adapter {name}; it has {', '.join(model.peft_config)}")
    tuner: Any = model.base_model
    model.active_adapter = tuner.active_adapter = name
    for layer in _layers(model):
        layer._active_adapter = [name]


@contextmanager
def adapters_off(model: PeftModel) -> Iterator[None]:
    """Makes forward passes in this context use the base alone. Afterwards the adapter in use and the trainable weights
    are as before (peft's `disable_adapter` would leave only the adapter in use trainable)."""
    layers = list(_layers(model))
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _layers(model: PeftModel) -> Iterator[BaseTunerLayer]:
    return (module for module in model.modules() if isinstance(module, BaseTunerLayer))
