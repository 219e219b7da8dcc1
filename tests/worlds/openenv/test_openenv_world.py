"""The world of OpenEnv servers through chains: episodes, concurrency, servers that fail, a world of ours, OpenEnv's own
server."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.config import McpServerConfig, ToolsRecipe
from agentfactory.base.errors import SettingError
from agentfactory.base.messages import CallError, ToolCall, ToolInfrastructureError, ToolResult
from agentfactory.rollout.config import DataConfig
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.tools.sessions.toolset import Toolset, open_toolset
from agentfactory.worlds.openenv import server as server_module
from agentfactory.worlds.openenv.tasks import OpenEnvSource
from tests.waiting import until, wait_for
from tests.worlds.openenv.servers import LineServer, served
from tests.worlds.test_openenv import GARDEN, ROWS

pytest.importorskip("websockets")


@asynccontextmanager
async def playing(**fields: Any) -> AsyncIterator[Toolset]:
    recipe = ToolsRecipe(mcp_servers={"openenv": McpServerConfig(module="openenv", **fields)})
    async with open_toolset(recipe, Path.cwd()) as toolset:
        yield toolset


async def rows(server: LineServer | str, **fields: Any) -> list[dict[str, Any]]:
    url = server if isinstance(server, str) else server.url
    source = OpenEnvSource(**{"url": url, "tasks": 3, **fields})
    return await asyncio.to_thread(source.rows)


async def act(session: ToolSession, seconds: float | None = None, **action: Any) -> ToolResult:
    return await session.call(ToolCall("1", "act", {"action": action}), seconds)


async def check_waiting(tasks: list[dict[str, Any]], chains: int) -> None:
    """Assert that a pool makes chains wait for one of two places of the server."""

    async def play(number: int) -> bool:
        async with toolset.chain(str(number), tasks[number % 3]) as session:
            return (await act(session, by=-1)).error is None

    async with playing(pool={"capacity": 2}) as toolset:
        assert all(await asyncio.gather(*map(play, range(chains))))


async def test_an_address_gives_tasks_and_a_world() -> None:
    async with LineServer(places=1).serve() as server:
        data = DataConfig.model_validate({"openenv": {"url": f"{server.url}/", "tasks": 3, "success_return": 0.5}})
        assert data.world == "openenv"
        tasks = await asyncio.to_thread(data.registered[1].rows)
        assert [(task["question"], task["seed"]) for task in tasks] == [("Move to the goal.", n) for n in range(3)]
        async with playing() as toolset:
            assert [spec.name for spec in toolset.specs] == ["act"]
            toolset.check_rows(tasks, "data", False)
            async with toolset.chain("a", tasks[1]) as session:
                assert session.opening == (
                    "An action is an object with these fields:\n"
                    "- by (integer [minimum -2, maximum 2]): Cells to move\n\n"
                    "text: You are at 0, the goal is 2.\ncells: [0, 2]"
                )
                first = session.anchor
                assert first
                wrong = await act(session, by=3)
                assert wrong.error is CallError.TOOL_ERROR
                assert wrong.content == "ValueError: by: 3 is out of range"
                step = await act(session, by=1)
                assert step.content == "text: You are at 1, the goal is 2.\ncells: [1, 2]"
                assert step.info == {"reward": -0.25, "done": False, "metadata": {"hidden": 2}}
                assert session.anchor not in (None, first)
                # written as text, as models sometimes do
                last = await session.call(ToolCall("1", "act", {"action": '{"by": 1}'}))
                assert last.finish
                assert str(last.content).startswith("The episode has ended. Return: 0.75.\n\ntext: You are at 2")
                assert "has ended" in str((await act(session, by=1)).content)
                judged = await session.reward()
            # the only place of the server is free again
            async with toolset.chain("b", tasks[0]) as session:
                early = await session.reward()
        assert (judged.reward, judged.metrics) == (0.75, {"steps": 2, "ended": 1, "success": 1})
        assert (early.reward, early.metrics) == (0, {"steps": 0, "ended": 0, "success": 0})
        await until(lambda: server.sessions == 0)


async def test_a_full_server_refuses_one_chain_and_a_pool_makes_it_wait() -> None:
    async with LineServer(places=2).serve() as server:
        tasks = await rows(server)
        async with playing() as toolset, toolset.chain("a", tasks[0]), toolset.chain("b", tasks[1]):
            with pytest.raises(ToolInfrastructureError, match="no free session: Server at capacity; fix: raise the"):
                async with toolset.chain("c", tasks[2]):
                    pass
            with pytest.raises(SettingError, match=r"openenv\.url: got .* has no free session"):
                await rows(server)
        await check_waiting(tasks, 8)


FAULTS = {
    "dies": "closed the connection before it answered",
    "closes": "out of ice",
    "hangs": "did not answer a",
    "giant": r"message too big",
    "<html>": "'<html>', which is no observation",
    "[" * 60_000: "which is no observation",
    '{"type": "observation", "data": {"observation": {}, "reward": NaN}}': "which is no observation",
    '{"type": "error", "data": {"code": "SESSION_ERROR", "message": "lost"}}': "with SESSION_ERROR: lost",
}


async def test_a_chain_whose_server_fails_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MESSAGE_BYTES", 65_536)
    faults = dict(FAULTS)
    async with LineServer().serve() as server, playing() as toolset:
        task, other, _ = await rows(server)

        def failing(fault: str, at: str) -> dict[str, Any]:
            seconds = 0.3 if fault == "hangs" else 50.0
            return {**task, "openenv": {**task["openenv"], "seconds": seconds, "reset": {"fault": fault, "at": at}}}

        async def fail_at_step(fault: str, told: str) -> None:
            async with toolset.chain(f"step {fault}", failing(fault, "step")) as bad:
                with pytest.raises(ToolInfrastructureError, match=told):
                    await act(bad, by=1)

        async def fail_at_reset(fault: str, told: str) -> None:
            with pytest.raises(ToolInfrastructureError, match=told):
                async with toolset.chain(f"reset {fault}", failing(fault, "reset")):
                    pass

        async with toolset.chain("good", other) as good:
            hanging = {"hangs": faults.pop("hangs")}
            for some in (faults, hanging):
                await asyncio.gather(*[fail(*each) for each in some.items() for fail in (fail_at_step, fail_at_reset)])
            assert (await act(good, by=1)).error is None
        await until(lambda: server.sessions == 0)


async def test_a_step_that_is_given_up_counts_once_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LineServer().serve() as server, playing() as toolset:
        _, task, _ = await rows(server)
        async with toolset.chain("a", task) as session:
            server.may_answer.clear()
            assert (await act(session, seconds=0.02, by=-1)).error is CallError.TIMEOUT
            server.may_answer.set()
            assert "You are at 0, the goal is 2" in str((await act(session, by=1)).content)
            judged = await session.reward()
        assert (judged.reward, judged.metrics["steps"]) == (-0.5, 2)
        # a chain that ends during a step does not wait for its answer
        monkeypatch.setattr(server_module, "_CLOSE_SECONDS", 0.05)
        async with toolset.chain("b", task) as session:
            server.may_answer.clear()
            assert (await act(session, seconds=0.02, by=-1)).error is CallError.TIMEOUT
        server.may_answer.set()
        await until(lambda: server.sessions == 0)


@pytest.mark.parametrize(
    ("pages", "fields", "told"),
    [
        ({"/schema": (404, "no")}, {}, r"openenv.url: got 'http.* is no description \(status 404\): no; fix: give"),
        ({"/schema": (200, {"action": {"properties": {"a": {"$ref": "#/$defs/b"}}}})}, {}, "cannot be read: KeyErr"),
        ({"/schema": (401, "no")}, {}, r"openenv.api_key_env: got null, and http.* needs a key \(status 401\); fix: "),
        ({"/schema": (403, "no")}, {"api_key_env": "A_KEY"}, "openenv.api_key_env: got 'A_KEY', whose key http"),
        ({"/metadata": (200, {"name": "x"})}, {}, "openenv.question: got null, and the metadata"),
        ({}, {"observation": ["txt"]}, "openenv.observation: got 'txt'; observations of http.* have text, cells, met"),
        ({}, {"reset": {"fault": "dies"}}, "openenv.url: got .* closed the connection before it answered a reset"),
        (
            {},
            {"reset": {"fault": '{"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "no such map"}}'}},
            r"openenv.reset: got .* refuses: no such map; fix: correct it",
        ),
        ({}, {"url": "http://127.0.0.1:9"}, "openenv.url: got 'http://127.0.0.1:9': http.* does not answer: .*; fix"),
    ],
)
async def test_a_source_names_the_field(
    pages: dict[str, Any], fields: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "k")
    async with LineServer().serve() as server:
        server.pages |= pages
        with pytest.raises(SettingError, match=told):
            await rows(server, **fields)
        await until(lambda: server.sessions == 0)


async def test_a_world_of_ours_is_played_by_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "garden.py").write_text(GARDEN)
    async with served(ToolsRecipe(tools=["garden.py:Garden"]), ROWS, tmp_path, "a key") as url:
        with pytest.raises(SettingError, match=r"openenv\.api_key_env: got null, and .* needs a key \(status 401\)"):
            await rows(url)
        monkeypatch.setenv("GARDEN_KEY", "a key")
        tasks = await rows(url, api_key_env="GARDEN_KEY", observation=["messages"])
        in_address = await rows(url.replace("//", "//:a%20key@"), observation=["messages"])
        assert tasks[0]["openenv"]["tools"] is True
        async with playing() as toolset:
            async with toolset.chain("a", tasks[1]) as session:
                lines = str(session.opening).splitlines()
                assert lines[:5] == [
                    'An action calls a tool: {"tool_name": NAME, "arguments": {...}}. The tools:',
                    *("", "water: Water a bed.", "- litres (integer, default 1)", ""),
                ]
                assert lines[5].startswith("end_episode: End the episode")
                assert lines[-5:] == ["", "system: You garden.", "user: Water 2 beds.", "", "There are 2 dry beds."]
                unknown = await act(session, tool_name="rain")
                assert unknown.error is CallError.TOOL_ERROR
                assert "There is no tool 'rain'" in str(unknown.content)
                assert "tool_name: Field required" in str((await act(session, tool="water")).content)
                assert (await act(session, tool_name="water")).content == "1 are dry"
                last = await act(session, tool_name="water", arguments={"litres": 2})
                assert last.finish
                assert last.content == "The episode has ended. Return: 1.\n\nall wet"
                judged = await session.reward()
            async with toolset.chain("b", in_address[0]) as session:
                assert (await act(session, tool_name="end_episode")).finish
        assert (judged.reward, judged.metrics) == (1, {"steps": 3, "ended": 1})


@contextmanager
def openenvs_server(python: str, places: int) -> Iterator[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, str(Path(__file__).with_name("openenv_app.py")), str(places)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield wait_for(process.stdout.readline, 120).strip()
        finally:
            process.kill()


@pytest.mark.long
@pytest.mark.processes
async def test_openenvs_own_server_with_plain_actions(openenv_python: str) -> None:
    with openenvs_server(openenv_python, 2) as url:
        tasks = await rows(url)
        assert tasks[0]["question"] == "Move to the goal."
        await check_waiting(tasks, 20)
        async with playing() as toolset:
            async with toolset.chain("a", tasks[1]) as session:
                assert "Input should be less than or equal to 2" in str((await act(session, by=9)).content)
                assert (await act(session, by=1, note="crash")).content == "ValueError: crashed"
                step = await act(session, by=1)
                assert [part["type"] for part in step.content] == ["text", "text", "image_url"]
                assert step.content[0]["text"] == "text: You are at 1, the goal is 2."
                assert (await act(session, by=1)).finish
                judged = await session.reward()
                assert judged.reward == 0.75
            async with toolset.chain("b", tasks[0]), toolset.chain("c", tasks[1]) as dying:
                with pytest.raises(ToolInfrastructureError, match="Server at capacity: 2/2"):
                    async with toolset.chain("d", tasks[2]):
                        pass
                with pytest.raises(ToolInfrastructureError, match="closed the connection"):
                    await act(dying, by=1, note="die")
