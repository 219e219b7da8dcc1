"""Faults of tools and servers are found before anything slow is started, and named with their fix."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.launching import launcher
from agentfactory.launching.launcher import train
from agentfactory.launching.reach_early import check_tools_open
from agentfactory.recipe.checks import doubts
from agentfactory.recipe.schema import Recipe
from tests.project import load_and_check

TOOLS = '''
from agentfactory import tool


@tool
def look(word: str) -> str:
    """Look it up."""
    return word
'''
LOOK = {"module": "more.py:look"}
GONE = {"command": "python", "args": ["-m", "no_such_module"]}


def load(*overrides: str) -> Recipe:
    recipe = load_and_check("recipe.yaml", overrides)
    assert isinstance(recipe, Recipe)
    return recipe


@pytest.mark.processes
@pytest.mark.parametrize(
    ("servers", "problem"),
    [
        ({"one": LOOK, "two": LOOK}, "the tool look is offered by one and by two; fix: remove one, or set mcp_serv"),
        ({"one": {**LOOK, "allow": ["fly"]}}, r"one\.allow: the server has no tool 'fly' for models, it offers look"),
        ({"one": {**LOOK, "allow": []}}, r"one\.allow: it leaves none of the server's tools \(look\)"),
        ({"one": {**LOOK, "deny": ["look"]}}, r"one\.deny: it leaves none of the server's tools \(look\)"),
        ({"gone": GONE}, "(?s)gone: .*No module named no_such_module; fix: correct it"),
    ],
)
def test_tools_are_opened_before_anything_is_started(
    project: Path, monkeypatch: pytest.MonkeyPatch, servers: dict[str, object], problem: str
) -> None:
    (project / "more.py").write_text(TOOLS)
    (project / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    monkeypatch.setattr(launcher, "begin_server", lambda *_, **__: pytest.fail("a server was started"))
    recipe = load(f"mcp_servers={json.dumps(servers)}", "server={engine: embedded}")
    with pytest.raises(SettingError, match=problem):
        train(recipe, False, None, print)
    assert not recipe.output.exists(), "nothing was written"


def test_limits_of_tools_that_there_are_not(project: Path) -> None:
    with pytest.raises(SettingError, match=r"limits\.calls_per_tool\.fly: there is no tool 'fly'"):
        check_tools_open(load("limits.calls_per_tool.fly=1"))


def test_a_server_that_does_not_answer_is_named_with_the_command_that_starts_it(project: Path) -> None:
    (project / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    fix = "start it: agentfactory serve RECIPE server.url=null server.port=PORT"
    with pytest.raises(
        SettingError, match=rf"server\.url: nothing answers at http://127\.0\.0\.1:9: .*refused; fix: {fix}"
    ):
        train(load("server.url=http://127.0.0.1:9"), False, None, print)


def test_a_batch_of_more_tasks_than_rows_is_doubted(project: Path) -> None:
    said = "train.batch_size: got 8, more than the rows of data (1): a batch has groups of the same task several times"
    assert doubts(load("train.batch_size=8")) == [f"{said}; fix: lower it to 1, or add rows"]
    assert doubts(load("train.batch_size=1")) == []


@pytest.mark.processes
def test_too_few_open_files_for_the_chains_are_refused() -> None:
    files = 1024
    code = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (64, {files}))\n"
        "from agentfactory.rollout.inference.concurrency import check_open_files\n"
        f"check_open_files({files // 2})\n"
        f"assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == {files}\n"
        f"check_open_files({files // 2 + 1})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    problem = (
        f"{files // 2 + 1} chains at a time each need a connection, but a process may open {files} files (ulimit -n)"
    )
    assert f"rollout.concurrency: {problem}; fix: lower it to {files // 2}, or raise that limit" in done.stderr
