"""User code that ends its process: the command says so, and fails with its own status."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.waiting import wait_for

pytestmark = pytest.mark.processes

TOOLS = '''
import ctypes
import os
import re
import time
from pathlib import Path
from agentfactory import tool


@tool
def end(how: str) -> str:
    """End the process."""
    if how == "exit":
        os._exit(3)
    if how == "crash":
        ctypes.string_at(0)
    if how == "kill":
        os.kill(os.getpid(), 9)
    Path("pid").write_text(str(os.getpid()))
    if how == "hold":
        re.match("(a+)+$", "a" * 60 + "b")
    time.sleep(60)
'''


def start(folder: Path, how: str) -> "subprocess.Popen[str]":
    (folder / "ends.py").write_text(TOOLS)
    (folder / "tools.yaml").write_text("tools: [ends.py:end]\n")
    command = [sys.executable, "-m", "agentfactory", "tools", "call", "tools.yaml", "end", f"how={how}"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.extended
def test_a_tool_that_ends_the_process_is_reported(tmp_path: Path) -> None:
    running = {how: start(tmp_path, how) for how in ("exit", "crash", "kill")}
    said = {how: process.communicate(timeout=60)[1] for how, process in running.items()}
    assert {how: process.returncode for how, process in running.items()} == dict.fromkeys(running, 1)
    begin = "agentfactory: failed: the process of `agentfactory tools` "
    assert f"{begin}ended with status 3, as by os._exit in user code; fix: correct the tool" in said["exit"]
    assert f"{begin}was killed by signal 11 (SIGSEGV), as by a crash in user code; fix: " in said["crash"]
    assert "ends.py" in said["crash"], "the line that crashed is named"
    assert f"{begin}was killed by signal 9 (SIGKILL), as by the kernel when memory runs out; fix: " in said["kill"]


@pytest.mark.extended
def test_signals_reach_the_command_and_it_ends_with_its_parent(tmp_path: Path) -> None:
    expected = {signal.SIGINT: "interrupted by Ctrl-C", signal.SIGTERM: "interrupted by SIGTERM", signal.SIGKILL: ""}
    running = {}
    for number in expected:
        (folder := tmp_path / number.name).mkdir()
        running[number] = start(folder, "wait")
    for number, process in running.items():
        pid = tmp_path / number.name / "pid"
        wait_for(lambda pid=pid: pid.exists() and pid.read_text())
        inside = int(pid.read_text())
        assert inside != process.pid
        process.send_signal(number)
        _, said = process.communicate(timeout=20)
        assert process.returncode == (130 if number != signal.SIGKILL else -9)
        assert expected[number] in said
        wait_for(lambda inside=inside: not os.path.exists(f"/proc/{inside}"))


@pytest.mark.long
def test_code_that_holds_the_lock_is_killed_by_a_further_signal_and_with_its_parent(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        (folder := tmp_path / number.name).mkdir()
        process = start(folder, "hold")
        pid = folder / "pid"
        wait_for(lambda pid=pid: pid.exists() and pid.read_text())
        inside = int(pid.read_text())
        process.send_signal(number)
        if number is signal.SIGTERM:
            time.sleep(6)
            assert process.poll() is None
            process.send_signal(number)
        _, said = process.communicate(timeout=20)
        if number is signal.SIGTERM:
            assert process.returncode == 1
            assert "`agentfactory tools` still ran 6 s after a signal, and SIGTERM killed it; user code" in said
        wait_for(lambda inside=inside: not os.path.exists(f"/proc/{inside}"))
