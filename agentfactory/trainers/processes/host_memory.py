"""Host memory for copies of a device's tensors. For a GPU it is page-locked, which makes copies several times as
fast."""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import UInt8
from torch import Tensor

Bytes = UInt8[Tensor, "bytes"]

_LEAST_LOCKED = 2**25 + 1
"""Minimum number of bytes to page-lock: smaller pieces could share a page, which can be locked only once (glibc maps
pieces beyond 32 MiB separately)."""
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
        """`device` is the device of the tensors."""
        self._device = device
        self._memory: Bytes = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def copy(self, like: Sequence[Tensor], tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return copies of `tensors` in host memory, each with its own storage; they are valid until the next call.
        `like` has their shapes and dtypes. Raises torch.cuda.CudaError if the memory cannot be page-locked."""
        starts = [0]
        for tensor in like:
            starts.append(starts[-1] + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
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
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)
        return copies

    def free(self) -> None:
        """Free the memory; copies must not be used afterwards."""
        unlock(self._memory)
        self._memory = torch.empty(0, dtype=torch.uint8)
