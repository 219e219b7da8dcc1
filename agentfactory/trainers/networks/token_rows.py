"""Rows of single tokens in the head and the embedding: finding rows that were never trained, which are all equal, so
that an adapter on the layers cannot tell them apart, and training rows beside an adapter."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from agentfactory.base.errors import SettingError
from agentfactory.base.run_notices import inform, notify
from agentfactory.rollout.text.load_renderer import FormatTokens, pieces_of, token_id
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks.lora import POLICY_ADAPTER, rows_of

logger = logging.getLogger(__name__)

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


def untrained_tokens(network: Any, tokens: FormatTokens) -> dict[int, Alike]:
    """Return the tokens that the network cannot tell apart: written ones by its head, all needed by its embedding."""
    tokens.check(len(table_of(network.get_input_embeddings())))
    written, read = tokens.written.values(), tokens.read.values()
    head = find_alike("head", table_of(network.get_output_embeddings()), written)
    return find_alike("embedding", table_of(network.get_input_embeddings()), [*written, *read]) | head


def tokens_to_train(network: Any, recipe: TrainRecipe, needs: TokenNeeds | None) -> list[int]:
    """Return the ids of the tokens whose rows the recipe trains beside its adapter (model.lora.trainable_tokens).
    Raises SettingError if the run needs a token that the network cannot tell from others, and an adapter leaves it so.
    If all weights are trained, warn."""
    lora = recipe.model.lora
    asked = lora.trainable_tokens if lora is not None else None
    if needs is None:
        return []
    alike = untrained_tokens(network, needs.tokens)
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


# ---- training


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
