"""Faults of tools and servers are found before anything slow is started, and named with their fix."""

import json
from pathlib import Path

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.launching import launcher
from agentfactory.launching.launcher import train
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
    return load_and_check("recipe.yaml", overrides)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("servers", "problem"),
    [
        ({"one": LOOK, "two": LOOK}, "the tool look is offered by one and by two; fix: remove one, or set mcp_serv"),
        ({"one": {**LOOK, "allow": ["fly"]}}, r"one\.allow: the server has no tool 'fly' for models, it offers look"),
        ({"one": {**LOOK, "allow": []}}, r"one\.allow: it leaves none of the server's tools \(look\)"),
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


def test_a_server_that_does_not_answer_is_named_with_the_command_that_starts_it(project: Path) -> None:
    (project / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    fix = "start it: agentfactory serve RECIPE server.url=null server.port=PORT"
    with pytest.raises(
        SettingError, match=rf"server\.url: nothing answers at http://127\.0\.0\.1:9: .*refused; fix: {fix}"
    ):
        train(load("server.url=http://127.0.0.1:9"), False, None, print)
