"""HTTP to inference servers: one pool of connections, queries about a server's state, and the meaning of refusals."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import aiohttp

from agentfactory.rollout.inference.server_metrics import METRICS_ROUTE, REPLICA_HEADER, Load, parse_loads
from agentfactory.tools.errors import SettingError
from agentfactory.tools.http.server_keys import find_key, key_folder

# vLLM closes idle connections after 5 s; if it closes one while we write, the server would look dead
_IDLE_SECONDS = 4.0
_CONNECT_SECONDS = 30.0
_STATE_SECONDS = 30.0
"""Time for an answer on a server's state; a stopped process takes connections and never answers."""


class InferenceError(Exception):
    """The server refused or failed one request."""


class ContextOverflowError(InferenceError):
    """The prompt does not fit the server's context length."""


class ServerUnreachableError(Exception):
    """No server answers, or one lacks a required route: no chain can continue."""


class LostError(Exception):
    """The connection failed during a request."""


def authorization(url: str, api_key_env: str | None) -> dict[str, str]:
    """Return the HTTP header with the key of the server at `url`: the environment variable `api_key_env`, or if it is
    None, the key that a server of this user has left on this machine. Empty if there is none.

    Raises SettingError, a ValueError, if the variable is named but not set.
    """
    if api_key_env is None:
        key = find_key(url)
    elif not (key := os.environ.get(api_key_env)):
        raise SettingError("server.api_key_env", f"the variable {api_key_env} is not set", "export it")
    return {"Authorization": f"Bearer {key}"} if key else {}


def lacking_key(url: str, api_key_env: str | None) -> str:
    """Say why the server at `url` refused a request for lack of its key, and the fix."""
    if api_key_env is not None:
        return f"it refuses the key in {api_key_env}; fix: server.api_key_env must name the variable with its key"
    return (
        f"it takes requests only with its key, and {key_folder()} has none for its address; fix: name the environment "
        "variable that holds it as server.api_key_env"
    )


class Connection:
    """Connections to the servers; use it as an async context manager. Requests raise LostError.

    We measured before choosing aiohttp: it takes 125 us of CPU per turn (512 tokens in, 64 out), of which 48 are JSON,
    from 16 to 256 chains. httpx2 takes 420 to 900, and bare asyncio streams take 80.
    """

    def __init__(self, api_key_env: str | None = None):
        self._api_key_env = api_key_env
        self._keys: dict[str, dict[str, str]] = {}
        """URL -> header. Looking a key up for each request would take 2 % of the worker's time."""
        if api_key_env is not None:
            authorization("", api_key_env)

    async def __aenter__(self) -> Self:
        # no limit on connections: chains limit their own number
        self._session = aiohttp.ClientSession(
            headers={"Content-Type": "application/json"},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def request(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        seconds: float | None = None,
        replica: int | None = None,
    ) -> tuple[int, str]:
        """Make a request that may take `seconds` (None: any time); return the answer's status and text. `replica` is
        the one that shall answer; None leaves the choice to the server."""
        status, text, _ = await self.exchange(method, url, body, seconds=seconds, replica=replica)
        return status, text

    async def exchange(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        with_key: bool = True,
        seconds: float | None = None,
        replica: int | None = None,
    ) -> tuple[int, str, Mapping[str, str]]:
        """Make a request; return the answer's status, text and headers."""
        chosen = {} if replica is None else {REPLICA_HEADER: str(replica)}
        if not with_key:
            return await self._send(method, url, body, chosen, seconds)
        known = url in self._keys
        if not known:
            self._keys[url] = authorization(url, self._api_key_env)
        answer = await self._send(method, url, body, {**self._keys[url], **chosen}, seconds)
        if answer[0] == 401 and known:
            # a server that was started again has another key
            self._keys[url] = authorization(url, self._api_key_env)
            answer = await self._send(method, url, body, {**self._keys[url], **chosen}, seconds)
        return answer

    async def _send(
        self, method: str, url: str, body: bytes | None, headers: dict[str, str], seconds: float | None
    ) -> tuple[int, str, Mapping[str, str]]:
        limit = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._session.request(method, url, data=body, headers=headers, timeout=limit) as response:
                # JSON and metrics are UTF-8, whatever the header says
                return response.status, (await response.read()).decode(errors="replace"), response.headers
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise LostError(str(error) or repr(error)) from error

    async def is_healthy(self, url: str) -> bool:
        """Return whether the server accepts requests."""
        status, _ = await self.request("GET", url + "/health", seconds=_STATE_SECONDS)
        return status == 200

    def lacking_key(self, url: str) -> str:
        """See the function of the same name."""
        return lacking_key(url, self._api_key_env)

    async def is_guarded(self, url: str) -> bool:
        """Return whether the server asks for a key, also on routes that change its weights: vLLM's own key does not
        protect these."""
        for route in ("/v1/models", "/is_paused"):
            status, _, _ = await self.exchange("GET", url + route, with_key=False, seconds=_STATE_SECONDS)
            if status == 200:
                return False
        return True

    async def models(self, url: str) -> list[dict[str, Any]]:
        """Return the cards of the server's models and adapters; an adapter's card has a `parent`."""
        status, text = await self.request("GET", url + "/v1/models", seconds=_STATE_SECONDS)
        return _object(text).get("data", []) if status == 200 else []

    async def loads(self, url: str, seconds: float = _STATE_SECONDS) -> list[Load]:
        """Return the load of each replica behind `url`. Raises ValueError if the server does not report it."""
        status, text = await self.request("GET", url + METRICS_ROUTE, seconds=seconds)
        if status != 200:
            raise ValueError(f"{url}{METRICS_ROUTE} answered {status}")
        return parse_loads(text)

    async def weight_version(self, url: str) -> str:
        """Return the label of the server's base weights; empty if it has none."""
        status, text = await self.request("GET", url + "/weight_info", seconds=_STATE_SECONDS)
        return str(_object(text).get("weight_version")) if status == 200 else ""

    async def holds_requests(self, url: str) -> bool:
        """Return whether the server reports that it is paused or asleep."""
        for route, key in (("/is_sleeping", "is_sleeping"), ("/is_paused", "is_paused")):
            status, text = await self.request("GET", url + route, seconds=_STATE_SECONDS)
            if status == 200 and _object(text).get(key):
                return True
        return False


def _object(text: str) -> dict[str, Any]:
    """Return a JSON object. Raises LostError for anything else, such as the error page of a proxy."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise LostError(f"it answered with no JSON: {text[:200]}") from error
    if not isinstance(found, dict):
        raise LostError(f"it answered with no JSON object: {text[:200]}")
    return found


_OVERFLOW = (
    *("context length", "context_length_exceeded", "maximum model length"),  # vLLM, OpenAI, Ollama
    *("context window", "context limit", "prompt is too long"),  # OpenAI, Anthropic
    "context size",  # llama.cpp, also with status 500
)


def refusal(status: int, text: str) -> InferenceError:
    """Return the error that a refused request raises."""
    if status in (400, 500) and any(words in text.lower() for words in _OVERFLOW):
        return ContextOverflowError(text)
    return InferenceError(f"the server answered {status}: {text[:500]}")


def missing_routes(url: str, described: Sequence[str], needed: Sequence[str]) -> tuple[str, str] | None:
    """Return the problem with the server at `url`, and the fix; None if all routes in `needed` are among `described`,
    the routes in its /openapi.json."""
    missing = [route for route in needed if route not in described]
    if not missing:
        return None
    switches = {
        "/inference": "--enable-scale-out",
        "/v1/load_lora": "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora",
        "/v1/unload_lora": "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora",
    }
    ways = []
    for route in missing:
        # a route for neither generation nor adapters, and not of OpenAI's API, is a development route
        way = next((way for start, way in switches.items() if route.startswith(start)), "VLLM_SERVER_DEV_MODE=1")
        if route not in ("/health", "/v1/models") and way not in ways:
            ways.append(way)
    fix = f"start vLLM >= 0.32 with {', '.join(ways)}" if ways else "is it an inference server?"
    return f"server {url} lacks {', '.join(missing)}", fix
