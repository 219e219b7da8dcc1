"""Tests of our MCP server: objects that may be served together, its listing and errors, and its environments' pool."""

import asyncio
import itertools
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from mcp import Client, MCPError
from mcp.server.mcpserver import MCPServer

from agentfactory.base.config import PoolConfig
from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.tools.calls.mcp_results import ERROR_KEY, content_of
from agentfactory.tools.environments.environment import Environment
from agentfactory.tools.mcp_servers.own_server import CHAIN_KEY, ROLE_KEY, build_server
from agentfactory.tools.tool import tool
from tests.waiting import pass_time, until


class Counter(Environment):
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
        return threading.current_thread().name

    @tool
    async def amble(self) -> str:
        return threading.current_thread().name

    @tool
    async def add(self, number: int) -> int:
        assert not self.busy
        self.busy = True
        await asyncio.sleep(0.005)
        self.value += number
        self.busy = False
        return self.value

    @tool
    def stop(self) -> str:
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
        own = dict.fromkeys(("zigzag", "amble", "add", "stop"), "tool")
        assert [*roles.items()] == [*(own | {name: name for name in ("reset", "reward", "close", "gauges")}).items()]
        assert await call(client, "reset", start=3, color="red", size=2) == ("color, size", None)
        assert await call(client, "zigzag") == ("user code", None)
        assert await call(client, "amble") == ("MainThread", None)
        assert await call(client, "stop") == ("RuntimeError: StopIteration: over", "tool_error")
        assert (await call(client, "add", number="x"))[1] == "invalid_arguments"
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


async def test_a_reward_takes_the_prediction_and_nothing_else() -> None:
    class Judge(Environment):
        def reward(self, prediction: str) -> float:
            return float(len(prediction))

    class Greedy(Environment):
        def reward(self, trajectory: Any) -> float:
            return 0.0

    async with Client(build_server([Judge])) as client:
        await call(client, "reset")
        assert await call(client, "reward", prediction="four") == ('{"reward": 4.0}', None)
    with pytest.raises(TypeError, match=r"Greedy\.reward takes 'trajectory'; it can take only `prediction`"):
        build_server([Greedy])


class Room(Environment):
    """An environment that logs each instance's events. `nap` waits for `wake`."""

    log: ClassVar[list[str]] = []
    numbers: ClassVar[Iterator[int]]
    wake: ClassVar[threading.Event]

    def __init__(self, name: str = "room") -> None:
        self.name = f"{name}{next(self.numbers)}"
        self.word = ""
        self.log.append(f"make {self.name}")

    async def reset(self, word: str = "", fault: str = "") -> str:
        self.fault = fault
        if fault == "reset":
            raise ValueError("no way in")
        before, self.word = self.word, word
        return before

    @tool
    async def read(self) -> str:
        return self.word

    @tool
    def nap(self) -> str:
        self.log.append(f"asleep in {self.name}")
        self.wake.wait(60)
        self.log.append(f"slept in {self.name}")
        return "awake"

    @tool
    async def collapse(self) -> str:
        raise ToolInfrastructureError("the roof came down")

    def release(self) -> None:
        self.log.append(f"release {self.name}")
        if self.fault == "release":
            raise ValueError("no way out")

    async def healthy(self) -> bool:
        return self.fault != "sick"

    def close(self) -> None:
        self.log.append(f"close {self.name}")


@pytest.fixture
def log() -> list[str]:
    Room.log.clear()
    Room.numbers, Room.wake = itertools.count(), threading.Event()
    return Room.log


async def gauges(client: Client) -> Any:
    return (await client.call_tool("gauges", {})).structured_content


async def test_instances_that_are_not_used_again(log: list[str]) -> None:
    async with Client(build_server([Room], pool=PoolConfig(capacity=1))) as client:
        assert await call(client, "reset", "a", fault="reset") == ("ValueError: no way in", "tool_error")
        assert await call(client, "reset", "b", fault="release") == ("", None)
        await call(client, "close", "b")
        assert await call(client, "reset", "c", fault="sick") == ("", None)
        await call(client, "close", "c")
        assert await call(client, "reset", "d") == ("", None)
        with pytest.raises(MCPError, match="the roof came down"):
            await call(client, "collapse", "d")
        await call(client, "close", "d")
        assert await call(client, "reset", "e") == ("", None)
        assert (await gauges(client))["broken"] == 4
    assert [line for line in log if line.startswith("close")] == [f"close room{number}" for number in range(5)]


async def test_a_call_that_was_given_up_keeps_its_instance(log: list[str]) -> None:
    async with Client(build_server([Room], pool=PoolConfig(capacity=1))) as client:
        await call(client, "reset", "a", word="a")
        nap = asyncio.create_task(call(client, "nap", "a"))
        await until(lambda: "asleep in room0" in log)
        nap.cancel()
        closing = asyncio.create_task(call(client, "close", "a"))
        following = asyncio.create_task(call(client, "reset", "b", word="b"))
        await until_waiting(client)
        Room.wake.set()
        assert await following == ("a", None)
        assert await call(client, "read", "b") == ("b", None)
        await closing
    assert log == ["make room0", "asleep in room0", "slept in room0", "release room0", "close room0"]


async def until_waiting(client: Client, number: int = 1) -> None:
    async with asyncio.timeout(30):
        while (await gauges(client))["waiting"] != number:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_class_that_cannot_forget_is_made_anew() -> None:
    class Bucket(Environment):
        def __init__(self) -> None:
            self.words: list[str] = []

        @tool
        async def put(self, word: str) -> list[str]:
            self.words.append(word)
            return self.words

    async with Client(build_server([Bucket])) as client:
        for chain in "ab":
            await call(client, "reset", chain)
            assert await call(client, "put", chain, word=chain) == (f'["{chain}"]', None)
            await call(client, "close", chain)
        assert (await gauges(client))["recycled"] == 2


async def test_a_chain_that_calls_nothing_any_more_loses_its_instance(log: list[str]) -> None:
    pool = PoolConfig(capacity=1)
    async with Client(build_server([Room], pool=pool, idle_seconds=60)) as client:
        await call(client, "reset", "a", word="a")
        for _ in range(5):  # longer than the limit in total, but never without a call
            pass_time(20)
            assert await call(client, "read", "a") == ("a", None)
        following = asyncio.create_task(call(client, "reset", "b", word="b"))
        await until_waiting(client)
        pass_time(60)
        assert await following == ("a", None)
        with pytest.raises(MCPError, match=r"holds no state of this chain: .* it made no call for 60 s"):
            await call(client, "read", "a")
        assert await call(client, "read", "b") == ("b", None)


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
        ([Another, Counter], "Another and Counter are Environments; name one, and serve each by a server"),
        ([Demanding], "options.size: Demanding requires it; set it under `options:`"),
        ([Confused], "Confused.reset is not for the model"),
        ([len], "<built-in function len> is neither a @tool function or method nor an Environment"),
        ([MCPServer("x"), add], r"is served alone"),
    ]


@pytest.mark.parametrize(("objects", "reason"), _refused())
def test_refused_objects(objects: list[Any], reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        build_server(objects, "pad")


def test_options_that_do_not_fit() -> None:
    @tool
    def add(number: int) -> int: ...

    with pytest.raises(TypeError, match=r"options\.colour: Room has no such argument; it takes name"):
        build_server([Room], options={"colour": "red", "name": "x"})
    with pytest.raises(TypeError, match=r"options\.size: Counter has no such argument; it takes none"):
        build_server([Counter], options={"size": 1})
    with pytest.raises(SettingError, match=r"options\.name: got 5: Input should be a valid string"):
        build_server([Room], options={"name": 5})
    for objects in ([add], [MCPServer("theirs")]):
        with pytest.raises(TypeError, match=r"options: only an Environment class takes options, .*; remove it"):
            build_server(objects, "pad", options={"size": 1})
        with pytest.raises(TypeError, match=r"pool: only an Environment class takes pool"):
            build_server(objects, "pad", pool=PoolConfig(capacity=1))


async def test_a_tool_in_this_process_may_change_its_arguments() -> None:
    @tool
    async def take(items: Any) -> int:
        items.pop()
        return len(items)

    arguments = {"items": [1, 2, 3]}
    server = build_server([take])
    for _ in range(2):
        result = await server.call("take", arguments, "chain")
        assert content_of(result) == "2"
    assert arguments == {"items": [1, 2, 3]}
    with pytest.raises(MCPError, match="has no tool leave"):
        await server.call("leave", {}, "chain")
