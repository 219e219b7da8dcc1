"""A project that has packages and modules of our names, and of our libraries', beside its task: its code gets its own,
and ours gets ours, by each way to start us."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import QUICKSTART, REPOSITORY

pytestmark = [pytest.mark.processes, pytest.mark.extended]

AGENTFACTORY = str(Path(sys.executable).with_name("agentfactory"))
TAKEN = "raise RuntimeError('{} of the user was taken for the library')\n"

FILES = {
    # a name that ours has too: agentfactory/tools/messages.py
    "tools/messages.py": "OWNER = 'user'\n",
    "tools/helpers.py": "import tools.messages\n\ndef owner():\n    return tools.messages.OWNER\n",
    "trainers.py": "OWNER = 'user'\n",
    "rollout/__init__.py": "OWNER = 'user'\n",
    "datasets/__init__.py": TAKEN.format("datasets"),
    "mcp/__init__.py": TAKEN.format("mcp"),
    # after its own folder, a file's imports search the recipe's folder
    "tasks/world.py": """
from typing import Any

import rollout
import trainers
from beside import TreasureHunt
from tools.helpers import owner

from agentfactory import tool

assert [owner(), trainers.OWNER, rollout.OWNER] == ["user"] * 3


class World(TreasureHunt):
    def reset(self, **task: Any) -> str:
        import tools.helpers

        assert tools.helpers.owner() == "user"
        return super().reset(**task)


@tool
def whose() -> str:
    \"\"\"Tell whose tools these are.\"\"\"
    return owner()
""",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, as current folder; its tools/ is a package."""
    folder = tmp_path / "project"
    for name, text in {**FILES, "tools/__init__.py": ""}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    shutil.copyfile(QUICKSTART / "treasure_hunt.py", folder / "tasks" / "beside.py")
    monkeypatch.chdir(folder)
    return folder


def write_recipe(folder: Path, quickstart_run: Path, warm_start: Path, **fields: object) -> None:
    recipe = {
        "model": {"path": str(warm_start), "dtype": "float32"},
        "data": {"path": str(quickstart_run / "prepared" / "train.jsonl")},
        "tools": ["tasks/world.py:World"],
        "rollout": {"group_size": 4, "max_turns": 3, "max_tokens": 16, "max_total_tokens": 512},
        "train": {"steps": 1, "batch_size": 2, "learning_rate": 1e-4},
        "server": {"engine": "embedded", "max_model_len": 512},
        **fields,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def run(*command: str, cwd: Path | None = None, **environment: str) -> str:
    known = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, cwd=cwd, env=known, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_commands(project: Path, quickstart_run: Path, warm_start: Path) -> None:
    """From the user's folder, and from the checkout, whose links `tools` and `rollout` Python finds first."""
    serve = ["-m", "agentfactory.tools.serve", "tasks/world.py:whose"]
    pooled = {"command": "python", "args": serve, "isolation": "process", "pool": {"capacity": 2}}
    theirs = {"command": "python", "args": ["-m", "mcp_server_time", "--local-timezone", "UTC"]}
    write_recipe(project, quickstart_run, warm_start, mcp_servers={"pooled": pooled, "time": theirs})
    recipe = str(project / "recipe.yaml")
    assert "user" in run(AGENTFACTORY, "tools", "call", recipe, "whose", cwd=project)
    # a folder of modules, not a package
    (project / "tools" / "__init__.py").unlink()
    from_checkout = [sys.executable, "-m", "agentfactory"]
    assert "import_path:\n- " + str(project) in run(*from_checkout, "train", recipe, "--dry-run", cwd=REPOSITORY)
    assert "get_current_time" in run(*from_checkout, "tools", "list", recipe, cwd=REPOSITORY)


SCRIPT = """
import asyncio, sys

import rollout, trainers
from agentfactory import Agent
from tasks.world import whose
from tools.helpers import owner

assert [owner(), trainers.OWNER, rollout.OWNER] == ["user"] * 3


async def main():
    async with Agent(sys.argv[1], tools=[whose]) as agent:
        (trajectory,) = (await agent.run("go", max_turns=1)).trajectories
        print(trajectory.outcome.failed, trajectory.error)


asyncio.run(main())
"""


def test_an_agent_in_a_script(project: Path, warm_server: str) -> None:
    """A script's folder comes first on Python's path, so that its `datasets` and `mcp` are folders of files here."""
    for name in ("datasets", "mcp"):
        (project / name / "__init__.py").unlink()
    (project / "script.py").write_text(SCRIPT.replace("from tasks", "sys.path.append('tasks')\nfrom tasks"))
    assert run(sys.executable, "script.py", warm_server) == "False None\n"


def test_tools_served_by_hand(project: Path) -> None:
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    lines = [
        {"method": "initialize", "id": 1, "params": hello},
        {"method": "notifications/initialized"},
        {"method": "tools/call", "id": 2, "params": {"name": "whose", "arguments": {}}},
    ]
    said = "".join(json.dumps({"jsonrpc": "2.0", **line}) + "\n" for line in lines)
    commands = ([AGENTFACTORY, "tools", "serve"], [sys.executable, "-m", "agentfactory.tools.serve"])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    for server in [subprocess.Popen([*command, "tasks/world.py:whose"], **pipes) for command in commands]:
        with server:
            server.stdin.write(said)
            server.stdin.flush()
            answers = [json.loads(server.stdout.readline()) for _ in range(2)]
            server.stdin.close()
        assert answers[1]["result"]["content"][0]["text"] == "user"
