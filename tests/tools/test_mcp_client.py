"""Tests of connections: opening, death and reopening."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.run_notices import notice_of
from agentfactory.tools.mcp_servers import server_connection as mcp_client
from agentfactory.tools.mcp_servers import server_entry as containers
from agentfactory.tools.sessions.toolset import open_toolset
from tests.tools.conftest import NOTEBOOK, ROLES, ask, recipe_of, stdio_server
from tests.waiting import until

pytestmark = pytest.mark.processes


async def test_a_killed_child_comes_back(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log: list[dict[str, Any]] = []
    entry = {**NOTEBOOK, "isolation": "shared", "environment": ROLES}
    others = set(psutil.Process().children())

    def child() -> psutil.Process:
        (process,) = {*psutil.Process().children()} - others
        return process

    async with open_toolset(recipe_of(pad=entry), folder, log.append) as toolset:
        async with toolset.chain("old", {"word": "old"}) as old, toolset.chain("too", {"word": "too"}) as too:
            first = child()
            begun = tmp_path / "begun"
            calls = [asyncio.create_task(ask(session, "sleep", path=str(begun))) for session in (old, too)]
            await until(begun.exists)
            first.kill()
            for call in calls:
                with pytest.raises(ToolInfrastructureError, match="tool server pad died during a call of sleep"):
                    await call
            with pytest.raises(ToolInfrastructureError, match="pad was restarted and lost this chain's state"):
                await ask(old, "read")

        async with toolset.chain("new", {"word": "new"}) as new:
            assert await ask(new, "read") == "new"
        assert child() != first
        child().kill()  # while nobody calls
        await until(lambda: log[-1]["event"] == "tool_server_lost")
        async with toolset.chain("newer", {"word": "newer"}) as newer:
            assert await ask(newer, "read") == "newer"
    assert [record["event"].rpartition("_")[2] for record in log] == ["opened", "lost", "opened", "lost", "opened"]
    told = [notice_of(record) for record in caplog.records if notice_of(record)]
    assert [(notice.topic, notice.times) for notice in told if notice] == [("tool server pad was lost", 1)] * 2
    assert str(told[0]).startswith("tool server pad was lost, and it is started again: ")


async def test_a_server_that_keeps_dying_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_client, "REOPEN_DELAYS", (0.0, 0.0, 0.0))
    recipe = recipe_of(pad={**NOTEBOOK, "isolation": "shared"})
    async with open_toolset(recipe, folder) as toolset, toolset.chain("a", {}) as session:
        for reason in ("died during a call of burn",) * 3 + ("given up after 3 failures: `.*notebook",):
            with pytest.raises(ToolInfrastructureError, match=f"tool server pad:? {reason}"):
                await ask(session, "burn")


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (
            {"command": "python", "args": ["-c", "import sys; sys.exit('no key for you')"]},
            r"tool server bad: `.*python.* -c .*exit.*` in .*Connection closed; the end of its stderr:\nno key for you",
        ),
        (
            {"command": "python", "args": ["-c", "import mcp.server as s; s.Server('old').list_resources"]},
            r"no attribute 'list_resources'\n; fix: .*mcp_servers\.bad\.command to a Python with mcp<2",
        ),
        ({"url": "http://127.0.0.1:1/mcp"}, "tool server bad: http://127.0.0.1:1/mcp: ConnectError"),
    ],
)
async def test_servers_that_do_not_start(folder: Path, server: dict[str, Any], reason: str) -> None:
    with pytest.raises(ToolInfrastructureError, match=reason):
        async with open_toolset(recipe_of(good={"module": "scratchpad.py:add"}, bad=server), folder):
            pass


MINE = """
import os
from agentfactory.tools.tool import tool

@tool
def look(name: str) -> str:
    return str(os.environ.get(name))
"""


async def test_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tools.py").write_text("raise RuntimeError('a module of the user took our place')\n")
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.setenv("SECRET", "hush")
    monkeypatch.setenv("OTHER", "not passed on")
    server = stdio_server("mine.py:look", env={"TOKEN": "Bearer ${SECRET}!", "PLAIN": "$SECRET"})
    log: list[dict[str, Any]] = []
    async with open_toolset(recipe_of(mine=server), tmp_path, log.append) as toolset, toolset.chain("a", {}) as session:
        seen = [await ask(session, "look", name=name) for name in ("TOKEN", "PLAIN", "OTHER")]
    assert seen == ["Bearer hush!", "$SECRET", "None"]
    assert "hush" not in str(log)


async def test_no_container_without_a_program(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "_works", [])
    broken = tmp_path / "docker"
    broken.write_text("#!/bin/sh\necho 'is the daemon running?' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = (
        r"tool server box: container of some/image: .*no container can be run here: `docker info` failed: is the "
        r"daemon running\?; podman is not installed\. Install podman, start docker's daemon, or give the"
    )
    with pytest.raises(ToolInfrastructureError, match=reason):
        async with open_toolset(recipe_of(box={"container": "some/image"}), folder):
            pass


PROGRAM = """#!{python} -S
import json, os, sys
with open({log!r}, "a") as log:
    log.write(json.dumps([sys.argv[1:], os.environ.get("TOKEN")]) + "\\n")
if sys.argv[1] == "run":
    os.execv({python!r}, [{python!r}, "-S", {server!r}])
"""


@pytest.mark.parametrize("isolation", ["shared", "process"])
async def test_container_command(isolation: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a fake docker that records its arguments, and runs a server without a container."""
    monkeypatch.setattr(containers, "_works", [])
    monkeypatch.setenv("SECRET", "hush")
    log = tmp_path / "log"
    docker = tmp_path / "docker"
    docker.write_text(PROGRAM.format(python=sys.executable, log=str(log), server=str(folder / "notebook.py")))
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    entry = {"container": "some/image:1", "args": ["--flag"], "env": {"TOKEN": "${SECRET}"}, "isolation": isolation}
    if isolation == "process":
        entry["pool"] = {"warm": 0}
    async with (
        open_toolset(recipe_of(box=entry), folder) as toolset,
        toolset.chain("a", {}) as one,
        toolset.chain("b", {}) as two,
    ):
        await ask(one, "write", word="mine")
        assert await ask(two, "read") == ("mine" if isolation == "shared" else "nothing")
    commands = [json.loads(line) for line in log.read_text().splitlines()]
    assert commands[0][0] == ["info"]
    runs = [(arguments, token) for arguments, token in commands if arguments[0] == "run"]
    removed = [arguments for arguments, _ in commands if arguments[0] == "rm"]
    assert len(runs) == (1 if isolation == "shared" else 2)
    names = {arguments[5] for arguments, _ in runs}
    assert len(names) == len(runs)
    for arguments, token in runs:
        assert arguments[5].startswith("agentfactory-box-")
        expected = ["run", "-i", "--rm", "--init", "--name", arguments[5], "--env", "TOKEN", "some/image:1", "--flag"]
        assert arguments == expected
        assert token == "hush"
    assert sorted(removed) == sorted(["rm", "--force", name] for name in names)
