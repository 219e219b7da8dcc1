"""Checks whether one model can be served instead of another, by the architecture and shapes in their configs alone."""

from itertools import zip_longest

import torch
from transformers import PretrainedConfig

from agentfactory.placement.server_memory import meta_network

_WITHOUT_WEIGHTS = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("layer_types", "rope_parameters"),
)
"""Fields that affect results without showing in a shape, or that are more readable than shapes."""


def difference(model: PretrainedConfig, served: PretrainedConfig) -> str | None:
    """Return the first difference between the architectures of `served`, such as a quantised copy, and `model`, such as
    "vocab_size is 152064, not 151936"; None if an adapter of one fits the other.

    Compares fields first, then the shapes of all weights below the head, from networks without memory: exact for any
    architecture that transformers has. The quantisation of weights, and whether the head is tied, may differ. A config
    does not show whether the weights are those of the same model; the sync's canary does.
    """
    first, second = model.get_text_config(), served.get_text_config()
    for name in _WITHOUT_WEIGHTS:
        here, there = getattr(first, name, None), getattr(second, name, None)
        if here != there:
            return f"{name} is {there}, not {here}"
    for mine, other in zip_longest(_shapes(first).items(), _shapes(second).items()):
        if mine != other:
            return f"its weights have {_shown(other)} where {_shown(mine)} is expected"
    return None


def _shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    network = meta_network(config, torch.float32)
    return {name: tuple(weight.shape) for name, weight in network.base_model.named_parameters()}


def _shown(entry: tuple[str, tuple[int, ...]] | None) -> str:
    return f"{entry[0]} of shape {list(entry[1])}" if entry else "nothing"
