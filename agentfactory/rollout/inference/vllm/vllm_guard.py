"""Middleware that requires the API key on all of vLLM's routes. vLLM itself checks it only on /v1, /v2 and /inference,
and leaves open the routes that change weights, read memory and run code. vLLM imports it by `--middleware
agentfactory.rollout.inference.vllm.vllm_guard.RequireKey`, in its API servers only."""

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

KEY_VARIABLE = "VLLM_API_KEY"
_OPEN = "/health"
"""Open to supervisors; it reveals nothing."""

_App = Callable[[dict[str, Any], Any, Callable[[dict[str, Any]], Awaitable[None]]], Awaitable[None]]


class RequireKey:
    """ASGI middleware that forwards only requests with the key."""

    def __init__(self, app: _App) -> None:
        self._app = app
        self._authorization = f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(
        self, scope: dict[str, Any], receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan" or scope["path"] == _OPEN or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})

    def _has_key(self, scope: dict[str, Any]) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._authorization)
