"""Batches: rows divided into micro-batches, planned by rank 0, built by each process, with one global normaliser."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch import distributed as dist

from agentfactory.rollout.images.image_tokens import Vision
from agentfactory.rollout.token_row import ImageSpan, Row
from agentfactory.trainers.batches.image_batches import merge_keys
from agentfactory.trainers.batches.packing import Tree, TreePlan, deal, fill, grow, merge, row_work, stack

Batching = Literal["padded", "packed", "tree"]

Group = dist.ProcessGroup | None
Member = tuple[int, int, int, tuple[ImageSpan, ...]]
"""A row in a plan: its index (-1: a row of zeros), its numbers of tokens and targets, and its images."""
Lines = list[list[list[Member]]]
"""The plan of a micro-batch: by line, its trees as lists of rows in lexicographic order."""


@dataclass(frozen=True, eq=False)
class TrainingRow:
    """One token sequence, with the values that the loss needs for each trained token, as arrays on the host.

    `targets` are positions in `token_ids`, ascending and at least 1. `streams` have one value per target: always
    `behaviour` (the server's log-probability), `advantage`, `weight` and `mixed` (1 if the token's cached context may
    be from older weights, see trajectory.Span, else 0), and others as the algorithm needs them. `labels` are ids to
    score in place of the row's own, one or several per target. `images` are those before the last target, in order.
    `in_context` has the same targets after a teacher's prompt, which is longer."""

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
    labels: Int[Tensor, "targets *several"]
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
class Plan:
    """One process's batch before it is built."""

    micro_batches: list[Lines]
    shapes: dict[str, tuple[int, ...]]
    """Name of a stream -> shape of the values of one target."""
    seen: bool
    """True if any row of the step has images, on any process."""
    normaliser: float
    tokens: int


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
    plans = make_plans(rows, batching, token_budget, processes, normaliser, vision is not None)
    return [deal_batch([plan], rows, vision, torch.device("cpu"), None) for plan in plans]


def make_plans(
    rows: Sequence[TrainingRow], batching: Batching, budget: int, processes: int, normaliser: float | None, sees: bool
) -> list[Plan]:
    """Plan the batches of make_batches, one per process. `sees` is true for a model that accepts images."""
    if not rows:
        raise ValueError("there is no row to train on")
    if normaliser is None:
        normaliser = float(sum(np.sum(row.streams["weight"]) for row in rows))
    if not normaliser > 0.0:
        raise ValueError(f"the weights of the trained tokens sum to {normaliser}; they must sum to more than 0")
    seen = any(row.images for row in rows)
    if seen and not sees:
        raise ValueError("the rows have images, and the model reads only text: train the model that made them")
    # a row's last target, and the tokens after it, predict nothing
    inputs = [np.asarray(row.token_ids[: row.targets[-1]]) for row in rows]
    if batching == "tree":
        trees = merge(merge_keys(inputs, [row.images for row in rows]), budget, processes)
    else:
        work = row_work(np.array([len(ids) for ids in inputs]))
        trees = [TreePlan((number,), len(ids), work[number]) for number, ids in enumerate(inputs)]
    members = [(n, len(inputs[n]) + 1, len(row.targets), row.images) for n, row in enumerate(rows)]
    shares: list[list[Lines]] = []
    for share in deal([tree.cost for tree in trees], processes):
        own = [trees[number] for number in share]
        # a tree without branches is an ordinary row, and rows of one length are fastest as a block
        flat = own if batching == "packed" else [tree for tree in own if not tree.plain]
        blocks = [[line] for line in fill(flat, budget)]
        if batching != "packed":
            blocks += [[[row] for row in block] for block in stack([tree for tree in own if tree.plain], budget)]
        shares.append([[[[members[n] for n in tree.rows] for tree in line] for line in block] for block in blocks])
    most, tokens = max(map(len, shares)), sum(len(row.targets) for row in rows)
    shapes = {name: np.shape(stream)[1:] for name, stream in rows[0].streams.items()}
    # a micro-batch without effect: the processes' collective calls must match
    idle: Lines = [[[(-1, 2, 1, ())]]]
    return [Plan(own + [idle] * (most - len(own)), shapes, seen, normaliser, tokens) for own in shares]


def deal_batch(
    plans: list[Plan] | None, rows: Sequence[TrainingRow], vision: Vision | None, device: torch.device, group: Group
) -> Batch:
    """Build this process's batch on `device`. Rank 0 passes the plans of all processes and the rows; the others pass
    None and get their rows through `group`, a gloo group (None: the default group)."""
    received: list[Any] = [plans[0] if plans else None]
    if plans is None or len(plans) > 1:
        # through the default group, whose peers were checked: plans are unpickled, rows are not
        dist.scatter_object_list(received, plans, src=0)
    plan: Plan = received[0]
    idle = {name: np.zeros((1, *shape)) for name, shape in plan.shapes.items()}
    rows = [*rows, TrainingRow(np.zeros(2, dtype=np.int64), np.ones(1, dtype=np.int64), idle)]  # at index -1
    parts = []
    for number, lines in enumerate(plan.micro_batches):
        # one micro-batch per process at a time, so that rank 0 never has all of them
        sent: list[Any] = []
        for rank, other in enumerate((plans or ())[1:], 1):
            for array in _pack(other.micro_batches[number], rows, plan):
                sent.append(dist.isend(torch.from_numpy(array), rank, group))
        packed = _receive(lines, plan, group) if plans is None else _pack(lines, rows, plan)
        parts.append(_micro_batch(lines, *packed, plan, vision).to(device))
        for work in sent:
            work.wait()
    return Batch(parts, plan.normaliser, plan.tokens)


def _members(lines: Lines) -> list[Member]:
    return [member for line in lines for tree in line for member in tree]


def _pack(lines: Lines, rows: Sequence[TrainingRow], plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows as int32 (all ids, then all targets) and float32 (stream by stream)."""
    chosen = [rows[index] for index, *_ in _members(lines)]
    whole = [row.token_ids[: row.targets[-1] + 1] for row in chosen] + [row.targets for row in chosen]
    streams = [np.ravel(row.streams[name]) for name in plan.shapes for row in chosen]
    return np.concatenate(whole, dtype=np.int32), np.concatenate(streams, dtype=np.float32)


def _receive(lines: Lines, plan: Plan, group: Group) -> tuple[np.ndarray, np.ndarray]:
    _, tokens, targets, _ = zip(*_members(lines), strict=True)
    values = sum(targets) * sum(map(math.prod, plan.shapes.values()))
    packed = np.empty(sum(tokens + targets), dtype=np.int32), np.empty(values, dtype=np.float32)
    for array in packed:
        dist.recv(torch.from_numpy(array), 0, group)
    return packed


def _micro_batch(lines: Lines, whole: np.ndarray, values: np.ndarray, plan: Plan, vision: Vision | None) -> MicroBatch:
    indices, tokens, targets, images_of = zip(*_members(lines), strict=True)
    arrays = np.split(whole, np.cumsum(tokens + targets)[:-1])
    found = zip(indices, arrays, arrays[len(indices) :], images_of, strict=False)
    rows = {index: TrainingRow(ids, places, {}, spans) for index, ids, places, spans in found}
    trees = [[_grow(tree, rows) for tree in line] for line in lines]
    width = max(sum(len(tree.ids) for tree in line) for line in trees)
    ids = np.zeros((len(lines), width), dtype=np.int64)
    positions, ends = np.zeros((2, 1, width), dtype=np.int64)
    sources: list[np.ndarray] = []
    rotary: np.ndarray | None = None
    images: dict[int, ImageSpan] = {}
    for number, line in enumerate(trees):
        start = 0
        for tree in line:
            place = slice(start, start + len(tree.ids))
            ids[number, place], positions[0, place], ends[0, place] = tree.ids, tree.positions, tree.ends + start
            for index, path in tree.paths.items():
                row = rows[index]
                sources.append(path[row.targets - 1] + number * width + start)
                if plan.seen and vision is not None:
                    # the tree's ids are keys for image tokens
                    ids[number, path + start] = row.token_ids[:-1]
                    if (places := vision.positions(len(path), row.images)) is not None:
                        rotary = np.zeros((3, len(lines), width), dtype=np.int64) if rotary is None else rotary
                        rotary[:, number, path + start] = places
                    images |= {number * width + start + int(path[image.offset]): image for image in row.images}
            start = place.stop
    causal = all(len(line) == 1 and line[0].plain for line in trees)
    shapes = {name: (sum(targets), *shape) for name, shape in plan.shapes.items()}
    split = np.split(values, np.cumsum([math.prod(shape) for shape in shapes.values()])[:-1])
    streams = {name: part.reshape(shapes[name]) for name, part in zip(shapes, split, strict=True)}
    own = np.concatenate([row.token_ids[row.targets] for row in rows.values()])
    return MicroBatch(
        ids=torch.from_numpy(ids),
        positions=None if causal else torch.from_numpy(positions),
        ends=None if causal else torch.from_numpy(ends),
        sources=torch.from_numpy(np.concatenate(sources)),
        labels=torch.from_numpy(streams.pop("labels", own).astype(np.int64)),  # float32 is exact below 2^24
        sequence=torch.from_numpy(np.repeat(np.arange(len(rows)), targets)),
        rows=tuple(index for index in indices if index >= 0),
        streams={name: torch.from_numpy(stream) for name, stream in streams.items()},
        images=tuple(images[place] for place in sorted(images)),
        rotary=torch.from_numpy(rotary) if images and rotary is not None else None,
        in_step_with_images=plan.seen,
    )


def _grow(tree: list[Member], rows: dict[int, TrainingRow]) -> Tree:
    keys = merge_keys([rows[index].token_ids[:-1] for index, *_ in tree], [images for *_, images in tree])
    return grow(zip([index for index, *_ in tree], keys, strict=True))
