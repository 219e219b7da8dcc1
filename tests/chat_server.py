"""A chat endpoint for tests: OpenAI's protocol over real HTTP, scripted, or backed by a server that takes token ids.

It is independent of AgentFactory's requests: it accepts and refuses the same requests as OpenAI's API."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from aiohttp import web

from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.config import ModelConfig
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.text.load_renderer import load_renderer

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any] | tuple[int, str] | tuple[int, str, dict[str, str]]]]
"""A request -> a choice with `usage`, or a status, a text and optionally headers."""

TEACHER = {"id": "teacher", "object": "model"}

_KNOWN = {
    "system": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "tool_calls"},
    "tool": {"role", "content", "tool_call_id"},
}


def fault(body: dict[str, Any]) -> str | None:
    """The reason why OpenAI's API would refuse a request; None if it would not."""
    open_calls: list[str] = []
    for number, message in enumerate(body["messages"]):
        if unknown := set(message) - _KNOWN.get(message["role"], set()):
            return f"messages.{number}: unknown {unknown}"
        if open_calls and message["role"] != "tool":
            return f"messages.{number}: the calls {open_calls} are not answered"
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_calls:
                return f"messages.{number}: {message['tool_call_id']} answers no call"
            open_calls.remove(message["tool_call_id"])
        for call in message.get("tool_calls", ()):
            if not isinstance(call["function"]["arguments"], str):
                return f"messages.{number}: arguments are JSON text"
            json.loads(call["function"]["arguments"])
            open_calls.append(call["id"])
    return "the last calls are not answered" if open_calls else None


class ChatServer:
    """A running endpoint: its address and its received requests."""

    def __init__(self, answer: Answer, key: str | None, models: list[Any]):
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self._answer = answer
        self._key = key
        self._models = models

    async def complete(self, request: web.Request) -> web.Response:
        if self._key is not None and (given := request.headers.get("Authorization")) != f"Bearer {self._key}":
            return web.json_response({"error": {"message": f"Incorrect API key provided: {given}"}}, status=401)
        body = await request.json()
        self.requests.append(body)
        if problem := fault(body):
            return web.json_response({"error": {"message": problem}}, status=400)
        answer = await self._answer(body)
        if isinstance(answer, tuple):
            status, problem, *headers = answer
            return web.json_response({"error": {"message": problem}}, status=status, headers=dict(*headers))
        choice = dict(answer)
        usage = choice.pop("usage", None)
        return web.json_response({"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage})

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self._models})


@contextmanager
def serve_chat(answer: Answer, key: str | None = None, models: Sequence[Any] = (TEACHER,)) -> Iterator[ChatServer]:
    """Run the endpoint in a thread, for commands in other processes."""
    server = ChatServer(answer, key, [*models])
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    end = asyncio.Event()

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", server.complete), web.get("/v1/models", server.models)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await end.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


def said(content: str, *calls: tuple[str, str], reason: str | None = None, tokens: int = 5) -> dict[str, Any]:
    """A choice: words, and calls as (name, arguments)."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{name}_{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for place, (name, arguments) in enumerate(calls)
        ]
    usage = {"completion_tokens": tokens, "total_tokens": 20 + tokens}
    reason = reason or ("tool_calls" if calls else "stop")
    return {"index": 0, "message": message, "finish_reason": reason, "usage": usage}


def model_behind(url: str, model: Path) -> Answer:
    """The model of a server that takes token ids, behind the chat API: it renders and parses, as vLLM's does."""
    renderer = load_renderer(ModelConfig(path=str(model)), "hermes")

    async def answer(body: dict[str, Any]) -> dict[str, Any]:
        functions = [tool["function"] for tool in body["tools"]]
        specs = [ToolSpec(f["name"], f["description"], f["parameters"]) for f in functions]
        messages = [{**message, "content": message["content"] or ""} for message in deepcopy(body["messages"])]
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        ids = renderer.open(messages, specs)
        sampling = {"temperature": body["temperature"], "max_tokens": body["max_tokens"], "seed": 0}
        async with InferenceClient(url) as client:
            completion = await client.generate(ids, "policy", {**sampling, "stop_token_ids": renderer.stop_token_ids})
        parsed = renderer.parse(completion.token_ids, specs=specs)
        calls = [(call.name, json.dumps(call.arguments)) for call in parsed.calls]
        choice = said(str(parsed.message["content"]), *calls, reason="length" if completion.cut else None)
        count = len(completion.token_ids)
        return {**choice, "usage": {"completion_tokens": count, "total_tokens": len(ids) + count}}

    return answer
