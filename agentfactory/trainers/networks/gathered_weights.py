"""The trained weights of one version, gathered one by one, so that no process needs memory for all of them."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from agentfactory.trainers.networks.handover import HandedOver


class Weights(Mapping[str, Tensor]):
    """Weights by name, with their values at the time of reading; they may share memory with the policy's.

    `stream` yields them one by one; as a mapping they are gathered together, sharded ones into host memory. Sharded
    weights are read once, by every process at the same time: only rank 0 gets them, and others get nothing."""

    def __init__(self, entries: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> None:
        """Floats are converted to `dtype`, if given."""
        self._tensors = dict(entries)
        self._dtype = dtype
        self.meta = {n: torch.empty(v.shape, dtype=self._dtype_of(v), device="meta") for n, v in self._tensors.items()}
        """All names, with shape and dtype and without values."""
        self.sharded = any(isinstance(value, DTensor) for value in self._tensors.values())
        self._read: dict[str, Tensor] | None = None
        self._rest: Iterator[tuple[str, Tensor]] | None = None
        # starts with its first task, and ends with this object; by default it would use the first GPU
        device: Any = (torch.cuda.set_device, (torch.cuda.current_device(),)) if torch.cuda.is_initialized() else ()
        self._thread = ThreadPoolExecutor(1, "gather", *device)

    @property
    def resident(self) -> bool:
        """True if the weights are the policy's own: holding them takes no memory."""
        held = self._tensors.values()
        return not self.sharded and all(v.dtype == self._dtype_of(v) and v.is_contiguous() for v in held)

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.meta.values())

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weight) in the order of `meta`. Raises RuntimeError if sharded ones were read before."""
        if self._read is not None:
            yield from self._read.items()
        elif not self.sharded:
            yield from self._gather()
        elif self._rest is not None:
            raise RuntimeError("sharded weights can be gathered only once: read them as a mapping to use them again")
        else:
            self._rest = self._gather()
            if dist.get_rank() == 0:
                yield from iter(self._next, None)
            self.finish()

    def finish(self) -> None:
        """Gather the weights that have not been read: the other processes take part until the last one."""
        if self.sharded and self._read is None:
            self._rest = self._rest or self._gather()
            while self._next() is not None:
                pass

    def __getitem__(self, name: str) -> Tensor:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, Tensor]:
        if self._read is None:
            self._read = {name: value.cpu() if self.sharded else value for name, value in self.stream()}
        return self._read

    def _next(self) -> tuple[str, Tensor] | None:
        # in a thread: a signal that ends the caller's wait must not end a collective call
        assert self._rest is not None
        found = HandedOver(self._thread, partial(next, self._rest, None)).result()
        if found is not None and found[1].is_cuda:
            # its memory is not reused before what is queued here has read it
            found[1].record_stream(torch.cuda.current_stream())
        return found

    def _gather(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self._tensors.items():
            # converted before the transfer, and one at a time
            converted = value.detach().to(self._dtype_of(value))
            whole = converted.full_tensor() if isinstance(converted, DTensor) else converted
            yield name, whole.contiguous()

    def _dtype_of(self, value: Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and value.is_floating_point() else value.dtype
