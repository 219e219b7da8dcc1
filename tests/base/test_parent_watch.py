"""Tests of processes that end with the process that started them, however it ends, or are killed and replaced."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from agentfactory.base.processes import parent_watch

pytestmark = pytest.mark.processes

FOLLOWER = """
import signal, sys, time
from pathlib import Path
from agentfactory.base.processes import parent_watch
parent_watch.follow_parent()
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(sys.argv[1]).write_text("up")
time.sleep(60)
"""

# starts a follower through a shell between them, like accelerate's launcher
PARENT = """
import os, subprocess, sys, time
from agentfactory.base.processes import parent_watch
env = {**os.environ, **parent_watch.environment()}
child = subprocess.Popen(["sh", "-c", '"$0" "$@"; true', sys.executable, "-c", *sys.argv[1:]], env=env)
time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["willing", pytest.param("stubborn", marks=pytest.mark.long)])
def test_a_follower_ends_when_its_parent_is_killed(tmp_path: Path, kind: str) -> None:
    up = tmp_path / "up"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, FOLLOWER, str(up), kind])
    try:
        while not up.exists():
            assert parent.poll() is None
            time.sleep(0.05)
        family = psutil.Process(parent.pid).children(recursive=True)
        assert len(family) == 2
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def test_a_zombie_and_a_reused_number_are_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    created = psutil.Process(child.pid).create_time()
    assert not parent_watch.is_alive(child.pid, created - 100)
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert not parent_watch.is_alive(child.pid, created)
    child.wait()
    assert not parent_watch.is_alive(child.pid, created)
