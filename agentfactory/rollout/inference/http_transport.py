"""HTTP to inference servers: a connection pool, queries of a server's state, and the errors of refused requests."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

import aiohttp

from agentfactory.base.http.clients import answer_within, open_session
from agentfactory.base.http.proxies import Proxy, through
from agentfactory.base.http.server_keys import find_key, key_folder, key_of_environment
from agentfactory.rollout.inference.server_metrics import METRICS_ROUTE, REPLICA_HEADER, Load, parse_loads

# vLLM closes idle connections after 5 s; a connection closed while we write would make the server look dead
_IDLE_SECONDS = 4.0
_CONNECT_SECONDS = 30.0
ANSWER_BYTES = 1 << 24
"""Maximum size of an answer, unless a request may get more."""
_STATE_SECONDS = 30.0
"""Timeout of state queries, in seconds. A stopped process accepts connections and never answers."""


class InferenceError(Exception):
    """A request that the server refused or failed."""


class RefusedError(InferenceError):
    """A request that the server refuses however often it is sent."""


class ContextOverflowError(InferenceError):
    """A prompt that exceeds the server's context length."""


class ServerUnreachableError(Exception):
    """A failure that stops all chains: no server answers, or one lacks a required route."""


class LostError(Exception):
    """A connection that failed during a request."""


def authorization(url: str, api_key_env: str | None, section: str = "server") -> dict[str, str]:
    """Return the HTTP header with the key of the server at `url`: that in the environment variable `api_key_env`, or if
    that is None, in the key file that this user's server has written on this machine; empty if there is no key.
    `section` is the recipe's. Raises SettingError, a ValueError, if the variable is named but not set."""
    key = find_key(url) if api_key_env is None else key_of_environment(f"{section}.api_key_env", api_key_env)
    return {"Authorization": f"Bearer {key}"} if key else {}


def lacking_key(url: str, api_key_env: str | None, section: str = "server") -> str:
    """Return why the server at `url` rejected the key or its absence, and the fix."""
    if api_key_env is not None:
        return f"it refuses the key in {api_key_env}; fix: {section}.api_key_env must name the variable with its key"
    return (
        f"it requires its key, and {key_folder()} has none for its address; fix: set {section}.api_key_env to the name "
        "of the environment variable that holds the key"
    )


class Connection:
    """Connections to the servers; use it as an async context manager. Requests raise LostError. aiohttp takes 125 us of
    CPU per turn (512 tokens in, 64 out); httpx2 takes 420 to 900 us, and bare asyncio streams take 80 us."""

    def __init__(self, api_key_env: str | None = None, proxy: Proxy | None = None, section: str = "server"):
        self._proxy = proxy
        self._api_key_env = api_key_env
        self._section = section
        self._keys: dict[str, dict[str, str]] = {}
        """URL -> header. A key lookup per request would take 2 % of the worker's time."""
        if api_key_env is not None:
            authorization("", api_key_env, section)

    async def __aenter__(self) -> Self:
        # no limit on connections: chains limit their own number
        self._session = open_session(self._proxy, _IDLE_SECONDS, headers={"Content-Type": "application/json"})
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
        most: int = ANSWER_BYTES,
        with_key: bool = True,
    ) -> tuple[int, str, Mapping[str, str]]:
        """Send a request with a timeout of `seconds` (None: no timeout); return the response's status, its text, of at
        most `most` bytes, and its headers. `replica` is the rank that must answer (None: any)."""
        headers = {} if replica is None else {REPLICA_HEADER: str(replica)}
        limit = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        known = url in self._keys
        while True:
            if with_key and not known:
                self._keys[url] = authorization(url, self._api_key_env, self._section)
            sent = self._keys[url] | headers if with_key else headers
            try:
                async with self._session.request(
                    method, url, data=body, headers=sent, timeout=limit, allow_redirects=False
                ) as response:
                    # JSON and metrics are UTF-8, whatever the header says
                    text = (await answer_within(response, most)).decode(errors="replace")
            except TimeoutError as error:
                late = str(error) if seconds is None else f"no answer to {method} {url} within {seconds:g} s"
                raise LostError((late or repr(error)) + through(self._proxy)) from error
            except (aiohttp.ClientError, OSError) as error:
                raise LostError((str(error) or repr(error)) + through(self._proxy)) from error
            if response.status != 200 and (key := sent.get("Authorization", "").removeprefix("Bearer ")):
                text = text.replace(key, "(the key)")
            if response.status != 401 or not (with_key and known):
                return response.status, text, response.headers
            known = False  # a restarted server has another key

    async def _state(self, url: str, route: str) -> dict[str, Any] | None:
        """Return the JSON object at a route; None if the server answers with another status than 200. Raises LostError
        for anything else, such as a proxy's error page."""
        status, text, _ = await self.request("GET", url + route, seconds=_STATE_SECONDS)
        if status != 200:
            return None
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise LostError(f"its response is not a JSON object: {text[:200]}")
        return found

    async def is_healthy(self, url: str) -> bool:
        return (await self.request("GET", url + "/health", seconds=_STATE_SECONDS))[0] == 200

    def lacking_key(self, url: str) -> str:
        """Return why the server at `url` rejected the key or its absence, and the fix."""
        return lacking_key(url, self._api_key_env, self._section)

    async def is_guarded(self, url: str) -> bool:
        """Return whether the server requires a key, even on routes that change its weights, unlike vLLM's own key."""
        for route in ("/v1/models", "/is_paused"):
            if (await self.request("GET", url + route, with_key=False, seconds=_STATE_SECONDS))[0] == 200:
                return False
        return True

    async def models(self, url: str) -> list[dict[str, Any]]:
        """Return the cards of the server's models and adapters, each with an `id`; an adapter's has a `parent`."""
        cards = (await self._state(url, "/v1/models") or {}).get("data", [])
        if not isinstance(cards, list) or not all(isinstance(card, dict) and "id" in card for card in cards):
            raise LostError(f"{url}/v1/models lists no models with ids: {str(cards)[:200]}")
        return cards

    async def loads(self, url: str, seconds: float = _STATE_SECONDS) -> list[Load]:
        """Return the load of each replica behind `url`. Raises ValueError if the server does not report it."""
        status, text, _ = await self.request("GET", url + METRICS_ROUTE, seconds=seconds)
        if status != 200:
            raise ValueError(f"{url}{METRICS_ROUTE} answered {status}")
        return parse_loads(text)

    async def weight_version(self, url: str) -> str:
        """Return the version label of the server's base weights; empty if there is none."""
        state = await self._state(url, "/weight_info")
        return "" if state is None else str(state.get("weight_version"))

    async def holds_requests(self, url: str) -> bool:
        """Return whether the server reports that it is paused or asleep."""
        for key in ("is_sleeping", "is_paused"):
            if (await self._state(url, f"/{key}") or {}).get(key):
                return True
        return False


_OVERFLOW = (
    *("context length", "context_length_exceeded", "maximum model length"),  # vLLM, OpenAI, Ollama
    *("context window", "context limit", "prompt is too long"),  # OpenAI, Anthropic
    "context size",  # llama.cpp, also with status 500
)


def refusal(status: int, text: str) -> InferenceError:
    if status in (400, 500) and any(words in text.lower() for words in _OVERFLOW):
        return ContextOverflowError(text)
    return RefusedError(f"the server answered {status}: {text[:500]}")


def missing_routes(url: str, described: Sequence[str], needed: Sequence[str]) -> tuple[str, str] | None:
    """Return the problem with the server at `url` and the fix. Return None if `described`, the routes in its
    /openapi.json, include all of `needed`."""
    missing = [route for route in needed if route not in described]
    if not missing:
        return None
    if "/update_weights_from_disk" in described:
        fix = f"set server.engine=sglang, server.options.attach={url} and server.url=null"
        return f"server {url} is SGLang itself", f"{fix}, or run `agentfactory serve` with these and use its address"
    ways: dict[str, None] = {}
    for route in missing:
        if route.startswith("/inference"):
            ways["--enable-scale-out"] = None
        elif route.startswith(("/v1/load_lora", "/v1/unload_lora")):
            ways["VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"] = None
        elif route not in ("/health", "/v1/models"):  # the others are development routes
            ways["VLLM_SERVER_DEV_MODE=1"] = None
    fix = f"start vLLM >= 0.32 with {', '.join(ways)}" if ways else "is it an inference server?"
    return f"server {url} lacks {', '.join(missing)}", fix
