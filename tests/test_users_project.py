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


@pytest.fixture(params=["package"])
def project(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, as current folder; its tools/ is a package, or a folder of modules."""
    folder = tmp_path / "project"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    shutil.copyfile(QUICKSTART / "treasure_hunt.py", folder / "tasks" / "beside.py")
    if request.param == "package":
        (folder / "tools" / "__init__.py").write_text("")
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


STARTS = {"installed": [AGENTFACTORY], "python -m": [sys.executable, "-m", "agentfactory"]}


@pytest.mark.parametrize(
    ("start", "place", "project"),
    [("installed", "project", "package"), ("python -m", "checkout", "plain folder")],
    indirect=["project"],
)
def test_commands(start: str, place: str, project: Path, quickstart_run: Path, warm_start: Path) -> None:
    """From the user's folder, and from the checkout, whose links `tools` and `rollout` Python finds first."""
    serve = ["-m", "agentfactory.tools.serve", "tasks/world.py:whose"]
    pooled = {"command": "python", "args": serve, "isolation": "process", "pool": {"capacity": 2}}
    theirs = {"command": "python", "args": ["-m", "mcp_server_time", "--local-timezone", "UTC"]}
    write_recipe(project, quickstart_run, warm_start, mcp_servers={"pooled": pooled, "time": theirs})
    cwd = project if place == "project" else REPOSITORY
    recipe = str(project / "recipe.yaml")
    assert "import_path:\n- " + str(project) in run(*STARTS[start], "train", recipe, "--dry-run", cwd=cwd)
    assert "user" in run(*STARTS[start], "tools", "call", recipe, "whose", cwd=cwd)
    assert "get_current_time" in run(*STARTS[start], "tools", "list", recipe, cwd=cwd)


@pytest.mark.long
def test_training(project: Path, quickstart_run: Path, warm_start: Path) -> None:
    """Launcher, trainer, worker, server and a pool of processes, all of them from the user's folder."""
    serve = ["-m", "agentfactory", "tools", "serve", "tasks/world.py:World"]
    pooled = {"command": "python", "args": serve, "isolation": "process", "pool": {"capacity": 4}}
    (project / "tasks" / "prepare.py").write_text(
        "import json\nfrom tools.helpers import owner\n\n"
        "def prepare(folder, seed):\n    (folder / 'said.json').write_text(json.dumps(owner()))\n\n"
        "from agentfactory import reward\n\n@reward\ndef always(prediction):\n    return float(owner() == 'user')\n"
    )
    own = {"prepare": "tasks/prepare.py:prepare", "output": "run", "tools": [], "mcp_servers": {"pooled": pooled}}
    write_recipe(project, quickstart_run, warm_start, **own, rewards=["tasks/prepare.py:always"])
    run(sys.executable, "-m", "agentfactory", "train", "recipe.yaml", "output=run")
    assert json.loads((project / "run" / "prepared" / "said.json").read_text()) == "user"
    assert json.loads((project / "run" / "summary.json").read_text())["status"] == "completed"


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
    for command in ([AGENTFACTORY, "tools", "serve"], [sys.executable, "-m", "agentfactory.tools.serve"]):
        with subprocess.Popen(
            [*command, "tasks/world.py:whose"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(said)
            server.stdin.flush()
            answers = [json.loads(server.stdout.readline()) for _ in range(2)]
            server.stdin.close()
        assert answers[1]["result"]["content"][0]["text"] == "user"
