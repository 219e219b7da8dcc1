"""Two questions about the weight sync that only a GPU answers, in seconds."""

import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import psutil
import torch
from torch import Tensor

from agentfactory.trainers.sync.ipc_sync import IpcSync
from agentfactory.trainers.sync.nccl_sync import VllmGroup, packed
from agentfactory.trainers.update.offload import HostBuffer
from benchmarks.gpu_parts.findings import DEVICE, GPU, Findings


class CopyingCommunicator:
    """In place of vLLM's PyNcclCommunicator: copies on the given stream; by default, as that does, on one that vLLM's
    `current_stream()` makes for each thread."""

    def __init__(self) -> None:
        self.received: list[Tensor] = []
        self._own = threading.local()

    def broadcast(self, buffer: Tensor, src: int, stream: Any = None) -> None:
        """Receive a buffer."""
        if GPU and stream is None:
            if not hasattr(self._own, "stream"):
                self._own.stream = torch.cuda.Stream()
                self._own.stream.wait_stream(torch.cuda.current_stream())
                torch.cuda.set_stream(self._own.stream)
            stream = self._own.stream
        with torch.cuda.stream(stream) if GPU else nullcontext():
            self.received.append(buffer.clone())


def race(findings: Findings) -> None:
    """Count the broadcasts that read weights before the gather thread has made them: on vLLM's default stream, and on
    the stream that the trainer's group names."""
    count, size = (32, 2**24) if GPU else (4, 2**10)
    for way in ("vLLM's default", "the trainer's group"):
        communicator = CopyingCommunicator()
        group = VllmGroup.__new__(VllmGroup)
        group._communicator = communicator

        def broadcast(buffer: Tensor, way: str = way, of: Any = communicator, group: Any = group) -> None:
            if GPU and way == "the trainer's group":
                group.broadcast(buffer)
                return
            of.broadcast(buffer, src=0)
            if GPU:
                torch.cuda.current_stream().synchronize()

        def make(number: int) -> Tensor:
            if GPU:
                torch.cuda._sleep(20_000_000)  # an all-gather: queued, and not waited for
            return torch.full((size,), float(number), device=DEVICE, dtype=torch.bfloat16)

        def weights(pool: ThreadPoolExecutor) -> Iterator[tuple[str, Tensor]]:
            for number in range(1, count + 1):
                yield f"w{number}", pool.submit(make, number).result()

        def send() -> None:
            with ThreadPoolExecutor(1) as pool:
                for buffer in packed(weights(pool), 4 * size):
                    broadcast(buffer)

        thread = threading.Thread(target=send)
        thread.start()
        thread.join()
        if GPU:
            torch.cuda.synchronize()
        values = [buffer.view(torch.bfloat16).float().unique() for buffer in communicator.received]
        wrong = sum(not bool(((each >= 1) & (each <= count) & (each == each.round())).all()) for each in values)
        findings.add(way, {"buffers": len(values), "wrong": wrong})


def receive(pipe: Connection) -> None:
    """Open handles as vLLM 0.32's PackedBufferImporter does, which keeps the last one open until the update ends."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    held: Any = None
    while (handle := pipe.recv()) is not None:
        if handle == "finish":
            held = None
        elif held is None or held[0] != handle:
            held = None
            held = (handle, rebuild_cuda_tensor(*handle) if GPU else SharedMemory(handle[0]))
        if held is not None and GPU:
            held[1].clone()
            torch.cuda.synchronize()
        pipe.send("done")


def leak(findings: Findings) -> None:
    """The trainer's memory after each of six `ipc` transfers to a process that opens handles as vLLM does."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs,), daemon=True)
    process.start()
    theirs.close()

    def tell(message: object) -> None:
        ours.send(message)
        ours.recv()

    size = 2**24 if GPU else 2**12
    state = {f"w{number}": torch.randn(size, device=DEVICE).bfloat16() for number in range(16)}
    # a sync asks its servers for their model; there are none here
    sync, after = IpcSync.__new__(IpcSync), list[float]()
    sync._copy, sync._shared, sync._buffer_bytes, sync._device = {}, [], 8 * size, DEVICE
    sync._host = HostBuffer(DEVICE)
    if not GPU:
        sync._allocate(state)
    for _ in range(6):
        with ExitStack() as stack:
            copied = sync._keep(state, stack.enter_context(ThreadPoolExecutor(1)))
            for _, buffer in stack.enter_context(sync._filled(state, copied)):
                [handle] = buffer.handles.values()
                # the receiver's number of the device, which is the seventh entry of a GPU's handle
                tell((*handle[:6], DEVICE.index, *handle[7:]) if GPU else handle)
            tell("finish")
        after.append(held_mib())
        findings.add("MiB after each push", after)
    ours.send(None)
    process.join(10)
    findings.add("leaks", after[-1] > after[1] + 1)


def held_mib() -> float:
    """Return the MiB that torch has allocated on the GPU; on a CPU, those of this process."""
    return torch.cuda.memory_allocated() / 2**20 if GPU else psutil.Process().memory_info().rss / 2**20
