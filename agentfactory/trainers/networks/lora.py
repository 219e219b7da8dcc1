"""LoRA adapters on a network: adding them, and selecting the one that the next forward pass uses.

peft is imported only if there is an adapter: with the optional packages that it tries, this takes seconds.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentfactory.rollout.config import LoraConfig

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

POLICY_ADAPTER = "default"
"""peft's own name, so that an exported adapter looks like any other."""
CRITIC_ADAPTER = "critic"


def has_adapter(model: "PreTrainedModel | PeftModel") -> "TypeGuard[PeftModel]":
    """Return whether an adapter has been added to this network."""
    return not isinstance(model, PreTrainedModel)


def add_adapter(
    network: PreTrainedModel,
    config: LoraConfig,
    modules: str | list[str],
    seed: int,
    tokens: Mapping[str, list[int]] | None = None,
) -> "PeftModel":
    """Return the network with the policy's adapter on `modules` (peft's `target_modules`), and on rows of tables: see
    `token_rows.tables_of`. The adapter's weights are float32 and determined by `seed`; the base is frozen."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    alpha: Any = config.alpha if config.alpha is not None else 2 * config.rank
    lora = PeftLoraConfig(
        r=config.rank,
        lora_alpha=alpha,
        lora_dropout=config.dropout,
        target_modules=modules,
        task_type="CAUSAL_LM",
        trainable_token_indices=dict(tokens) if tokens else None,
    )
    torch.manual_seed(seed)
    model: Any = get_peft_model(network, lora, adapter_name=POLICY_ADAPTER)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def adapter_weights(model: "PeftModel") -> dict[str, Tensor]:
    """Return the weights of the policy's adapter, under the names that peft saves."""
    from peft import get_peft_model_state_dict

    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    own = {name: value for name, value in trained.items() if POLICY_ADAPTER in name.split(".")}
    return get_peft_model_state_dict(model, state_dict=own, save_embedding_layers=False)


def merge_adapter(network: Any, folder: Path) -> PreTrainedModel:
    """Return the network with the adapter of a peft folder merged into its weights."""
    from peft import PeftModel

    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    if tied:
        # peft adds the factors of each table to its weight, and would add both to a shared one
        head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
        network.config.tie_word_embeddings = False
    merged: Any = PeftModel.from_pretrained(network, folder).merge_and_unload(safe_merge=True)
    if tied:
        if not torch.equal(merged.get_output_embeddings().weight, merged.get_input_embeddings().weight):
            raise ValueError("the adapter changes head and embedding, which are one table, differently")
        merged.config.tie_word_embeddings = True
        merged.tie_weights()
    return merged


def use_adapter(model: "PeftModel", name: str) -> None:
    """Make later forward passes use only this adapter.

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
def adapters_off(model: "PeftModel") -> Iterator[None]:
    """Make forward passes in this context use the base alone. Afterwards the active adapter and the trainable weights
    are unchanged (peft's `disable_adapter` would leave only the active adapter trainable)."""
    layers = list(_layers(model))
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _layers(model: "PeftModel") -> "Iterator[BaseTunerLayer]":
    from peft.tuners.tuners_utils import BaseTunerLayer

    return (module for module in model.modules() if isinstance(module, BaseTunerLayer))
