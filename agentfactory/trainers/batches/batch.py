"""Batches: training rows divided into micro-batches for every process, with one global normaliser."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from jaxtyping import Float, Int
from torch import Tensor
from torch import distributed as dist

from agentfactory.rollout.images.image_tokens import Vision
from agentfactory.rollout.token_row import ImageSpan, Row
from agentfactory.trainers.batches.image_batches import merge_keys
from agentfactory.trainers.batches.packing import Tree, deal, fill, grow, merge, stack

Batching = Literal["padded", "packed", "tree"]


@dataclass(frozen=True, eq=False)
class TrainingRow:
    """One token sequence, with the values that the loss needs for each trained token, as arrays on the host.

    `targets` are positions in `token_ids`, ascending and at least 1. `streams` have one value per target: always
    `behaviour` (the server's log-probability), `advantage`, `weight` and `mixed` (1 if the token's cached context may
    be from older weights, see trajectory.Span, else 0), and others as the algorithm needs them. `images` are those
    before the last target, in order. `in_context` has the same targets after a teacher's prompt, which is longer."""

    token_ids: Int[np.ndarray, "tokens"]
    targets: Int[np.ndarray, "targets"]
    streams: dict[str, Float[np.ndarray, "targets *several"]]
    images: tuple[ImageSpan, ...] = ()
    in_context: "TrainingRow | None" = None


def training_row(row: Row, advantage: float = 0.0) -> TrainingRow | None:
    """Return the trained part of a rollout's row, with the same advantage for every token; None if no token is trained.
    Tokens after the last trained one are left out: attention is causal, so they change nothing."""
    for name in ("mask", "logprobs", "weights"):
        stream = getattr(row, name)
        if stream is not None and len(stream) != len(row.token_ids):
            raise ValueError(f"a row of {len(row.token_ids)} tokens has {len(stream)} {name}")
    targets = row.graded()
    if not targets.size:
        return None
    mixed = np.zeros(len(row.mask))
    for span in row.versions:
        mixed[span.start : span.end] = span.mixed
    return TrainingRow(
        token_ids=np.asarray(row.token_ids[: targets[-1] + 1], dtype=np.int64),
        targets=targets,
        streams={
            "behaviour": np.asarray(row.logprobs, dtype=np.float64)[targets],
            "advantage": np.full(len(targets), advantage),
            "weight": np.ones(len(targets)) if row.weights is None else np.asarray(row.weights)[targets],
            "mixed": mixed[targets],
        },
        images=tuple(image for image in row.images if image.offset < targets[-1]),
        in_context=None if row.teacher_prompt is None else _in_context(row, targets),
    )


def only_targets(row: TrainingRow, kept: np.ndarray) -> TrainingRow | None:
    """Return the row with the targets where `kept` is true, or None if there are none; other tokens are context."""
    if not kept.any():
        return None
    targets = row.targets[kept]
    return replace(
        row,
        token_ids=row.token_ids[: targets[-1] + 1],
        targets=targets,
        streams={name: stream[kept] for name, stream in row.streams.items()},
        images=tuple(image for image in row.images if image.offset < targets[-1]),
        in_context=None if row.in_context is None else only_targets(row.in_context, kept),
    )


def _in_context(row: Row, targets: Int[np.ndarray, "targets"]) -> TrainingRow:
    """Return the teacher's row: its own prompt, and the row's tokens from the first sampled one on."""
    prompt = np.asarray(row.teacher_prompt, dtype=np.int64)
    first = int(np.flatnonzero(row.mask)[0])
    places = targets - first + len(prompt)
    return TrainingRow(
        token_ids=np.concatenate([prompt, np.asarray(row.token_ids[first : targets[-1] + 1], dtype=np.int64)]),
        targets=places,
        streams={"weight": np.ones(len(targets))},
        images=tuple(image for image in row.images_for_teacher() if image.offset < places[-1]),
    )


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward and backward pass: a block of token lines, and streams along their targets, row by row.

    A line contains a row, padded on the right, or, as the only line, trees of rows end to end (see packing). Tokens
    that only keep a process in step with the others have weight 0; all others have a positive weight."""

    ids: Int[Tensor, "batch length"]
    positions: Int[Tensor, "1 length"] | None
    ends: Int[Tensor, "1 length"] | None
    """Position of the last token that attends to this one, plus one; None if lines attend causally."""
    sources: Int[Tensor, "targets"]
    """Flat indices into batch x length: the token that predicts each target."""
    labels: Int[Tensor, "targets"]
    sequence: Int[Tensor, "targets"]
    """Number of the target's row within the micro-batch."""
    rows: tuple[int, ...]
    """Indices of the contained rows among those passed to `make_batches`, in the order of `sequence`; none if idle."""
    streams: dict[str, Float[Tensor, "targets *several"]]
    images: tuple[ImageSpan, ...] = ()
    """The images in the lines, in order; offsets are relative to their rows."""
    rotary: Int[Tensor, "3 batch length"] | None = None
    """Rotary positions in time, height and width; None means the positions in the rows."""
    in_step_with_images: bool = False
    """True if any micro-batch of the step has images, on any process."""

    def to(self, device: torch.device) -> "MicroBatch":
        moved: dict[str, Any] = {name: v.to(device) for name, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved, streams={name: stream.to(device) for name, stream in self.streams.items()})


@dataclass(frozen=True)
class Batch:
    """One process's share of a step. All processes have the same number of micro-batches."""

    micro_batches: list[MicroBatch]
    normaliser: float
    """Divisor of the losses, the same for all processes."""
    tokens: int


def make_batches(
    rows: Sequence[TrainingRow],
    batching: Batching,
    token_budget: int,
    processes: int = 1,
    normaliser: float | None = None,
    vision: Vision | None = None,
) -> list[Batch]:
    """Divide rows into one batch per process, with at most `token_budget` tokens, padding included, per micro-batch.

    `batching` is the content of a line of tokens: a row (padded), rows end to end (packed), or trees of rows in which
    common prefixes appear once (tree). Rows are never cut; a row longer than the budget is processed alone. Processes
    get equal work; those with fewer micro-batches get additional ones of weight zero. `normaliser` defaults to the sum
    of the weights. `vision` belongs to a model that accepts images.

    Raises ValueError if there is no row, the normaliser is not positive, or the model does not accept the images."""
    if not rows:
        raise ValueError("there is no row to train on")
    names = list(rows[0].streams)
    if normaliser is None:
        normaliser = float(sum(np.sum(row.streams["weight"]) for row in rows))
    if not normaliser > 0.0:
        raise ValueError(f"the weights of the trained tokens sum to {normaliser}; they must sum to more than 0")
    seen = any(row.images for row in rows)
    if seen and vision is None:
        raise ValueError("the rows have images, and the model reads only text: train the model that made them")
    # a row's last target, and the tokens after it, predict nothing
    inputs = [np.asarray(row.token_ids[: row.targets[-1]], dtype=np.int64) for row in rows]
    if batching == "tree":
        trees = merge(merge_keys(inputs, [row.images for row in rows]), token_budget, processes)
    else:
        trees = [grow([(number, row)]) for number, row in enumerate(inputs)]
    shares = []
    for share in deal([tree.cost for tree in trees], processes):
        own = [trees[number] for number in share]
        # a tree without branches is an ordinary row, and rows of one length are fastest as a block
        flat = own if batching == "packed" else [tree for tree in own if not tree.plain]
        blocks = [[line] for line in fill(flat, token_budget)]
        if batching != "packed":
            blocks += [[[row] for row in block] for block in stack([tree for tree in own if tree.plain], token_budget)]
        shares.append(blocks)
    most, tokens = max(map(len, shares)), sum(len(row.targets) for row in rows)
    batches = []
    for blocks in shares:
        parts = [_micro_batch(block, rows, inputs, names, vision, seen) for block in blocks]
        batches.append(Batch(parts + [_idle(rows[0], seen)] * (most - len(blocks)), normaliser, tokens))
    return batches


def _micro_batch(
    lines: list[list[Tree]],
    rows: Sequence[TrainingRow],
    inputs: list[np.ndarray],
    names: list[str],
    vision: Vision | None,
    seen: bool,
) -> MicroBatch:
    width = max(sum(len(tree.ids) for tree in line) for line in lines)
    ids = np.zeros((len(lines), width), dtype=np.int64)
    positions, ends = np.zeros((2, 1, width), dtype=np.int64)
    members: list[int] = []
    sources: list[np.ndarray] = []
    rotary: np.ndarray | None = None
    images: dict[int, ImageSpan] = {}
    for number, line in enumerate(lines):
        start = 0
        for tree in line:
            place = slice(start, start + len(tree.ids))
            positions[0, place], ends[0, place] = tree.positions, tree.ends + start
            for index, path in tree.paths.items():
                row = rows[index]
                members.append(index)
                sources.append(path[np.asarray(row.targets) - 1] + number * width + start)
                # not the tree's ids, which are keys for image tokens
                ids[number, path + start] = inputs[index]
                if seen and vision is not None:
                    if (places := vision.positions(len(path), row.images)) is not None:
                        rotary = np.zeros((3, len(lines), width), dtype=np.int64) if rotary is None else rotary
                        rotary[:, number, path + start] = places
                    images |= {number * width + start + int(path[image.offset]): image for image in row.images}
            start = place.stop
    causal = all(len(line) == 1 and line[0].plain for line in lines)
    chosen = [rows[index] for index in members]
    return MicroBatch(
        ids=torch.from_numpy(ids),
        positions=None if causal else torch.from_numpy(positions),
        ends=None if causal else torch.from_numpy(ends),
        sources=torch.from_numpy(np.concatenate(sources)),
        labels=torch.from_numpy(np.concatenate([np.asarray(row.token_ids)[row.targets] for row in chosen])),
        sequence=torch.from_numpy(np.repeat(np.arange(len(chosen)), [len(row.targets) for row in chosen])),
        rows=tuple(members),
        streams={
            name: torch.from_numpy(np.concatenate([row.streams[name] for row in chosen]).astype(np.float32))
            for name in names
        },
        images=tuple(images[place] for place in sorted(images)),
        rotary=torch.from_numpy(rotary) if images and rotary is not None else None,
        in_step_with_images=seen,
    )


def _idle(row: TrainingRow, seen: bool) -> MicroBatch:
    """Return a micro-batch without effect: the processes' collective calls must match."""
    zero = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(
        ids=zero[None],
        positions=None,
        ends=None,
        sources=zero,
        labels=zero,
        sequence=zero,
        rows=(),
        streams={name: torch.zeros(1, *np.shape(stream)[1:]) for name, stream in row.streams.items()},
        in_step_with_images=seen,
    )


def scatter(batches: list[Batch] | None, accelerator: Accelerator) -> Batch:
    """Return this process's batch, on its device. Rank 0 passes the batches of all processes, the others None."""
    if accelerator.num_processes == 1:
        assert batches is not None
        own = batches[0]
    else:
        received: list[Batch | None] = [None]
        dist.scatter_object_list(received, batches, src=0)
        assert received[0] is not None
        own = received[0]
    return Batch([part.to(accelerator.device) for part in own.micro_batches], own.normaliser, own.tokens)
