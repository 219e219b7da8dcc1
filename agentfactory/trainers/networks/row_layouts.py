"""Exactness of row layouts for a network."""

import inspect
import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentfactory.base.errors import SettingError
from agentfactory.rollout.inference.sequence_lengths import LONGEST, position_limit, proof_length
from agentfactory.trainers.batches.batch import Batching
from agentfactory.trainers.batches.packing import grow
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
        if attention in ("auto", "sdpa"):
            return f"{type(network).__name__} does not use transformers' attention interface"
        return f"train.attention={kind} does not support {batching} rows; use sdpa or flex_attention"
    if not measure:
        return None
    # a network's own declaration is not enough: some accept the arguments and do not use them
    name = type(network).__name__
    try:
        error = _error(network, batching)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as fault:  # each network has its own
        return f"{name} fails on rows that share a line: {type(fault).__name__}: {fault}"
    # NaN is an error, too
    if not error <= (1e-4 if network.dtype == torch.float32 else 0.05):
        return f"{name} gives rows that share a line other results, by {error:.1g} of the largest value"
    return None


@torch.no_grad()
def _error(network: PreTrainedModel, batching: Batching) -> float:
    """Return the largest deviation of the hidden states of a line's rows from those of the rows alone, as a share of
    the largest value."""
    network.eval()
    backbone, rows = Backbone(network, network.dtype), proof_rows(network)
    alone = torch.cat([backbone.hidden(row[None])[0] for row in rows])
    numbered = list(enumerate(row.numpy(force=True) for row in rows))
    parts, paths, start = [], [], 0
    for tree in [grow(numbered)] if batching == "tree" else [grow([row]) for row in numbered]:
        parts.append((tree.ids, tree.positions, tree.ends + start))
        paths += [tree.paths[number] + start for number in sorted(tree.paths)]
        start += len(tree.ids)
    line, positions, ends = torch.from_numpy(np.hstack(parts)[:, None]).to(alone.device)
    shared = backbone.hidden(line, positions, ends)[0, torch.from_numpy(np.concatenate(paths)).to(alone.device)]
    return float((shared - alone).abs().max() / alone.abs().max())


def proof_rows(network: PreTrainedModel) -> list[Tensor]:
    """Return rows of several lengths, in lexicographic order, with common prefixes. The longest exceeds the lengths at
    which the network computes differently, as far as a proof at the start can."""
    config = network.config.get_text_config()
    fields = config.to_dict()
    limit, reach = position_limit(fields), getattr(config, "max_position_embeddings", None)
    # XLNet's is -1
    longest = min(2 * LONGEST if limit is None else limit.length, reach if reach and reach > 0 else 2 * LONGEST)
    tokens = torch.arange(min(proof_length(fields, longest) + 16, longest), device=network.device)
    # few and small ids: others may stand for images
    tokens = (tokens + tokens // 9) % 9 + 1
    rows = [tokens, torch.cat([tokens[:3], tokens[5:10]]), torch.cat([tokens[:5], tokens[9:15]])]
    rows = [row % config.vocab_size for row in rows]
    return sorted(rows, key=lambda row: row.tolist())
