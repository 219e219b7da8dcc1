"""Ctrl-C while a command's modules are imported: one line, status 130, and no traceback."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.extended]


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("new sums", "tempfile"),
        ("tools list recipe.yaml", "agentfactory.commands.options"),
        ("tools serve my_tools.py", "mcp_types"),
        ("train recipe.yaml", "agentfactory.trainers.config"),
    ],
)
def test_ctrl_c_while_a_module_is_imported(command: str, module: str, project: Path) -> None:
    program = [sys.executable, "-X", "importtime", "-m", "agentfactory", *command.split()]
    run = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert run.stderr is not None
    for line in run.stderr:
        if line.rpartition("|")[2].strip() == module:
            break
    run.send_signal(signal.SIGINT)
    said, rest = run.communicate(timeout=60)
    lines = [line for line in rest.splitlines() if not line.startswith("import time:")]
    assert (lines, said) == (["agentfactory: interrupted by Ctrl-C"], "")
    assert run.returncode == 130


def test_ctrl_c_while_pydantic_builds_a_model(project: Path) -> None:
    # the hash of a literal is computed within pydantic, which turns KeyboardInterrupt into an error of its own
    (project / "colors.py").write_text(
        "import enum, os, signal\nfrom typing import Literal\nfrom pydantic import TypeAdapter\n"
        "class Color(enum.Enum):\n    RED = 1\n"
        "    def __hash__(self):\n        os.kill(os.getpid(), signal.SIGINT)\n        return 1\n"
        "TypeAdapter(Literal[Color.RED])\n"
    )
    (project / "recipe.yaml").write_text("tools: [colors.py:paint]\n")
    command = [sys.executable, "-m", "agentfactory", "tools", "list", "recipe.yaml"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (run.stderr, run.stdout, run.returncode) == ("agentfactory: interrupted by Ctrl-C\n", "", 130)
