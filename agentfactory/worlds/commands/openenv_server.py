"""A server of a world or recipe that speaks OpenEnv's protocol (0.10): `/ws` is a session with `reset`, `step`, `state`
and `close`; `/schema`, `/metadata` and `/health` describe it."""

import ipaddress
import json
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from agentfactory.base.errors import SettingError
from agentfactory.base.http.http_server import serve_websockets
from agentfactory.base.http.key_guard import HEALTH, KeyGuard, listen, server_key
from agentfactory.base.messages import CallError, ToolCall, ToolInfrastructureError, text_of
from agentfactory.base.processes import parent_watch
from agentfactory.base.user_code.extras import check_extra
from agentfactory.rollout.chains.opening_prompt import add_text, opening_messages
from agentfactory.rollout.data import Task
from agentfactory.rollout.text.parsers.values import whole_object
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.tools.sessions.toolset import Toolset, open_toolset
from agentfactory.worlds.commands.subject import Subject

END = "end_episode"
"""The tool by which a client ends an episode, which is then judged; worlds may also end it."""
_END_TOOL = {
    "name": END,
    "description": "End the episode, which is then judged. Call it when the task is done.",
    "input_schema": {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The final message, which some worlds judge"}},
    },
}
_ERRORS = {
    CallError.UNKNOWN_TOOL: "tool_not_found",
    CallError.INVALID_ARGUMENTS: "invalid_args",
    CallError.TIMEOUT: "timeout",
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ResetData(_Strict):
    """Arguments of a reset: the number of a task, or a seed, which stands for task `seed % tasks`; without either, a
    session gets the next task that no session has had."""

    index: int | None = Field(default=None, ge=0)
    seed: int | None = Field(default=None, ge=0)
    episode_id: str | None = Field(default=None, max_length=255)


class ListTools(_Strict):
    """The action that lists the tools."""

    type: Literal["list_tools"]
    metadata: dict[str, Any] = {}


class CallToolAction(_Strict):
    """Call a tool; OpenEnv's schema of an action."""

    type: Literal["call_tool"] = "call_tool"
    tool_name: str = Field(description="Name of the tool to call")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Arguments to pass to the tool")
    metadata: dict[str, Any] = {}


_ACTION: TypeAdapter[ListTools | CallToolAction] = TypeAdapter(ListTools | CallToolAction)


class SessionError(Exception):
    """A message that cannot be answered; `code` is OpenEnv's."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class ServedWorld:
    """A world's tools and tasks, for all sessions."""

    def __init__(self, name: str, toolset: Toolset, tasks: list[Task], system_prompt: str | None) -> None:
        self.name, self.toolset, self.tasks, self.system_prompt = name, toolset, tasks, system_prompt
        self._numbers = count()
        self.tools = [
            {"name": spec.name, "description": spec.description, "input_schema": spec.parameters}
            for spec in toolset.specs
        ] + [_END_TOOL]

    def task(self, asked: ResetData) -> tuple[int, Task]:
        """Return a task and its number. Raises SessionError."""
        if not self.tasks:
            return 0, {}
        number = asked.index if asked.index is not None else asked.seed
        if asked.index is not None and asked.index >= len(self.tasks):
            raise SessionError("VALIDATION_ERROR", f"index: got {asked.index}; there are {len(self.tasks)} tasks")
        number = (next(self._numbers) if number is None else number) % len(self.tasks)
        return number, self.tasks[number]


class Session:
    """One client's session: one episode at a time, which a reset begins."""

    def __init__(self, world: ServedWorld) -> None:
        self._world, self._stack = world, AsyncExitStack()
        self._tools: ToolSession | None = None
        self._episode: dict[str, Any] = {"episode_id": "", "step_count": 0, "index": 0, "done": False}

    async def close(self) -> None:
        self._tools, stack, self._stack = None, self._stack, AsyncExitStack()
        await stack.aclose()

    async def reset(self, data: Any) -> dict[str, Any]:
        """Begin an episode; return its observation. Raises SessionError, ValidationError, ToolInfrastructureError."""
        asked = ResetData.model_validate(data)
        number, task = self._world.task(asked)
        await self.close()
        key = uuid.uuid4().hex
        tools = await self._stack.enter_async_context(self._world.toolset.chain(key, task))
        self._tools = tools
        self._episode = {"episode_id": asked.episode_id or key, "step_count": 0, "index": number, "done": False}
        messages = opening_messages(task, self._world.system_prompt) if task else []
        if messages and tools.opening:
            messages = add_text(messages, text_of(tools.opening))
        observation = {"messages": messages, "opening": tools.opening, "metadata": {"index": number}}
        return {"observation": observation, "reward": None, "done": False}

    async def step(self, data: Any) -> dict[str, Any]:
        """Take an action; return the observation, with the reward if the episode ends. Raises like `reset`."""
        action = _ACTION.validate_python(data)
        if isinstance(action, ListTools):
            return {"observation": {"tools": self._world.tools, "metadata": {}}, "reward": None, "done": False}
        if self._tools is None or self._episode["done"]:
            why = "the episode has ended" if self._tools is not None else "there is no episode"
            raise SessionError("EXECUTION_ERROR", f"{why}; begin one by reset")
        self._episode["step_count"] += 1
        observation: dict[str, Any] = {"tool_name": action.tool_name, "result": "", "error": None, "metadata": {}}
        done = action.tool_name == END
        if not done:
            result = await self._tools.call(ToolCall("call", action.tool_name, action.arguments))
            observation["result"], done = result.content, result.finish
            if result.error is not None:
                kind = _ERRORS.get(result.error, "execution_error")
                observation["error"] = {"error_type": kind, "message": text_of(result.content)}
        reward = None
        if done:
            self._episode["done"] = True
            answer = action.arguments.get("answer") if action.tool_name == END else None
            if (verdict := await self._tools.reward(str(answer or ""))) is not None:
                reward, observation["metadata"] = verdict.reward, verdict.metrics
        return {"observation": observation, "reward": reward, "done": done}

    async def answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer to a message; None if it ends the session."""
        kind = message.get("type")
        try:
            match kind:
                case "reset":
                    return {"type": "observation", "data": await self.reset(message.get("data") or {})}
                case "step":
                    return {"type": "observation", "data": await self.step(message.get("data"))}
                case "state":
                    return {"type": "state", "data": self._episode}
                case "close":
                    return None
            return _error("UNKNOWN_TYPE", f"Unknown message type: {kind!r:.200}")
        except ValidationError as error:
            faults = error.errors(include_url=False, include_context=False, include_input=False)
            told = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults)
            return _error("VALIDATION_ERROR", f"Invalid {kind}: {told}", errors=faults)
        except SessionError as error:
            return _error(error.code, str(error))
        except ToolInfrastructureError as error:
            await self.close()
            # not EXECUTION_ERROR, which an action may cause
            return _error("SESSION_ERROR", f"{self._world.name}: {error}")


def _error(code: str, text: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": text, "code": code, **more}}


def make_app(world: ServedWorld) -> Starlette:
    async def session(socket: WebSocket) -> None:
        await socket.accept()
        found = Session(world)
        try:
            while (received := await socket.receive())["type"] == "websocket.receive":
                text = received.get("text")
                message, problem = (None, "the frame is binary") if text is None else whole_object(text.strip())
                if message is None:
                    answer: dict[str, Any] | None = _error("INVALID_JSON", f"Invalid JSON: {problem}")
                else:
                    answer = await found.answer(message)
                if answer is None:
                    await socket.close()
                    return
                # escaped, because results of tools may contain lone surrogates
                await socket.send_text(json.dumps(answer))
        except WebSocketDisconnect:
            pass
        finally:
            await found.close()

    async def schema(request: Request) -> Response:
        action = CallToolAction.model_json_schema()
        anything = {"type": "object", "additionalProperties": True}
        return JSONResponse({"action": action, "observation": anything, "state": anything})

    async def metadata(request: Request) -> Response:
        about = f"{world.name}, served by AgentFactory: {len(world.tasks):,} tasks"
        return JSONResponse({"name": world.name, "description": about, "tasks": len(world.tasks)})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "healthy"})

    routes = [Route("/schema", schema), Route("/metadata", metadata), Route(HEALTH, health)]
    return Starlette(routes=[*routes, WebSocketRoute("/ws", session)])


async def serve(
    subject: Subject, host: str, port: int, api_key_env: str | None, say: Callable[[str], None], client: str = ""
) -> None:
    """Serve until SIGINT or SIGTERM, and say `ready http://HOST:PORT`. Raises SettingError, ToolInfrastructureError."""
    check_extra("openenv")
    parent_watch.follow_parent()
    tasks = subject.rows()
    async with open_toolset(subject.recipe, Path.cwd()) as toolset:
        if lack := subject.missing_rows(toolset, bool(tasks)):
            raise lack
        toolset.check_rows(tasks, "data", bool(subject.recipe.rewards))
        if any(spec.name == END for spec in toolset.specs):
            fix = "set mcp_servers.NAME.prefix"
            raise SettingError("", f"{subject.name} has a tool {END}, which is the server's own", fix)
        listener = listen(host, port, "--port")
        address, port = listener.getsockname()[:2]
        if not ipaddress.ip_address(address).is_loopback and api_key_env is None:
            listener.close()
            problem = f"{host} is reachable from other machines, whose clients cannot read this user's key file"
            raise SettingError("--host", problem, "name an environment variable with a key by --api-key-env")
        world = ServedWorld(subject.name, toolset, tasks, subject.recipe.rollout.system_prompt)
        shown = f"[{host}]" if ":" in host else host
        with server_key(address, port, api_key_env) as (key, where):
            judged = "" if toolset.judges else "; it gives no reward: clients judge its episodes"
            say(f"ready http://{shown}:{port}\n{subject.name}: {len(tasks):,} tasks{judged}\n{where}{client}")
            await serve_websockets(KeyGuard(make_app(world), key), listener)
