"""An inference server with completions scripted by a test: real HTTP, vLLM's routes, no model."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from agentfactory.rollout.inference.inference_client import NEEDED_ROUTES

Script = Callable[[list[int]], list[int]]
"""Prompt ids -> the ids that are 'sampled' after them."""


Server = TypeVar("Server", bound="ScriptedServer")


@dataclass
class ScriptedServer:
    """A server that answers each prompt by `script`. `requests`, `responses` and `held` record the traffic and each
    request's duration in seconds. With `decode`, from ids to text, it honours a request's stop strings. With
    `tells_model`, tokens have the requested model as their version."""

    script: Script
    delay: float = 0.0
    decode: Callable[[list[int]], str] | None = None
    tells_model: bool = False
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    responses: list[list[int]] = field(default_factory=list)
    held: list[float] = field(default_factory=list)

    async def generate(self, request: web.Request) -> web.Response:
        begun = time.perf_counter()
        body = await request.json()
        await asyncio.sleep(self.delay)
        limit = body["sampling_params"]["max_tokens"]
        ids = self.script(body["token_ids"])
        cut = len(ids) > limit
        ids = ids[:limit]
        stop = None
        for count in range(1, len(ids) + 1) if self.decode else ():
            text = self.decode(ids[:count])
            if stop := next((stop for stop in body["sampling_params"].get("stop", []) if stop in text), None):
                ids, cut = ids[:count], False
                break
        self.requests.append(body)
        self.responses.append(ids)
        choice = {
            "index": 0,
            "finish_reason": "length" if cut else "stop",
            "stop_reason": stop,
            "token_ids": ids,
            "logprobs": {"content": [{"token_id": i, "logprob": -1.0} for i in ids]},
            "weight_versions": [{"version": body["model"] if self.tells_model else "0", "start": 0, "end": len(ids)}],
        }
        response = web.json_response({"request_id": "r", "choices": [choice]})
        self.held.append(time.perf_counter() - begun)
        return response

    async def describe(self, _: web.Request) -> web.Response:
        return web.json_response({"paths": {route: {} for route in NEEDED_ROUTES}})


@asynccontextmanager
async def serve_script(
    script: Script,
    delay: float = 0.0,
    decode: Callable[[list[int]], str] | None = None,
    kind: Callable[..., Server] = ScriptedServer,
    **settings: Any,
) -> AsyncIterator[Server]:
    """Run a server of class `kind` with the additional `settings` on a free loopback port."""
    server = kind(script, delay, decode, **settings)
    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/inference/v1/generate", server.generate), web.get("/openapi.json", server.describe)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
