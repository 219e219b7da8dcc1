"""Orderly early stopping: rank 0 gets a signal or a request, and all ranks stop between the same two steps."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

import psutil
from accelerate import Accelerator

from agentfactory.base.processes import parent_watch
from agentfactory.base.processes.supervised import Signalled
from agentfactory.base.user_code import watch
from agentfactory.trainers.config import Symptom
from agentfactory.trainers.processes.accelerator import of_rank_0

Result = TypeVar("Result")
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def name_of(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class _WaitCutShort(Exception):
    """Raised by the signal handler, only during a wait."""


class Stop:
    """The decision to end the run early: after SIGTERM or Ctrl-C (once it listens), or because of a symptom
    (`train.stop_when`). A signal interrupts waits, but no update or checkpoint; before the first step, and as the
    second one, it ends the process."""

    def __init__(self) -> None:
        self.agreed_on: signal.Signals | Symptom | None = None
        """The reason for stopping that all ranks have agreed on."""
        self.asked: Symptom | None = None
        """The symptom because of which the run will stop after the current step."""
        self.heard: signal.Signals | None = None
        """The signal that this process has received, agreed on or not."""
        self._listens = False
        self._follows: threading.Event | None = None
        self._stepping = False
        self._waiting = False
        self._on_signal: Callable[[], None] = lambda: None

    def listen(self, accelerator: Accelerator, on_signal: Callable[[], None]) -> None:
        """Make rank 0 handle signals from now on, and call `on_signal` when it will stop for one; the other ranks exit
        when rank 0 is gone, if it is on their machine. Every process calls it."""
        self._listens, self._on_signal = True, on_signal
        watch.tell("reacts")
        if accelerator.is_main_process:
            for number in SIGNALS:
                signal.signal(number, self._hear)
        if accelerator.num_processes > 1:
            first = of_rank_0((os.getpid(), psutil.Process().create_time()))
            # on other machines, its number is another process's or nobody's
            if not accelerator.is_main_process and os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
                self._follows = parent_watch.follow(*first)

    def ask(self, symptom: Symptom) -> None:
        """Stop after the current step; rank 0 calls it."""
        self.asked = self.asked or symptom

    def wait_for(self, call: Callable[[], Result]) -> Result | None:
        """Return the result of `call`, which waits for other processes, or None at a signal."""
        try:
            self._waiting = True
            try:
                return None if self.heard else call()
            finally:
                self._waiting = False
        except _WaitCutShort:
            return None

    def agreed(self, accelerator: Accelerator) -> bool:
        """Return rank 0's decision in all ranks; every process calls it at the start of each step."""
        if self._listens and not self._stepping and not accelerator.is_main_process:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        self._stepping = True
        self.agreed_on = of_rank_0(self.heard or self.asked)
        return self.agreed_on is not None

    def end(self, accelerator: Accelerator) -> None:
        """End the run, so that ranks can exit at different times. Every process calls it."""
        if self._follows is not None:
            self._follows.set()
        accelerator.wait_for_everyone()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.heard is not None:
            # the user is impatient; a half-written checkpoint does not have its final name yet
            watch.tell("returned", 128 + number)
            os._exit(128 + number)
        if not self._stepping:
            raise Signalled(number)
        self.heard = signal.Signals(number)
        self._on_signal()
        if self._waiting:
            self._waiting = False
            raise _WaitCutShort
