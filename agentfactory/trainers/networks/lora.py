"""LoRA adapters on a network: adding them, selecting the one in use, and their files, in which trained rows of tables
are low-rank factors. And rows of single tokens in the head and the embedding: finding rows that were never trained,
which are all equal, so that an adapter on the layers cannot tell them apart, and training rows beside an adapter.

peft is imported only if there is an adapter: with the optional packages that it tries, this takes seconds."""

import copy
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentfactory.base.errors import SettingError, short
from agentfactory.base.files.disk import set_usual_modes, writing
from agentfactory.base.run_notices import inform, notify
from agentfactory.rollout.config import LoraConfig
from agentfactory.rollout.inference.adapter_config import ADAPTER, WEIGHTS
from agentfactory.rollout.text.load_renderer import FormatTokens, pieces_of, token_id
from agentfactory.trainers.config import TrainRecipe

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

logger = logging.getLogger(__name__)

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
    `tables_of`). Its weights are in float32 at least, and determined by `seed`; the base is frozen."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    alpha: Any = config.alpha if config.alpha is not None else 2 * config.rank
    file = None if config.from_ is None else Path(config.from_) / ADAPTER
    saved = json.loads(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else {}
    lora = PeftLoraConfig(
        r=config.rank,
        lora_alpha=alpha,
        target_modules=modules,
        task_type="CAUSAL_LM",
        use_rslora=bool(saved.get("use_rslora")),
        trainable_token_indices=dict(tokens) if tokens else None,
    )
    torch.manual_seed(seed)
    return get_peft_model(network, lora, adapter_name=POLICY_ADAPTER)


def add_reference_adapter(model: "PeftModel") -> None:
    """Add a frozen adapter of the policy's shape: see `load_adapter`."""
    model.add_adapter(REFERENCE_ADAPTER, copy.deepcopy(model.peft_config[POLICY_ADAPTER]))
    # peft 0.21.2 would train its rows
    model.set_requires_grad(REFERENCE_ADAPTER, False)


@torch.no_grad()
def load_adapter(model: "PeftModel", folder: Path, saved: Mapping[str, Tensor]) -> None:
    """Load `saved`, the weights of the adapter in `folder`, into the policy's adapter, and the reference's if there is
    one. Raises SettingError unless they fit exactly."""
    for name in (POLICY_ADAPTER, REFERENCE_ADAPTER):
        if name not in model.peft_config:
            continue
        own = weights_of(model, name)
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
    weights = weights_of(model, source)
    for key, value in weights_of(model, target).items():
        value.copy_(weights[key])


def weights_of(model: "PeftModel", name: str, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the weights of an adapter, in `state` or those in use, under the names that peft saves."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, state_dict=state, adapter_name=name, save_embedding_layers=False)


def adapter_weights(model: "PeftModel", adapter: str = POLICY_ADAPTER) -> dict[str, Tensor]:
    """Return an adapter's trained weights, under the names that peft saves."""
    return weights_of(model, adapter, trained_weights(model, adapter))


def trained_weights(model: "PeftModel", adapter: str) -> dict[str, nn.Parameter]:
    named = model.named_parameters()
    return {name: value for name, value in named if value.requires_grad and adapter in name.split(".")}


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


def save_adapter(model: "PeftModel", folder: Path, state: Mapping[str, Tensor], adapter: str = POLICY_ADAPTER) -> Path:
    """Write `state`, a gathered adapter, to `folder` in peft's format; return its file. Raises DiskError."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / WEIGHTS
    with writing(file):
        # a copy: a checkpoint and a sync may be written at the same time
        config = copy.copy(model.peft_config[adapter])
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
        change = rows.cpu().float() - (layer.tied_adapter or layer).original_rows
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
            state[f"{prefix}.token_adapter.trainable_tokens_delta"] = layer.original_rows + change
    return state


# ---- rows of single tokens


EQUAL = 0.02
"""Distance of two rows, relative to their length, below which no network tells their tokens apart."""
CLOSE, CROWD = 0.2, 32
"""A row with at least CROWD others within the relative distance CLOSE was never trained either: quantisation and weight
decay leave untrained rows slightly different. Rows of trained tokens are .3 or more apart."""
_PAGE = "docs/lora.md"
_ROWS_AT_A_TIME = 2**14


@dataclass(frozen=True)
class Alike:
    """A row of a table that is (nearly) equal to those of `others` tokens, at the `distance` from `nearest`'s."""

    table: str
    others: int
    nearest: int
    distance: float


@dataclass(frozen=True)
class TokenNeeds:
    """The tokens that a run needs, with their tokenizer."""

    tokens: FormatTokens
    tokenizer: PreTrainedTokenizerBase


Needs = TokenNeeds | Callable[[], TokenNeeds | None] | None


@torch.no_grad()
def find_alike(table: str, weight: Float[Tensor, "vocabulary width"], tokens: Iterable[int]) -> dict[int, Alike]:
    """Return the tokens whose rows cannot be told apart from those of others."""
    if not (ids := sorted(set(tokens))):
        return {}
    rows = weight[ids].float()
    lengths = rows.norm(dim=1).clamp(min=1e-12)
    # the exact difference: rows that are equal have a distance of 0
    parts = weight.split(_ROWS_AT_A_TIME)
    found = [torch.stack([(part.float() - row).norm(dim=1) for row in rows]) / lengths[:, None] for part in parts]
    distances = torch.cat(found, 1)
    distances[torch.arange(len(ids)), torch.tensor(ids)] = torch.inf
    alike = {}
    for number, token in enumerate(ids):
        nearest = int(distances[number].argmin())
        distance = float(distances[number, nearest])
        close = int((distances[number] <= CLOSE).sum())
        if distance <= EQUAL or close >= CROWD:
            alike[token] = Alike(table, max(close, 1), nearest, distance)
    return alike


def tokens_to_train(embedding: Tensor, head: Tensor, recipe: TrainRecipe, needs: TokenNeeds | None) -> list[int]:
    """Return the ids of the tokens whose rows the recipe trains beside its adapter (model.lora.trainable_tokens).
    Raises SettingError if the run needs a token that the network cannot tell from others, and an adapter leaves it so:
    a written one by its head, any by its embedding. If all weights are trained, warn."""
    lora = recipe.model.lora
    asked = lora.trainable_tokens if lora is not None else None
    if needs is None:
        return []
    needs.tokens.check(len(embedding))
    written, read = needs.tokens.written.values(), needs.tokens.read.values()
    alike = find_alike("embedding", embedding, [*written, *read]) | find_alike("head", head, written)
    if lora is None:
        if alike:
            fix = "they are learned slowly: watch the share of malformed turns, or choose another rollout.parser"
            notify(logger, "untrained tokens", f"{_describe(alike, needs)}; {fix}", see=_PAGE)
        return []
    if isinstance(asked, list):
        trained = [token_id(needs.tokenizer, text) for text in asked]
    else:
        trained = sorted(alike) if asked == "auto" else []
    if left := {token: found for token, found in alike.items() if token not in trained}:
        problem = "missing" if asked is None else f"got {', '.join(map(repr, asked or []))}"
        problem = f"{problem}, but {_describe(left, needs)}, and an adapter on the layers cannot change that"
        raise SettingError("model.lora.trainable_tokens", problem, _fix(left, needs.tokens))
    if asked == "auto":
        told = f"{_describe(alike, needs)}; their rows are trained" if alike else "no row needs training"
        inform(logger, f"model.lora.trainable_tokens=auto: {told}", see=_PAGE)
    return trained


def _describe(alike: dict[int, Alike], needs: TokenNeeds) -> str:
    name = needs.tokenizer.convert_ids_to_tokens
    named = ", ".join(f"{name(token)} ({token})" for token in alike)
    most = max(alike.values(), key=lambda found: found.others)
    return (
        f"the network cannot tell {named} from {most.others:,} other tokens such as {name(most.nearest)!r} "
        f"({most.nearest}): their rows of the {most.table} are equal to {max(most.distance, 1e-4):.1g} of their "
        "length, so they were never trained"
    )


def _fix(alike: dict[int, Alike], tokens: FormatTokens) -> str:
    other = "write calls without these tokens: rollout.parser=json"
    if alike.keys() & {*tokens.ends, *tokens.read.values()}:
        other = "set model.chat_template to one with tokens that the network knows"
    return f"train their rows, too: model.lora.trainable_tokens=auto; or {other}"


def table_of(module: Any) -> Tensor:
    """Return the weight of a head or an embedding, without trained rows."""
    adapter = getattr(module, "token_adapter", None)
    weight: Tensor = module.weight if adapter is None else adapter.base_layer.weight
    return weight


def tables_of(network: Any, tokens: Sequence[int]) -> dict[str, list[int]]:
    """Return peft's `trainable_token_indices`: embedding and head with `tokens`, or one table that is both."""
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    tables = [embedding] if head.weight is embedding.weight else [embedding, head]
    return {name: list(tokens) for name, module in network.named_modules() if module in tables} if tokens else {}


@torch.no_grad()
def set_initial_rows(network: Any, tokens: Sequence[int], needs: TokenNeeds, seed: int) -> None:
    """Set the policy's rows of `tokens` to their own values, or if those are (nearly) equal to others, to the mean of
    the rows of the pieces of the token's text, half of it the first piece's."""
    for _, layer in rows_of(network):
        if layer.tied_adapter is None:
            # in host memory, for files that are written while the network's memory is used otherwise
            layer.original_rows = layer.base_layer.weight[list(tokens)].float().cpu()
            rows = _initial_rows(layer.base_layer.weight, tokens, needs, seed)
            layer.trainable_tokens_delta[POLICY_ADAPTER].data.copy_(rows)


def _initial_rows(
    table: Float[Tensor, "vocabulary width"], tokens: Sequence[int], needs: TokenNeeds, seed: int
) -> Float[Tensor, "tokens width"]:
    rows = table[list(tokens)].float()
    alike = find_alike("", table, tokens)
    for number, token in enumerate(tokens):
        text = str(needs.tokenizer.convert_ids_to_tokens(token))
        pieces = [piece for piece in pieces_of(needs.tokenizer, text) if piece != token]
        if token in alike and pieces:
            # the first piece counts as much as all others: `<` and `</` are what tells an opening from a closing tag
            first, rest = table[pieces[0]].float(), table[pieces[1:] or pieces].float().mean(0)
            mean = (first + rest) / 2
            # texts of the same pieces must differ, too
            noise = torch.randn(len(mean), generator=torch.Generator().manual_seed(seed + token)).to(mean.device)
            rows[number] = mean + (0.05 * mean.norm() / noise.norm()) * noise
    return rows


@torch.no_grad()
def copy_rows(network: Any, source: str, target: str) -> None:
    for _, layer in rows_of(network):
        if layer.tied_adapter is None:
            layer.trainable_tokens_delta[target].data = layer.trainable_tokens_delta[source].data.clone()


def compute_rows_alone(network: Any) -> None:
    """Make peft's layers compute the trained rows beside the frozen table, without copies of all its rows."""
    for _, layer in rows_of(network):
        layer.forward_adapters = MethodType(_forward, layer)


def _forward(self: Any, inputs: Tensor, active_adapters: list[str]) -> Tensor:
    table = self.base_layer
    output: Tensor = table(inputs)
    name = next((name for name in active_adapters if name in self.trainable_tokens_delta), None)
    if self.disable_adapters or name is None:
        return output
    rows = self.trainable_tokens_delta[name]
    tokens = torch.tensor(self.token_indices[name], device=inputs.device)
    if isinstance(table, nn.Embedding):
        hit = inputs[..., None] == tokens
        # scaled as the table's rows are, which Gemma's embedding multiplies
        chosen = rows[hit.int().argmax(-1)] * getattr(table, "embed_scale", 1.0)
        return torch.where(hit.any(-1, keepdim=True), chosen.to(output.dtype), output)
    bias = table.bias[tokens] if table.bias is not None else None
    return output.index_copy(-1, tokens, nn.functional.linear(inputs, rows.to(inputs.dtype), bias).to(output.dtype))
