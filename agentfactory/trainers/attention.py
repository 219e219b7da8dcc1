"""Attention without a dense mask, for lines whose tokens do not see everything before them (see tree)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentfactory.tools.errors import SettingError
from agentfactory.trainers.tree import RUN_LENGTH

BY_RUNS = "sdpa_by_runs"
"""transformers' sdpa, applied separately to each run of a line: the attention implementation of our networks."""


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of a line; each sees the previous token and everything that it sees."""

    length: int
    seen: list[int]
    """Pieces of the line that the last token of the run sees."""
    mask: Float[Tensor, "1 1 run seen"] | None
    """Mask added to the scores; None if attention is causal."""


class Runs:
    """The runs of a line, in order. A separate object, so that torch.compile does not trace into it."""

    def __init__(self, positions: Int[Tensor, "1 length"], ends: Int[Tensor, "1 length"], dtype: torch.dtype) -> None:
        """`positions` and `ends` as in MicroBatch; `dtype` is that of queries and keys."""
        places, last = positions[0].cpu().numpy(), ends[0].cpu().numpy()
        line = np.arange(len(places))
        # in preorder the next token is a child of the previous one, or begins another branch, which is not deeper
        branches = np.flatnonzero(np.diff(places, prepend=places[0] - 2) != 1)
        starts = np.concatenate(
            [
                # the first of a tree's branches, at depth 0, is plainly causal
                np.arange(start, end, RUN_LENGTH) if places[start] else [start]
                for start, end in zip(branches, [*branches[1:], len(line)], strict=True)
            ]
        )
        context = [np.flatnonzero(last[:start] > start) for start in starts]
        # a run sees some runs completely, and others up to where it, or a run that it sees, branched off
        forks = [seen[-1:] + 1 for seen in context]
        cuts = np.unique(np.concatenate([starts, *forks, line[-1:] + 1]))
        self.pieces: list[int] = np.diff(cuts).tolist()
        """Lengths of the pieces of the line."""
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
    """Attention function for transformers; without `runs` it is transformers' own sdpa.

    Work and memory grow with the pairs of tokens that see each other; with a dense mask they grow with all pairs.
    """
    if runs is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
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
        parts.append(sdpa_attention_forward(module, queries, seen, known, run.mask, **options)[0])
    return torch.cat(parts, dim=1)


AttentionInterface.register(BY_RUNS, attention_by_runs)
AttentionMaskInterface.register(BY_RUNS, sdpa_mask)


def use_runs(network: PreTrainedModel) -> None:
    """Replaces the network's sdpa with BY_RUNS, which is equivalent but also accepts runs."""
    if network.config._attn_implementation == "sdpa":
        network.set_attn_implementation(BY_RUNS)


def block_mask(ends: Int[Tensor, "batch length"]) -> BlockMask:
    """Returns the mask for FlexAttention, which skips the blocks that no token sees."""
    batch, length = ends.shape

    def visible(line: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[line, key])

    return create_block_mask(visible, batch, None, length, length, device=ends.device)


def attention_arguments(
    kind: str, positions: Int[Tensor, "1 length"], ends: Int[Tensor, "1 length"], dtype: torch.dtype
) -> dict[str, Any]:
    """Returns the arguments that describe a line to the attention implementation `kind`; `dtype` is that of queries and
    keys.

    FlashAttention gets none: it finds rows that are placed end to end by their positions, and does not support trees.
    """
    if kind == BY_RUNS:
        # without a four-dimensional mask, transformers would make a dense one from the positions
        return {"runs": Runs(positions, ends, dtype), "attention_mask": torch.empty(1, 1, 1, 1, device=ends.device)}
    if kind == "flex_attention":
        return {"attention_mask": block_mask(ends)}
    if kind.startswith("flash_attention"):
        return {}
    raise SettingError("train.attention", f"{kind} takes no rows that share a line", "use sdpa or flex_attention")
