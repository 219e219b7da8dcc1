"""Batches: training rows cut into micro-batches for every process, with one global normaliser."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from accelerate import Accelerator
from jaxtyping import Float, Int
from torch import Tensor
from torch import distributed as dist

from agentfactory.rollout.trajectory import Row
from agentfactory.trainers.tree import Tree, deal, fill, grow, merge, stack

Batching = Literal["padded", "packed", "tree"]


@dataclass(frozen=True)
class TrainingRow:
    """One token sequence and, for each token that is trained, what the loss needs.

    `targets` are positions in `token_ids`, ascending and at least 1 (the first token has no context to be predicted
    from). `streams` run along `targets`: always `behaviour` (the server's log-probability), `advantage`, `weight` and
    `mixed` (1 where the token's cached context may be of older weights, see trajectory.Span, else 0); others as
    the algorithm needs them. What stands at masked positions is not carried, hence never read.
    """

    token_ids: list[int]
    targets: list[int]
    streams: dict[str, list[float]]


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
        streams={
            "behaviour": [row.logprobs[position] for position in targets],
            "advantage": [advantage] * len(targets),
            "weight": [1.0] * len(targets) if row.weights is None else [row.weights[position] for position in targets],
            "mixed": [float(position in mixed) for position in targets],
        },
    )


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass works on: a block of token lines, and streams along their targets.

    A line holds a row, padded on the right, or trees of rows end to end (see tree): then it is the only one.
    Targets stand row by row. Tokens that keep a process in step with the others have weight 0, all others more.
    """

    ids: Int[Tensor, "batch length"]
    positions: Int[Tensor, "1 length"] | None
    """Place of each token in its rows; None where lines count from 0."""
    ends: Int[Tensor, "1 length"] | None
    """Where the last token that sees this one stands, plus one; None where each sees all before it."""
    sources: Int[Tensor, "targets"]
    """Flat indices into batch x length: the token that predicts each target."""
    labels: Int[Tensor, "targets"]
    sequence: Int[Tensor, "targets"]
    """Number of the target's row within the micro-batch."""
    rows: tuple[int, ...]
    """Which of the rows given to `make_batches` are in here, in the order of `sequence`; none where idle."""
    streams: dict[str, Float[Tensor, "targets"]]

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on `device`."""
        return MicroBatch(
            ids=self.ids.to(device),
            positions=None if self.positions is None else self.positions.to(device),
            ends=None if self.ends is None else self.ends.to(device),
            sources=self.sources.to(device),
            labels=self.labels.to(device),
            sequence=self.sequence.to(device),
            rows=self.rows,
            streams={name: stream.to(device) for name, stream in self.streams.items()},
        )


@dataclass(frozen=True)
class Batch:
    """One process's share of a step. All processes have equally many micro-batches."""

    micro_batches: list[MicroBatch]
    normaliser: float
    """Losses are divided by it; it is the same for all processes, so that neither micro-batching nor the number of
    processes changes anything."""
    tokens: int
    """Trained tokens of all processes."""


def make_batches(
    rows: Sequence[TrainingRow],
    batching: Batching,
    token_budget: int,
    processes: int = 1,
    normaliser: float | None = None,
) -> list[Batch]:
    """Cuts rows into one batch per process, each micro-batch at most `token_budget` tokens with its padding.

    `batching` says what a line of tokens holds: a row (padded), rows end to end (packed), or trees of rows, in which
    what rows begin with in common is there once (tree). All give the same log-probabilities. Rows are never cut; one
    that is longer than the budget goes alone. Processes get equal work; those with fewer micro-batches get ones of
    weight zero. `normaliser` defaults to the sum of the weights.

    Raises ValueError where there is no row, rows differ in their streams, or the normaliser is not positive.
    """
    if not rows:
        raise ValueError("there is no row to train on")
    names = list(rows[0].streams)
    for row in rows:
        if set(row.streams) != set(names):
            raise ValueError(f"a row has the streams {sorted(row.streams)}, another {sorted(names)}")
    if normaliser is None:
        normaliser = sum(sum(row.streams["weight"]) for row in rows)
    if not normaliser > 0.0:
        raise ValueError(f"the weights of the trained tokens sum to {normaliser}; they must sum to more than 0")
    # what follows a row's last target, and that target itself, predicts nothing
    inputs = [np.asarray(row.token_ids[: row.targets[-1]], dtype=np.int64) for row in rows]
    if batching == "tree":
        trees = merge(inputs, token_budget, processes)
    else:
        trees = [grow([(number, row)]) for number, row in enumerate(inputs)]
    shares = []
    for share in deal([tree.cost for tree in trees], processes):
        own = [trees[number] for number in share]
        # a tree without branches is a row like any other, and rows of one length are fastest as a block
        flat = own if batching == "packed" else [tree for tree in own if not tree.plain]
        blocks = [[line] for line in fill(flat, token_budget)]
        if batching != "packed":
            blocks += [[[row] for row in block] for block in stack([tree for tree in own if tree.plain], token_budget)]
        shares.append(blocks)
    most = max(len(share) for share in shares)
    tokens = sum(len(row.targets) for row in rows)
    return [
        Batch(
            [_micro_batch(block, rows, names) for block in share] + [_idle(names)] * (most - len(share)),
            normaliser,
            tokens,
        )
        for share in shares
    ]


def _micro_batch(lines: list[list[Tree]], rows: Sequence[TrainingRow], names: list[str]) -> MicroBatch:
    width = max(sum(len(tree.ids) for tree in line) for line in lines)
    ids = np.zeros((len(lines), width), dtype=np.int64)
    positions, ends = np.zeros((2, 1, width), dtype=np.int64)
    members: list[int] = []
    sources: list[np.ndarray] = []
    for number, line in enumerate(lines):
        start = 0
        for tree in line:
            place = slice(start, start + len(tree.ids))
            ids[number, place] = tree.ids
            positions[0, place], ends[0, place] = tree.positions, tree.ends + start
            for index, path in tree.paths.items():
                members.append(index)
                sources.append(path[np.asarray(rows[index].targets) - 1] + number * width + start)
            start = place.stop
    causal = all(len(line) == 1 and line[0].plain for line in lines)
    chosen = [rows[index] for index in members]
    return MicroBatch(
        ids=torch.from_numpy(ids),
        positions=None if causal else torch.from_numpy(positions),
        ends=None if causal else torch.from_numpy(ends),
        sources=torch.from_numpy(np.concatenate(sources)),
        labels=torch.tensor([row.token_ids[target] for row in chosen for target in row.targets]),
        sequence=torch.from_numpy(np.repeat(np.arange(len(chosen)), [len(row.targets) for row in chosen])),
        rows=tuple(members),
        streams={
            name: torch.tensor([value for row in chosen for value in row.streams[name]], dtype=torch.float32)
            for name in names
        },
    )


def _idle(names: list[str]) -> MicroBatch:
    """Keeps a process in step with the others (their collective calls must match) and adds nothing."""
    zero = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(
        ids=zero[None],
        positions=None,
        ends=None,
        sources=zero,
        labels=zero,
        sequence=zero,
        rows=(),
        streams={name: torch.zeros(1) for name in names},
    )


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
