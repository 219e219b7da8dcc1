"""User code that ends its process: the command says so, and fails with its own status."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.extended]

TOOLS = '''
import os
import time
from pathlib import Path
from agentfactory import tool


@tool
def end(how: str) -> str:
    """End the process."""
    if how == "exit":
        os._exit(3)
    Path("pid").write_text(str(os.getpid()))
    time.sleep(60)
'''


def call(folder: Path, how: str) -> "subprocess.Popen[str]":
    (folder / "ends.py").write_text(TOOLS)
    (folder / "tools.yaml").write_text("mcp_servers:\n  ends: {module: ends.py:end, timeout_seconds: 100}\n")
    command = [sys.executable, "-m", "agentfactory", "tools", "call", "tools.yaml", "end", f"how={how}"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_signals_reach_the_command_and_it_ends_with_its_parent(tmp_path: Path) -> None:
    exited = call(tmp_path, "exit")
    expected = {signal.SIGINT: "interrupted by Ctrl-C", signal.SIGTERM: "interrupted by SIGTERM", signal.SIGKILL: ""}
    running = {}
    for number in expected:
        (folder := tmp_path / number.name).mkdir()
        running[number] = call(folder, "wait")
    for number, process in running.items():
        pid = tmp_path / number.name / "pid"
        wait_for(lambda pid=pid: pid.exists() and pid.read_text(), 120)
        inside = int(pid.read_text())
        assert inside != process.pid
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert process.returncode == (130 if number != signal.SIGKILL else -9)
        assert expected[number] in said
        wait_for(lambda inside=inside: not os.path.exists(f"/proc/{inside}"))
    _, said = exited.communicate(timeout=180)
    told = "agentfactory: failed: the process of `agentfactory tools` ended with status 3, as by os._exit in user code"
    assert (exited.returncode, f"{told}; fix: correct the tool" in said) == (1, True), said
