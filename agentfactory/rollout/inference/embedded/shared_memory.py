"""Memory that the sender of weights shares with this process: a GPU's through CUDA IPC, the machine's by name.

A handle is pickled and base64-encoded, as in vLLM 0.32's `ipc` backend: {UUID of a GPU: result of
`torch.multiprocessing.reductions.reduce_tensor` for a buffer of bytes}. In addition, {"cpu": (name, bytes)} is a block
of `multiprocessing.shared_memory`.
"""

import base64
import binascii
import io
import pickle
import sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

CPU = "cpu"
"""Key of handles to the machine's own memory."""

_DEVICE_ARGUMENT = 6
"""Index of the device number in the result of `reduce_tensor`; the number is valid only for the sender."""


class SharedMemoryError(ValueError):
    """A handle cannot be opened here."""


def memory_key(device: torch.device) -> str:
    """Return the key of handles to a device's memory: a GPU's UUID, or "cpu"."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else CPU


class SharedBuffers:
    """The sender's buffers, each mapped once for all parts of an update: torch counts one release for each handle, and
    the sender writes one part after the other into the same few buffers. CUDA: untested on a GPU."""

    def __init__(self, device: torch.device) -> None:
        """`device` is the model's device."""
        self._device = device
        self._opened: list[tuple[Any, SharedMemory | None, Tensor]] = []
        """The handles, with the blocks that the machine's memory is mapped by."""

    def open(self, pickled: str) -> UInt8[Tensor, "bytes"]:
        """Open the buffer behind a handle; it is the sender's memory, not a copy. Raises SharedMemoryError."""
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
            "server must run on the same one, and see the same /dev/shm"
        ) from error
    if block.size < size:
        block.close()
        raise SharedMemoryError(f"ipc_handles_pickled: the shared memory {name} has {block.size} bytes, not {size}")
    return block, torch.frombuffer(block.buf, dtype=torch.uint8, count=size)


def _attach(name: str) -> SharedMemory:
    if sys.version_info >= (3, 13):
        return SharedMemory(name, track=False)
    # before 3.13 Python treats the block as this process's own, and would remove it when this process ends
    register, resource_tracker.register = resource_tracker.register, lambda *_: None
    try:
        return SharedMemory(name)
    finally:
        resource_tracker.register = register


class _Handles(pickle.Unpickler):
    """Unpickles only what handles contain: plain pickle would run arbitrary code."""

    _KNOWN = {
        ("torch", "Tensor"): torch.Tensor,
        ("torch", "Size"): torch.Size,
        ("torch", "uint8"): torch.uint8,
        ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
        ("torch.storage", "UntypedStorage"): torch.storage.UntypedStorage,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a handle")
        return self._KNOWN[module, name]


def _read(pickled: str) -> dict[Any, Any]:
    try:
        handles = _Handles(io.BytesIO(base64.b64decode(pickled, validate=True))).load()
    except (binascii.Error, pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError) as error:
        raise SharedMemoryError(f"ipc_handles_pickled: cannot be read: {error}") from error
    if not isinstance(handles, dict):
        raise SharedMemoryError(f"ipc_handles_pickled: got {type(handles).__name__}, not a dictionary")
    return handles
