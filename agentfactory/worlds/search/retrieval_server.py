"""A retrieval server: serves an index with Search-R1's retrieval protocol."""

import ipaddress
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

from mcp.server.transport_security import RequestBodyLimitMiddleware
from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentfactory.base.errors import SettingError
from agentfactory.base.http.http_server import serve_http
from agentfactory.base.http.key_guard import HEALTH, KeyGuard, listen, server_key
from agentfactory.base.processes import parent_watch
from agentfactory.base.processes.threads import run_in_thread
from agentfactory.worlds.search.passage import Passage
from agentfactory.worlds.search.ranking import Index

MOST_BYTES = 16 << 20
MOST_PASSAGES = 20_000
"""Maximum number of passages that a request may ask for, over all of its queries."""


class Query(BaseModel):
    """The body of `POST /retrieve` as Search-R1's clients send it; other fields are ignored."""

    queries: list[str]
    topk: Annotated[int, Field(ge=0)] | None = None
    """Passages per query; null or 0: the server's default."""
    return_scores: bool = False


def make_app(index: Index, topk: int) -> Starlette:
    """Return the server's application: `POST /retrieve` and `GET /health`."""

    async def retrieve(request: Request) -> Response:
        try:
            asked = Query.model_validate_json(_encodable(await request.body()))
        except ValidationError as error:
            # FastAPI's error format, which Search-R1's servers use
            return JSONResponse(
                {"detail": error.errors(include_url=False, include_context=False, include_input=False)}, 422
            )
        count = asked.topk or topk
        if len(asked.queries) * count > MOST_PASSAGES:
            return JSONResponse({"detail": f"queries x topk: at most {MOST_PASSAGES} passages at a time"}, 422)
        found = await run_in_thread(lambda: [index.search(query, count) for query in asked.queries])
        return JSONResponse({"result": [[_item(each, asked.return_scores) for each in passages] for passages in found]})

    async def health(request: Request) -> Response:
        return Response()

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"]), Route(HEALTH, health)])


def _encodable(body: bytes) -> bytes:
    """Return JSON without lone surrogates, which models write and pydantic rejects."""
    if rb"\ud" not in body.lower():
        return body
    with suppress(ValueError, RecursionError):
        return json.dumps(json.loads(body), ensure_ascii=False).encode("utf-8", "replace")
    return body


def _item(passage: Passage, with_score: bool) -> dict[str, Any]:
    document = {"id": passage.id, "contents": passage.contents}
    if passage.url is not None:
        document["url"] = passage.url
    return {"document": document, "score": passage.score} if with_score else document


def serve(index: Index, host: str, port: int, topk: int, api_key_env: str | None, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; port 0 takes a free port. Says `ready http://HOST:PORT/retrieve` once it listens.
    Raises SettingError if the address cannot be used, or is not loopback and `api_key_env` is None."""
    parent_watch.follow_parent()
    listener = listen(host, port, "--port")
    address, port = listener.getsockname()[:2]
    if not ipaddress.ip_address(address).is_loopback and api_key_env is None:
        problem = f"{host} is reachable from other machines, whose clients cannot read this user's key file"
        raise SettingError("--host", problem, "name an environment variable with a key by --api-key-env")
    shown = f"[{host}]" if ":" in host else host
    app = RequestBodyLimitMiddleware(make_app(index, topk), MOST_BYTES)
    with server_key(address, port, api_key_env) as (key, where):
        say(f"ready http://{shown}:{port}/retrieve\n{where}")
        serve_http(KeyGuard(app, key), listener)
