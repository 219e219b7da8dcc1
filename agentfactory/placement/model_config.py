"""Model configurations for memory planning: load one, and compare the architectures of two."""

import json
from itertools import zip_longest
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig, PretrainedConfig

from agentfactory.placement.server_memory import meta_network
from agentfactory.rollout.model_hub import hub_answers, is_hub_name

SHAPES = Path(__file__).with_name("shapes")
"""Copies of the config.json published with the models of our recipes, as ORGANISATION--NAME.json."""


class NoConfigError(Exception):
    """No configuration is available; the message gives the reason."""


def load_config(path: str) -> tuple[PreTrainedConfig, str | None]:
    """Load the configuration of the model in a folder, or of a hub name: from the hub, from earlier downloads, or from
    `SHAPES`. The second value is a note if it comes from `SHAPES`, else None. Raises NoConfigError."""
    # the hub's own client retries for half a minute
    offline = is_hub_name(path) and not hub_answers(path)
    try:
        return AutoConfig.from_pretrained(path, local_files_only=offline, trust_remote_code=False), None
    except (OSError, ValueError) as error:
        shape = SHAPES / f"{path.replace('/', '--')}.json"
        if offline and shape.is_file():
            config = AutoConfig.for_model(**json.loads(shape.read_text(encoding="utf-8")))
            return (
                config,
                f"{path}: the hub cannot be reached; shapes are those of AgentFactory's copy of its config.json",
            )
        why = "the hub cannot be reached, and it was not downloaded before" if offline else str(error).splitlines()[0]
        raise NoConfigError(f"the configuration of {path} cannot be loaded: {why}") from error


_WITHOUT_WEIGHTS = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("layer_types", "rope_parameters"),
)
"""Fields that affect results but no shape, or that are more readable than shapes."""


def difference(model: PretrainedConfig, served: PretrainedConfig) -> str | None:
    """Return the first difference between the architectures of `served`, such as a quantised copy, and `model`, such as
    "vocab_size is 152064, not 151936"; None if an adapter of one fits the other.

    Compare fields first, then the shapes of all weights below the head, on the meta device: exact for any
    architecture in transformers. The quantisation of weights, and whether the head is tied, may differ. A config
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
