"""Device memory: eviction of tensors to the host and back, and buffers shared by the sender of weights.

A handle is pickled and base64-encoded, as in vLLM's `ipc` backend: {UUID of a GPU: torch's `reduce_tensor` of a
buffer of bytes}, or {"cpu": (name, bytes)} for a `SharedMemory`."""

import base64
import binascii
import io
import pickle
import sys
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import rebuild_cuda_tensor


class Evictable:
    """Tensors on one device whose contents can be moved to host memory. References to them stay valid, but their
    addresses change. The host copy is kept, and the next eviction copies only tensors that changed by torch's count of
    in-place changes, which does not include those through `.data`."""

    def __init__(self, tensors: Iterable[Tensor], *, pin: bool) -> None:
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
        """Copy changed tensors to the host, and return their memory to torch's allocator. Raises MemoryError, with
        nothing changed, if the host lacks room for the copy."""
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
        """Allocate the memory again and fill it. Raises MemoryError, with nothing changed, if there is too little."""
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
        assert self._host is not None
        return list(self._host.split(self._sizes)) if self._sizes else []

    def _wait(self) -> None:
        if self._storages and self._storages[0].device.type == "cuda":
            torch.cuda.synchronize(self._storages[0].device)


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_memory(size: int, pin: bool) -> Tensor:
    try:
        memory = torch.empty(size, dtype=torch.uint8)
    except RuntimeError as error:  # what torch's allocators raise
        raise MemoryError(f"{size / 2**30:.1f} GiB of the host's memory are needed for a copy: {error}") from error
    if pin and size:
        # torch allocates pinned memory in powers of two, up to twice the requested size
        try:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
        except torch.cuda.CudaError as error:
            with suppress(RuntimeError):  # clears CUDA's last error, which the next kernel would raise
                torch.zeros(1, device="cuda")
            raise MemoryError(f"{size / 2**30:.1f} GiB of the host's memory cannot be page-locked: {error}") from error
    return memory


CPU = "cpu"
"""Key of handles to host memory."""

_DEVICE_ARGUMENT = 6
"""Index of the device number in the result of `reduce_tensor`; the number is valid only for the sender."""


class SharedMemoryError(ValueError):
    """A handle that cannot be opened in this process."""


def memory_key(device: torch.device) -> str:
    """Return the key of handles to the device's memory: a GPU's UUID, or "cpu"."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else CPU


class SharedBuffers:
    """The sender's buffers, each mapped once for all parts of an update, because torch counts one release per handle.
    The sender writes one part after the other into the same few buffers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._opened: list[tuple[Any, SharedMemory | None, Tensor]] = []
        """(Handle, block of shared host memory, buffer)."""

    def open(self, pickled: str) -> UInt8[Tensor, "bytes"]:
        """Open a handle's buffer; it is the sender's memory, not a copy. Raises SharedMemoryError."""
        handles = _read(pickled)
        key = next((key for key in (memory_key(self._device), CPU) if key in handles), None)
        if key is None:
            raise SharedMemoryError(
                f"ipc_handles_pickled: the handle is for the memory of {', '.join(map(str, handles)) or 'nothing'}, "
                f"and the model is on {memory_key(self._device)}: trainer and server must use the same GPU"
            )
        for handle, _, opened in self._opened:
            if handle == handles[key]:
                return opened
        block = None
        if key == CPU:
            block, buffer = _open_block(handles[key])
        else:
            arguments = list(handles[key])
            arguments[_DEVICE_ARGUMENT] = self._device.index or 0
            buffer = rebuild_cuda_tensor(*arguments)
        self._opened.append((handles[key], block, buffer))
        return buffer

    def close(self) -> None:
        """Release the buffers to the sender."""
        blocks = [block for _, block, _ in self._opened if block is not None]
        self._opened.clear()
        for block in blocks:
            block.close()


def _open_block(handle: Any) -> tuple[SharedMemory, Tensor]:
    match handle:
        case (str(name), int(size)):
            pass
        case _:
            raise SharedMemoryError(f"ipc_handles_pickled: {handle!r} is not (name, bytes)")
    try:
        block = _attach(name)
    except (OSError, ValueError) as error:
        raise SharedMemoryError(
            f"ipc_handles_pickled: there is no shared memory {name} on the server's machine ({error}): trainer and "
            "server must run on the same machine, with the same /dev/shm"
        ) from error
    if block.size < size:
        block.close()
        raise SharedMemoryError(f"ipc_handles_pickled: the shared memory {name} has {block.size} bytes, not {size}")
    return block, torch.frombuffer(block.buf, dtype=torch.uint8, count=size)


def _attach(name: str) -> SharedMemory:
    if sys.version_info >= (3, 13):
        return SharedMemory(name, track=False)
    # before 3.13, Python treats the block as owned by this process, and would remove it when the process ends
    register, resource_tracker.register = resource_tracker.register, lambda *_: None
    try:
        return SharedMemory(name)
    finally:
        resource_tracker.register = register


class _Handles(pickle.Unpickler):
    """An unpickler for handles only: plain pickle would run arbitrary code."""

    _KNOWN = {
        ("torch", "Tensor"): torch.Tensor,
        ("torch", "Size"): torch.Size,
        ("torch", "uint8"): torch.uint8,
        ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
        ("torch.storage", "UntypedStorage"): torch.storage.UntypedStorage,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a handle")
        return self._KNOWN[module, name]


def _read(pickled: str) -> dict[Any, Any]:
    try:
        handles = _Handles(io.BytesIO(base64.b64decode(pickled, validate=True))).load()
    except (binascii.Error, pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError) as error:
        raise SharedMemoryError(f"ipc_handles_pickled: cannot be read: {error}") from error
    if not isinstance(handles, dict):
        raise SharedMemoryError(f"ipc_handles_pickled: got {type(handles).__name__}, not a dictionary")
    return handles
