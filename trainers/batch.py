"""Batches: training rows cut into micro-batches for every process, with one global normaliser."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch import distributed as dist

from rollout.trajectory import Row


@dataclass(frozen=True)
class TrainingRow:
    """One token sequence and, for each token that is trained, what the loss needs.

    `targets` are positions in `token_ids`, ascending and at least 1 (the first token has no context to be predicted
    from); the other lists run along `targets`. What stands at masked positions is not carried, hence never read.
    """

    token_ids: list[int]
    targets: list[int]
    behaviour: list[float]
    advantage: list[float]
    weight: list[float]
    mixed: list[bool]


def training_row(row: Row, advantage: float = 0.0) -> TrainingRow | None:
    """The trained part of a rollout's row, every token with the same advantage; None if nothing in it is trained.

    Tokens after the last trained one are left out: attention is causal, so they change nothing.
    """
    for name in ("mask", "logprobs", "weights"):
        stream = getattr(row, name)
        if stream is not None and len(stream) != len(row.token_ids):
            raise ValueError(f"a row of {len(row.token_ids)} tokens has {len(stream)} {name}")
    targets = [position for position, trained in enumerate(row.mask) if trained and position > 0]
    if not targets:
        return None
    mixed = {position for span in row.versions if span.mixed for position in range(span.start, span.end)}
    return TrainingRow(
        token_ids=row.token_ids[: targets[-1] + 1],
        targets=targets,
        behaviour=[row.logprobs[position] for position in targets],
        advantage=[advantage] * len(targets),
        weight=[1.0] * len(targets) if row.weights is None else [row.weights[position] for position in targets],
        mixed=[position in mixed for position in targets],
    )


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass works on: rows padded on the right, and streams along their targets."""

    ids: Int[Tensor, "batch length"]
    sources: Int[Tensor, "targets"]
    """Flat indices into batch x length: the position that predicts each target."""
    labels: Int[Tensor, "targets"]
    behaviour: Float[Tensor, "targets"]
    advantage: Float[Tensor, "targets"]
    weight: Float[Tensor, "targets"]
    mixed: Bool[Tensor, "targets"]
    """Whether the token's cached context may be of older weights than it; see rollout.trajectory.Span."""

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on `device`."""
        return MicroBatch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


@dataclass(frozen=True)
class Batch:
    """One process's share of a step. All processes have equally many micro-batches."""

    micro_batches: list[MicroBatch]
    normaliser: float
    """Sum of the weights of all trained tokens of all processes: losses are divided by it, so that neither
    micro-batching nor the number of processes changes anything."""
    tokens: int
    """Trained tokens of all processes."""


def padded(rows: Sequence[TrainingRow], token_budget: int, processes: int = 1) -> list[Batch]:
    """Cuts rows into one batch per process, each micro-batch at most `token_budget` tokens with its padding.

    Rows are sorted by length, so that little is padded, and dealt in turn, so that processes get equal work. A row
    longer than the budget goes alone. Processes with fewer micro-batches get ones of weight zero.
    """
    if not rows:
        raise ValueError("there is no row to train on")
    ordered = sorted(rows, key=lambda row: len(row.token_ids), reverse=True)
    shares = [_cut(ordered[rank::processes], token_budget) for rank in range(processes)]
    most = max(len(share) for share in shares)
    normaliser = sum(sum(row.weight) for row in rows)
    if normaliser <= 0.0:
        raise ValueError(f"the weights of the trained tokens sum to {normaliser}; they must sum to more than 0")
    tokens = sum(len(row.targets) for row in rows)
    return [
        Batch([_pad(cut) for cut in share] + [_pad([_IDLE])] * (most - len(share)), normaliser, tokens)
        for share in shares
    ]


_IDLE = TrainingRow(token_ids=[0, 0], targets=[1], behaviour=[0.0], advantage=[0.0], weight=[0.0], mixed=[False])
"""Keeps a process in step with the others (their collective calls must match) and adds nothing."""


def _cut(ordered: list[TrainingRow], token_budget: int) -> list[list[TrainingRow]]:
    cuts: list[list[TrainingRow]] = []
    for row in ordered:
        # the first row of a cut is its longest: the width of the padded block
        if cuts and len(cuts[-1][0].token_ids) * (len(cuts[-1]) + 1) <= token_budget:
            cuts[-1].append(row)
        else:
            cuts.append([row])
    return cuts


def _pad(rows: list[TrainingRow]) -> MicroBatch:
    width = len(rows[0].token_ids)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row.token_ids)] = row.token_ids
    flat = np.concatenate([np.asarray(row.targets) + i * width for i, row in enumerate(rows)])
    return MicroBatch(
        ids=torch.from_numpy(ids),
        sources=torch.from_numpy(flat - 1),
        labels=torch.from_numpy(ids.reshape(-1)[flat]),
        behaviour=_stream([row.behaviour for row in rows]),
        advantage=_stream([row.advantage for row in rows]),
        weight=_stream([row.weight for row in rows]),
        mixed=torch.from_numpy(np.concatenate([np.asarray(row.mixed, dtype=bool) for row in rows])),
    )


def _stream(values: list[list[float]]) -> Float[Tensor, "targets"]:
    return torch.from_numpy(np.concatenate([np.asarray(value, dtype=np.float32) for value in values]))


def scatter(batches: list[Batch] | None, accelerator: Accelerator) -> Batch:
    """This process's batch, on its device. Rank 0 gives the batches of all processes, the others None."""
    if accelerator.num_processes == 1:
        assert batches is not None
        own = batches[0]
    else:
        received: list[Batch | None] = [None]
        dist.scatter_object_list(received, batches, src=0)
        assert received[0] is not None
        own = received[0]
    return Batch([part.to(accelerator.device) for part in own.micro_batches], own.normaliser, own.tokens)
