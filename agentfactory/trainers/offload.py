"""Offload: what a learner keeps between two steps leaves its device for the host's memory, and comes back as it was."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from agentfactory.trainers.learner import Learner

Bytes = UInt8[Tensor, "bytes"]

_LEAST_LOCKED = 2**25 + 1
"""Bytes from which host memory is page-locked: smaller pieces could share a page, which is locked once only (glibc maps
pieces beyond 32 MiB by themselves)."""


@dataclass
class _Place:
    """One piece of memory: the tensors that lie in it, and its copy in the host's memory."""

    tensors: list[Tensor]
    frozen: bool
    """Nothing changes it: its copy stays right, and is kept while the device has it."""
    host: Bytes


class Offload:
    """Weights, buffers, constants of quantised weights, optimiser state and the reference of a learner.

    Tensors stay the objects that they are and change only the memory that they lie in, so that whoever holds them (an
    optimiser, tied layers, bitsandbytes) finds them in both places. An offloaded learner can be gathered and written to
    a checkpoint, but computes nothing. Between two steps there are no gradients. Host memory is page-locked where the
    device is a GPU, and stays taken from the first time on. Not for weights that several processes share.
    """

    def __init__(self, learner: Learner) -> None:
        """`learner` is on its device."""
        self._learner = learner
        self._device = learner.accelerator.device
        self._places: list[_Place] = []
        self._offloaded = False

    @torch.no_grad()
    def to_host(self) -> None:
        """Moves everything to the host's memory, and gives the device's back to the system. Raises torch.cuda.CudaError
        where host memory cannot be page-locked."""
        if self._offloaded:
            return
        earlier = {id(place.tensors[0]): place for place in self._places}
        held = ((tensor, frozen) for tensor, frozen in _held(self._learner) if tensor.device.type == self._device.type)
        self._places = [self._copied(tensors, frozen, earlier) for tensors, frozen in _by_memory(held)]
        for orphan in earlier.values():
            self._unlock(orphan.host)
        self._wait()
        for place in self._places:
            _lay(place.tensors, place.host)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()
        self._offloaded = True

    @torch.no_grad()
    def to_device(self) -> None:
        """Moves everything back to the device. Raises torch.OutOfMemoryError where it does not fit."""
        if not self._offloaded:
            return
        for place in self._places:
            _lay(place.tensors, place.host.to(self._device, non_blocking=True, copy=True))
        self._wait()
        self._offloaded = False

    def _copied(self, tensors: list[Tensor], frozen: bool, earlier: dict[int, _Place]) -> _Place:
        here = _bytes_of(tensors[0])
        known = earlier.get(id(tensors[0]))
        if known is not None and known.host.numel() == here.numel():
            del earlier[id(tensors[0])]
            if not frozen:
                known.host.copy_(here, non_blocking=True)
            return _Place(tensors, frozen, known.host)
        host = torch.empty_like(here, device="cpu")
        self._lock(host)
        host.copy_(here, non_blocking=True)
        return _Place(tensors, frozen, host)

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)

    def _lock(self, host: Bytes) -> None:
        # torch's own page-locked memory comes in powers of two, up to twice what is asked for
        if self._device.type == "cuda" and host.numel() >= _LEAST_LOCKED:
            status = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0))
            # CUDA keeps a failure as its last error: the next kernel would raise it in its own name
            torch.cuda.check_error(status)

    def _unlock(self, host: Bytes) -> None:
        if host.is_pinned():
            torch.cuda.cudart().cudaHostUnregister(host.data_ptr())


def _held(learner: Learner) -> Iterator[tuple[Tensor, bool]]:
    """Every tensor that is kept between two steps, and whether it is frozen."""
    for network in learner.networks:
        for parameter in network.parameters():
            yield parameter, not parameter.requires_grad
            # bitsandbytes: the scales of a quantised weight hang on the parameter
            yield from ((constant, True) for constant in _tensors(getattr(parameter, "quant_state", None)))
        yield from ((buffer, False) for buffer in network.buffers())
    yield from ((value, False) for value in _tensors(learner.optimizer.state))


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested dictionaries, lists and quantisation states."""
    if isinstance(value, Tensor):
        yield value
        return
    inside: Iterable[Any] = ()
    if isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, list | tuple):
        inside = value
    elif type(value).__name__ == "QuantState":
        inside = vars(value).values()
    for part in inside:
        yield from _tensors(part)


def _by_memory(held: Iterable[tuple[Tensor, bool]]) -> Iterator[tuple[list[Tensor], bool]]:
    """The tensors that lie in the same memory together; what one of them may change is not frozen."""
    found: dict[int, dict[int, tuple[Tensor, bool]]] = {}
    for tensor, frozen in held:
        if tensor.untyped_storage().nbytes():
            found.setdefault(tensor.untyped_storage().data_ptr(), {})[id(tensor)] = (tensor, frozen)
    for together in found.values():
        yield [tensor for tensor, _ in together.values()], all(frozen for _, frozen in together.values())


def _bytes_of(tensor: Tensor) -> Bytes:
    """The whole memory that a tensor lies in."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _lay(tensors: list[Tensor], memory: Bytes) -> None:
    """Puts tensors into other memory, each where it was in its own."""
    for tensor in tensors:
        laid = torch.empty(0, dtype=tensor.dtype, device=memory.device)
        laid.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        tensor.data = laid
