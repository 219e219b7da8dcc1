"""Worlds served as OpenEnv environments: the protocol, the server's key and connections, and OpenEnv's own client."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.config import ToolsRecipe
from agentfactory.base.http.server_keys import key_file
from agentfactory.tools.sessions.toolset import open_toolset
from agentfactory.worlds.commands.openenv_server import ServedWorld, Session

GARDEN = '''
from agentfactory import Environment, finish, tool


class Garden(Environment):
    """Beds that need water."""

    def reset(self, beds: int) -> str:
        self.dry = beds
        return f"There are {beds} dry beds."

    @tool
    def water(self, litres: int = 1):
        """Water a bed."""
        self.dry -= 1
        if self.dry < 0:
            from agentfactory import ToolInfrastructureError

            raise ToolInfrastructureError("the pump broke")
        return finish("all wet") if not self.dry else f"{self.dry} are dry"

    def reward(self) -> dict:
        return {"reward": float(self.dry == 0), "dry": float(self.dry)}
'''
ROWS = [{"question": f"Water {beds} beds.", "beds": beds} for beds in (1, 2, 3)]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "garden.py").write_text(GARDEN)
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    path = tmp_path / "recipe.yaml"
    path.write_text("tools: ['garden.py:Garden']\ndata: {path: rows.jsonl}\nrollout: {system_prompt: You garden.}\n")
    return path


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "step", "data": {"type": "call_tool", "tool_name": tool, "arguments": arguments}}


async def test_episodes_follow_the_protocol(recipe: Path) -> None:
    async with open_toolset(ToolsRecipe(tools=["garden.py:Garden"]), recipe.parent) as toolset:
        world = ServedWorld("garden", toolset, ROWS, "You garden.")
        one, other = Session(world), Session(world)

        async def answer(session: Session, message: Any) -> dict[str, Any]:
            found = await session.answer(message)
            assert found is not None
            json.dumps(found)
            return found["data"] if found["type"] != "error" else found

        early = await answer(one, call("water"))
        assert early["data"] == {"message": "there is no episode; begin one by reset", "code": "EXECUTION_ERROR"}
        begun = await answer(one, {"type": "reset", "data": {"seed": 4}})
        assert begun["done"] is False
        assert begun["reward"] is None
        assert begun["observation"]["messages"] == [
            {"role": "system", "content": "You garden."},
            {"role": "user", "content": "Water 2 beds.\n\nThere are 2 dry beds."},
        ]
        listed = await answer(one, {"type": "step", "data": {"type": "list_tools"}})
        assert [tool["name"] for tool in listed["observation"]["tools"]] == ["water", "end_episode"]
        # without a seed, sessions get the tasks in order
        assert (await answer(other, {"type": "reset"}))["observation"]["metadata"] == {"index": 0}
        assert (await answer(one, call("water")))["observation"]["result"] == "1 are dry"
        wrong = (await answer(one, call("water", litres="x")))["observation"]["error"]
        assert wrong["error_type"] == "invalid_args"
        assert (await answer(one, call("rain")))["observation"]["error"]["error_type"] == "tool_not_found"
        last = await answer(one, call("water"))
        assert (last["done"], last["reward"], last["observation"]["result"]) == (True, 1.0, "all wet")
        assert last["observation"]["metadata"] == {"dry": 0.0}
        assert (await answer(one, {"type": "state"}))["step_count"] == 4
        assert "has ended" in (await answer(one, call("water")))["data"]["message"]
        # the client ends the episode
        await answer(one, {"type": "reset", "data": {"index": 2, "episode_id": "mine"}})
        ended = await answer(one, call("end_episode"))
        assert (ended["done"], ended["reward"]) == (True, 0.0)
        assert (await answer(one, {"type": "state"}))["episode_id"] == "mine"
        for message, code in (
            ({"type": "reset", "data": {"index": 3}}, "VALIDATION_ERROR"),
            ({"type": "reset", "data": {"goal": 3}}, "VALIDATION_ERROR"),
            ({"type": "step", "data": {}}, "VALIDATION_ERROR"),
            ({"type": "look"}, "UNKNOWN_TYPE"),
        ):
            assert (await answer(one, message))["data"]["code"] == code
        assert await one.answer({"type": "close"}) is None
        await one.close()
        await other.close()


@contextmanager
def served(recipe: Path, *before: str) -> Iterator[tuple[str, str]]:
    command = [sys.executable, "-m", "agentfactory", "worlds", "serve", str(recipe), "--as", "openenv", "--port", "0"]
    with subprocess.Popen([*before, *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().split()[1]
            assert process.stdout.readline().endswith("recipe: 3 tasks\n")
            yield url, key_file("127.0.0.1", int(url.rpartition(":")[2])).read_text().strip()
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 130


@pytest.mark.extended
@pytest.mark.processes
def test_sockets_need_the_key_and_give_their_places_back(recipe: Path) -> None:
    connect = pytest.importorskip("websockets.sync.client").connect
    # 256 open files: 128 connections at most
    limited = ("bash", "-c", 'ulimit -n 256; exec "$@"', "bash")
    with served(recipe, *limited) as (url, key):
        address = url.replace("http", "ws") + "/ws"
        with pytest.raises(Exception, match="HTTP 403"):
            connect(address)
        for index in range(200):
            with connect(address, additional_headers={"Authorization": f"Bearer {key}"}) as socket:
                socket.send(json.dumps({"type": "reset", "data": {"index": index % 3}}))
                assert json.loads(socket.recv())["data"]["observation"]["metadata"] == {"index": index % 3}
        # clients that only accept a URL
        with connect(address.replace("//", f"//:{key}@")) as socket:
            for frame in ("{", "[]", b"\xff", '{"type": "\\ud800"}', '{"type": ' + "[" * 5000 + "]" * 5000 + "}"):
                socket.send(frame)
                assert json.loads(socket.recv())["data"]["code"] == "INVALID_JSON"
            socket.send('{"type": "reset"}')
            assert json.loads(socket.recv())["type"] == "observation"


CLIENT = """
import sys
from openenv import GenericEnvClient
from openenv.core import CallToolAction, ListToolsAction

url, key = sys.argv[1:]
try:
    with GenericEnvClient(base_url=url).sync() as env:
        env.reset()
except ConnectionError as error:
    assert "403" in str(error), error
else:
    raise AssertionError("no key was needed")
with GenericEnvClient(base_url=url, headers={"Authorization": f"Bearer {key}"}).sync() as env:
    begun = env.reset(seed=1)
    assert begun.observation["opening"] == "There are 2 dry beds.", begun
    tools = env.step(ListToolsAction(type="list_tools").model_dump()).observation["tools"]
    assert [tool["name"] for tool in tools] == ["water", "end_episode"], tools
    assert env.step(CallToolAction(tool_name="water")).observation["result"] == "1 are dry"
    last = env.step(CallToolAction(tool_name="water", arguments={"litres": 2}))
    assert (last.done, last.reward) == (True, 1.0), last
    assert env.state()["step_count"] == 2
    try:
        env.step(CallToolAction(tool_name="water"))
    except RuntimeError as error:
        assert "has ended" in str(error)
    else:
        raise AssertionError("a step after the end")
print("played")
"""


@pytest.mark.long
@pytest.mark.processes
def test_openenvs_own_client_plays(recipe: Path, openenv_python: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with served(recipe) as (url, key):
        command = [openenv_python, "-c", CLIENT, url, key]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.stdout == "played\n", done.stderr
