"""Copies of a learner's tensors in host memory: offloading between two steps, and the buffer for checkpoints. For a GPU
the memory is page-locked, which makes copies several times as fast."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from agentfactory.trainers.update.learner import Learner

Bytes = UInt8[Tensor, "bytes"]

_LEAST_LOCKED = 2**25 + 1
"""Minimum number of bytes to page-lock: smaller pieces could share a page, which can be locked only once."""
_ALIGNMENT = 64


def lock(host: Bytes, device: torch.device) -> None:
    """Page-lock memory that is copied to or from `device`, if that is a GPU. Raises torch.cuda.CudaError."""
    # torch's own page-locked memory is allocated in powers of two, up to twice the requested size
    if device.type == "cuda" and host.numel() >= _LEAST_LOCKED:
        status = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0))
        # CUDA keeps a failure as its last error, which the next kernel would raise
        torch.cuda.check_error(status)


def unlock(host: Bytes) -> None:
    """Undo `lock`; call it before the memory is freed."""
    if host.is_pinned():
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())


class HostBuffer:
    """One piece of host memory for copies of tensors. It is kept, so that later copies find it allocated."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Bytes = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def copy(self, like: Sequence[Tensor], tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return copies of `tensors` in host memory, each with its own storage, valid until the next call. `like` has
        their shapes and dtypes. Raises torch.cuda.CudaError if the memory cannot be page-locked."""
        starts = [*accumulate((-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in like), initial=0)]
        if self._memory.numel() != starts[-1]:
            self.free()
            self._memory = torch.empty(starts[-1], dtype=torch.uint8)
            lock(self._memory, self._device)
        # a slice of a tensor would share its storage, which torch.save writes whole
        memory = self._memory.numpy()
        copies = []
        for tensor, start in zip(tensors, starts[:-1], strict=True):
            part = torch.from_numpy(memory[start : start + tensor.nbytes])
            copies.append(part.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True))
        _wait_for(self._device)
        return copies

    def free(self) -> None:
        """Free the memory; copies must not be used afterwards."""
        unlock(self._memory)
        self._memory = torch.empty(0, dtype=torch.uint8)


_Place = tuple[list[Tensor], Bytes]
"""The tensors stored in one piece of memory, and its copy in host memory."""


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


class Offload:
    """The offloadable tensors of a learner: weights, buffers, constants of quantised weights, optimiser state,
    reference. Not for weights that several processes share. An offloaded learner can be gathered and saved, but cannot
    compute. Tensors change only their memory, so an optimiser and tied layers find them on both sides."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._device = learner.accelerator.device
        self._places: list[_Place] = []
        self._offloaded = False

    @torch.no_grad()
    def to_host(self) -> None:
        """Move everything to host memory. Raises torch.cuda.CudaError if that cannot be page-locked."""
        if self._offloaded:
            return
        earlier = {id(tensors[0]): host for tensors, host in self._places}
        held = ((tensor, frozen) for tensor, frozen in _held(self._learner) if tensor.device.type == self._device.type)
        self._places = [self._copied(tensors, frozen, earlier) for tensors, frozen in _by_memory(held)]
        for orphan in earlier.values():
            unlock(orphan)
        _wait_for(self._device)
        for tensors, host in self._places:
            _lay(tensors, host)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()
        self._offloaded = True

    @torch.no_grad()
    def to_device(self) -> None:
        """Move everything back to the device. Raises torch.OutOfMemoryError if it does not fit."""
        if not self._offloaded:
            return
        for tensors, host in self._places:
            _lay(tensors, host.to(self._device, non_blocking=True, copy=True))
        _wait_for(self._device)
        self._offloaded = False

    def _copied(self, tensors: list[Tensor], frozen: bool, earlier: dict[int, Bytes]) -> _Place:
        """Return a copy, in the memory of an earlier one, which is still valid if the tensors are `frozen`."""
        storage = tensors[0].untyped_storage()
        here = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
        host = earlier.get(id(tensors[0]))
        if host is not None and host.numel() == here.numel():
            del earlier[id(tensors[0])]
            if frozen:
                return tensors, host
        else:
            host = torch.empty_like(here, device="cpu")
            lock(host, self._device)
        return tensors, host.copy_(here, non_blocking=True)


def _held(learner: Learner) -> Iterator[tuple[Tensor, bool]]:
    for network in learner.networks:
        for parameter in network.parameters():
            yield parameter, not parameter.requires_grad
            # bitsandbytes: the scales of a quantised weight are attached to the parameter
            yield from ((constant, True) for constant in tensors_in(getattr(parameter, "quant_state", None)))
        yield from ((buffer, False) for buffer in network.buffers())
    yield from ((value, False) for value in tensors_in(learner.optimizer.state))


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif type(value).__name__ == "QuantState":
        yield from tensors_in(vars(value))
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def _by_memory(held: Iterable[tuple[Tensor, bool]]) -> Iterator[tuple[list[Tensor], bool]]:
    """Group tensors that are stored in the same memory; if one of them may change, the memory is not frozen."""
    found: dict[int, dict[int, tuple[Tensor, bool]]] = {}
    for tensor, frozen in held:
        if tensor.untyped_storage().nbytes():
            found.setdefault(tensor.untyped_storage().data_ptr(), {})[id(tensor)] = (tensor, frozen)
    for together in found.values():
        yield [tensor for tensor, _ in together.values()], all(frozen for _, frozen in together.values())


def _lay(tensors: list[Tensor], memory: Bytes) -> None:
    for tensor in tensors:
        laid = torch.empty(0, dtype=tensor.dtype, device=memory.device)
        laid.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        tensor.data = laid
