"""A signal ends a run between two steps: it interrupts waits, but not work."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from accelerate import Accelerator

from agentfactory.base.processes import supervised
from agentfactory.trainers.loop.stopping import Stop
from tests.trainers.conftest import on_cpu

pytestmark = pytest.mark.processes

Signalled = Callable[..., tuple[str, int]]


Seconds = dict[int, float]
"""Seconds by step; 0 for steps that are not listed."""


def loop(folder: Path, accelerator: Accelerator, waits: Seconds, works: Seconds) -> str:
    stop = Stop()
    stop.listen(accelerator, (folder / "heard").touch)
    for step in range(3):

        def wait(step: int = step) -> str:
            (folder / f"waits-{step}").touch()
            time.sleep(waits.get(step, 0.0))
            return "a batch"

        given = stop.wait_for(wait)
        if stop.agreed(accelerator):
            break
        (folder / f"works-{step}").touch()
        until = time.monotonic() + works.get(step, 0.0)
        while time.monotonic() < until:
            time.sleep(0.01)
        (folder / f"worked-{step}").touch()
    assert stop.wait_for(lambda: "late") == (None if stop.agreed_on else "late")
    return f"step {step}, given {given}, stopped by {stop.agreed_on and stop.agreed_on.name}"


@pytest.fixture
def signalled(tmp_path: Path) -> Signalled:
    """Return the loop's result in a separate process after a signal at an event, and its exit status."""

    def run(event: str, number: signal.Signals, waits: Seconds, works: Seconds, times: int = 1) -> tuple[str, int]:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                (tmp_path / "said").write_text(loop(tmp_path, on_cpu(), waits, works))
                status = 0
            except supervised.Signalled as error:
                status = error.status
            finally:
                os._exit(status)
        while not (tmp_path / event).exists():
            time.sleep(0.01)
        started = time.monotonic()
        for _ in range(times):
            time.sleep(0.1)
            os.kill(child, number)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert time.monotonic() - started < 20
        return (tmp_path / "said").read_text() if (tmp_path / "said").exists() else "", status

    return run


TERM = signal.SIGTERM


@pytest.mark.parametrize(
    ("event", "number", "waits", "works", "times", "told", "done", "undone"),
    [
        # a wait is cut short
        ("waits-1", TERM, {1: 60.0}, {}, 1, ("step 1, given None, stopped by SIGTERM", 0), "heard worked-0", "works-1"),
        # work is finished
        ("works-1", TERM, {}, {1: 2.0}, 1, ("step 2, given None, stopped by SIGTERM", 0), "worked-1", "works-2"),
        # a second signal ends it at once
        ("works-0", TERM, {}, {0: 60.0}, 2, ("", 143), "heard", "worked-0"),
        # before the first step there is nothing to finish
        ("waits-0", TERM, {0: 60.0}, {}, 1, ("", 143), "waits-0", "heard"),
    ],
)
def test_a_signal(
    signalled: Signalled,
    tmp_path: Path,
    event: str,
    number: signal.Signals,
    waits: Seconds,
    works: Seconds,
    times: int,
    told: tuple[str, int],
    done: str,
    undone: str,
) -> None:
    assert signalled(event, number, waits, works, times) == told
    assert all((tmp_path / name).exists() for name in done.split())
    assert not (tmp_path / undone).exists()
