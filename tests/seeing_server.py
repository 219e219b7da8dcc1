"""A scripted server that takes images as vLLM does: it expands their tokens, and knows those that it was sent."""

import json
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from aiohttp import web
from PIL import Image

from agentfactory.rollout.images.vision import Vision
from tests.scripted_server import Script, ScriptedServer


@dataclass
class SeeingServer(ScriptedServer):
    """`images` are those that it knows, by uuid; `prompts` are the expanded ids of each answered request, and `sent`
    the bytes of images that came."""

    vision: Vision | None = None
    images: dict[str, Image.Image] = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert self.vision is not None
        assert body["sampling_params"]["logit_bias"] == {str(i): -100.0 for i in self.vision.banned_token_ids}
        digests = []
        for part in body.get("content_parts", []):
            assert part["type"] == "image_url"
            if part["url"] is not None:
                content = b64decode(part["url"].removeprefix("data:image/png;base64,"), validate=True)
                self.images[part["uuid"]] = Image.open(BytesIO(content))
                self.sent.append(part["uuid"])
            if part["uuid"] not in self.images:
                return web.Response(status=400, text=f"Cache miss for {part['uuid']}")
            digests.append((part["uuid"], self.vision.grid(self.images[part["uuid"]])))
        expanded, _ = self.vision.expand(body["token_ids"], digests)
        answer = await super().generate(request)
        self.prompts.append(expanded)
        return self.with_prompt(answer, expanded) if body.get("return_token_ids") else answer

    def with_prompt(self, answer: web.Response, expanded: list[int]) -> web.Response:
        assert answer.text is not None
        return web.json_response({**json.loads(answer.text), "prompt_token_ids": expanded})


@asynccontextmanager
async def serve_seeing(script: Script, vision: Vision, kind: Any = SeeingServer) -> AsyncIterator[SeeingServer]:
    """Run the server on a free loopback port."""
    server = kind(script, vision=vision)
    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/inference/v1/generate", server.generate), web.get("/openapi.json", server.describe)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
