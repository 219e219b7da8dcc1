"""HTTP to an inference server's control routes, from the trainer: rare, blocking calls with JSON in and out."""

import http.client
import json
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from rollout.client import missing_routes


class SyncError(Exception):
    """The server did not take new weights, or did not prove that it has them. It stops the run."""


class ServerGoneError(SyncError):
    """Nothing answers at the server's address; another server, or the same one started again, may do its work."""


class ServerControl:
    """One inference server. The standard library's client is enough here: a handful of calls per step, and it heeds
    no proxy variables, which would break loopback addresses."""

    def __init__(self, url: str, api_key_env: str | None = None, timeout_seconds: float = 600.0) -> None:
        """`url` such as http://127.0.0.1:8000; `api_key_env` names the environment variable that holds the key."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"server.url: {url!r} is not an address such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._prefix = parts.hostname, parts.port, parts.path.rstrip("/")
        self._timeout = timeout_seconds
        self._headers = {"Content-Type": "application/json"}
        if api_key_env is not None:
            if api_key_env not in os.environ:
                raise ValueError(f"server.api_key_env: the environment variable {api_key_env} is not set")
            self._headers["Authorization"] = f"Bearer {os.environ[api_key_env]}"

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object that `path` answers. Raises SyncError with the server's words, ServerGoneError where
        nothing answers."""
        return self._request("GET", path, None)

    def require(self, routes: Sequence[str]) -> None:
        """Raises SyncError unless the server describes all of `routes`; it names the switch that turns them on."""
        problem = missing_routes(self.url, list(self.get("/openapi.json").get("paths", {})), routes)
        if problem:
            raise SyncError(problem)

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Posts JSON; returns the answer if it is a JSON object, else {}. Raises SyncError with the server's words."""
        return self._request("POST", path, body)

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        connection = self._connect(self._host, self._port, timeout=self._timeout)
        try:
            connection.request(method, self._prefix + path, json.dumps(body or {}), self._headers)
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
        except OSError as error:
            raise ServerGoneError(f"{method} {self.url}{path}: {error!r}") from error
        except http.client.HTTPException as error:
            raise ServerGoneError(f"{method} {self.url}{path}: {error!r}") from error
        finally:
            connection.close()
        if response.status in (502, 503, 504):
            raise ServerGoneError(f"{method} {self.url}{path} answered {response.status}: {text[:500]}")
        if response.status != 200:
            raise SyncError(f"{method} {self.url}{path} answered {response.status}: {text[:500]}")
        # vLLM answers some of its routes with plain words or nothing
        try:
            answer = json.loads(text)
        except json.JSONDecodeError:
            return {}
        return answer if isinstance(answer, dict) else {}
