"""User code that ends its process: the command says so, and fails with its own status."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_for

pytestmark = pytest.mark.processes

TOOLS = '''
import ctypes
import os
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
    time.sleep(60)
'''


def start(folder: Path, how: str) -> "subprocess.Popen[str]":
    (folder / "ends.py").write_text(TOOLS)
    (folder / "tools.yaml").write_text("mcp_servers:\n  ends: {module: ends.py:end, timeout_seconds: 100}\n")
    command = [sys.executable, "-m", "agentfactory", "tools", "call", "tools.yaml", "end", f"how={how}"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.extended
def test_a_tool_that_ends_the_process_is_reported(tmp_path: Path) -> None:
    running = {how: start(tmp_path, how) for how in ("exit", "crash", "kill")}
    said = {how: process.communicate(timeout=180)[1] for how, process in running.items()}
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
        wait_for(lambda pid=pid: pid.exists() and pid.read_text(), 120)
        inside = int(pid.read_text())
        assert inside != process.pid
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert process.returncode == (130 if number != signal.SIGKILL else -9)
        assert expected[number] in said
        wait_for(lambda inside=inside: not os.path.exists(f"/proc/{inside}"))


ENDS = """
import os
import sys
import time
from agentfactory import Environment, reward, tool

if os.environ["AT"] == "import":
    os._exit(int(os.environ["STATUS"]))


class Desk(Environment):
    @classmethod
    def check_machine(cls) -> None:
        if os.environ["AT"] == "machine":
            sys.exit(int(os.environ["STATUS"]))

    @classmethod
    def check_data_row(cls, row, has_rewards) -> None:
        if os.environ["AT"] == "row":
            os._exit(int(os.environ["STATUS"]))

    def reset(self, **task: object) -> None:
        pass

    @tool
    def look(self) -> str:
        "Look."
        return "nothing"

    def reward(self) -> float:
        return 1.0
"""

RECIPE = """
model: {path: model}
tools: [ends.py:Desk]
data: {path: rows.jsonl}
train: {steps: 1, batch_size: 1}
rollout: {group_size: 2}
server: {engine: embedded}
"""


@pytest.mark.extended
def test_user_code_that_ends_train_or_serve_before_any_chain_is_reported(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    (tmp_path / "recipe.yaml").write_text(RECIPE + "env: [AT, STATUS]\n")
    (tmp_path / "rows.jsonl").write_text('{"question": "go"}\n')
    exits = {
        "import": "failed: the process of `agentfactory {command}` ended with status {status} while importing ends.py, "
        "as by os._exit in user code; fix: ",
        "machine": "failed: user code called sys.exit({status}) (ends.py, line 15, in check_machine); fix: raise",
        "row": "ended with status {status} while checking the rows of data by Desk.check_data_row, as by os._exit",
    }
    cases = [("train", "import", "0"), ("serve", "import", "3"), ("serve", "machine", "0"), ("train", "row", "0")]
    running = {}
    for command, at, status in cases:
        arguments = [sys.executable, "-m", "agentfactory", command, "recipe.yaml"]
        environment = {**os.environ, "AT": at, "STATUS": status}
        running[command, at, status] = subprocess.Popen(
            arguments, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    for (command, at, status), process in running.items():
        _, said = process.communicate(timeout=180)
        assert process.returncode == 1, said
        assert exits[at].format(command=command, status=status) in said


@pytest.mark.extended
def test_train_py_reports_user_code_that_ends_it(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    (tmp_path / "recipe.yaml").write_text(f"{RECIPE}output: run\nenv: [AT, STATUS]\n")
    (tmp_path / "rows.jsonl").write_text('{"question": "go"}\n')
    command = [sys.executable, "-m", "agentfactory.train", "recipe.yaml", "server.url=http://127.0.0.1:9"]
    environment = {**os.environ, "AT": "import", "STATUS": "0"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    assert "the trainer's process ended with status 0 while importing ends.py, as by os._exit" in result.stderr
