"""LoRA adapters on a network: adding them, selecting the one in use, and their files, in which trained rows of tables
(see token_rows) are low-rank factors.

peft is imported only if there is an adapter: with the optional packages that it tries, this takes seconds."""

import copy
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentfactory.base.errors import SettingError, short
from agentfactory.base.files.disk import set_usual_modes, writing
from agentfactory.rollout.config import LoraConfig
from agentfactory.rollout.inference.adapter_config import ADAPTER, WEIGHTS

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

POLICY_ADAPTER = "default"
"""peft's own name, so that an exported adapter looks like any other."""
CRITIC_ADAPTER = "critic"
REFERENCE_ADAPTER = "reference"
"""A frozen copy of a continued adapter as it was when the run began."""


def has_adapter(model: "PreTrainedModel | PeftModel") -> "TypeGuard[PeftModel]":
    return not isinstance(model, PreTrainedModel)


def add_adapter(
    network: PreTrainedModel,
    config: LoraConfig,
    modules: str | list[str],
    seed: int,
    tokens: Mapping[str, list[int]] | None = None,
) -> "PeftModel":
    """Return the network with the policy's adapter on `modules` (peft's `target_modules`), and on rows of tables (see
    `token_rows.tables_of`). Its weights are float32 and determined by `seed`; the base is frozen."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    alpha: Any = config.alpha if config.alpha is not None else 2 * config.rank
    lora = PeftLoraConfig(
        r=config.rank,
        lora_alpha=alpha,
        target_modules=modules,
        task_type="CAUSAL_LM",
        use_rslora=_uses_rslora(config),
        trainable_token_indices=dict(tokens) if tokens else None,
    )
    torch.manual_seed(seed)
    model: Any = get_peft_model(network, lora, adapter_name=POLICY_ADAPTER)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def _uses_rslora(config: LoraConfig) -> bool:
    file = Path(config.from_ or "") / ADAPTER
    has_file = config.from_ is not None and file.is_file()
    return has_file and bool(json.loads(file.read_text(encoding="utf-8")).get("use_rslora"))


def add_reference_adapter(model: "PeftModel") -> None:
    """Add a frozen adapter of the policy's shape: see `load_adapter`."""
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    model.add_adapter(REFERENCE_ADAPTER, copy.deepcopy(model.peft_config[POLICY_ADAPTER]))
    for name, weight in model.named_parameters():
        if REFERENCE_ADAPTER in name.split("."):
            weight.data = weight.data.float()
        weight.requires_grad_(name in trained)


@torch.no_grad()
def load_adapter(model: "PeftModel", folder: Path, saved: Mapping[str, Tensor]) -> None:
    """Load `saved`, the weights of the adapter in `folder`, into the policy's adapter, and the reference's if there is
    one. Raises SettingError unless they fit exactly."""
    for name in (POLICY_ADAPTER, REFERENCE_ADAPTER):
        if name not in model.peft_config:
            continue
        own = _weights_of(model, name)
        for key in [*saved, *own]:
            given, wanted = (short(tuple(held[key].shape)) if key in held else "nothing" for held in (saved, own))
            if given != wanted:
                problem = f"{folder} has {given} as {key}, where the network of model.path has {wanted}"
                fix = "set model.path and model.lora.target_modules as they were when it was trained"
                raise SettingError("model.lora.from", problem, f"{fix}, or model.lora.merge=true")
        for key, value in own.items():
            value.copy_(saved[key])


@torch.no_grad()
def copy_adapter(model: "PeftModel", source: str, target: str) -> None:
    weights = _weights_of(model, source)
    for key, value in _weights_of(model, target).items():
        value.copy_(weights[key])


def _weights_of(model: "PeftModel", name: str) -> dict[str, Tensor]:
    """Return the weights of an adapter, which share its memory, under the names that peft saves."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)


def adapter_weights(model: "PeftModel") -> dict[str, Tensor]:
    """Return the weights of the policy's adapter, under the names that peft saves."""
    from peft import get_peft_model_state_dict

    trained = ((name, value) for name, value in model.named_parameters() if value.requires_grad)
    own = {name: value for name, value in trained if POLICY_ADAPTER in name.split(".")}
    return get_peft_model_state_dict(model, state_dict=own, save_embedding_layers=False)


def untie(network: Any) -> bool:
    """Give a head that is tied to the embedding its own weight; return whether it was tied."""
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return False
    head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
    network.config.tie_word_embeddings = False
    return True


def tie_equal(network: Any) -> None:
    """Tie the head to the embedding if their weights are equal."""
    if torch.equal(network.get_output_embeddings().weight, network.get_input_embeddings().weight):
        network.config.tie_word_embeddings = True
        network.tie_weights()


def use_adapter(model: "PeftModel", name: str) -> None:
    """Make later forward passes use only this adapter. Unlike in peft's `set_adapter`, `requires_grad` does not change:
    both adapters are trained in one step, and DDP and FSDP2 must always find the same trainable weights."""
    if model.active_adapter == name:
        return
    tuner: Any = model.base_model
    model.active_adapter = tuner.active_adapter = name
    for layer in _layers(model):
        layer._active_adapter = [name]


@contextmanager
def adapters_off(model: "PeftModel") -> Iterator[None]:
    """Make forward passes in this context use the base alone, without peft's effect on trainable weights."""
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


# ---- files


def save_adapter(model: "PeftModel", folder: Path, state: Mapping[str, Tensor]) -> Path:
    """Write `state`, the policy's gathered adapter, to `folder` in peft's format; return its file. Raises DiskError."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / WEIGHTS
    with writing(file):
        # a copy: a checkpoint and a sync may be written at the same time
        config = copy.copy(model.peft_config[POLICY_ADAPTER])
        state = with_low_rank_rows(model.get_base_model(), config, state)
        # the saved adapter is for inference, not for training; the flag is part of peft's format
        config.inference_mode = True
        config.save_pretrained(str(folder))
        save_file({name: value.cpu() for name, value in state.items()}, file, metadata={"format": "pt"})
    set_usual_modes(folder)
    return file


def rows_of(network: Any) -> list[tuple[str, Any]]:
    """Return peft's layers with trained rows, and their tables' names; a tied head's refers to the embedding's."""
    from peft.utils.other import TrainableTokensWrapper

    named = network.named_modules()
    return [(name, module.token_adapter) for name, module in named if isinstance(module, TrainableTokensWrapper)]


def with_low_rank_rows(network: Any, config: Any, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a gathered adapter with its trained rows as low-rank factors, which peft and servers load, and change
    `config` (peft's) accordingly. This is exact: one factor has the rows' differences, the other selects the tokens."""
    if not config.trainable_token_indices:
        return state
    state, ranks = dict(state), {}
    first: Tensor | None = None
    for name, layer in rows_of(network):
        rows = state.pop(f"base_model.model.{name}.token_adapter.trainable_tokens_delta", first)
        assert rows is not None
        first = rows if first is None else first
        tokens = layer.token_indices[POLICY_ADAPTER]
        change = rows.cpu().float() - _original(layer)
        select = torch.zeros(len(tokens), layer.base_layer.weight.shape[0])
        select[torch.arange(len(tokens)), torch.tensor(tokens)] = 1.0
        prefix = f"base_model.model.{name}"
        if isinstance(layer.base_layer, nn.Embedding):
            state |= {f"{prefix}.lora_embedding_A": select, f"{prefix}.lora_embedding_B": change.T.contiguous()}
        else:
            state |= {f"{prefix}.lora_A.weight": change, f"{prefix}.lora_B.weight": select.T.contiguous()}
        ranks[name] = len(tokens)
    targets = config.target_modules
    if isinstance(targets, str):
        config.target_modules = "|".join([f"(?:{targets})", *(re.escape(name) for name in ranks)])
    else:
        config.target_modules = {*targets, *ranks}
    # a scale of 1
    config.rank_pattern = ranks
    config.alpha_pattern = {name: rank**0.5 if config.use_rslora else rank for name, rank in ranks.items()}
    config.trainable_token_indices = None
    return state


def _original(layer: Any) -> Any:
    return (layer.tied_adapter or layer).original_rows


def with_trained_rows(network: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Invert `with_low_rank_rows`. Raises ValueError if the rows are of other tokens than the adapter trains."""
    state = dict(state)
    for name, layer in rows_of(network):
        prefix = f"base_model.model.{name}"
        if isinstance(layer.base_layer, nn.Embedding):
            select, change = state.pop(f"{prefix}.lora_embedding_A"), state.pop(f"{prefix}.lora_embedding_B").T
        else:
            change, select = state.pop(f"{prefix}.lora_A.weight"), state.pop(f"{prefix}.lora_B.weight").T
        tokens = layer.token_indices[POLICY_ADAPTER]
        if select.argmax(1).tolist() != list(tokens):
            raise ValueError(f"the adapter has rows of the tokens {select.argmax(1).tolist()}, not of {list(tokens)}")
        if layer.tied_adapter is None:
            state[f"{prefix}.token_adapter.trainable_tokens_delta"] = _original(layer) + change
    return state
