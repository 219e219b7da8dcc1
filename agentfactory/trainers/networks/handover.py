"""Work on a GPU's weights in another thread. A thread queues its work on its current CUDA stream, and a signal of the
CPU, such as a future's result, does not order it before or after the work on another thread's stream."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


def queued() -> "torch.cuda.Event | None":
    """Return the end of all that this thread has queued on its current stream; None if no GPU is used."""
    return torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None


def wait_for(end: "torch.cuda.Event | None") -> None:
    """Let what this thread queues from now on begin after `end`."""
    if end is not None:
        torch.cuda.current_stream().wait_event(end)


class HandedOver(Generic[Result]):
    """A call in another thread, which begins after what this thread has queued. What the thread that takes its result
    queues from then on begins after what the call has queued."""

    def __init__(self, pool: Executor, call: Callable[[], Result]) -> None:
        before = queued()

        def run() -> "tuple[Result, torch.cuda.Event | None]":
            wait_for(before)
            return call(), queued()

        self._future: Future[tuple[Result, torch.cuda.Event | None]] = pool.submit(run)

    def result(self) -> Result:
        """Wait for the call in the CPU's order, and let this thread's stream wait for its work. Raise its error."""
        value, end = self._future.result()
        wait_for(end)
        return value
