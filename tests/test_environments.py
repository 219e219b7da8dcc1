"""Processes with code of others have none of this process's keys: their environments, as the kernel has them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
import yaml
from mcp import StdioServerParameters

from agentfactory.base.errors import SettingError
from agentfactory.base.processes import environment
from agentfactory.base.processes.killable import KillableProcess
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.data import Share
from agentfactory.rollout.rewards import math_equal
from agentfactory.rollout.workers.worker_socket import Job, WorkerProcess
from agentfactory.tools.mcp_servers.stdio import stdio_transport
from agentfactory.tools.sandbox.program import start_confined
from agentfactory.tools.sandbox.session import run_script
from agentfactory.worlds.game_processes.game_process import GameProcess
from agentfactory.worlds.reasoning_gym import gym_tasks
from agentfactory.worlds.scienceworld.jvm import Jvm
from agentfactory.worlds.verifiers import verifiers_process
from tests.conftest import QUICKSTART
from tests.project import load_and_check, refused

pytestmark = pytest.mark.processes

SECRET = "sk-planted-93"
KEYS = ("OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "DATABASE_URL", "HTTPS_PROXY")
NAMED = "SEARCH_KEY"
"""The variable that the recipe names."""
OWN = """
import json, os
from agentfactory import reward

def make(folder, seed):
    (folder / "environment").write_text(json.dumps(dict(os.environ)))
"""

RUN_PREPARE = """
import sys
from agentfactory.launching.child_processes import Children
from agentfactory.launching.prepare import run_prepare
from tests.project import load_and_check

with Children() as children:
    run_prepare(load_and_check(sys.argv[1]), children, print)
"""

Environment = dict[str, str]


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.setenv(name, f"http://{SECRET}@127.0.0.1:9")
    monkeypatch.setenv(NAMED, "named")
    monkeypatch.setenv(environment.VARIABLE, NAMED)


def recipe_in(folder: Path, code: str = OWN, **fields: object) -> Recipe:
    (folder / "own.py").write_text(code)
    content = {"extends": str(QUICKSTART / "grpo.yaml"), "prepare": "own.py:make", "env": [NAMED], **fields}
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**content, "output": str(folder / "run")}))
    return load_and_check(folder / "recipe.yaml")


@contextmanager
def confined(module: str) -> Iterator[int]:
    process = KillableProcess("-m", module, variables=gym_tasks.VARIABLES, start=start_confined)
    yield process.pid
    process.end()


@contextmanager
def game(place: str) -> Iterator[int]:
    with closing(GameProcess(place, place)) as process:
        yield process._server._process.pid


@contextmanager
def java() -> Iterator[int]:
    machine = Jvm(64)
    yield machine._process.pid
    machine.end()


@contextmanager
def worker(folder: Path) -> Iterator[int]:
    job = Job(recipe_in(folder), folder, [], folder, folder, 1, 1)
    process = WorkerProcess(job, Share(0, 1), folder / "worker.log", lambda url: False)
    yield process._process.pid
    process._process.kill()
    process.close()


RUNNING = {
    "rollout worker": worker,
    "verifier of reasoning_gym": lambda folder: confined(gym_tasks.PROCESS),
    "math_equal": lambda folder: confined(math_equal._PROCESS),
    "reader of pages": lambda folder: confined("agentfactory.worlds.browse.read_process"),
    "gymnasium": lambda folder: game("agentfactory.worlds.gymnasium.episode:Episode"),
    "textarena": lambda folder: game("agentfactory.worlds.textarena.play:Play"),
    "ScienceWorld's Java": lambda folder: java(),
}
NEEDS = {"verifier of reasoning_gym": "reasoning_gym", "ScienceWorld's Java": "scienceworld"}


def check(kind: str, found: Environment) -> None:
    print(f"{kind}: {' '.join(sorted(found))}")
    assert not [name for name, value in found.items() if SECRET in value]
    assert found[NAMED] == "named"
    assert "PATH" in found


@pytest.mark.parametrize("kind", RUNNING)
def test_a_running_process_has_only_the_named_variable(kind: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(kind, "agentfactory"))
    proxied = kind == "rollout worker"
    with RUNNING[kind](tmp_path) as pid:
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            found = each.environ()
            if proxied:  # it is a client of servers elsewhere
                assert found.pop("HTTPS_PROXY")
            check(kind, found)


def test_prepare_has_only_the_named_variable(tmp_path: Path) -> None:
    recipe_in(tmp_path)
    subprocess.run([sys.executable, "-c", RUN_PREPARE, tmp_path / "recipe.yaml"], check=True)
    found = json.loads((tmp_path / "run" / "prepared" / "environment").read_text())
    del found["HTTPS_PROXY"]
    check("prepare", found)


def test_verifiers_python_has_only_the_named_variable(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat > /dev/null; env > {tmp_path}/environment\n")
    python.chmod(0o700)
    with pytest.raises(SettingError, match=r"verifiers\.python: got .*, which is no Python"):
        verifiers_process.load_rows({"python": str(python), "id": "sums", "folder": None})
    lines = (tmp_path / "environment").read_text().splitlines()
    check("verifiers", dict(line.split("=", 1) for line in lines))


async def test_tool_servers_and_sandboxes_have_what_their_section_names() -> None:
    program = StdioServerParameters(command="sleep", args=["60"], env={NAMED: "named"})
    started: list[int] = []
    with open(os.devnull, "w") as log:
        async with stdio_transport(program, log, 1 << 20, print, lambda: None, started.append):
            check("MCP server", psutil.Process(started[0]).environ())
    result = await run_script("import os; print(*os.environ)")
    print(f"code interpreter: {result.stdout}")
    assert result.stdout.split()
    assert not {*KEYS, NAMED} & {*result.stdout.split()}


@pytest.mark.parametrize("reads", ["os.environ['MY_KEY']", "os.environ.get('MY_KEY', '')", "os.getenv('MY_KEY')"])
def test_reading_an_unnamed_variable_is_refused(reads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = f"{OWN}\n@reward\ndef right(prediction):\n    return float(prediction == {reads})\n"
    recipe_in(tmp_path, code, rewards=["own.py:right"])
    monkeypatch.setenv("MY_KEY", "mine")
    fix = r"env: own.py reads MY_KEY, which the recipe does not name.*; fix: env: \[SEARCH_KEY, MY_KEY\], or unset"
    refused(fix, path=tmp_path / "recipe.yaml")
    load_and_check(tmp_path / "recipe.yaml", ["env=[MY_KEY]"])
    refused(
        "env: the environment variable OTHER_KEY is not set; fix: export it",
        "env=[MY_KEY,OTHER_KEY]",
        path=tmp_path / "recipe.yaml",
    )


def test_a_recipe_names_variables_where_it_uses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "key")
    servers = {"other": {"command": "true", "env": {"A": "${LOGIN}"}}}
    monkeypatch.setenv("LOGIN", "me")
    recipe = recipe_in(tmp_path, mcp_servers=servers, server={"api_key_env": "SERVER_KEY"})
    assert {NAMED, "LOGIN", "SERVER_KEY"} <= recipe.variables()
    assert "HF_TOKEN" not in recipe.variables()
    recipe.model.path = "someone/model"
    assert "HF_TOKEN" in recipe.variables()
