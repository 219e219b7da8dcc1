"""Middleware that requires the API key on all of vLLM's routes. vLLM itself checks it only on /v1, /v2 and /inference,
and leaves open the routes that change weights, read memory and run code. vLLM imports it by `--middleware
agentfactory.rollout.inference.vllm.vllm_guard.RequireKey`, in its API servers only."""

import os

from starlette.types import ASGIApp

from agentfactory.base.http.key_guard import KeyGuard

KEY_VARIABLE = "VLLM_API_KEY"


class RequireKey(KeyGuard):
    """ASGI middleware that forwards only requests with the key, except to /health."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app, os.environ[KEY_VARIABLE])
