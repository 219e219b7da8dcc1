"""A supervised command, whose user code ends it, holds Python's lock, ignores signals, or stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.extended]

SCRIPT = """
import signal
import sys
from pathlib import Path
from agentfactory.base.processes import supervised
from agentfactory.base.user_code import watch
from agentfactory.base.user_code.loading import load_module

supervised.QUIET_SECONDS, supervised._TICK_SECONDS = 2.0, 0.2
supervised._REACT_SECONDS, supervised._LEAVE_SECONDS = 1.0, 4.0
watch.BEAT_SECONDS = 0.2


def command():
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with watch.limited(float(sys.argv[3]), "rollout.timeout_seconds"):
        return getattr(load_module(Path(sys.argv[1])), sys.argv[2])()


try:
    status = supervised.supervised(command)
except supervised.DiedFromInside as error:
    print(error, file=sys.stderr)
    status = 1
sys.exit(status)
"""

USERS = """
import atexit, ctypes, os, re, signal, threading, time

def hold():
    thread = threading.Thread(target=slow)
    thread.start()
    thread.join()

def slow():
    Path("pid").write_text(str(os.getpid()))
    re.match("(a+)+$", "a" * 60 + "b")

def ignore():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait()

def wait():
    Path("pid").write_text(str(os.getpid()))
    while not Path("go").exists():
        time.sleep(0.05)
    return 0

def default():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    wait()

def swallow():
    def handler(number, frame):
        pass
    signal.signal(signal.SIGTERM, handler)
    wait()

def stay():
    threading.Thread(target=forever).start()
    return 4

def forever():
    while True:
        time.sleep(0.05)

def late_exit():
    atexit.register(os._exit, 3)
    return 4

def late_fork():
    if os.fork() == 0:
        time.sleep(3)
        os._exit(0)
    os._exit(3)

def fork_returns():
    child = os.fork()
    if child == 0:
        return 7
    os.waitpid(child, 0)
    return 4
"""


def start(folder: Path, function: str, limit: float = 100.0, nohup: bool = False) -> "subprocess.Popen[str]":
    (folder / "users.py").write_text(f"from pathlib import Path\n{USERS}")
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", "users.py", function, str(limit)]
    if nohup:
        command = ["nohup", *command]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def inside(folder: Path) -> int:
    return int(wait_for(lambda: (folder / "pid").exists() and (folder / "pid").read_text()))


def test_code_that_holds_the_lock_is_named_and_ended_at_the_limit(tmp_path: Path) -> None:
    process = start(tmp_path, "hold", limit=3.0)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    named, ended = said.splitlines()
    assert named.startswith("agentfactory: users.py, line 12, in slow, has held Python's lock for ")
    assert "users.py, line 12, in slow, held Python's lock for longer than rollout.timeout_seconds=3; fix: " in ended


@pytest.mark.parametrize("function", ["ignore", "swallow", "hold"])
def test_code_that_reacts_to_no_signal_is_killed_and_named(function: str, tmp_path: Path) -> None:
    process = start(tmp_path, function)
    inside(tmp_path)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    function = "slow" if function == "hold" else "wait"
    assert "was killed, because user code did not react to a signal: users.py, line " in said
    assert f"in {function}" in said


def test_a_signal_that_has_no_handler_is_not_blamed_on_user_code(tmp_path: Path) -> None:
    process = start(tmp_path, "default")
    inside(tmp_path)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert said.splitlines()[-1] == "agentfactory.base.processes.endings.Signalled: SIGTERM"


def test_a_thread_that_keeps_a_finished_command_alive_is_named_and_ended(tmp_path: Path) -> None:
    process = start(tmp_path, "stay")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 4
    assert "the command is done, and its process has not ended: users.py, line 40, in forever" in said
    assert "its process was killed 4 s after the command was done" in said


@pytest.mark.parametrize(
    ("function", "status", "words"),
    [("late_exit", 4, ""), ("late_fork", 1, "ended with status 3, as by os._exit"), ("fork_returns", 4, "")],
)
def test_exits_of_user_code_do_not_replace_the_status(function: str, status: int, words: str, tmp_path: Path) -> None:
    process = start(tmp_path, function)
    assert process.wait(timeout=60) == status
    assert process.stderr is not None
    said = process.stderr.read()
    assert words in said
    assert words or not said


def test_a_stopped_process_holds_no_lock(tmp_path: Path) -> None:
    process = start(tmp_path, "wait", limit=1.0)
    child = inside(tmp_path)
    os.kill(child, signal.SIGSTOP)
    time.sleep(4)
    os.kill(child, signal.SIGCONT)
    (tmp_path / "go").touch()
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")


def test_a_signal_that_nohup_has_made_ignored_stays_ignored(tmp_path: Path) -> None:
    process = start(tmp_path, "wait", nohup=True)
    inside(tmp_path)
    os.kill(process.pid, signal.SIGHUP)
    time.sleep(2.5)
    (tmp_path / "go").touch()
    assert process.wait(timeout=60) == 0


def test_nothing_is_left_when_the_command_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "hold")
    child = inside(tmp_path)
    process.kill()
    process.wait()
    wait_for(lambda: not psutil.pid_exists(child))
