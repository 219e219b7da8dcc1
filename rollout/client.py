"""The inference client: token ids in, sampled token ids out, over the server's HTTP routes."""

import os
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from rollout.trajectory import Span

GENERATE = "/inference/v1/generate"
NEEDED_ROUTES = (GENERATE, "/health", "/v1/models")


class InferenceError(Exception):
    """The server refused or failed one request."""


class ContextOverflowError(InferenceError):
    """The prompt does not fit the server's context length."""


class ServerUnreachableError(Exception):
    """Nothing answers at the server's address, or it lacks a route that is needed: no chain can go on."""


@dataclass(frozen=True)
class Completion:
    """One sampled turn: its ids, their log-probabilities after temperature, and the weights that sampled them.

    `cut` is true when the turn ended by a token limit and not by the model.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[Span]
    cut: bool


def authorization(api_key_env: str | None) -> dict[str, str]:
    """The HTTP header that carries the key held by the environment variable `api_key_env`.

    Raises ValueError where the variable is named but not set.
    """
    if api_key_env is None:
        return {}
    key = os.environ.get(api_key_env)
    if not key:
        raise ValueError(f"server.api_key_env: the environment variable {api_key_env} is not set; export it")
    return {"Authorization": f"Bearer {key}"}


class InferenceClient:
    """Keeps connections to one server; use it as an async context manager."""

    def __init__(self, url: str, api_key_env: str | None = None):
        self.url = url.rstrip("/")
        self._headers = authorization(api_key_env)

    async def __aenter__(self) -> Self:
        # no limit on connections and no total time: chains bound their own number and time
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def check_routes(self) -> None:
        """Compare the server's own description with the routes that rollouts need."""
        try:
            async with self._session.get(f"{self.url}/openapi.json") as response:
                if response.status != 200:
                    raise ServerUnreachableError(
                        f"server {self.url} answered {response.status} to /openapi.json; is it an inference server?"
                    )
                routes = (await response.json()).get("paths", {})
        except aiohttp.ClientConnectionError as error:
            raise ServerUnreachableError(f"no server answers at {self.url}: {error}") from error
        missing = [route for route in NEEDED_ROUTES if route not in routes]
        if missing:
            raise ServerUnreachableError(
                f"server {self.url} lacks {', '.join(missing)}; start vLLM >= 0.32 with --enable-scale-out"
            )

    async def generate(self, token_ids: list[int], model: str, sampling: dict[str, Any]) -> Completion:
        """Sample one turn after `token_ids` with the weights called `model`.

        Raises ContextOverflowError or InferenceError for a refused request, ServerUnreachableError when the
        server is gone.
        """
        body = {"token_ids": token_ids, "model": model, "sampling_params": {"logprobs": 0, **sampling}}
        try:
            async with self._session.post(self.url + GENERATE, json=body) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.text())
                answer = await response.json()
        except aiohttp.ClientConnectorError as error:
            raise ServerUnreachableError(f"no server answers at {self.url}: {error}") from error
        except aiohttp.ClientError as error:
            raise InferenceError(f"the connection to {self.url} broke: {error!r}") from error
        return _completion(answer)


def _completion(answer: dict[str, Any]) -> Completion:
    try:
        choice = answer["choices"][0]
        token_ids = choice["token_ids"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        # vLLM gives no span for a turn without tokens
        versions = [Span(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or []]
    except (KeyError, TypeError, IndexError) as error:
        raise InferenceError(f"the server's answer lacks {error!r}") from error
    if choice["finish_reason"] == "abort":
        raise InferenceError("the server aborted the request")
    if len(token_ids) != len(logprobs):
        raise InferenceError(f"the server sent {len(token_ids)} tokens with {len(logprobs)} log-probabilities")
    return Completion(token_ids, logprobs, versions, cut=choice["finish_reason"] == "length")


def _refusal(status: int, text: str) -> InferenceError:
    if status == 400 and "context length" in text:
        return ContextOverflowError(text)
    return InferenceError(f"the server answered {status}: {text[:500]}")
