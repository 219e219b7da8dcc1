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
import atexit, ctypes, os, re, subprocess, signal, threading, time

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

def unload():
    threading.Thread(target=forever, daemon=True).start()
    atexit.register(time.sleep, 3)
    return 4

def forever():
    while True:
        time.sleep(0.05)

def late_exit():
    atexit.register(os._exit, 3)
    return 4

def leave():
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    own = subprocess.Popen(["sleep", "600"], **quiet)
    daemon = subprocess.Popen(["sleep", "600"], start_new_session=True, **quiet)
    Path("pid").write_text(f"{own.pid} {daemon.pid}")
    return 0

def fill():
    raise MemoryError

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


SIGTERM = signal.SIGTERM
NO_REACTION = "was killed, because user code did not react to a signal: users.py, line "
CASES: dict[str, tuple[str, float, int | None, int, list[str]]] = {
    # function, limit, signal, status, words
    "held": (
        *("hold", 3.0, None, 1),
        [
            "agentfactory: users.py, line 12, in slow, has held Python's lock for ",
            "users.py, line 12, in slow, held Python's lock for longer than rollout.timeout_seconds=3; fix: ",
        ],
    ),
    "held at a signal": ("hold", 100.0, SIGTERM, 1, [NO_REACTION, ", in slow"]),
    "ignored signal": ("ignore", 100.0, SIGTERM, 1, [NO_REACTION, ", in wait"]),
    "swallowed signal": ("swallow", 100.0, SIGTERM, 1, [NO_REACTION, ", in wait"]),
    # user code is not to blame
    "no handler": ("default", 100.0, SIGTERM, 1, ["agentfactory.base.processes.supervised.Signalled: SIGTERM\n"]),
    "thread": (
        *("stay", 100.0, None, 4),
        [
            "the command is done, and its process has not ended: users.py, line 45, in forever",
            "its process was killed 4 s after the command was done",
        ],
    ),
    # unloading takes longer than QUIET_SECONDS, and a daemon thread is not what it waits for
    "daemon": ("unload", 100.0, None, 4, []),
    # exits of user code do not replace the status
    "exit at the end": ("late_exit", 100.0, None, 4, []),
    "uncaught": ("fill", 100.0, None, 1, ["was ended by MemoryError, which nothing caught", "; fix: free memory"]),
    "fork": ("late_fork", 100.0, None, 1, ["ended with status 3, as by os._exit"]),
    "fork that returns": ("fork_returns", 100.0, None, 4, []),
}


def start(folder: Path, function: str, limit: float = 100.0, nohup: bool = False) -> "subprocess.Popen[str]":
    folder.mkdir(exist_ok=True)
    (folder / "users.py").write_text(f"from pathlib import Path\n{USERS}")
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", "users.py", function, str(limit)]
    if nohup:
        command = ["nohup", *command]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def inside(folder: Path) -> int:
    return int(wait_for(lambda: (folder / "pid").exists() and (folder / "pid").read_text()))


def test_what_user_code_does_to_its_process_is_named(tmp_path: Path) -> None:
    running = {case: start(tmp_path / case, function, limit) for case, (function, limit, *_) in CASES.items()}
    for case, (_, _, number, _, _) in CASES.items():
        if number is not None:
            inside(tmp_path / case)
            running[case].send_signal(number)
    for case, (*_, status, words) in CASES.items():
        # a fork may keep the pipe open
        found = running[case].wait(timeout=60)
        stderr = running[case].stderr
        said = stderr.read()
        assert (found, all(each in said for each in words), bool(said)) == (status, True, bool(words)), (case, said)


def test_a_stopped_process_holds_no_lock_and_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    stopped, ignoring = start(tmp_path / "stop", "wait", limit=1.0), start(tmp_path / "nohup", "wait", nohup=True)
    child = inside(tmp_path / "stop")
    inside(tmp_path / "nohup")
    os.kill(child, signal.SIGSTOP)
    os.kill(ignoring.pid, signal.SIGHUP)
    time.sleep(4)
    os.kill(child, signal.SIGCONT)
    for folder, process in (("stop", stopped), ("nohup", ignoring)):
        (tmp_path / folder / "go").touch()
        assert process.wait(timeout=60) == 0
    assert stopped.stderr.read() == ""


def test_processes_that_user_code_leaves_are_ended(tmp_path: Path) -> None:
    process = start(tmp_path / "left", "leave")
    assert process.wait(timeout=60) == 0
    own, daemon = map(int, (tmp_path / "left" / "pid").read_text().split())
    assert f"processes that user code has left are ended: {own}" in process.stderr.read()
    assert not psutil.pid_exists(own)
    psutil.Process(daemon).kill()
