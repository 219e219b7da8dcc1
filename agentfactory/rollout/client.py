"""The inference client: token ids in, sampled token ids out, over the HTTP routes of one or several servers."""

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from agentfactory.rollout.concurrency import METRICS_ROUTE, Load, parse_load
from agentfactory.rollout.retries import Retries
from agentfactory.rollout.routing import Router, ServerState
from agentfactory.rollout.trajectory import Span
from agentfactory.tools.errors import SettingError

logger = logging.getLogger(__name__)

GENERATE = "/inference/v1/generate"
NEEDED_ROUTES = (GENERATE, "/health", "/v1/models")
# vLLM closes idle connections after 5 s; one that it closes while we write would look like a death
_IDLE_SECONDS = 4.0
_CONNECT_SECONDS = 30.0


class InferenceError(Exception):
    """The server refused or failed one request."""


class ContextOverflowError(InferenceError):
    """The prompt does not fit the server's context length."""


class ServerUnreachableError(Exception):
    """No server answers, or one lacks a route that is needed: no chain can go on."""


class LostError(Exception):
    """The connection failed under a request."""


@dataclass(frozen=True)
class Completion:
    """One turn: its ids, their log-probabilities after temperature, and the weights that sampled them.

    `cut` is true when the turn ended by a token limit and not by the model. `mask` is 1 where a token was sampled, and
    0 where it was put there, as a forced beginning is: such a token is context, of log-probability 0.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[Span]
    cut: bool
    mask: list[int]


def authorization(api_key_env: str | None) -> dict[str, str]:
    """The HTTP header that carries the key held by the environment variable `api_key_env`.

    Raises ValueError where the variable is named but not set.
    """
    if api_key_env is None:
        return {}
    key = os.environ.get(api_key_env)
    if not key:
        raise SettingError("server.api_key_env", f"the variable {api_key_env} is not set", "export it")
    return {"Authorization": f"Bearer {key}"}


def missing_routes(url: str, described: Sequence[str], needed: Sequence[str]) -> tuple[str, str] | None:
    """What is wrong with the server at `url`, whose /openapi.json names the routes `described`, and the fix; None if
    nothing."""
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
        # whatever is neither generation, an adapter nor OpenAI's is a development route
        way = next((way for start, way in switches.items() if route.startswith(start)), "VLLM_SERVER_DEV_MODE=1")
        if route not in ("/health", "/v1/models") and way not in ways:
            ways.append(way)
    fix = f"start vLLM >= 0.32 with {', '.join(ways)}" if ways else "is it an inference server?"
    return f"server {url} lacks {', '.join(missing)}", fix


class InferenceClient:
    """Keeps connections to the servers; use it as an async context manager.

    aiohttp by measurement: 125 us of CPU a turn (512 tokens in, 64 out), of which 48 are JSON, from 16 to 256 chains;
    httpx2 takes 420 to 900 and the same over bare asyncio streams 80.
    """

    def __init__(self, urls: str | Sequence[str], api_key_env: str | None = None, retry_seconds: float = 300.0):
        """What can heal is tried again for `retry_seconds`."""
        self.urls = [url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls)]
        self.restore: Callable[[str], Awaitable[bool]] | None = None
        """Has the current weights brought to a server that lacks them; false where it went away meanwhile. None where
        nobody publishes weights."""
        self._headers = {"Content-Type": "application/json", **authorization(api_key_env)}
        self._limit = retry_seconds
        self._router = Router(self.urls)
        self._returning: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._last_words = "it refused the connection"
        self._base_models: set[str] = set()
        self._version: int | None = None
        self._model = ""

    async def __aenter__(self) -> Self:
        # no limit on connections and no total time: chains bound their own number and time
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._returning:
            task.cancel()
        await asyncio.gather(*self._returning, return_exceptions=True)
        await self._session.close()

    def published(self, version: int, model: str) -> None:
        """The weights `version` are live as `model`: a turn that is asked for from now on comes from these weights or
        newer ones, and what a server samples from others is thrown away."""
        self._version, self._model = version, model

    async def check_routes(self) -> None:
        """Compare each server's own description with the routes that rollouts need."""
        for url in self.urls:
            try:
                status, text = await self._request("GET", url + "/openapi.json")
                if status != 200:
                    raise ServerUnreachableError(
                        f"server {url} answered {status} to /openapi.json; is it an inference server?"
                    )
                problem = missing_routes(url, list(json.loads(text).get("paths", {})), NEEDED_ROUTES)
                if problem:
                    raise ServerUnreachableError("; ".join(problem))
                self._base_models |= {card["id"] for card in await self.models(url) if not card.get("parent")}
            except LostError as error:
                raise ServerUnreachableError(f"no server answers at {url}: {error}") from error
            except ValueError as error:
                raise ServerUnreachableError(f"server {url} describes itself in no JSON: {error}") from error

    async def generate(
        self,
        token_ids: list[int],
        model: str,
        sampling: dict[str, Any],
        cache_salt: str | None = None,
        chain: str = "",
    ) -> Completion:
        """Sample one turn of `chain` after `token_ids` with the weights called `model`; requests with different
        `cache_salt` share no cache.

        A lost answer is sampled again from the same ids, elsewhere if need be; what a paused or sleeping server holds
        back, or has cut off, is waited for. Raises ContextOverflowError or InferenceError for a refused request,
        ServerUnreachableError when no server has answered for `retry_seconds`.
        """
        request = {"token_ids": token_ids, "model": model, "sampling_params": {"logprobs": 0, **sampling}}
        if cache_salt is not None:
            request["cache_salt"] = cache_salt
        body = json.dumps(request).encode()
        prompt = hash(tuple(token_ids)) if len(self.urls) > 1 else 0
        oldest = self._version
        retries = Retries(self._limit)
        failed_at = set[str]()
        while True:
            url = await self._take(chain, prompt, failed_at)
            self._router.started(url)
            try:
                status, text = await self._request("POST", url + GENERATE, body)
            except LostError as error:
                self._lose(url, str(error))
                continue
            finally:
                self._router.ended(url)
            completion = None
            if status == 200:
                self._router.succeeded(time.monotonic())
                completion = _completion(json.loads(text))
            if (status == 503 or (status == 200 and completion is None)) and await self._held_back(url):
                # that is no failure, however long it took
                retries = Retries(self._limit)
                continue
            if status == 200:
                if completion is None:
                    problem = "the server aborted the request"
                elif self._is_current(completion, model, oldest):
                    return completion
                else:
                    self._distrust(url, f"it sampled with {completion.versions[0].version}, not with {oldest}")
                    continue
            elif status == 404 and model == self._model and self._version is not None:
                self._distrust(url, f"it does not know {model}")
                continue
            elif status == 429 or status >= 500:
                problem = f"the server answered {status}: {text[:500]}"
                failed_at.add(url)
            else:
                raise refusal(status, text)
            await self._wait_to_retry(retries, url, problem)

    async def load(self) -> Load:
        """What the servers that serve say of their load, together. Raises InferenceError where one does not say it."""
        pages = []
        for url, state in self._router.states.items():
            if state is ServerState.SERVING:
                try:
                    status, text = await self._request("GET", url + METRICS_ROUTE)
                except LostError as error:
                    raise InferenceError(f"{url}{METRICS_ROUTE}: {error}") from error
                if status != 200:
                    raise InferenceError(f"{url}{METRICS_ROUTE} answered {status}")
                pages.append(text)
        try:
            return parse_load("\n".join(pages))
        except ValueError as error:
            raise InferenceError(str(error)) from error

    async def _wait_to_retry(self, retries: Retries, url: str, problem: str, asked: float = 0.0) -> None:
        delay = retries.delay(time.monotonic(), asked=asked)
        if delay is not None:
            logger.info("%s: %s; trying again in %.1f s", url, problem, delay)
            await asyncio.sleep(delay)
            return
        successful = self._router.last_success
        if successful is None or successful < (retries.failing_since or 0.0):
            raise ServerUnreachableError(f"no server completed a request for {self._limit:g} s; {url}: {problem}")
        raise InferenceError(f"{problem} (for {self._limit:g} s)")

    async def _take(self, chain: str, prompt: int, avoid: set[str]) -> str:
        """The server for a request; waits while none serves."""
        while True:
            if self._failure is not None:
                raise self._failure
            url = self._router.choose(chain, prompt, avoid)
            if url is not None:
                return url
            silent = self._router.silent_since
            left = None if silent is None else silent + self._limit - time.monotonic()
            if left is not None and left <= 0:
                raise ServerUnreachableError(
                    f"no server answers at {', '.join(self.urls)} for {self._limit:g} s: {self._last_words}"
                )
            self._changed.clear()
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                continue

    # ---- servers that went away, or hold the wrong weights

    def _lose(self, url: str, problem: str) -> None:
        self._last_words = problem
        if self._router.states[url] is ServerState.SERVING:
            logger.warning("server %s is lost: %s", url, problem)
            self._router.lost(url, time.monotonic())
            self._bring_back(url)

    def _distrust(self, url: str, problem: str) -> None:
        if self._router.states[url] is ServerState.SERVING:
            logger.warning("server %s lost its weights: %s; asking for them", url, problem)
            self._router.answers(url)
            self._bring_back(url)

    def _bring_back(self, url: str) -> None:
        self._changed.set()
        task = asyncio.create_task(self._return(url))
        self._returning.add(task)
        task.add_done_callback(self._returned)

    def _returned(self, task: asyncio.Task[None]) -> None:
        self._returning.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # whoever waits for the server gets to know
            self._failure = task.exception()
            self._changed.set()

    async def _return(self, url: str) -> None:
        """Ask until the server answers; let requests through again once it has proven that it has the weights."""
        tries = 0
        while True:
            tries += 1
            try:
                if await self._answers(url):
                    self._router.answers(url)
                    self._changed.set()
                    if await self._has_weights(url) or self.restore is None or await self.restore(url):
                        break
                    self._router.lost(url, time.monotonic())
            except LostError as error:
                self._last_words = str(error)
                self._router.lost(url, time.monotonic())
            await asyncio.sleep(Retries.pause(tries))
        logger.warning("server %s is back", url)
        self._router.proven(url)
        self._changed.set()

    async def _answers(self, url: str) -> bool:
        status, _ = await self._request("GET", url + "/health")
        return status == 200

    async def _has_weights(self, url: str) -> bool:
        """Whether the server's process still is the one that took the published weights."""
        if self._version is None:
            return self.restore is None
        if self._model not in self._base_models:
            return any(card["id"] == self._model for card in await self.models(url))
        status, text = await self._request("GET", url + "/weight_info")
        label = str(json.loads(text).get("weight_version")) if status == 200 else ""
        # a fresh embedded engine calls what it was started with version 0 too
        return self._version > 0 and _number(label) >= self._version

    def _is_current(self, completion: Completion, model: str, oldest: int | None) -> bool:
        """Whether base weights were published when the turn was asked for, or later. (An adapter is asked for by its
        version's own name.)"""
        if oldest is None or model not in self._base_models:
            return True
        return all(_number(span.version) >= oldest for span in completion.versions)

    async def _held_back(self, url: str) -> bool:
        """Waits while the server is paused or asleep; returns whether it was. No turn is sent to it meanwhile: vLLM
        would queue it, with an adapter that it may lose in its sleep."""
        tries = 0
        while await self._holds_requests(url):
            tries += 1
            await asyncio.sleep(Retries.pause(tries))
        return tries > 0

    async def _holds_requests(self, url: str) -> bool:
        """Whether the server is paused or asleep, as it says itself."""
        try:
            for route, key in (("/is_sleeping", "is_sleeping"), ("/is_paused", "is_paused")):
                status, text = await self._request("GET", url + route)
                if status == 200 and json.loads(text).get(key):
                    return True
        except LostError as error:
            self._lose(url, str(error))
        return False

    async def models(self, url: str) -> list[dict[str, Any]]:
        status, text = await self._request("GET", url + "/v1/models")
        return json.loads(text).get("data", []) if status == 200 else []

    async def _request(self, method: str, url: str, body: bytes | None = None) -> tuple[int, str]:
        status, text, _ = await self._exchange(method, url, body)
        return status, text

    async def _exchange(self, method: str, url: str, body: bytes | None = None) -> tuple[int, str, Mapping[str, str]]:
        """Status, text and headers of an answer."""
        try:
            async with self._session.request(method, url, data=body) as response:
                return response.status, await response.text(), response.headers
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise LostError(str(error) or repr(error)) from error


def _number(label: str) -> int:
    """The version that a label of base weights stands for; -1 where it is not one of ours, such as vLLM's "default"."""
    return int(label) if label.isdecimal() else -1


def _completion(answer: dict[str, Any]) -> Completion | None:
    """The turn in a server's answer; None for one that the server aborted."""
    try:
        choice = answer["choices"][0]
        if choice["finish_reason"] == "abort":
            return None
        token_ids = choice["token_ids"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        # vLLM gives no span for a turn without tokens
        versions = [Span(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or []]
    except (KeyError, TypeError, IndexError) as error:
        raise InferenceError(f"the server's answer lacks {error!r}") from error
    if len(token_ids) != len(logprobs):
        raise InferenceError(f"the server sent {len(token_ids)} tokens with {len(logprobs)} log-probabilities")
    return Completion(token_ids, logprobs, versions, choice["finish_reason"] == "length", [1] * len(token_ids))


_OVERFLOW = (
    *("context length", "context_length_exceeded", "maximum model length"),  # vLLM, OpenAI, Ollama
    *("context window", "context limit", "prompt is too long"),  # OpenAI, Anthropic
    "context size",  # llama.cpp, also with status 500
)


def refusal(status: int, text: str) -> InferenceError:
    """What a refused request raises."""
    if status in (400, 500) and any(words in text.lower() for words in _OVERFLOW):
        return ContextOverflowError(text)
    return InferenceError(f"the server answered {status}: {text[:500]}")
