"""A taskset of verifiers (0.4) whose tasks, tools and rewards are those of `agentfactory worlds serve`.

This file needs verifiers, and nothing of AgentFactory. Put its folder on PYTHONPATH, and the server's key into the
environment variable AGENTFACTORY_WORLD_KEY:

    vf-eval agentfactory-world --env.taskset.url http://127.0.0.1:8000
"""

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx
import verifiers.v1 as vf
from openai import APIStatusError, AsyncOpenAI, omit

__all__ = ["WorldEnv", "WorldHarness", "WorldTaskset"]

END = "end_episode"


class WorldData(vf.TaskData):
    url: str
    key_var: str
    index: int


class WorldTask(vf.Task[WorldData]):
    pass


class WorldConfig(vf.TasksetConfig):
    url: str = ""
    key_var: str = "AGENTFACTORY_WORLD_KEY"
    """Environment variable with the server's key."""


class WorldTaskset(vf.Taskset[WorldTask, WorldConfig]):
    def load(self) -> Iterator[WorldTask]:
        url, key_var = self.config.url.rstrip("/"), self.config.key_var
        if not url:
            raise ValueError("the taskset agentfactory-world needs --env.taskset.url, the address of the server")
        answer = httpx.get(f"{url}/metadata", headers=_authorization(key_var), trust_env=False)
        answer.raise_for_status()
        for index in range(answer.json()["tasks"]):
            # the server writes the messages when an episode begins
            prompt = f"Task {index} of {answer.json()['name']}"
            yield WorldTask(WorldData(prompt=prompt, url=url, key_var=key_var, index=index), self.config.task)


class World:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue()
        # reads always, because only a reading client answers the server's pings, and the model may take its time
        self._reading = asyncio.create_task(self._read())
        self.ended: dict[str, Any] | None = None

    async def _read(self) -> None:
        while True:
            answer = await self._socket.receive()
            self._answers.put_nowait(answer)
            if answer.type is not aiohttp.WSMsgType.TEXT:
                return

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        await self._socket.send_json({"type": kind, "data": data})
        answer = await self._answers.get()
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"the server closed the connection: {answer.data!r} {answer.extra or ''}")
        found = json.loads(answer.data)
        if found["type"] == "error":
            raise RuntimeError(f"the server refused {kind}: {found['data']['message']}")
        return found["data"]

    async def begin(self, index: int) -> list[dict[str, Any]]:
        observation = (await self._ask("reset", {"index": index}))["observation"]
        if messages := observation["messages"]:
            return messages
        return [{"role": "user", "content": observation["opening"] or "Begin."}]

    async def tools(self) -> list[dict[str, Any]]:
        found = (await self._ask("step", {"type": "list_tools"}))["observation"]["tools"]
        functions = [
            {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
            for tool in found
        ]
        return [{"type": "function", "function": function} for function in functions if function["name"] != END]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool; return its result. Sets `ended` if it ends the episode."""
        found = await self._ask("step", {"type": "call_tool", "tool_name": name, "arguments": arguments})
        if found["done"]:
            self.ended = found
        result = found["observation"]["result"]
        if not isinstance(result, str) and any(part.get("type") != "text" for part in result):
            raise TypeError(f"{name} returned images, which this client does not pass on")
        return result if isinstance(result, str) else "\n".join(part["text"] for part in result)


class WorldHarness(vf.Harness[vf.HarnessConfig]):
    """The loop of model and tools, in this process, with the server's tools."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: WorldData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        async with (
            aiohttp.ClientSession(headers=_authorization(data.key_var)) as http,
            http.ws_connect(f"{data.url.replace('http', 'ws', 1)}/ws", max_msg_size=0) as socket,
            AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None) as model,
        ):
            world = World(socket)
            messages = await world.begin(data.index)
            if data.system_prompt is not None:
                others = [message for message in messages if message["role"] != "system"]
                messages = [{"role": "system", "content": data.system_prompt}, *others]
            refused = None
            try:
                reply = await _converse(world, model, ctx.model, messages)
            except APIStatusError as error:  # a limit of the rollout: what was reached counts
                refused, reply = error, ""
            if world.ended is None:
                await world.call(END, {"answer": reply})
            assert world.ended is not None
            if world.ended["reward"] is not None:
                trace.record_reward("world", world.ended["reward"])
            trace.record_metrics(world.ended["observation"]["metadata"])
            if refused is not None:
                raise refused
        return vf.ProgramResult(0, "", "")


class WorldEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class WorldEnv(vf.Env[WorldEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.agent.run(task)


async def _converse(world: World, model: AsyncOpenAI, name: str, messages: list[Any]) -> str:
    """Let the model act until it calls no tool, or the episode ends. Return its last text."""
    tools: list[Any] = await world.tools()
    while True:
        answer = await model.chat.completions.create(model=name, messages=messages, tools=tools or omit)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        calls: list[Any] = message.tool_calls or []
        for call in calls:
            try:
                arguments = json.loads(call.function.arguments or "{}")
                if not isinstance(arguments, dict):
                    raise ValueError("they are not an object")
            except ValueError as error:
                result = f"The arguments of {call.function.name} are not JSON: {error}"
            else:
                result = await world.call(call.function.name, arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if world.ended is not None:
                break
        if world.ended is not None or not calls:
            return message.content or ""


def _authorization(variable: str) -> dict[str, str]:
    if not (key := os.environ.get(variable)):
        raise RuntimeError(f"the variable {variable} is not set; it must have the server's key")
    return {"Authorization": f"Bearer {key}"}
