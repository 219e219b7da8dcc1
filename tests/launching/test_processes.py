"""Children are ended with all that they started, and their deaths are told."""

import functools
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from agentfactory.launching import child_processes as processes
from agentfactory.launching.child_processes import Child, ChildFailed, Children
from tests.waiting import wait_for

pytestmark = pytest.mark.processes


def apart(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test in a process of its own: Children end all that their process has started, and ours has servers."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        process = multiprocessing.get_context("fork").Process(target=test, kwargs=fixtures)
        process.start()
        process.join()
        assert process.exitcode == 0, "its traceback is on stderr"

    return run


# a child with a child, which notes its own number
FAMILY = """
import subprocess, sys, time
inner = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", inner, sys.argv[1]], start_new_session=True)
time.sleep(60)
"""


def start(children: Children, folder: Path, name: str, code: str, *arguments: str) -> Child:
    return children.start(name, [sys.executable, "-c", code, *arguments], folder / f"{name}.log")


def written(path: Path) -> str:
    return wait_for(lambda: path.exists() and path.read_text())


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@apart
def test_leaving_ends_grandchildren_too(tmp_path: Path) -> None:
    with Children() as children:
        child = start(children, tmp_path, "family", FAMILY, str(tmp_path / "pid"))
        grandchild = int(written(tmp_path / "pid"))
        # its parent dies first, so that only this process can still find it
        child.process.kill()
        child.process.wait()
    assert child.process.poll() is not None
    wait_for(lambda: is_gone(grandchild))


@apart
def test_a_child_is_stopped_with_its_own_children(tmp_path: Path) -> None:
    with Children() as children:
        child = start(children, tmp_path, "family", FAMILY, str(tmp_path / "pid"))
        grandchild = int(written(tmp_path / "pid"))
        children.stop(child)
        assert is_gone(grandchild), "while other children may go on"


@apart
def test_a_stubborn_child_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_TERM_SECONDS", 0.3)
    code = (
        "import signal, sys, time; signal.signal(15, signal.SIG_IGN); open(sys.argv[1], 'w').write('x'); time.sleep(60)"
    )
    with Children() as children:
        child = start(children, tmp_path, "stubborn", code, str(tmp_path / "up"))
        written(tmp_path / "up")
    assert child.process.returncode == -signal.SIGKILL


# says that it is at work after it was told to end, until a file lets it, and ends half a second later
FINISHER = """
import pathlib, signal, sys, time
at_work = pathlib.Path(sys.argv[1])
signal.signal(15, lambda *_: at_work.touch())
pathlib.Path(sys.argv[1] + ".up").write_text("x")
while not at_work.exists() or not pathlib.Path(sys.argv[1] + ".enough").exists():
    time.sleep(0.01)
at_work.unlink()
time.sleep(0.5)
"""


@apart
def test_a_child_that_finishes_something_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_work, seconds = tmp_path / "at-work", 0.0

    def sleep(pause: float) -> None:
        """Time passes while the child is at work, and only then."""
        nonlocal seconds
        time.sleep(pause)
        seconds += at_work.exists()
        if seconds > 4 * processes._TERM_SECONDS:
            (tmp_path / "at-work.enough").touch()

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: seconds, sleep=sleep))
    with Children() as children:
        command = [sys.executable, "-c", FINISHER, str(at_work)]
        child = children.start("trainer", command, tmp_path / "log", is_finishing=at_work.exists)
        written(tmp_path / "at-work.up")
    assert child.process.returncode == 0


@apart
def test_a_bad_end_is_told_with_the_last_words_of_this_child(tmp_path: Path) -> None:
    with Children() as children:
        first = start(children, tmp_path, "trainer", "print('an earlier one')")
        children.wait(first)
        child = start(children, tmp_path, "trainer", "raise ValueError('no luck')")
        with pytest.raises(
            ChildFailed, match=r"the trainer ended with exit status 1: ValueError: no luck \(log: .*trainer\.log"
        ):
            children.wait(child)
        assert child.log == first.log
        assert "an earlier one" not in child.tail(10)


@apart
def test_the_death_of_a_neighbour_is_the_cause(tmp_path: Path) -> None:
    with Children() as children:
        server = start(children, tmp_path, "server", "import time; time.sleep(60)")
        trainer = start(children, tmp_path, "trainer", "import time; time.sleep(60)")
        server.process.kill()
        with pytest.raises(ChildFailed, match=r"the server was ended by signal 9 \(SIGKILL\)"):
            children.wait(trainer)
    assert trainer.process.returncode == -signal.SIGTERM
