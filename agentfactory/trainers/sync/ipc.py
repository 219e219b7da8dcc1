"""Sync by shared memory: full weights from trainer to server on one GPU, or between processes on one machine's CPU."""

import base64
import pickle
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import cycle
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from agentfactory.rollout.embedded.shared_memory import CPU, memory_key
from agentfactory.trainers.policy import Policy
from agentfactory.trainers.server_control import ServerControl, SyncError
from agentfactory.trainers.sync.content import Content, Served
from agentfactory.trainers.sync.full import holds_full_weights, update_full_weights
from agentfactory.trainers.sync.protocol import SyncReport, base_model, find, on_each

BUFFER_BYTES = 2**27
"""Size of each of two shared buffers, unless one weight is larger: the trainer fills one while the server reads the
other. They exist only during a transfer, in addition to both models."""
_PARTS = 8
"""Parts in which a small model travels, so that filling and reading overlap there, too."""

_SHARED_MEMORY = Path("/dev/shm")


class Buffer:
    """Memory that a server can open. Raises SyncError if there is too little."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        """Allocates `capacity` bytes on `device`."""
        self.handles: dict[str, tuple[Any, ...]]
        """The data with which a server opens it, under the key of the memory."""
        self._block: SharedMemory | None = None
        self._bytes: Tensor
        if device.type == "cuda":
            self._bytes = torch.empty(capacity, dtype=torch.uint8, device=device)
            self.handles = {memory_key(device): reduce_tensor(self._bytes)[1]}
        else:
            _check_shared_memory(capacity)
            self._block = SharedMemory(create=True, size=capacity)
            self._bytes = torch.frombuffer(self._block.buf, dtype=torch.uint8, count=capacity)
            self.handles = {CPU: (self._block.name, capacity)}

    def fill(self, part: list[tuple[str, Tensor]]) -> None:
        """Writes tensors one after the other, from any device; returns when they can be read."""
        start = 0
        for _, value in part:
            flat = value.detach().contiguous().view(-1).view(torch.uint8)
            self._bytes[start : start + len(flat)].copy_(flat)
            start += len(flat)
        if self._bytes.is_cuda:
            torch.cuda.synchronize(self._bytes.device)

    def close(self) -> None:
        """Returns the memory to the system: the server may be waiting for it."""
        del self._bytes
        if self._block is not None:
            self._block.close()
            self._block.unlink()
        else:
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


class IpcSync:
    """Sends full weights in parts through memory that trainer and server share, in the packed mode of vLLM's `ipc`
    weight transfer engine: vLLM servers are started with `--weight-transfer-config '{"backend": "ipc"}'`.

    A trainer on a GPU shares a buffer of this GPU (CUDA IPC, untested on a GPU); a trainer on a CPU shares a block of
    `multiprocessing.shared_memory`, which the embedded engine reads. The policy's weights may be on another device than
    the buffer: those of an offloaded trainer go from the CPU to a GPU. Proof: a server echoes the version, and its
    checksum of every weight equals ours.
    """

    def __init__(
        self,
        servers: list[ServerControl],
        prefix: str = "",
        keep_caches: bool = False,
        device: torch.device | None = None,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """Raises SyncError if a server cannot open this process's memory. `device` is the buffer's, by default the
        current GPU, or the CPU if there is none. Versions are called {prefix}{version}. `keep_caches`: see
        update_full_weights."""
        self._servers = servers
        self._prefix = prefix
        self._keep_caches = keep_caches
        self._buffer_bytes = buffer_bytes
        gpu = torch.cuda.is_available()
        self._device = device or (torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu"))
        self._model = base_model(servers)
        self._version = 0
        # copy of the last pushed version for a server that is restarted; the policy's own weights keep changing
        self._copy: dict[str, Tensor] = {}
        self._served: Served = {}
        self._digest = ""
        for server in servers:
            self._init(server)

    def push(self, version: int, policy: Policy, state: Mapping[str, Tensor]) -> SyncReport:
        """See WeightSync."""
        started = time.perf_counter()
        content = Content(state, self._served)
        if self._copy.keys() != state.keys():
            self._copy = {name: torch.empty_like(value, device="cpu") for name, value in state.items()}
        self._version = version
        with ThreadPoolExecutor(1, "copy") as pool:
            copied = pool.submit(self._keep, state)
            on_each(self._servers, lambda server: self._update(server, content))
        copied.result()
        self._served = content.served
        return self._report(started)

    def restore(self, url: str) -> SyncReport:
        """See WeightSync."""
        assert self._copy
        started = time.perf_counter()
        server, content = find(self._servers, url), Content(self._copy)
        if not holds_full_weights(server, self._label, content):
            self._update(server, content)
        return self._report(started)

    def close(self) -> None:
        """See WeightSync. Nothing is shared between two pushes."""

    def _keep(self, state: Mapping[str, Tensor]) -> None:
        for name, value in state.items():
            self._copy[name].copy_(value)

    def _init(self, server: ServerControl) -> None:
        answer = server.post("/init_weight_transfer_engine", {"init_info": {"packed": True}})
        own = memory_key(self._device)
        readable = answer.get("memory")  # vLLM does not report it; it reads its GPUs' memory
        if readable is None and own == CPU:
            raise SyncError(
                f"sync.backend: ipc: {server.url} takes weights from a GPU's memory only, and the trainer has no GPU; "
                "use sync.backend: file"
            )
        if readable is not None and own not in readable:
            raise SyncError(
                f"sync.backend: ipc: {server.url} can read the memory of {', '.join(readable)}, and the trainer's is "
                f"{own}; let both use one GPU, or use sync.backend: file"
            )

    def _update(self, server: ServerControl, content: Content) -> None:
        # every time: a server that was restarted since the last version is not initialised
        self._init(server)
        state = content.state
        largest = max(value.nbytes for value in state.values())
        total = sum(value.nbytes for value in state.values())
        capacity = max(largest, min(total // _PARTS, self._buffer_bytes))
        with ExitStack() as stack:
            # own buffers for each server: torch counts one opening for each handle
            buffers = [stack.enter_context(closing(Buffer(capacity, self._device))) for _ in range(2)]
            pool = stack.enter_context(ThreadPoolExecutor(1, "parts"))

            def transfer() -> None:
                read: Future[Any] | None = None
                for part, buffer in zip(parts(state, capacity), cycle(buffers), strict=False):
                    buffer.fill(part)
                    if read is not None:
                        read.result()
                    # answers after it has copied the part
                    read = pool.submit(server.post, "/update_weights", {"update_info": update_info(part, buffer)})
                if read is not None:
                    read.result()

            self._digest = update_full_weights([server], self._label, content, transfer, self._keep_caches)

    @property
    def _label(self) -> str:
        return f"{self._prefix}{self._version}"

    def _report(self, started: float) -> SyncReport:
        size = sum(value.nbytes for value in self._copy.values())
        salt = self._label if self._keep_caches else None
        seconds = time.perf_counter() - started
        return SyncReport(self._version, self._label, self._model, size, seconds, self._digest, salt)


def parts(state: dict[str, Tensor], capacity: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields weights in parts of at most `capacity` bytes; no single weight may exceed it. Wide dtypes come first, so
    that each tensor begins at a multiple of its own width."""
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name, value in sorted(state.items(), key=lambda entry: -entry[1].itemsize):
        if part and size + value.nbytes > capacity:
            yield part
            part, size = [], 0
        part.append((name, value))
        size += value.nbytes
    if part:
        yield part


def update_info(part: list[tuple[str, Tensor]], buffer: Buffer) -> dict[str, Any]:
    """Returns what the receiver needs to know of a part in a buffer."""
    return {
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(buffer.handles)).decode("ascii"),
        "names": [name for name, _ in part],
        "dtype_names": [str(value.dtype).removeprefix("torch.") for _, value in part],
        "shapes": [list(value.shape) for _, value in part],
        "tensor_sizes": [value.nbytes for _, value in part],
    }


def _check_shared_memory(capacity: int) -> None:
    # a write beyond the available memory kills the process by a signal; a container has 64 MiB by default
    free = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else capacity
    if free < capacity:
        raise SyncError(
            f"sync.backend: ipc: {_SHARED_MEMORY} has {free / 2**20:.0f} MiB free, and weights travel in parts of "
            f"{capacity / 2**20:.0f} MiB; enlarge it (docker run --shm-size), or use sync.backend: file"
        )
