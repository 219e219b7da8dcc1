"""Whether one model can be served in place of another: its architecture and shapes, by their configs alone."""

from itertools import zip_longest

import torch
from transformers import PretrainedConfig

from agentfactory.placement.server_memory import meta_network

_WITHOUT_WEIGHTS = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("layer_types", "rope_parameters"),
)
"""What decides results and shows in no shape, or says more than one."""


def difference(model: PretrainedConfig, served: PretrainedConfig) -> str | None:
    """The first thing in which `served`, such as a quantised copy, is another architecture than `model`, in words such
    as "vocab_size is 152064, not 151936"; None where an adapter of one fits the other.

    Fields first, then the shapes of all weights below the head, from networks without memory: exact for any
    architecture that transformers has. How weights are quantised, and whether the head is tied, may differ. That the
    weights are those of the same model no config tells: the sync's canary does.
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
