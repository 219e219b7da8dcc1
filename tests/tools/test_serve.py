"""`python -P -m tools.serve`: its command line, and that it never outlives its parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

PARENT = """
import asyncio, sys
from pathlib import Path
from tools.config import ToolsRecipe
from tools.messages import ToolCall
from tools.toolset import open_toolset

servers = {
    name: {"command": "python", "args": ["-P", "-m", "tools.serve", f"scratchpad.py:{name}"]}
    for name in ("process_id", "block")
}

async def main():
    async with open_toolset(ToolsRecipe.model_validate({"mcp_servers": servers}), Path(sys.argv[1])) as toolset:
        async with toolset.chain("a", {}) as session:
            stuck = asyncio.create_task(session.call(ToolCall("1", "block", {})))
            await session.call(ToolCall("2", "process_id", {}))
            await asyncio.sleep(0.2)
            print("ready", flush=True)
            await stuck

asyncio.run(main())
"""


def test_children_end_when_their_parent_is_killed(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-P", "-c", PARENT, folder], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) == 2
        os.kill(parent.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "the following arguments are required: FILE.py:NAME"),
        (["scratchpad.py:sub"], "scratchpad.py defines no sub"),
        (["scratchpad.py:add", "scratchpad.py:add"], "two tools are called add"),
        (["scratchpad.py:add", "--http", "many"], "argument --http: invalid int value: 'many'"),
    ],
)
def test_command_lines_that_are_wrong(folder: Path, arguments: list[str], reason: str) -> None:
    command = [sys.executable, "-P", "-m", "tools.serve", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 2
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_stdout_belongs_to_the_protocol(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "from tools.tool import tool\nprint('while loading')\n\n@tool\ndef talk() -> str:\n    return 'x'\n"
    )
    command = [sys.executable, "-P", "-m", "tools.serve", "loud.py:talk"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True)
    assert done.stdout == ""
    assert "while loading" in done.stderr
