"""OpenEnv servers for the tests: a line of cells that fails as its reset asks for, and worlds of ours."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

from agentfactory.base.config import ToolsRecipe
from agentfactory.base.http.http_server import serve_websockets
from agentfactory.base.http.key_guard import KeyGuard, listen
from agentfactory.tools.sessions.toolset import open_toolset
from agentfactory.worlds.commands.openenv_server import ServedWorld, make_app

ACTION = {
    "type": "object",
    "properties": {
        "metadata": {"type": "object"},
        "by": {"type": "integer", "minimum": -2, "maximum": 2, "description": "Cells to move"},
    },
    "required": ["by"],
}


class LineServer:
    """A server of a line of cells. The field `fault` of a reset says how the session fails, at the reset or, with
    `at: step`, at a step. `places` are the sessions that it gives at a time; steps wait for `may_answer`."""

    def __init__(self, places: int = 1000) -> None:
        self.url = ""
        self.places, self.sessions = places, 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.pages: dict[str, tuple[int, Any]] = {
            "/schema": (200, {"action": ACTION}),
            "/metadata": (200, {"name": "line", "description": "Move to the goal."}),
        }

    @asynccontextmanager
    async def serve(self) -> AsyncIterator["LineServer"]:
        from websockets.asyncio.server import serve

        async with serve(self._session, "127.0.0.1", 0, process_request=self._page, max_size=None) as server:
            self.url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            yield self

    def _page(self, connection: Any, request: Any) -> Any:
        if request.path == "/ws":
            return None
        status, page = self.pages.get(request.path, (404, "there is no such page"))
        response = connection.respond(HTTPStatus(status), page if isinstance(page, str) else json.dumps(page))
        response.headers["Content-Type"] = "application/json"
        return response

    async def _session(self, socket: Any) -> None:
        from websockets.exceptions import ConnectionClosed

        if self.sessions >= self.places:
            full = {"message": "Server at capacity", "code": "CAPACITY_REACHED", "max_sessions": self.places}
            await socket.send(json.dumps({"type": "error", "data": full}))
            return
        self.sessions += 1
        try:
            await self._play(socket)
        except ConnectionClosed:
            pass
        finally:
            await asyncio.sleep(0.02)  # as an environment that takes time to close
            self.sessions -= 1

    async def _play(self, socket: Any) -> None:
        at = goal = 0
        asked: dict[str, Any] = {}
        async for raw in socket:
            message = json.loads(raw)
            match message["type"]:
                case "close":
                    return
                case "reset":
                    asked = message["data"]
                    at, goal = 0, 1 + asked["seed"] % 5
                case "step" if (by := message["data"].get("by")) not in range(-2, 3):
                    faults = [{"loc": ["by"], "msg": f"{by} is out of range"}]
                    data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": faults}
                    await socket.send(json.dumps({"type": "error", "data": data}))
                    continue
                case "step":
                    at += message["data"]["by"]
            if "fault" in asked and asked.get("at", "reset") == message["type"]:
                await self._fail(socket, asked["fault"])
            if message["type"] == "step":
                await self.may_answer.wait()
            seen = {"text": f"You are at {at}, the goal is {goal}.", "cells": [at, goal], "metadata": {"hidden": goal}}
            reward = None if message["type"] == "reset" else 1.0 if at == goal else -0.25
            data = {"observation": seen, "reward": reward, "done": at == goal}
            await socket.send(json.dumps({"type": "observation", "data": data}))

    async def _fail(self, socket: Any, fault: str) -> None:
        match fault:
            case "dies":
                socket.transport.abort()
            case "closes":
                await socket.close(1011, "out of ice")
            case "hangs":
                await socket.wait_closed()
            case "giant":
                await socket.send("x" * 100_000)
            case _:
                await socket.send(fault)


@asynccontextmanager
async def served(recipe: ToolsRecipe, tasks: list[dict[str, Any]], base: Path, key: str) -> AsyncIterator[str]:
    """Serve a world as `agentfactory worlds serve --as openenv` does; yield its address."""
    async with open_toolset(recipe, base) as toolset:
        listener = listen("127.0.0.1", 0, "--port")
        app = KeyGuard(make_app(ServedWorld("garden", toolset, tasks, "You garden.")), key)
        serving = asyncio.create_task(serve_websockets(app, listener))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
