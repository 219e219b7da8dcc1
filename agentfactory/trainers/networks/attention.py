"""Attention without a dense mask, for lines whose tokens do not attend to everything before them (see packing)."""

from collections import defaultdict
from collections.abc import Iterator
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
from agentfactory.trainers.batches.packing import BRANCH_TOKENS, PAIRS_PER_TOKEN, RUN_LENGTH, Ids

BY_RUNS = "sdpa_by_runs"
"""transformers' sdpa, applied separately to each group of runs of a line: the attention of our networks."""
BY_BLOCKS = "flex_attention_by_blocks"
"""transformers' flex_attention, on lines of whole blocks: it replaces flex_attention."""
IGNORED = {"s_aux": "attention sinks", "indices": "selected keys", "block_indices": "selected keys"}
"""Arguments of attention functions in transformers that torch's kernel does not support, and their meaning."""
SELECTIONS = ("index_topk", "index_topk_blocks", "indexer_budget", "keep_window_size")
"""Fields of configurations whose networks select some keys per query."""
BLOCK = 128


@dataclass(frozen=True)
class Group:
    """Runs whose attention is one call: `count` runs of at most `queries` tokens, each with at most `keys` keys. A run
    is consecutive tokens of a line; each attends to the previous token and to everything that token attends to."""

    count: int
    queries: int
    keys: int
    mask: Float[Tensor, "1 1 queries keys"] | None
    """Mask added to the scores; None if attention is causal."""


class Runs:
    """The runs of a line, in groups. A separate object, so that torch.compile does not trace into it."""

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
        alike: dict[int, list[tuple[Ids, Ids]]] = defaultdict(list)
        for start, end in zip(starts, [*starts[1:], len(line)], strict=True):
            seen = np.flatnonzero(last[:start] > start)
            alike[len(seen)].append((seen, line[start:end]))
        self.groups: list[Group] = []
        queries, keys, order, count = [], [], np.empty_like(line), 0
        for seen_by_each, members in alike.items():
            for group in _groups(members, seen_by_each):
                length = len(group[0][1])
                # the rest of a shorter run is repeated tokens: later than its keys, and not in the result
                own = np.stack([np.resize(run, length) for _, run in group])
                for number, (_, run) in enumerate(group):
                    order[run] = count + number * length + np.arange(len(run))
                queries.append(own.ravel())
                keys.append(np.concatenate([np.stack([seen for seen, _ in group]), own], axis=1).ravel())
                mask = None
                if seen_by_each:
                    later = torch.full((length, length), float("-inf"), dtype=dtype, device=ends.device).triu(1)
                    mask = nn.functional.pad(later, (seen_by_each, 0))[None, None]
                self.groups.append(Group(len(group), length, seen_by_each + length, mask))
                count += len(group) * length
        indices = np.concatenate(queries), np.concatenate(keys), order
        one, two, self.order = (torch.from_numpy(index).to(ends.device, non_blocking=True) for index in indices)
        """Indices of the line's tokens among the queries of all groups."""
        self.queries = one, [group.count * group.queries for group in self.groups]
        self.keys = two, [group.count * group.keys for group in self.groups]
        """Indices in the line of the queries and the keys of all groups, and their numbers per group."""


def _groups(members: list[tuple[Ids, Ids]], seen: int) -> Iterator[list[tuple[Ids, Ids]]]:
    """Yield runs that see the same number of earlier tokens, by length: a shorter run is padded to the longest of its
    group where that costs at most another call, or a quarter of its own attention."""
    members = sorted(members, key=lambda member: -len(member[1]))

    def pairs(member: tuple[Ids, Ids]) -> int:
        return len(member[1]) * (seen + len(member[1]))

    group = members[:1]
    for member in members[1:]:
        if pairs(group[0]) - pairs(member) > max(BRANCH_TOKENS * PAIRS_PER_TOKEN, pairs(member) / 4):
            yield group
            group = []
        group.append(member)
    yield group


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
    return _by_groups(module, query, key, value, runs, options), None


# each line has different runs: a compiled function would be recompiled every time
@torch.compiler.disable
def _by_groups(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, runs: Runs, options: dict[str, Any]
) -> Float[Tensor, "1 length heads width"]:
    query, key, value = _in_autocasts_precision(query, key, value)
    # rows of a table: the backward pass of an embedding adds up the gradients of all runs at once
    asked, seen, known = (
        nn.functional.embedding(index, tensor[0].transpose(0, 1).flatten(1)).split(sizes)
        for tensor, index, sizes in ((query, *runs.queries), (key, *runs.keys), (value, *runs.keys))
    )
    parts = []
    for group, *tensors in zip(runs.groups, asked, seen, known, strict=True):
        one, two, three = (
            tensor.view(group.count, -1, whole.shape[1], whole.shape[-1]).transpose(1, 2)
            for tensor, whole in zip(tensors, (query, key, value), strict=True)
        )
        if options.get("softcap"):
            found = _capped(module, one, two, three, group.mask, **options)[0]
        elif group.mask is None:
            found = sdpa_attention_forward(module, one, two, three, None, **options)[0]
        else:
            found = _masked(one, two, three, group.mask, options)
        parts.append(found.reshape(group.count * group.queries, -1))
    found = nn.functional.embedding(runs.order, torch.cat(parts))
    return found.view(1, len(found), query.shape[1], -1)


def _in_autocasts_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors in autocast's precision, if it is enabled: rotary embeddings return float32."""
    device = tensors[0].device.type
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor.to(dtype) for tensor in tensors) if torch.is_autocast_enabled(device) else tensors


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    # groups of heads take the place of lines: they share keys, which transformers would copy for each
    lines, heads, length, _ = query.shape
    several = heads // key.shape[1]
    grouped = query.reshape(lines * key.shape[1], several, length, -1)
    seen, known = (tensor.flatten(0, 1)[:, None].expand(-1, several, -1, -1) for tensor in (key, value))
    attend = nn.functional.scaled_dot_product_attention
    found = attend(grouped, seen, known, mask, options.get("dropout", 0.0), scale=options.get("scaling"))
    return found.reshape(lines, heads, length, -1).transpose(1, 2)


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
    query, key, value = _in_autocasts_precision(query, key, value)
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
