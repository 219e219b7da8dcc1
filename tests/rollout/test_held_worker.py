"""A rollout worker that user code holds up, as rank 0 sees it."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentfactory.base.processes.supervised import Inside
from agentfactory.rollout.workers import worker_socket
from agentfactory.rollout.workers.worker_socket import (
    Messages,
    Ready,
    RolloutWorkers,
    WorkerDiedError,
    WorkerProcess,
    encode,
)
from tests.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.extended]

SCRIPT = """
import sys
from pathlib import Path
from agentfactory.base.processes.supervised import show_to
from agentfactory.base.user_code.loading import load_module
show_to(int(sys.argv[1]))
Path("ready").touch()
load_module(Path("users.py"))
"""

BLOCKS = "import time\ntime.sleep(60)\n"
HOLDS = """
import re, threading
def slow():
    re.match("(a+)+$", "a" * 60 + "b")
thread = threading.Thread(target=slow)
thread.start()
thread.join()
"""


@pytest.fixture
def held(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[WorkerProcess, socket.socket]]:
    """Rank 0's end of a process that runs the test's user code, and the worker's end of the socket."""
    (tmp_path / "users.py").write_text(request.param)
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    ours, theirs = socket.socketpair()
    end = WorkerProcess.__new__(WorkerProcess)
    end._process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(writer)], cwd=tmp_path, pass_fds=[writer])
    os.close(writer)
    end._inside, end.messages, end.log_file = Inside(end._process.pid, reader), Messages(ours), Path("worker.log")
    end._longest_call, end.started = (0.5, "rollout.timeout_seconds"), True
    wait_for((tmp_path / "ready").exists)
    with theirs:
        yield end, theirs
    end._process.kill()
    end.close()


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (BLOCKS, "users.py, line 2, in <module>, blocks its event loop"),
        (HOLDS, "users.py, line 4, in slow, holds Python's lock"),
    ],
    indirect=["held"],
)
def test_the_code_that_holds_up_a_worker_is_named_and_ended(
    held: tuple[WorkerProcess, socket.socket],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    end, theirs = held
    caplog.set_level("INFO")
    monkeypatch.setattr(worker_socket, "QUIET_SECONDS", 0.5)
    answers: list[Ready] = []
    waiting = threading.Thread(target=lambda: answers.append(end.wait_until_ready()))
    waiting.start()
    wait_for(lambda: caplog.messages)
    theirs.sendall(encode("ready", renderer={}, chat_template=""))
    waiting.join()
    assert caplog.messages[0].startswith("the rollout worker is not ready after ")
    assert f"s: {words}; see worker.log" in caplog.messages[0]
    assert answers == [Ready({}, "")]
    monkeypatch.setattr(worker_socket, "STALL_SECONDS", 0.5)
    together = RolloutWorkers.__new__(RolloutWorkers)
    together._workers, together._evaluates = [end], True
    end.batches = []  # type: ignore[assignment]
    with pytest.raises(WorkerDiedError) as died:
        together.next_batch(1)
    begin = f"the rollout worker was killed: {words}, for longer than rollout.timeout_seconds=0.5; fix: "
    assert str(died.value).startswith(begin)
    assert f"has sent no message for 0.5 s: {words}; fix: " in caplog.messages[-1]


HANDLED = "import os, traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()\n    "


@pytest.mark.parametrize(
    ("then", "words"),
    [
        ("raise", " was ended by ZeroDivisionError: division by zero, which nothing caught; fix: correct the code"),
        ("os.write(2, b'later'); os._exit(1)", " ended with status 1, as by os._exit"),
        ("os.abort()", " was killed by signal 6 (SIGABRT)"),
    ],
)
def test_the_exception_that_ended_a_worker_is_named(then: str, words: str, tmp_path: Path) -> None:
    end = WorkerProcess.__new__(WorkerProcess)
    end.log_file = tmp_path / "worker.log"
    with end.log_file.open("wb") as log:
        end._process = subprocess.Popen([sys.executable, "-c", HANDLED + then], stderr=log)
    assert f"the rollout worker{words}" in str(end._death())


def test_a_process_that_shows_no_stacks_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        reader, writer = os.pipe2(os.O_NONBLOCK)
        inside = Inside(other.pid, reader)
        assert inside.place() is None
        assert other.poll() is None
        other.kill()
        inside.close()
        os.close(writer)
