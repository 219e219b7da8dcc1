"""Rank 0's intake from its workers: batches that it accepts and refuses, and a worker that user code holds up."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from agentfactory.base.processes.supervised import Inside
from agentfactory.rollout.chains.chain_counts import ChainCounts
from agentfactory.rollout.config import RolloutConfig
from agentfactory.rollout.data import Place, Share
from agentfactory.rollout.groups.group_files import encode_group
from agentfactory.rollout.token_row import Row
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory
from agentfactory.rollout.workers import worker_socket
from agentfactory.rollout.workers.worker_socket import (
    Delivered,
    Messages,
    Ready,
    RolloutWorkers,
    WorkerDiedError,
    WorkerProcess,
    encode,
    encode_delivered,
)
from tests.waiting import wait_for


def worker(*batches: list[str], may_be_short: bool = False, trained: tuple[str, ...] = ()) -> WorkerProcess:
    """Rank 0's end after these batches have arrived; there is no real process."""
    end = WorkerProcess.__new__(WorkerProcess)
    end.batches = deque(([Group(group_id, {}, []) for group_id in ids], {"filtered/groups": 1.0}) for ids in batches)
    end._may_be_short, end._delivered, end.started = may_be_short, set(trained), True
    end._groups, end.evaluations, end.log_file, end.counts = [], deque(), Path("logs/worker.log"), ChainCounts()
    end.held_by = lambda: None  # type: ignore[method-assign]
    end._longest_call = (600.0, "rollout.timeout_seconds")
    end._restore = lambda url: url == "http://a"
    return end


@contextmanager
def connected(*ends: WorkerProcess) -> Iterator[list[socket.socket]]:
    """The workers' ends of the sockets."""
    with ExitStack() as stack:
        theirs = []
        for end in ends:
            ours, other = (stack.enter_context(side) for side in socket.socketpair())
            end.messages = Messages(ours)
            theirs.append(other)
        yield theirs


def together(*ends: WorkerProcess) -> RolloutWorkers:
    all_of_them = RolloutWorkers.__new__(RolloutWorkers)
    all_of_them._workers, all_of_them._evaluates, all_of_them._rollout = list(ends), True, RolloutConfig()
    return all_of_them


def delivered(group: Group, *chains: str) -> bytes:
    """The message of a group in which these chains count."""
    return b"".join(encode_delivered(Delivered(encode_group(group), list(chains))))


def test_a_group_is_taken_once_over_all_attempts_of_a_run() -> None:
    for end in (worker(["g000001"], ["g000001"]), worker(["g000000"], ["g000001"], trained=("g000001", "g000002"))):
        end.take_batch(1)
        with pytest.raises(WorkerDiedError, match=r"sent a group that was already delivered, one of g000001"):
            end.take_batch(1)


def test_a_batch_is_short_only_where_groups_are_dropped() -> None:
    assert len(worker(["g000001"], may_be_short=True).take_batch(3)[0]) == 1
    for end in (worker(["g000001"]), worker(["a", "b", "c", "d"], may_be_short=True), worker([], may_be_short=True)):
        with pytest.raises(WorkerDiedError, match="groups, expected 3"):
            end.take_batch(3)


def test_groups_arrive_in_pieces_between_other_messages() -> None:
    row = Row(list(range(300_000)), [1] * 300_000, [-0.125] * 300_000)
    groups = [Group("g\n1", {"q": "}\n"}, [Trajectory("g\n1.0", [], [row], Outcome.COMPLETED)]), Group("g2", {}, [])]
    end = worker()
    sent = (
        encode("alive", counts=[1, 1, 0, 0, 0, 0.0])
        + delivered(groups[0], "g\n1.0")
        + delivered(groups[1])
        + encode("batch", figures={"x": 1.0})
    )
    with connected(end) as (theirs,):
        sending = threading.Thread(target=theirs.sendall, args=[sent])
        sending.start()
        every = together(end)
        assert every.next_batch(2) == groups
        assert every.figures() == {"x": 1.0}
        sending.join()


def test_only_the_chains_that_count_arrive() -> None:
    rows = [Row([n, n], [0, 1], [0.0, -0.5]) for n in range(3)]
    chains = [Trajectory(f"g.{n}", [], [row], Outcome.COMPLETED) for n, row in enumerate(rows)]
    end = worker()
    with connected(end) as (theirs,):
        theirs.sendall(delivered(Group("g", {}, chains), "g.0", "g.2") + encode("batch", figures={}))
        (group,) = together(end).next_batch(1)
    assert group.trajectories == [chains[0], chains[2]]
    assert isinstance(group.trajectories[1].rows[0].token_ids, np.ndarray)


def test_what_is_no_message_is_refused_before_memory_is_taken_for_it() -> None:
    end = worker()
    for stray in (b"GET / HTTP/1.1\r\nHost: 127.0.0.1", bytes(24)):
        with connected(end) as (theirs,):
            theirs.sendall(stray)
            with pytest.raises(WorkerDiedError, match="sent bytes that are not a message"):
                end.hear()


def test_a_batch_is_made_of_equal_shares_and_a_waiting_worker_is_answered() -> None:
    """The second worker's server restarted without weights; the batch comes only after it is restored."""
    first, second = worker(), worker()
    with connected(first, second) as (one, other):

        def play() -> None:
            one.sendall(delivered(Group("g000000", {}, [])) + encode("batch", figures={"chains": 4.0, "a": 1.0}))
            other.sendall(encode("restore", url="http://a"))
            expected = encode("restored", url="http://a", proven=True)
            assert other.recv(len(expected), socket.MSG_WAITALL) == expected
            other.sendall(delivered(Group("g000001", {}, [])) + encode("batch", figures={"chains": 2.0}))

        playing = threading.Thread(target=play)
        playing.start()
        every = together(first, second)
        assert [group.id for group in every.next_batch(2)] == ["g000000", "g000001"]
        assert every.figures() == {"chains": 6.0, "a": 1.0}
        playing.join()


def test_shares_take_every_position_once() -> None:
    shares = [Share(number, 3) for number in range(3)]
    assert [[position for position in range(7) if position in share] for share in shares] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [share.part(8) for share in shares] == [3, 3, 2]
    assert [share.part(1) for share in shares] == [1, 1, 1]
    assert Place.of("g000004-1").position in shares[1]


def test_the_death_of_one_worker_ends_the_wait_for_all() -> None:
    first, second = worker(), worker()
    second._death = lambda: WorkerDiedError("the rollout worker was killed by signal 9")
    with connected(first, second) as (_, other):
        other.close()
        with pytest.raises(WorkerDiedError, match="killed by signal 9"):
            together(first, second).next_batch(2)


@pytest.mark.processes
def test_a_worker_that_stays_is_killed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(worker_socket, "END_SECONDS", 0.1)
    end = worker()
    end._process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    end._inside = Inside(end._process.pid, os.open(os.devnull, os.O_RDONLY))
    with connected(end):
        end.close()
    assert end._process.returncode == -signal.SIGKILL
    assert "the rollout worker had not ended after 0.1 s, and was killed: user code still ran" in caplog.text


# ---- a worker that user code holds up


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


@pytest.mark.processes
@pytest.mark.extended
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
    end.batches, end.counts = [], ChainCounts()  # type: ignore[assignment]
    with pytest.raises(WorkerDiedError) as died:
        together(end).next_batch(1)
    begin = f"the rollout worker was killed: {words}, for longer than rollout.timeout_seconds=0.5; fix: "
    assert str(died.value).startswith(begin)
    assert f"has sent no message for 0.5 s: {words}; fix: " in caplog.messages[-1]


HANDLED = "import os, traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()\n    "


@pytest.mark.processes
@pytest.mark.extended
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


@pytest.mark.processes
@pytest.mark.extended
def test_a_process_that_shows_no_stacks_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        reader, writer = os.pipe2(os.O_NONBLOCK)
        inside = Inside(other.pid, reader)
        assert inside.place() is None
        assert other.poll() is None
        other.kill()
        inside.close()
        os.close(writer)
