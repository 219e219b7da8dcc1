"""The plan of one step: the shape of attention, cache positions of tokens, and groups that attend together."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from agentfactory.rollout.inference.embedded.sampling import UnsupportedModel

_KINDS = {"full_attention", "sliding_attention"}


def sliding_window(config: Any) -> int | None:
    """Return the window of sliding-window layers in tokens; None without. Raises UnsupportedModel for other layers."""
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - _KINDS):
        raise UnsupportedModel(f"layers of type {', '.join(others)}; only {' and '.join(sorted(_KINDS))} are supported")
    return int(config.sliding_window) if has_sliding_window(config) else None


def has_sliding_window(config: Any) -> bool:
    """Return whether some layers have a sliding window: the ones listed in the configuration, or all."""
    kinds = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) is not None and (kinds is None or "sliding_attention" in kinds)


def head_width(config: Any) -> int:
    """Return the width of a head's keys in the cache: the largest of all layers."""
    # Gemma 4's widths vary by layer
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    widths = (getattr(layer, "qk_head_dim", None) or getattr(layer, "head_dim", None) for layer in layers)
    return max(width or config.hidden_size // config.num_attention_heads for width in widths)


class Group(NamedTuple):
    """Requests of one step whose queries are padded to one length and attend together. `gather` [n * queries] indexes
    the step's tokens; `tokens` [count] are those tokens and `pick` [count] the positions of their results among the n *
    queries. None means all, in order. Either the slots `first` to `end` are viewed in place, or `slots` are copied.
    `window_mask` is the mask of sliding-window layers; None without such layers."""

    queries: int
    keys: int
    mask: Float[Tensor, "n 1 rows keys"]
    window_mask: Float[Tensor, "n 1 rows keys"] | None
    first: int
    end: int
    slots: Tensor | None = None
    gather: Tensor | None = None
    tokens: Tensor | None = None
    pick: Tensor | None = None


class Plan(NamedTuple):
    """The input of attention for the current step; `rows` are the cache rows that its tokens fill."""

    rows: Tensor
    groups: list[Group]


@dataclass(frozen=True)
class Planner:
    """A planner of steps for a cache of `length` keys per slot."""

    heads: int
    kv_heads: int
    length: int
    dtype: torch.dtype
    device: torch.device
    window: int | None = None
    """Number of tokens, itself included, that a token attends to in sliding-window layers."""

    def plan(self, slots: np.ndarray, start: np.ndarray, count: np.ndarray, position: np.ndarray) -> Plan:
        """Plan a step from requests' slots, their new tokens `start` to `start + count`, and all tokens' `position`."""
        slot_of = np.repeat(slots, count)
        rows = (slot_of[:, None] * self.kv_heads + np.arange(self.kv_heads)) * self.length + position[:, None]
        return Plan(self.tensor(rows.ravel()), list(self._groups(slots, start, count, position)))

    def tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def masks(self, visible: Tensor, keys: int, times: int = 1) -> tuple[Tensor, Tensor | None]:
        """Return the attention mask [n, 1, rows, keys], and the mask of sliding-window layers. `visible` [n, queries]
        are positions; a query attends to the keys up to its own. The queries are repeated `times` times."""
        n, queries = visible.shape
        places, own = torch.arange(keys, device=self.device), visible[:, None, :, None]

        def filled(blocked: Tensor) -> Tensor:
            mask = torch.zeros(n, times, queries, keys, dtype=self.dtype, device=self.device)
            return mask.masked_fill_(blocked, float("-inf")).view(n, 1, times * queries, keys)

        later = places > own
        return filled(later), None if self.window is None else filled(later | (places <= own - self.window))

    def _groups(self, slots: np.ndarray, start: np.ndarray, count: np.ndarray, position: np.ndarray) -> Iterator[Group]:
        """Group requests with similar numbers of new tokens; split a group where padding would double its work."""
        offset, end = count.cumsum() - count, start + count
        width = np.where(count == 1, 0, np.ceil(np.log2(np.maximum(count, 32))))
        short = (count > 1) & (count <= 32)
        if short.any() and short.sum() * count[short].max() > 2 * count[short].sum():
            width[short] = np.ceil(np.log2(count[short]))
        for kind in np.unique(width):
            members = np.flatnonzero(width == kind)
            ends = end[members]
            depth = np.ceil(np.log2(np.maximum(ends, 256)))
            if len(ends) * ends.max() <= 2 * ends.sum():
                depth[:] = 0
            for level in np.unique(depth):
                chosen = members[depth == level]
                yield self._group(slots[chosen], offset[chosen], count[chosen], end[chosen], position)

    def _group(
        self, slots: np.ndarray, offset: np.ndarray, count: np.ndarray, end: np.ndarray, position: np.ndarray
    ) -> Group:
        queries = int(count.max())
        keys = min(self.length, -(-int(end.max()) // 16) * 16)
        first, last = int(slots.min()), int(slots.max()) + 1
        # reading a few idle slots is cheaper than copying the busy ones; they at most double the mask
        viewed = (last - first) * queries <= 2 * int(count.sum())
        place = slots - first if viewed else np.arange(len(slots))
        n = last - first if viewed else len(slots)
        # [n, queries] -> token; a padded query repeats its request's last token, an idle slot takes token 0
        column = np.minimum(np.arange(queries), count[:, None] - 1)
        gather = np.zeros((n, queries), np.int64)
        gather[place] = offset[:, None] + column
        real = np.arange(queries) < count[:, None]
        tokens = (offset[:, None] + np.arange(queries))[real]
        pick = (place[:, None] * queries + np.arange(queries))[real]
        # heads that share a key head act as further queries of it; a single query's mask is broadcast to them
        times = self.heads // self.kv_heads if queries > 1 else 1
        mask, window_mask = self.masks(self.tensor(position[gather]), keys, times)
        whole = n * queries == len(position) and bool((gather.ravel() == np.arange(len(position))).all())
        copied = None if viewed else self.tensor(slots)
        indices = () if whole else map(self.tensor, (gather.ravel(), tokens, pick))
        return Group(queries, keys, mask, window_mask, first, last, copied, *indices)


def attend(
    plan: Plan,
    cache: Float[Tensor, "2 slots kv_heads length width"],
    query: Float[Tensor, "1 heads tokens width"],
    scaling: float,
    windowed: bool,
    sinks: Float[Tensor, "heads"] | None,
) -> Float[Tensor, "1 tokens heads width"]:
    """Return the attention of the step's queries to a layer's keys and values. `windowed` applies the sliding window.
    `sinks` are the scores of an additional key per head, whose value is 0. Query heads that share a key head are
    treated as further queries of it, so keys and values are never repeated."""
    flat = query[0].transpose(0, 1)
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    for group in plan.groups:
        gathered = flat if group.gather is None else flat.index_select(0, group.gather)
        found = _attend_group(group, cache, gathered, scaling, windowed, sinks)
        if group.tokens is None:
            return found[None]
        assert group.pick is not None
        out.index_copy_(0, group.tokens, found.index_select(0, group.pick))
    return out[None]


def _attend_group(
    group: Group, cache: Tensor, query: Tensor, scaling: float, windowed: bool, sinks: Tensor | None
) -> Float[Tensor, "queries heads width"]:
    if group.slots is None:
        keys, values = cache[:, group.first : group.end, :, : group.keys]
    else:
        keys, values = cache[:, :, :, : group.keys].index_select(1, group.slots)
    mask = group.window_mask if windowed else group.mask
    assert mask is not None
    n, kv, _, width = keys.shape
    heads = query.shape[1]
    ratio = heads // kv
    if group.queries == 1 and query.dtype == torch.float32:
        # plain products: with two threads twice as fast as the fused kernel, which splits work by query blocks
        scores = torch.bmm(query.reshape(n * kv, ratio, width) * scaling, keys.flatten(0, 1).transpose(1, 2))
        scores.view(n, kv, ratio, group.keys).add_(mask)
        weights = _softmax(scores, None if sinks is None else sinks.view(1, kv, ratio).expand(n, -1, -1).flatten(0, 1))
        return torch.bmm(weights, values.flatten(0, 1)).view(n, heads, width)
    query = query.reshape(n, group.queries, kv, ratio, width).permute(0, 2, 3, 1, 4)
    query = query.reshape(n, kv, ratio * group.queries, width)
    if sinks is None:
        found = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    else:
        rows = sinks.view(kv, ratio).repeat_interleave(group.queries, dim=1)
        found = torch.empty_like(query)
        for head in range(kv):  # the scores of all heads at a time would take many times the mask's memory
            scores = query[:, head] @ keys[:, head].transpose(1, 2) * scaling + mask[:, 0]
            found[:, head] = _softmax(scores, rows[head].expand(n, -1)) @ values[:, head]
    return found.view(n, kv, ratio, group.queries, width).permute(0, 3, 1, 2, 4).reshape(-1, heads, width)


def _softmax(scores: Float[Tensor, "n rows keys"], sinks: Float[Tensor, "n rows"] | None) -> Tensor:
    if sinks is None:
        return torch.softmax(scores, -1)
    return torch.softmax(torch.cat([scores, sinks[..., None].to(scores)], -1), -1)[..., :-1]
