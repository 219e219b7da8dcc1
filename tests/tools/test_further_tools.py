"""Tools of an environment that only its options determine."""

from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.config import ToolsRecipe
from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolCall
from agentfactory.tools.sessions.toolset import open_toolset

WORLD = '''
from agentfactory import Environment, finish, tool
from agentfactory.base.messages import ToolSpec


class Echo(Environment):
    def __init__(self, names: list[str]) -> None:
        pass

    @classmethod
    def further_tools(cls, names):
        return [ToolSpec(name, f"Say {name}.", {"type": "object", "properties": {}}) for name in names]

    @tool
    def ping(self) -> str:
        """Answer."""
        return "pong"

    def reset(self, word: str, **task) -> None:
        self.word = word

    def call_tool(self, name, arguments):
        return finish("bye") if name == "leave" else f"{name} {self.word} {arguments}"
'''


def recipe(folder: Path, names: list[Any]) -> ToolsRecipe:
    (folder / "world.py").write_text(WORLD)
    return ToolsRecipe(mcp_servers={"echo": {"module": "world.py:Echo", "options": {"names": names}}})


async def test_they_are_listed_and_called_with_any_arguments(tmp_path: Path) -> None:
    async with open_toolset(recipe(tmp_path, ["say", "leave"]), tmp_path) as toolset:
        assert [(spec.name, spec.description) for spec in toolset.specs][1:] == [
            ("say", "Say say."),
            ("leave", "Say leave."),
        ]
        async with toolset.chain("c", {"word": "w"}) as session:
            said = await session.call(ToolCall("1", "say", {"any": 1}))
            assert (said.content, said.error) == ("say w {'any': 1}", None)
            assert (await session.call(ToolCall("2", "ping", {}))).content == "pong"
            left = await session.call(ToolCall("3", "leave", {}))
            assert (left.content, left.finish) == ("bye", True)


@pytest.mark.parametrize(("names", "told"), [([1], "options.names"), (["ping"], "two tools are called ping")])
async def test_wrong_ones_are_refused(tmp_path: Path, names: list[Any], told: str) -> None:
    with pytest.raises((TypeError, SettingError), match=told):
        async with open_toolset(recipe(tmp_path, names), tmp_path):
            pass
