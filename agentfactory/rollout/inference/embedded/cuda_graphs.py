"""Decoding steps with a few fixed shapes on tensors at fixed addresses. On a GPU each shape is captured once as a CUDA
graph and then replayed, so a step costs one launch instead of a thousand (`make test-gpu` tests this).

A step computes one token in each of its slots. Slots without a request compute an unused token, written to the slot's
first unused position, which exists because a sequence's last token is never computed."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from agentfactory.rollout.inference.embedded.adapters import Adapter, Factors, Segment
from agentfactory.rollout.inference.embedded.step_plan import Group, Plan, Planner

SLOTS, KEYS = 8, 256
"""Smallest increments to which the numbers of slots and keys are rounded up. Above four increments there are two sizes
per power of two."""
MAX_GRAPHS = 64
"""Maximum number of graphs; a new graph replaces the least recently used one."""

Forward = Callable[[Plan, list[Segment], Tensor, Tensor], Float[Tensor, "tokens vocabulary"]]
"""A function from a step's plan, adapters, token ids [tokens] and rotary positions [tokens] to its logits."""
Step = Callable[[], Float[Tensor, "slots vocabulary"]]


class Shape(NamedTuple):
    """The fixed properties of a captured step: the numbers of slots and keys, whether the first slots are viewed or
    slots are copied, the addresses of its adapters' factors, and whether some tokens differ in their adapter."""

    slots: int
    keys: int
    viewed: bool
    adapters: tuple[int, ...]
    mixed: bool


class StaticDecoder:
    """A decoder of one token per request with static steps, captured if `capture` is set, else run directly."""

    def __init__(self, forward: Forward, planner: Planner, slots: int, *, capture: bool) -> None:
        self._forward, self._planner, self._slots, self._capture = forward, planner, slots, capture
        self._steps: OrderedDict[Shape, tuple[Tensor, Step, torch.cuda.CUDAGraph | None]] = OrderedDict()
        self._logits: Tensor | None = None

    def clear(self) -> None:
        """Drop all graphs and their memory; required before the tensors that they read and write move."""
        self._steps.clear()
        self._logits = None

    def decode(
        self,
        slots: np.ndarray,
        ids: np.ndarray,
        position: np.ndarray,
        rotary: np.ndarray,
        adapters: Sequence[Adapter | None],
        computed: np.ndarray,
    ) -> Float[Tensor, "requests vocabulary"]:
        """Return the logits of the requests in `slots`, whose tokens `ids` have the index `position` in their slot and
        the rotary positions `rotary`. `computed` [all slots] is the number of used positions in each slot."""
        whole = _rounded(int(slots.max()) + 1, SLOTS, self._slots)
        viewed = whole <= 2 * len(slots)
        count = whole if viewed else _rounded(len(slots), SLOTS, self._slots)
        if viewed:
            rows, place = np.arange(count), slots
        else:
            idle = np.setdiff1d(np.arange(self._slots), slots)
            rows, place = np.concatenate([slots, idle[: count - len(slots)]]), np.arange(len(slots))
        distinct = list(dict.fromkeys(adapter for adapter in adapters if adapter))
        shape = Shape(
            slots=count,
            keys=_rounded(int(position.max()) + 1, KEYS, self._planner.length),
            viewed=viewed,
            adapters=tuple(id(adapter.factors) for adapter in distinct),
            mixed=len(set(adapters)) > 1,
        )
        unused = np.zeros(count, np.int64)
        inputs = np.stack([unused, computed[rows], unused, rows, unused])
        inputs[:3, place] = ids, position, rotary
        inputs[4, place] = [distinct.index(adapter) + 1 if adapter else 0 for adapter in adapters]
        if shape not in self._steps:
            if len(self._steps) >= MAX_GRAPHS:
                self._steps.popitem(last=False)
            fixed = self._planner.tensor(inputs)
            step: Step = partial(self._compute, shape, [adapter.factors for adapter in distinct], fixed)
            self._steps[shape] = fixed, step, self._captured(step) if self._capture else None
        self._steps.move_to_end(shape)
        fixed, step, graph = self._steps[shape]
        fixed.copy_(torch.from_numpy(inputs))
        if graph is None:
            return step()[self._planner.tensor(place)]
        graph.replay()
        assert self._logits is not None
        return self._logits[:count][self._planner.tensor(place)]

    def _compute(self, shape: Shape, factors: list[Factors], inputs: Tensor) -> Float[Tensor, "slots vocabulary"]:
        """Return the logits without a synchronisation with the host. `inputs` [5, slots] are the tokens' ids, indices
        in the slot, rotary positions, slots and adapters (0 is none)."""
        planner = self._planner
        ids, position, rotary, slots, owner = inputs
        heads = torch.arange(planner.kv_heads, device=planner.device)
        rows = (slots[:, None] * planner.kv_heads + heads) * planner.length + position[:, None]
        mask, window_mask = planner.masks(position[:, None], shape.keys)
        group = Group(1, shape.keys, mask, window_mask, 0, shape.slots, None if shape.viewed else slots)
        segments = [
            Segment(of, 0, shape.slots, (owner != index)[:, None] if shape.mixed else None)
            for index, of in enumerate(factors, 1)
        ]
        return self._forward(Plan(rows.flatten(), [group]), segments, ids, rotary)

    def _captured(self, step: Step) -> torch.cuda.CUDAGraph:
        """Capture a graph that writes the step's logits to `_logits`; run twice, it writes the same values."""
        device = self._planner.device
        stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            logits = step()  # libraries allocate their workspaces at the first call, which must precede the capture
        current.wait_stream(stream)
        if self._logits is None:
            self._logits = torch.empty(self._slots, logits.shape[1], dtype=logits.dtype, device=device)
        graph = torch.cuda.CUDAGraph()
        # graphs run one after another, so they can share memory
        others = [other for *_, other in self._steps.values() if other is not None]
        with torch.cuda.graph(graph, pool=others[0].pool() if others else None):
            self._logits[: logits.shape[0]].copy_(step())
        return graph


def _rounded(number: int, least: int, most: int) -> int:
    step = max(least, 2 ** (int(np.ceil(np.log2(number))) - 2))
    return min(-(-number // step) * step, most)
