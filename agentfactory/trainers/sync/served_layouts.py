"""The layout of the trainer's weights on a server: their names, stacking and slices, as in vLLM 0.32.

The functions are pure: they use names and shapes, and read no weight.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_EMBEDDINGS, _HEAD = "embed_tokens.weight", "lm_head.weight"

_PREFIXES = (
    ("language_model.model.", "model.language_model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("visual.", "model.visual."),
    ("vision_tower.", "model.vision_tower."),
    ("vision_model.", "model.vision_model."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)
"""Prefixes of names: the server's, and the trainer's (transformers' names in memory). For a multimodal model trained as
a text model, the trainer's names lack `language_model.`."""

_STACKED = (
    (".qkv_proj.", (".q_proj.", ".k_proj.", ".v_proj.")),
    (".gate_up_proj.", (".gate_proj.", ".up_proj.")),
    (".in_proj_qkvz.", (".in_proj_qkv.", ".in_proj_z.")),
    (".in_proj_ba.", (".in_proj_b.", ".in_proj_a.")),
)
"""Projections that the server stacks along the output dimension, under one name."""

_EXPERTS = re.compile(r"\.experts\.(routed_experts\.)?w(13|2)_(weight|bias)$")


@dataclass(frozen=True)
class Worker:
    """A tensor-parallel worker of a server."""

    rank: int = 0
    count: int = 1

    @classmethod
    def of_keys(cls, keys: Sequence[str]) -> "dict[str, Worker]":
        """Return the worker of each key such as "dp0:pp0:pcp0:tp1:NAME"; a bare name belongs to the only worker."""
        ranks = {key: int(found[1]) if (found := re.search(r"(?:^|:)tp(\d+):", key)) else 0 for key in keys}
        return {key: cls(rank, max(ranks.values()) + 1) for key, rank in ranks.items()}


@dataclass(frozen=True)
class Layout:
    """One possible composition of a server's parameter from the trainer's weights."""

    names: tuple[str, ...]
    """The trainer's names."""
    pieces: tuple[Tensor, ...]
    """The stacked tensors. A worker has its slice of each, not of the whole."""
    dim: int = 0
    """The dimension along which the pieces are stacked."""
    vocabulary: bool = False
    """True if the server may add rows of zeros."""
    swapped: bool = False
    """True if the pieces are in the opposite order."""

    @property
    def key(self) -> tuple[object, ...]:
        """A key that distinguishes the layouts of one state."""
        return self.names, len(self.pieces), self.dim, self.swapped

    def arranged(self, shape: Sequence[int] | None, worker: Worker) -> Tensor | None:
        """Return the required content of a worker's parameter of this shape, without padding zeros at the end; None if
        this layout has no such shape. Without a shape, return the whole."""
        first = self.pieces[0].shape
        whole = [
            sum(piece.shape[self.dim] for piece in self.pieces) if d == self.dim else n for d, n in enumerate(first)
        ]
        if shape is None or list(shape) == whole:
            return self._stack(self.pieces)
        if self.vocabulary and len(shape) == len(whole) and list(shape[1:]) == whole[1:]:
            start = min(worker.rank * shape[0], whole[0])
            return self.pieces[0][start : start + shape[0]] if shape[0] * worker.count >= whole[0] else None
        sliced = [d for d, size in enumerate(whole) if len(shape) == len(whole) and shape[d] != size]
        if len(sliced) != 1 or worker.count == 1:
            return None
        [d] = sliced
        sizes = [piece.shape[d] // worker.count for piece in self.pieces]
        if d == self.dim and sum(sizes) < shape[d] and len(sizes) == 3:
            # with fewer key-value heads than workers, several workers have the same heads
            sizes[1:] = [(shape[d] - sizes[0]) // 2] * 2
        if min(sizes) == 0 or (sum(sizes) if d == self.dim else sizes[0]) != shape[d]:
            return None
        starts = [
            worker.rank * piece.shape[d] // size // worker.count * size
            for piece, size in zip(self.pieces, sizes, strict=True)
        ]
        return self._stack(
            [p.narrow(d, start, size) for p, start, size in zip(self.pieces, starts, sizes, strict=True)]
        )

    def _stack(self, pieces: Sequence[Tensor]) -> Tensor:
        return pieces[0] if len(pieces) == 1 else torch.cat(tuple(pieces), self.dim)


def layouts(name: str, state: Mapping[str, Tensor]) -> Iterator[Layout]:
    """Yield the possible layouts of a server's parameter `name`, the most likely first; none if it is unknown. An equal
    name in the checkpoint comes before a stack: some networks (Phi-3, GLM-4) have stacked projections themselves."""
    for own in _names(name):
        if own in state:
            yield Layout((own,), _pieces(own, state), vocabulary=own.endswith((_EMBEDDINGS, _HEAD)))
        for stacked, projections in _STACKED:
            parts = tuple(own.replace(stacked, projection) for projection in projections)
            if stacked in own and all(part in state for part in parts):
                yield Layout(parts, tuple(state[part] for part in parts))
        if _EXPERTS.search(own):
            yield from _experts(own, state)
    if name.endswith(_HEAD):
        # tied
        for own in _names(name.removesuffix(_HEAD) + "model." + _EMBEDDINGS):
            if own in state:
                yield Layout((own,), (state[own],), vocabulary=True)


def is_experts(name: str) -> bool:
    """Return whether a server's parameter contains experts, whose layout depends on the kernel."""
    return _EXPERTS.search(name) is not None


def _names(name: str) -> Iterator[str]:
    """Yield the trainer's possible names for a server's name, beginning with the same name."""
    yield name
    for server, trainer in _PREFIXES:
        if name.startswith(server):
            yield trainer + name.removeprefix(server)


def _pieces(name: str, state: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the pieces that a stacked weight of the checkpoint consists of."""
    weight = state[name]
    if ".gate_up_proj." in name:
        return weight.chunk(2)
    if ".qkv_proj." in name:
        output = state.get(re.sub(r"\.qkv_proj\..*", ".o_proj.weight", name))
        if output is not None and (rest := len(weight) - output.shape[1]) > 0 and rest % 2 == 0:
            return weight.split([output.shape[1], rest // 2, rest // 2])
    return (weight,)


def _experts(name: str, state: Mapping[str, Tensor]) -> Iterator[Layout]:
    """Yield the layouts of a parameter with all experts of a layer: gate and up projections in either order ("w13"), or
    down projections ("w2")."""
    match = _EXPERTS.search(name)
    assert match is not None
    stem, is_gate_up, kind = name[: match.start()] + ".experts.", match[2] == "13", match[3]
    bias = "_bias" if kind == "bias" else ""
    fused = f"{stem}{'gate_up_proj' if is_gate_up else 'down_proj'}{bias}"
    if fused in state:
        names: tuple[str, ...] = (fused,)
        halves = state[fused].chunk(2, 1) if is_gate_up else (state[fused],)
    else:
        projections = ("gate_proj", "up_proj") if is_gate_up else ("down_proj",)
        numbers = range(sum(1 for other in state if other.startswith(stem) and other.endswith(f".down_proj.{kind}")))
        each = [[f"{stem}{number}.{projection}.{kind}" for number in numbers] for projection in projections]
        names = tuple(other for listed in each for other in listed)
        if not names or any(other not in state for other in names):
            return
        halves = tuple(torch.stack([state[other] for other in listed]) for listed in each)
    yield Layout(names, tuple(halves), dim=1)
    if is_gate_up:
        yield Layout(names, tuple(halves[::-1]), dim=1, swapped=True)
