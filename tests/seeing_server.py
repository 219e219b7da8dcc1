"""A scripted server that accepts images as vLLM does: it expands their tokens, and caches the images that it gets."""

import json
from base64 import b64decode
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from io import BytesIO

from aiohttp import web
from PIL import Image

from agentfactory.rollout.images.image_tokens import Vision
from tests.scripted_server import Script, ScriptedServer, serve_script


@dataclass
class SeeingServer(ScriptedServer):
    """A scripted server with images. `images` are the cached ones by uuid, `prompts` the expanded ids of each answered
    request, and `sent` the received bytes of images."""

    vision: Vision | None = None
    images: dict[str, Image.Image] = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
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
        return web.json_response({**json.loads(answer.text), "prompt_token_ids": expanded})


def serve_seeing(
    script: Script, vision: Vision, kind: type[SeeingServer] = SeeingServer
) -> AbstractAsyncContextManager[SeeingServer]:
    """Run the server on a free loopback port."""
    return serve_script(script, kind=kind, vision=vision)
