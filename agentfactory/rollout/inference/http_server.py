"""The HTTP side of the inference servers that run here: vLLM's routes, guarded by a key; a server's start and end."""

import argparse
import asyncio
import hmac
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn

import msgspec
from aiohttp import web

from agentfactory.base.errors import SettingError
from agentfactory.base.http.connections import HEADER_SECONDS, ConnectionLimit, log_few, most_connections
from agentfactory.base.http.key_guard import listen, server_key
from agentfactory.base.http.loopback import is_loopback
from agentfactory.base.processes import parent_watch
from agentfactory.rollout.inference.server_metrics import METRICS_ROUTE

Json = dict[str, Any]
Handler = Callable[[web.BaseRequest], Awaitable[Json | str]]

_METHODS = {
    **dict.fromkeys(("/is_paused", "/is_sleeping", "/health", "/v1/models", METRICS_ROUTE, "/openapi.json"), "GET"),
    **dict.fromkeys(("/weight_info", "/get_world_size"), "GET"),
    **dict.fromkeys(("/inference/v1/generate", "/pause", "/resume", "/sleep", "/wake_up"), "POST"),
    **dict.fromkeys(("/init_weight_transfer_engine", "/start_weight_update", "/update_weights"), "POST"),
    **dict.fromkeys(("/finish_weight_update", "/weight_checker"), "POST"),
    **dict.fromkeys(("/reset_prefix_cache", "/reset_encoder_cache"), "POST"),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), "POST"),
}
"""Path of a route -> its method."""
_OTHER_BYTES = 1 << 20
"""Bytes of a request besides its prompt."""
_TOKEN_BYTES = 16
_IMAGE_BYTES = 1 << 28
"""Bytes of all images of a request: those of the gateway's requests."""


class ApiError(Exception):
    """An error response in vLLM's format."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BadRequest(ApiError):
    """A request, or something that it names, which cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message)


class ProtocolServer:
    """A server of the protocol's routes. A subclass has a method for each route that it serves, with the name of the
    path's last part, which returns JSON or text. Requests may have as many bytes as a prompt of `max_model_len` tokens
    needs, and as many images."""

    def __init__(self, engine_name: str, api_key: str, max_model_len: int, images: bool) -> None:
        self.engine_name = engine_name
        self.max_model_len = max_model_len
        self.most_bytes = _OTHER_BYTES + _TOKEN_BYTES * max_model_len + (_IMAGE_BYTES if images else 0)
        self._authorization = f"Bearer {api_key}".encode()
        self._routes: dict[str, tuple[str, Handler]] = {
            path: (method, handler)
            for path, method in _METHODS.items()
            if (handler := getattr(self, path.rpartition("/")[2].removesuffix(".json"), None)) is not None
        }

    async def dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            if request.path != "/health":
                given = request.headers.get("Authorization", "").encode(errors="replace")
                if not hmac.compare_digest(given, self._authorization):
                    refusal = _answer({"error": "Unauthorized"}, 401)
                    refusal.force_close()  # clients without the key keep no connection
                    return refusal
            method, handler = self._routes.get(request.path, ("", None))
            if handler is None:
                raise ApiError(404, f"{self.engine_name} has no route {request.path}")
            if request.method != method:
                raise ApiError(405, f"{request.path} accepts {method}, not {request.method}")
            return _answer(await handler(request))
        except web.HTTPRequestEntityTooLarge:
            # in the words of a prompt that is too long, which clients know
            text = f"This model's maximum context length is {self.max_model_len} tokens, so that a request may have "
            return _error(400, f"{text}{self.most_bytes:,} bytes. However, yours has more.")
        except ApiError as error:
            return _error(error.status, str(error))

    def unsupported(self, field: str, value: Any, only: str) -> ApiError:
        """Return the refusal of a field's value; `only` names what is supported."""
        return BadRequest(f"{field}: {value!r} is not supported by {self.engine_name}; use {only}")

    async def openapi(self, http: web.BaseRequest) -> Json:
        described = {"responses": {"200": {"description": "OK"}}}
        paths = {path: {method.lower(): described} for path, (method, _) in self._routes.items()}
        return {"openapi": "3.1.0", "info": {"title": self.engine_name, "version": "0.2.0"}, "paths": paths}


def _answer(body: Json | str, status: int = 200) -> web.Response:
    if isinstance(body, str):
        return web.Response(text=body, status=status)
    return web.Response(body=json.dumps(body).encode(), status=status, content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "ServerError")
    return _answer({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)


async def body_of(http: web.BaseRequest) -> Json:
    """Return the request's JSON object; {} without a body. Raises ApiError."""
    raw = await http.read()
    try:
        body = msgspec.json.decode(raw) if raw else {}
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def server_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description, allow_abbrev=False)
    parser.add_argument("model", help="folder or hub name of a model in the transformers format")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; a public one needs an API key")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free port")
    parser.add_argument("--served-model-name", default="policy", help="the base model's name in requests")
    parser.add_argument("--max-model-len", type=int, default=8192, help="tokens per sequence, prompt included")
    parser.add_argument("--max-num-seqs", type=int, default=128, help="maximum number of concurrent sequences")
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the API key (default: a random key)"
    )
    return parser


def run_server(
    args: argparse.Namespace, serve: Callable[[socket.socket, str, ExitStack], Coroutine[Any, Any, None]]
) -> None:
    """Listen, and run `serve`, which gets the socket, the key, and a stack of what must end with this process, until
    SIGTERM or SIGINT, or the end of the parent process. Exit status 2 and one line on stderr for SettingError."""
    cleanup = ExitStack()

    def end(*_: object) -> NoReturn:
        cleanup.close()
        os._exit(0)  # there is nothing to save

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    parent_watch.follow_parent()
    with cleanup:
        try:
            # before the model is loaded: a taken port fails early, and no one else can get the keys of early clients
            listener = listen(args.host, args.port, "server.port")
            host, port = listener.getsockname()[:2]
            if not is_loopback(host) and not args.api_key_env:
                raise SettingError("--host", f"got {args.host}, a public address", "name a key by --api-key-env")
            api_key, _ = cleanup.enter_context(server_key(host, port, args.api_key_env))
            # requests wait until the model is loaded
            print(f"listening {_url(listener)}", flush=True)
            asyncio.run(serve(listener, api_key, cleanup))
        except SettingError as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
            raise SystemExit(2) from None


async def answer_requests(listener: socket.socket, server: ProtocolServer) -> None:
    """Begin to answer requests, and print `ready URL`."""
    log_few(logging.getLogger("aiohttp.server"))
    loop = asyncio.get_running_loop()

    def request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=server.most_bytes)

    connect = web.Server(
        server.dispatch,
        request_factory=request,
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=HEADER_SECONDS,
        auto_decompress=False,  # a short compressed body could expand to a huge one
    )
    limit = ConnectionLimit(most_connections())
    await loop.create_server(partial(limit.admit, connect), sock=listener, backlog=1024)
    print(f"ready {_url(listener)}", flush=True)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
