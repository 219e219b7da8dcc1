"""What may be served together, and what a server says of it."""

import asyncio
import threading
from typing import Any

import pytest
from mcp import Client, MCPError
from mcp.server.mcpserver import MCPServer

from tools.environment import Environment
from tools.mcp_server import CHAIN_KEY, ERROR_KEY, ROLE_KEY, build_server
from tools.tool import tool


class Counter(Environment):
    """Counts, and tells in which thread it does so."""

    instances = 0

    def __init__(self) -> None:
        type(self).instances += 1
        self.value = 0
        self.busy = False

    async def reset(self, start: int, **task: Any) -> str:
        self.value = start
        return ", ".join(sorted(task))

    @tool
    def zigzag(self) -> str:
        """Name the thread."""
        return threading.current_thread().name

    @tool
    async def amble(self) -> str:
        """Name the thread, too."""
        return threading.current_thread().name

    @tool
    async def add(self, number: int) -> int:
        """Add slowly, which goes wrong when two do it at once."""
        assert not self.busy
        self.busy = True
        await asyncio.sleep(0.005)
        self.value += number
        self.busy = False
        return self.value

    @tool
    def nothing(self) -> None:
        """Return nothing."""

    @tool
    def surrogate(self) -> str:
        """Return what no pipe can carry."""
        return "a\ud800b"

    @tool
    def unprintable(self) -> Any:
        """Return what is no result."""
        return object()

    @tool
    def stop(self) -> str:
        """Raise what a future cannot hold."""
        raise StopIteration("over")

    def reward(self) -> float:
        return self.value / 2


async def call(client: Client, name: str, chain: str | None = "a", **arguments: Any) -> tuple[str, Any]:
    meta: Any = {CHAIN_KEY: chain} if chain else None
    result = await client.call_tool(name, arguments, meta=meta)
    error = (result.meta or {}).get(ERROR_KEY)
    assert result.is_error == (error is not None)
    return "".join(part.text for part in result.content if part.type == "text"), error


async def test_an_environment() -> None:
    async with Client(build_server([Counter])) as client:
        listed = (await client.list_tools()).tools
        roles = {tool.name: (tool.meta or {})[ROLE_KEY] for tool in listed}
        assert list(roles) == [
            *("zigzag", "amble", "add", "nothing", "surrogate", "unprintable", "stop"),
            *("reset", "reward", "close"),
        ]
        assert {name for name, role in roles.items() if role != "tool"} == {"reset", "reward", "close"}

        assert await call(client, "reset", start=3, color="red", size=2) == ("color, size", None)
        assert await call(client, "zigzag") == ("tool", None)
        assert await call(client, "amble") == ("MainThread", None)
        assert await call(client, "nothing") == ("", None)
        assert await call(client, "surrogate") == ("a?b", None)
        assert (await call(client, "unprintable"))[1] == "tool_error"
        assert await call(client, "stop") == ("RuntimeError: StopIteration: over", "tool_error")
        assert await call(client, "add", number="x") == (
            "Invalid arguments for add: number: Input should be a valid integer, unable to parse string as an "
            'integer, got "x".',
            "invalid_arguments",
        )
        sums = await asyncio.gather(*(call(client, "add", number=1) for _ in range(5)))
        assert sorted(sums) == [(str(value), None) for value in (4, 5, 6, 7, 8)]
        assert await call(client, "reward") == ('{"reward": 4.0}', None)
        assert await call(client, "close") == ("", None)
        assert await call(client, "close") == ("", None)
        for chain, reason in ((None, "_meta needs 'agentfactory/chain'"), ("a", "reset was not called")):
            with pytest.raises(MCPError, match=reason):
                await call(client, "zigzag", chain)
        with pytest.raises(MCPError, match="no tool dance"):
            await call(client, "dance")


async def test_resets_make_instances() -> None:
    before = Counter.instances
    async with Client(build_server([Counter])) as client:
        await call(client, "reset", "a", start=1)
        await call(client, "reset", "b", start=2)
        await call(client, "reset", "a", start=10)
        assert (await call(client, "add", "a", number=1), await call(client, "add", "b", number=1)) == (
            ("11", None),
            ("3", None),
        )
        assert await call(client, "reset", "c") == (
            "TypeError: Counter.reset() missing 1 required positional argument: 'start'",
            "tool_error",
        )
    assert Counter.instances == before + 4


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (None, "returned None for reward"),
        ("good", "returned 'good' for reward"),
        (float("nan"), "returned nan for reward; it has to be a finite number"),
        ({"success": 1}, "a dict without `reward`"),
        ({"reward": 1, "success": "yes"}, "returned 'yes' for success"),
        ({"reward": 1, "turn_rewards": 3}, "returned 3 for turn_rewards; it has to be a list"),
        ({"reward": 1, "turn_rewards": [0, None]}, "returned None for turn_rewards"),
    ],
)
async def test_verdicts_that_are_no_reward(verdict: Any, reason: str) -> None:
    class Judge(Environment):
        def reward(self) -> Any:
            return verdict

    async with Client(build_server([Judge])) as client:
        await call(client, "reset")
        text, error = await call(client, "reward")
        assert reason in text
        assert error == "tool_error"


async def test_an_environment_without_a_reward() -> None:
    class Aimless(Environment):
        pass

    async with Client(build_server([Aimless])) as client:
        await call(client, "reset")
        text, _ = await call(client, "reward")
        assert text == "NotImplementedError: Aimless has no reward(): define one, or give the recipe `rewards:`"


def _refused() -> list[tuple[list[Any], str]]:
    @tool
    def add(number: int) -> int:
        return number

    class Demanding(Environment):
        def __init__(self, size: int) -> None: ...

    class Confused(Environment):
        @tool
        def reset(self) -> None: ...

    class Another(Environment):
        pass

    return [
        ([add, add], "two tools are called add"),
        ([Counter, add], "two tools are called add"),
        ([Another, Counter], "Another and Counter are both Environments"),
        ([Demanding], "Demanding: an Environment is made without arguments"),
        ([Confused], "Confused.reset is not for the model"),
        ([len], "<built-in function len> is neither a @tool function nor an Environment class"),
        ([MCPServer("x"), add], r"is served alone"),
    ]


@pytest.mark.parametrize(("objects", "reason"), _refused())
def test_refused_objects(objects: list[Any], reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        build_server(objects, "pad")


def test_a_server_object_is_served_as_it_is() -> None:
    server = MCPServer("theirs")
    assert build_server([server]) is server
