"""HTTP to one SGLang server, and the errors with which the front answers."""

import json
from typing import Any, Self

import aiohttp
import msgspec

from agentfactory.base.http.proxies import open_session

Json = dict[str, Any]

_IDLE_SECONDS = 4.0
"""uvicorn closes idle connections after 5 s."""


class ApiError(Exception):
    """An error response in vLLM's format."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class SglangGoneError(ApiError):
    """An SGLang server that does not answer; our clients take status 503 as that of a lost server."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message)


class Sglang:
    """Connections to one SGLang server; use it as an async context manager. Requests raise SglangGoneError."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def __aenter__(self) -> Self:
        # always direct, as all requests to inference servers
        self._session = open_session(None, _IDLE_SECONDS, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def request(self, method: str, path: str, body: Json | None = None) -> tuple[int, str]:
        """Send a request without a time limit; return the response's status and text."""
        data = None if body is None else msgspec.json.encode(body)
        try:
            # no limit: a turn takes minutes, and an update waits for the trainer's broadcast
            limit = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
            async with self._session.request(method, self.url + path, data=data, timeout=limit) as response:
                return response.status, (await response.read()).decode(errors="replace")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise SglangGoneError(f"SGLang at {self.url} does not answer: {error or repr(error)}") from error

    async def get(self, path: str) -> Json:
        """Return the JSON object at `path`. Raises ApiError with SGLang's message."""
        return _checked(path, *await self.request("GET", path))

    async def post(self, path: str, body: Json) -> Json:
        """Post a JSON object; return the response if it is one, else {}. Raises ApiError with SGLang's message, also if
        the response reports no success."""
        return _checked(path, *await self.request("POST", path, body))


def _checked(path: str, status: int, text: str) -> Json:
    answer = decoded(text)
    if status != 200 or answer.get("success") is False:
        raise ApiError(status if status != 200 else 400, f"SGLang's {path} answered {status}: {_message(answer, text)}")
    return answer


def decoded(text: str) -> Json:
    """Parse a JSON object; return {} for anything else."""
    try:
        answer = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _message(answer: Json, text: str) -> str:
    error = answer.get("error")
    if isinstance(error, dict):
        error = error.get("message")
    return str(error or answer.get("message") or text)[:500]
