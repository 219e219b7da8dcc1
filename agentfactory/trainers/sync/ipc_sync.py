"""Sync by shared memory: full weights from trainer to server on one GPU, or between processes on one machine's CPU."""

import base64
import pickle
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from agentfactory.rollout.inference.embedded.device_memory import CPU, memory_key
from agentfactory.trainers.networks.handover import HandedOver
from agentfactory.trainers.networks.policy import Policy
from agentfactory.trainers.sync.content_proof import Content
from agentfactory.trainers.sync.full_sync import FullSync, described, holds_full_weights
from agentfactory.trainers.sync.server_control import ServerControl, SyncError
from agentfactory.trainers.sync.weight_sync import SyncReport, find, on_each
from agentfactory.trainers.update.offload import HostBuffer

BUFFER_BYTES = 2**27
"""Bytes of a shared buffer, unless one weight is larger."""
_PARTS = 8
"""Approximate number of parts of a small model, so that filling and reading overlap."""

_SHARED_MEMORY = Path("/dev/shm")

Part = list[tuple[str, Tensor]]


class Buffer:
    """Memory that a server can open, of `capacity` bytes on `device`. Raises SyncError if there is too little."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.handles: dict[str, tuple[Any, ...]]
        """The handle with which a server opens the buffer, by key of the memory."""
        self._block: SharedMemory | None = None
        self._bytes: Tensor
        if device.type == "cuda":
            self._bytes = torch.empty(capacity, dtype=torch.uint8, device=device)
            self.handles = {memory_key(device): reduce_tensor(self._bytes)[1]}
        else:
            self._block = SharedMemory(create=True, size=capacity)
            self._bytes = torch.frombuffer(self._block.buf, dtype=torch.uint8, count=capacity)
            self.handles = {CPU: (self._block.name, capacity)}

    def fill(self, part: Part) -> None:
        """Write tensors one after the other, from any device; return when they can be read."""
        start = 0
        for _, value in part:
            flat = value.detach().contiguous().view(-1).view(torch.uint8)
            self._bytes[start : start + len(flat)].copy_(flat)
            start += len(flat)
        if self._bytes.is_cuda:
            torch.cuda.synchronize(self._bytes.device)

    def views(self, part: Part) -> list[Tensor]:
        """Return the tensors that `fill` writes, as views of this memory, aligned as by `parts`."""
        sizes = [value.nbytes for _, value in part]
        places = self._bytes[: sum(sizes)].split(sizes)
        return [place.view(value.dtype).view(value.shape) for (_, value), place in zip(part, places, strict=True)]

    def close(self) -> None:
        """Return the memory to the system. No view may exist any more."""
        del self._bytes
        if self._block is not None:
            self._block.close()
            self._block.unlink()
        else:
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


class IpcSync(FullSync):
    """A sync backend for full weights in parts through memory shared by trainer and server, in the packed mode of
    vLLM's `ipc` weight transfer engine. The proof is that of FileSync.

    A trainer on a GPU shares a buffer of it during an update (CUDA IPC), and keeps a copy of the version in page-locked
    host memory. A trainer on a CPU shares blocks of `multiprocessing.shared_memory`, which serve as the copy."""

    def __init__(
        self,
        servers: list[ServerControl],
        prefix: str = "",
        keep_caches: bool = False,
        device: torch.device | None = None,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """`device` is the buffer's, by default the current GPU, or the CPU. Raise SyncError if a server cannot read
        it."""
        super().__init__(servers, prefix, keep_caches)
        self._buffer_bytes = buffer_bytes
        gpu = torch.cuda.is_available()
        self._device = device or (torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu"))
        self._version = 0
        # a copy of the last pushed version for restarted servers, since the policy's own weights keep changing
        self._copy: dict[str, Tensor] = {}
        self._host = HostBuffer(self._device)
        self._shared: list[Buffer] = []
        """On a CPU: the copy's memory, one block per part. For a GPU it is in `_host`."""
        for server in servers:
            self._init(server)

    def push(self, version: int, policy: Policy, state: Mapping[str, Tensor]) -> SyncReport:
        started = time.perf_counter()
        content = Content(state, self._served)
        if self._device.type == "cpu" and self._copy.keys() != state.keys():
            self._allocate(content.state)
        self._version = version
        with ThreadPoolExecutor(1, "copy") as pool:
            copied = self._keep(content.state, pool)
            on_each(self._servers, lambda server: self._update(server, content, copied))
        for part in copied:
            part.result()
        self._served = content.served
        return self._report(version, self._size, started)

    def restore(self, url: str) -> SyncReport:
        assert self._copy
        started = time.perf_counter()
        server, content = find(self._servers, url), Content(self._copy)
        if not holds_full_weights(server, self._label(self._version), content):
            self._update(server, content, [])
        return self._report(self._version, self._size, started)

    def close(self) -> None:
        self._copy = {}
        self._host.free()
        while self._shared:
            self._shared.pop().close()

    def _allocate(self, state: dict[str, Tensor]) -> None:
        self.close()
        _check_shared_memory(sum(value.nbytes for value in state.values()))
        for part in self._parts(state):
            self._shared.append(Buffer(sum(value.nbytes for _, value in part), self._device))
            self._copy |= zip([name for name, _ in part], self._shared[-1].views(part), strict=True)

    def _keep(self, state: dict[str, Tensor], pool: ThreadPoolExecutor) -> list[HandedOver[None]]:
        if self._device.type == "cpu":
            pairs = zip(self._shared, self._parts(state), strict=True)
            return [HandedOver(pool, partial(buffer.fill, part)) for buffer, part in pairs]

        def copy() -> None:
            copies = self._host.copy([*state.values()], state.values())
            self._copy = dict(zip(state, copies, strict=True))

        return [HandedOver(pool, copy)]

    def _parts(self, state: dict[str, Tensor]) -> list[Part]:
        sizes = [value.nbytes for value in state.values()]
        return list(parts(state, max(*sizes, min(sum(sizes) // _PARTS, self._buffer_bytes))))

    @contextmanager
    def _filled(
        self, state: dict[str, Tensor], copied: list[HandedOver[None]]
    ) -> Iterator[Iterator[tuple[Part, Buffer]]]:
        """Yield an iterator of a version's parts, each in a buffer that is read before the next part is taken."""
        found = self._parts(state)
        with ExitStack() as stack:
            if self._device.type == "cpu":
                buffers = self._shared
            else:
                # one for all parts, because vLLM keeps only the last one open, and torch pairs each opening of a handle
                # with one release; one per server, because it counts one opening per handle
                capacity = max(sum(value.nbytes for _, value in part) for part in found)
                buffers = [stack.enter_context(closing(Buffer(capacity, self._device)))] * len(found)

            def fill() -> Iterator[tuple[Part, Buffer]]:
                for number, (part, buffer) in enumerate(zip(found, buffers, strict=True)):
                    if self._device.type != "cpu":
                        buffer.fill(part)
                    elif copied:
                        copied[number].result()
                    yield part, buffer

            yield fill()

    def _init(self, server: ServerControl) -> None:
        answer = server.post("/init_weight_transfer_engine", {"init_info": {"packed": True}})
        own = memory_key(self._device)
        readable = answer.get("memory")  # not reported by vLLM, which reads its GPUs' memory
        if own not in readable if readable is not None else own == CPU:
            places = "GPUs" if readable is None else ", ".join(readable)
            problem = f"{server.url} can read the memory of {places}, and the trainer's is {own}"
            raise SyncError(f"sync.backend: ipc: {problem}; let both use one GPU, or use sync.backend: file")

    def _update(self, server: ServerControl, content: Content, copied: list[HandedOver[None]]) -> None:
        # every time, because a server restarted since the last version is not initialised
        self._init(server)

        # open until /finish_weight_update, when the server releases it
        with self._filled(content.state, copied) as filled:

            def transfer() -> None:
                for part, buffer in filled:
                    # the server responds after it has copied the part
                    server.post("/update_weights", {"update_info": update_info(part, buffer)})

            self._load([server], self._version, content, transfer)

    @property
    def _size(self) -> int:
        return sum(value.nbytes for value in self._copy.values())


def parts(state: dict[str, Tensor], capacity: int) -> Iterator[Part]:
    """Yield weights in parts of at most `capacity` bytes, which no single weight may exceed. Wide dtypes come first, so
    each tensor begins at a multiple of its dtype's width."""
    part: Part = []
    size = 0
    for name, value in sorted(state.items(), key=lambda entry: -entry[1].itemsize):
        if part and size + value.nbytes > capacity:
            yield part
            part, size = [], 0
        part.append((name, value))
        size += value.nbytes
    if part:
        yield part


def update_info(part: Part, buffer: Buffer) -> dict[str, Any]:
    """Return the description of a part in a buffer for the receiver."""
    handles = base64.b64encode(pickle.dumps(buffer.handles)).decode("ascii")
    sizes = [value.nbytes for _, value in part]
    return {"ipc_handles_pickled": handles, **described(part), "tensor_sizes": sizes}


def _check_shared_memory(size: int) -> None:
    # writing beyond the available memory would kill the process by a signal; containers have 64 MiB by default
    free = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else size
    if free < size:
        problem = f"{_SHARED_MEMORY} has {free >> 20} MiB free, and the weights take {size >> 20} MiB there"
        fix = "enlarge it (docker run --shm-size), or use sync.backend: file"
        raise SyncError(f"sync.backend: ipc: {problem}; {fix}")
