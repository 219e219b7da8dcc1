"""Pools of processes that are killed and replaced."""

import pytest

from agentfactory.base.processes.killable import KillableProcesses
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.processes


def test_a_process_that_ends_is_not_lent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    processes = KillableProcesses("tests.ending_process", 1)
    pids = []
    for _ in range(3):
        with processes.borrowed() as process:
            process.send({})
            told = process.receive()
            assert told is not None
            pids.append(told["pid"])
            process.answered = True
    assert pids[0] == pids[1] != pids[2]
    processes.close()
