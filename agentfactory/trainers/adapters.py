"""Adapters on one base: which of them the next forward pass uses."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer

POLICY_ADAPTER = "default"
"""peft's own name, so that an exported adapter looks like any other."""
CRITIC_ADAPTER = "critic"


def use_adapter(model: PeftModel, name: str) -> None:
    """Later forward passes use this adapter alone.

    peft's `set_adapter` freezes the other adapters as well. Here `requires_grad` stays as it is: both adapters are
    trained in one step, and DDP and FSDP2 must find the same weights at all times.
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
    """Forward passes in here see the base alone. Which adapter is used, and what is trained, is as before afterwards
    (peft's `disable_adapter` would leave only the adapter in use trainable)."""
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
