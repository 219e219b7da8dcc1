"""Attention without a dense mask, for lines whose tokens do not attend to everything before them (see packing)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flex_attention_mask, sdpa_mask

from agentfactory.base.errors import SettingError
from agentfactory.trainers.batches.packing import RUN_LENGTH

BY_RUNS = "sdpa_by_runs"
"""transformers' sdpa, applied separately to each run of a line: the attention implementation of our networks."""
BY_BLOCKS = "flex_attention_by_blocks"
"""transformers' flex_attention, on lines of whole blocks: it replaces flex_attention."""
IGNORED = {"s_aux": "attention sinks", "indices": "selected keys", "block_indices": "selected keys"}
"""Arguments of attention functions in transformers that torch's kernel does not support, and their meaning."""
SELECTIONS = ("index_topk", "index_topk_blocks", "indexer_budget", "keep_window_size")
"""Fields of configurations whose networks select some keys per query."""
BLOCK = 128


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of a line; each attends to the previous token and to everything that token attends to."""

    length: int
    seen: list[int]
    """Pieces of the line that the last token of the run attends to."""
    mask: Float[Tensor, "1 1 run seen"] | None
    """Mask added to the scores; None if attention is causal."""


class Runs:
    """The runs of a line, in order. A separate object, so that torch.compile does not trace into it."""

    def __init__(self, positions: Int[Tensor, "1 length"], ends: Int[Tensor, "1 length"], dtype: torch.dtype) -> None:
        # `positions` and `ends` as in MicroBatch
        places, last = positions[0].cpu().numpy(), ends[0].cpu().numpy()
        line = np.arange(len(places))
        # in preorder the next token is a child of the previous one, or begins another branch, which is not deeper
        branches = np.flatnonzero(np.diff(places, prepend=places[0] - 2) != 1)
        bounds = zip(branches, [*branches[1:], len(line)], strict=True)
        # the first of a tree's branches, at depth 0, has plain causal attention
        runs = [np.arange(start, end, RUN_LENGTH) if places[start] else [start] for start, end in bounds]
        starts = np.concatenate(runs)
        context = [np.flatnonzero(last[:start] > start) for start in starts]
        # a run attends to some runs completely, and to others up to the branch of the run or of one that it attends to
        forks = [seen[-1:] + 1 for seen in context]
        cuts = np.unique(np.concatenate([starts, *forks, line[-1:] + 1]))
        self.pieces: list[int] = np.diff(cuts).tolist()  # lengths
        self.all: list[Run] = []
        piece_of = np.repeat(np.arange(len(self.pieces)), self.pieces)
        for start, end, seen in zip(starts, [*starts[1:], len(line)], context, strict=True):
            pieces = np.unique(np.append(piece_of[seen], piece_of[start:end])).tolist()
            mask = None
            if len(seen) and end - start > 1:
                later = torch.full((end - start, end - start), float("-inf"), dtype=dtype, device=ends.device).triu(1)
                mask = nn.functional.pad(later, (len(seen), 0))[None, None]
            self.all.append(Run(int(end - start), pieces, mask))


def attention_by_runs(
    module: nn.Module,
    query: Float[Tensor, "batch heads length width"],
    key: Float[Tensor, "batch groups length width"],
    value: Float[Tensor, "batch groups length width"],
    attention_mask: Tensor | None,
    runs: Runs | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "batch length heads width"], None]:
    """Attention function for transformers, which without `runs` is transformers' own sdpa. Work and memory grow with
    the attended pairs of tokens. Raises SettingError for attention sinks and selected keys."""
    for name, ignored in IGNORED.items():
        if options.get(name) is not None:
            raise SettingError("train.attention", f"sdpa would ignore the model's {ignored} ({name})", "use eager")
    if runs is None:
        attend = _capped if options.get("softcap") else sdpa_attention_forward
        return attend(module, query, key, value, attention_mask, **options)
    return _each_run(module, query, key, value, runs, options), None


# each line has different runs: a compiled function would be recompiled every time
@torch.compiler.disable
def _each_run(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, runs: Runs, options: dict[str, Any]
) -> Float[Tensor, "batch length heads width"]:
    # use split: its backward pass joins the pieces' gradients once; the backward pass of a slice fills a whole line
    keys, values = key.split(runs.pieces, dim=2), value.split(runs.pieces, dim=2)
    parts = []
    for run, queries in zip(runs.all, query.split([run.length for run in runs.all], dim=2), strict=True):
        seen, known = (torch.cat([pieces[piece] for piece in run.seen], dim=2) for pieces in (keys, values))
        if options.get("softcap"):
            parts.append(_capped(module, queries, seen, known, run.mask, **options)[0])
        elif run.mask is None:
            parts.append(sdpa_attention_forward(module, queries, seen, known, None, **options)[0])
        else:
            parts.append(_masked(queries, seen, known, run.mask, options))
    return torch.cat(parts, dim=1)


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    # groups take the place of lines: their heads share keys, which transformers would copy
    _, heads, length, _ = query.shape
    groups = key.shape[1]
    grouped = query.reshape(groups, heads // groups, length, -1)
    seen, known = (tensor.transpose(0, 1).expand(-1, heads // groups, -1, -1) for tensor in (key, value))
    attend = nn.functional.scaled_dot_product_attention
    found = attend(grouped, seen, known, mask, options.get("dropout", 0.0), scale=options.get("scaling"))
    return found.reshape(1, heads, length, -1).transpose(1, 2)


def _capped(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Float[Tensor, "batch length heads width"], None]:
    """Attend with the scores softcap * tanh(score / softcap) (Gemma 2, https://arxiv.org/abs/2408.00118), which no
    kernel of torch supports. Without a mask, the last query attends to all keys, and earlier ones causally."""
    softcap, scaling = options["softcap"], options.get("scaling")
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * (scores / softcap).tanh()
    if mask is None:
        length, seen = scores.shape[-2:]
        mask = torch.ones(length, seen, dtype=torch.bool, device=scores.device).tril(seen - length)
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    shares = nn.functional.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    shares = nn.functional.dropout(shares.to(query.dtype), options.get("dropout", 0.0), module.training)
    return (shares @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(BY_RUNS, attention_by_runs)
AttentionMaskInterface.register(BY_RUNS, sdpa_mask)


def attention_by_blocks(
    module: nn.Module,
    query: Float[Tensor, "batch heads length width"],
    key: Float[Tensor, "batch groups length width"],
    value: Float[Tensor, "batch groups length width"],
    attention_mask: BlockMask,
    **options: Any,
) -> tuple[Float[Tensor, "batch length heads width"], Tensor | None]:
    """Attention function for transformers, under autocast in autocast's precision, as sdpa: rotary embeddings return
    float32, and FlexAttention's backward pass refuses to mix precisions, which torch's autocast does not cover."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return flex_attention_forward(module, query, key, value, attention_mask, **options)


AttentionInterface.register(BY_BLOCKS, attention_by_blocks)
AttentionMaskInterface.register(BY_BLOCKS, flex_attention_mask)


def selects_keys(network: PreTrainedModel) -> bool:
    """Return whether each query attends to only some keys, as in DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556)."""
    config = network.config.get_text_config()
    return any(getattr(config, name, None) for name in SELECTIONS)


def use_ours(network: PreTrainedModel) -> None:
    """Replace the network's sdpa with BY_RUNS, and its flex_attention with BY_BLOCKS. Networks that select keys keep
    transformers' own: they mask other keys only if the name is "sdpa" or "eager"."""
    ours = {"sdpa": BY_RUNS, "flex_attention": BY_BLOCKS}.get(network.config._attn_implementation)
    if ours and not selects_keys(network):
        network.set_attn_implementation(ours)


def whole_blocks(
    ids: Int[Tensor, "batch length"], positions: Int[Tensor, "1 length"] | None, ends: Int[Tensor, "1 length"] | None
) -> tuple[Int[Tensor, "batch blocks"], Int[Tensor, "batch blocks"], Int[Tensor, "batch blocks"]]:
    """Return ids, positions and ends (default: of lines that attend causally) padded to whole blocks with tokens that
    no other token attends to: torch compiles FlexAttention once for all such lengths."""
    length = ids.shape[1]
    place = torch.arange(length + -length % BLOCK, device=ids.device)[None]
    if positions is None or ends is None:
        positions, ends = place[:, :length].expand_as(ids), torch.full_like(ids, length)
    rest = place[:, length:].expand(len(ids), -1)
    # a token attends at least to itself: an empty softmax is NaN
    return (
        nn.functional.pad(ids, (0, rest.shape[1])),
        # later ones could be beyond what the model's positions reach
        torch.cat([positions, torch.zeros_like(rest)], dim=1),
        torch.cat([ends, rest + 1], dim=1),
    )


def block_mask(ends: Int[Tensor, "batch length"]) -> BlockMask:
    """Return the mask of FlexAttention for lines of whole blocks, from the smallest and largest end in each block: no
    mask of length x length is made, and blocks that no token attends to are skipped."""
    batch, length = ends.shape

    def visible(line: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[line, key])

    blocks = ends.reshape(batch, 1, 1, -1, BLOCK)
    first = torch.arange(0, length, BLOCK, device=ends.device)
    keys, queries = first[None, :], first[:, None]
    before = keys < queries
    full = before & (blocks.amin(-1) >= queries + BLOCK)
    seen = (keys == queries) | (before & (blocks.amax(-1) > queries))
    return BlockMask.from_kv_blocks(
        *_ordered(seen & ~full), *_ordered(full), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(length, length)
    )


def _ordered(chosen: Bool[Tensor, "batch 1 queries keys"]) -> tuple[Tensor, Tensor]:
    """Return the number of chosen key blocks per query block, and all key blocks, chosen ones first."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.int()


def attention_arguments(
    kind: str, positions: Int[Tensor, "1 length"], ends: Int[Tensor, "1 length"], dtype: torch.dtype
) -> dict[str, Any]:
    """Return the arguments that describe a line to the attention implementation `kind`; `dtype` is that of queries and
    keys. FlashAttention gets none: it separates rows by their positions, and does not support trees."""
    if kind == BY_RUNS:
        # without a four-dimensional mask, transformers would make a dense one from the positions; with this one, a
        # network that ignores the runs attends to everything, which `resolve_batching` detects
        return {"runs": Runs(positions, ends, dtype), "attention_mask": torch.zeros(1, 1, 1, 1, device=ends.device)}
    if kind == BY_BLOCKS:
        return {"attention_mask": block_mask(ends)}
    if kind.startswith("flash_attention"):
        return {}
    raise SettingError("train.attention", f"{kind} does not support rows that share a line", "use sdpa")
