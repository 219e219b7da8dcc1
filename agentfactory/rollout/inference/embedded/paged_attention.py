"""Attention of a step's tokens to the KV cache: full or with a sliding window, with or without sinks."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from agentfactory.rollout.inference.embedded.step_plan import Group, Plan


def attend(
    plan: Plan,
    cache: Float[Tensor, "2 slots kv_heads length width"],
    query: Float[Tensor, "1 heads tokens width"],
    scaling: float,
    windowed: bool,
    sinks: Float[Tensor, "heads"] | None,
) -> Float[Tensor, "1 tokens heads width"]:
    """Return the attention of the step's queries to a layer's keys and values.

    `windowed` applies the sliding window. `sinks` are the scores of an additional key per head, whose value is 0. Query
    heads that share a key head are treated as further queries of it, so keys and values are never repeated.
    """
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
    """Return the attention weights of the keys; a sink takes its share."""
    if sinks is None:
        return torch.softmax(scores, -1)
    return torch.softmax(torch.cat([scores, sinks[..., None].to(scores)], -1), -1)[..., :-1]
