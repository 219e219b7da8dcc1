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


def start(folder: Path, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", *arguments]
    known = {**os.environ, **environment}
    return subprocess.Popen(command, cwd=folder, env=known, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def call(folder: Path, how: str) -> "subprocess.Popen[str]":
    (folder / "ends.py").write_text(TOOLS)
    (folder / "tools.yaml").write_text("mcp_servers:\n  ends: {module: ends.py:end, timeout_seconds: 100}\n")
    return start(folder, "agentfactory", "tools", "call", "tools.yaml", "end", f"how={how}")


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


def test_user_code_that_ends_a_command_before_any_chain_is_reported(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    (tmp_path / "recipe.yaml").write_text(RECIPE + "env: [AT, STATUS]\n")
    (tmp_path / "rows.jsonl").write_text('{"question": "go"}\n')
    exits = {
        "import": "process{of} ended with status {status} while importing ends.py, as by os._exit in user code; fix: ",
        "machine": "failed: user code called sys.exit({status}) (ends.py, line 15, in check_machine); fix: raise",
        "row": "ended with status {status} while checking the rows of data by Desk.check_data_row, as by os._exit",
    }
    attached = ("recipe.yaml", "output=run", "server.url=http://127.0.0.1:9")
    running = {
        (command, at, status): start(tmp_path, *command, AT=at, STATUS=status)
        for command, at, status in (
            (("agentfactory", "train", "recipe.yaml"), "import", "0"),
            (("agentfactory", "serve", "recipe.yaml"), "machine", "0"),
            (("agentfactory", "train", "recipe.yaml"), "row", "0"),
            (("agentfactory.train", *attached), "import", "3"),
        )
    }
    for (command, at, status), process in running.items():
        _, said = process.communicate(timeout=180)
        assert process.returncode == 1, said
        of = f" of `agentfactory {command[1]}`" if command[0] == "agentfactory" else ""
        assert exits[at].format(of=of, status=status) in said
