"""Moves tensors between device and host memory while the tensor objects stay the same."""

from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor, UntypedStorage


class Evictable:
    """Tensors on one device whose contents can be moved to host memory.

    References to them stay valid: tied weights, views, modules. Their addresses change, so a CUDA graph that reads them
    must be captured again. The host copy is kept, so that the next eviction copies only what has changed since. torch's
    count of in-place changes decides this; it does not include changes through `.data`.
    """

    def __init__(self, tensors: Iterable[Tensor], *, pin: bool) -> None:
        """`pin`: page-lock the host copy, which a GPU reads several times as fast."""
        groups: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                groups.setdefault(storage.data_ptr(), []).append(tensor)
        self._groups = list(groups.values())
        self._storages = [group[0].untyped_storage() for group in self._groups]
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._copied = [-1] * len(self._groups)
        self._pin = pin
        self._host: Tensor | None = None
        self.nbytes = sum(self._sizes)
        """Bytes of all tensors."""

    def evict(self) -> None:
        """Copy what has changed to the host, and return the memory to torch's allocator.

        Raises MemoryError if the host has no room for the copy; nothing has changed then.
        """
        if self._host is None:
            self._host = _host_memory(self.nbytes, self._pin)
        for index, (piece, storage) in enumerate(zip(self._pieces(), self._storages, strict=True)):
            version = sum(tensor._version for tensor in self._groups[index])
            if version != self._copied[index]:
                piece.copy_(_bytes(storage), non_blocking=self._pin)
                self._copied[index] = version
        self._wait()
        for storage in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the memory again and fill it. Raises MemoryError if there is too little; nothing has changed
        then."""
        taken: list[UntypedStorage] = []
        for storage, size in zip(self._storages, self._sizes, strict=True):
            try:
                storage.resize_(size)
            except RuntimeError as error:  # what torch's allocators raise
                for other in taken:
                    other.resize_(0)
                raise MemoryError(f"{self.nbytes / 2**30:.1f} GiB are needed on {storage.device}: {error}") from error
            taken.append(storage)
        for storage, piece in zip(self._storages, self._pieces(), strict=True):
            _bytes(storage).copy_(piece, non_blocking=self._pin)
        self._wait()

    def _pieces(self) -> list[Tensor]:
        """Return the host's bytes of each storage."""
        assert self._host is not None
        return list(self._host.split(self._sizes)) if self._sizes else []

    def _wait(self) -> None:
        if self._storages and self._storages[0].device.type == "cuda":
            torch.cuda.synchronize(self._storages[0].device)


def _bytes(storage: UntypedStorage) -> Tensor:
    """Return a storage's bytes as a tensor with its own change counter."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_memory(size: int, pin: bool) -> Tensor:
    try:
        memory = torch.empty(size, dtype=torch.uint8)
    except RuntimeError as error:  # what torch's allocators raise
        raise MemoryError(f"{size / 2**30:.1f} GiB of the host's memory are needed for a copy: {error}") from error
    if pin and size:
        # torch's own pinned memory is allocated in powers of two: up to twice the requested size
        try:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
        except torch.cuda.CudaError as error:
            with suppress(RuntimeError):  # CUDA keeps the error as its last one, which the next kernel would raise
                torch.zeros(1, device="cuda")
            raise MemoryError(f"{size / 2**30:.1f} GiB of the host's memory cannot be page-locked: {error}") from error
    return memory
