"""What rank 0 takes from its worker, and what it refuses."""

import io
import socket
import threading
from collections import deque
from pathlib import Path

import pytest

from agentfactory.rollout import delivery
from agentfactory.rollout.delivery import WorkerDiedError, WorkerProcess, encode
from agentfactory.rollout.trajectory import Group
from agentfactory.tools.notices import Notice, notice_of
from tests.waiting import wait_for


def worker(*batches: list[str], may_be_short: bool = False, trained: tuple[str, ...] = ()) -> WorkerProcess:
    """Rank 0's end after these batches have arrived; no process stands behind it."""
    end = WorkerProcess.__new__(WorkerProcess)
    end._batches = deque(([Group(group_id, {}, []) for group_id in ids], {"filtered/groups": 1.0}) for ids in batches)
    end._may_be_short, end._delivered, end._started = may_be_short, set(trained), True
    return end


def test_batches_in_their_order() -> None:
    end = worker(["g000001", "g000000"], ["g000002", "g000003-1"], trained=("g000004",))
    assert [group.id for group in end.next_batch(2)] == ["g000001", "g000000"]
    assert [group.id for group in end.next_batch(2)] == ["g000002", "g000003-1"]
    assert end.figures() == {"filtered/groups": 1.0}


def test_a_group_is_taken_once_over_all_attempts_of_a_run() -> None:
    for end in (
        worker(["g000001"], ["g000001"]),
        worker(["g000000"], ["g000001"], trained=("g000001", "g000002")),
    ):
        end.next_batch(1)
        with pytest.raises(WorkerDiedError, match=r"sent groups again that are trained already, among g000001"):
            end.next_batch(1)


def test_a_batch_is_short_only_where_groups_are_dropped() -> None:
    assert len(worker(["g000001"], may_be_short=True).next_batch(3)) == 1
    for end in (worker(["g000001"]), worker(["a", "b", "c", "d"], may_be_short=True), worker([], may_be_short=True)):
        with pytest.raises(WorkerDiedError, match="groups where 3 were due"):
            end.next_batch(3)


def test_the_workers_notices_are_told_where_a_person_sees_them(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = worker()
    end._log_file = Path("logs/worker.log")
    end._evaluates, end._evaluations = True, deque()
    monkeypatch.setattr(end, "_send", lambda kind: None)
    text = "held-out tasks, sampled: 8 of 8 chains ended as reward_error"
    # as many as may gather during an update
    sent = encode("notice", topic="held-out tasks, sampled", text=text, see="", times=2) * 2000
    lines = io.BytesIO(sent + encode("evaluation", figures={"sampled/failed": 1.0}))
    monkeypatch.setattr(end, "_lines", lines, raising=False)
    assert end.evaluate() == {"eval/sampled/failed": 1.0}
    assert caplog.messages == [f"{text}; see logs/worker.log"] * 2000
    assert notice_of(caplog.records[0]) == Notice("held-out tasks, sampled", text, "logs/worker.log", 2)


def test_a_worker_that_stands_still_is_told_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "STALL_SECONDS", 0.2)
    end = worker()
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rb") as lines:
        end._lines = lines
        receiving = threading.Thread(target=end._take_one)
        receiving.start()
        wait_for(lambda: caplog.messages)
        theirs.sendall(encode("alive") + encode("batch", figures={}))
        receiving.join()
    assert caplog.messages == ["the rollout worker has said nothing for 0.2 s: it is stopped, or its code blocks it"]
