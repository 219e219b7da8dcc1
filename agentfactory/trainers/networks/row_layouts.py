"""Exactness of row layouts for a network."""

import inspect
import logging
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentfactory.tools.errors import SettingError
from agentfactory.trainers.batches.batch import Batching
from agentfactory.trainers.config import TrainConfig
from agentfactory.trainers.networks.attention import BY_RUNS, selects_keys, use_ours
from agentfactory.trainers.networks.backbone import Backbone
from agentfactory.trainers.networks.network import body_of

logger = logging.getLogger(__name__)


def resolve_batching(network: PreTrainedModel, train: TrainConfig, measure: bool = True) -> Batching:
    """Return `train.batching`; for "auto", tree if it is exact for this network, else padded. The choice is logged.

    Call it while the network has transformers' choice of attention: `train.attention` may run only on a GPU. Without
    `measure` the network's own declaration is trusted and no weight is read. Raises ValueError if the requested layout
    would change the network's results.
    """
    if train.batching == "padded":
        return "padded"
    asked: Batching = "tree" if train.batching == "auto" else train.batching
    reason = _why_inexact(network, asked, train.attention, measure)
    if train.batching != "auto" and reason is not None:
        raise SettingError("train.batching", f"{asked} would be wrong: {reason}", "use padded, or auto")
    logger.info("train.batching: %s", asked if reason is None else f"padded, because {reason}")
    return asked if reason is None else "padded"


def _why_inexact(network: PreTrainedModel, batching: Batching, attention: str, measure: bool) -> str | None:
    """Return the reason why rows that share a line would get other results than alone; None if they would not."""
    config: Any = network.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        # networks older than layer_types
        kinds = ["full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"]
    others = sorted(set(kinds) - {"full_attention"})
    if others:
        return f"{type(network).__name__} has layers of {', '.join(others)}; only full_attention is exact"
    if selects_keys(network):
        return f"{type(network).__name__} selects keys per query"
    takes = inspect.signature(body_of(network).forward).parameters
    if "position_ids" not in takes or getattr(config, "alibi", False):
        return f"{type(network).__name__} does not accept position_ids"
    if all(parameter.kind != parameter.VAR_KEYWORD for parameter in takes.values()):
        return f"{type(network).__name__} passes no arguments to its attention"
    use_ours(network)
    kind = network.config._attn_implementation if attention in ("auto", "sdpa") else attention
    if kind not in (BY_RUNS, "flex_attention") and not (batching == "packed" and kind.startswith("flash_attention")):
        return f"train.attention={kind} does not support {batching} rows; use sdpa or flex_attention"
    if not measure:
        return None
    # a network's own declaration is not enough: some accept the arguments and do not use them
    error = _error(network, batching)
    # NaN is an error, too
    if not error <= (1e-4 if network.dtype == torch.float32 else 0.05):
        return (
            f"{type(network).__name__} gives rows that share a line other results, by {error:.1g} of the largest value"
        )
    return None


@torch.no_grad()
def _error(network: PreTrainedModel, batching: Batching) -> float:
    """Return the largest deviation of hidden states of two short rows from those of the rows alone, as a share of the
    largest value."""
    network.eval()
    backbone = Backbone(network, network.dtype)
    first, second = ids(network, [1, 2, 3, 4, 5, 6]), ids(network, [1, 2, 3, 7, 8, 9])
    alone = backbone.hidden(torch.stack([first, second]))
    place = torch.arange(6, device=first.device)
    if batching == "packed":
        line, positions, ends = torch.cat([first, second]), place.repeat(2), torch.full_like(place, 6)
        ends = torch.cat([ends, ends + 6])
        shared = backbone.hidden(line[None], positions[None], ends[None]).reshape(alone.shape)
    else:
        line, positions = torch.cat([first, second[3:]]), torch.cat([place, place[3:]])
        ends = torch.tensor([9, 9, 9, 6, 6, 6, 9, 9, 9], device=first.device)
        tree = backbone.hidden(line[None], positions[None], ends[None])[0]
        shared = torch.stack([tree[:6], torch.cat([tree[:3], tree[6:]])])
    return float((shared - alone).abs().max() / alone.abs().max())


def ids(network: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Return tokens on the network's device, within its vocabulary."""
    return torch.tensor(tokens, device=network.device) % network.config.get_text_config().vocab_size
