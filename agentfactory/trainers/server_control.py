"""HTTP client for an inference server's control routes: rare, blocking calls from the trainer, with JSON in and out."""

import http.client
import json
import logging
import threading
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from agentfactory.rollout.client import missing_routes
from agentfactory.rollout.connection import authorization, lacking_key
from agentfactory.rollout.server_keys import pinned
from agentfactory.rollout.stalls import STALL_SECONDS
from agentfactory.tools.errors import SettingError
from agentfactory.tools.notices import tell

logger = logging.getLogger(__name__)


class SyncError(Exception):
    """The server did not accept new weights, or did not prove that it has them. This stops the run."""


class ServerGoneError(SyncError):
    """Nothing answers at the server's address. Another server, or the same one after a restart, may take its place."""


SLEEP_ROUTES = ("/sleep", "/wake_up", "/is_sleeping")
"""Routes that a server needs for sleeping."""


class ServerControl:
    """One inference server. The standard library's client is enough here: there are only a few calls per step, and it
    ignores proxy variables, which would break loopback addresses."""

    def __init__(self, url: str, api_key_env: str | None = None, timeout_seconds: float = 600.0) -> None:
        """`url` such as http://127.0.0.1:8000; `api_key_env` names the environment variable that contains the
        key; see `authorization`. Raises SettingError."""
        parts = urlsplit(url := pinned(url))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingError("server.url", f"{url!r} is not an address", "write it as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self.asleep = False
        """Whether this object sent the server to sleep and it is not fully awake: nothing runs on it."""
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._prefix = parts.hostname, parts.port, parts.path.rstrip("/")
        self._timeout = timeout_seconds
        self._api_key_env = api_key_env
        authorization(url, api_key_env)

    def get(self, path: str) -> dict[str, Any]:
        """Returns the JSON object at `path`. Raises SyncError with the server's message, and ServerGoneError if nothing
        answers."""
        return self._request("GET", path, None)

    def require(self, routes: Sequence[str]) -> None:
        """Raises SyncError unless the server describes all of `routes`; the message names the switch that enables
        them."""
        problem = missing_routes(self.url, list(self.get("/openapi.json").get("paths", {})), routes)
        if problem:
            raise SyncError("; ".join(problem))

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Posts JSON; returns the answer if it is a JSON object, else {}. Raises SyncError with the server's
        message."""
        return self._request("POST", path, body)

    def sleep(self) -> None:
        """Sends the server to sleep at level 1: its weights move to host memory, its caches are dropped, and running
        requests are aborted. A server that sleeps already stays asleep.

        Raises SyncError if it refuses or stays awake.
        """
        fix = (
            "start the server by `agentfactory train` or `agentfactory serve` with placement.mode=time_share (vLLM: "
            "--enable-sleep-mode), or use placement.mode=split"
        )
        try:
            self.post("/sleep?level=1&mode=abort")
        except ServerGoneError:
            raise
        except SyncError as error:
            raise SyncError(f"placement.mode: time_share: the server does not sleep: {error}; {fix}") from error
        if not self.is_sleeping():
            raise SyncError(f"placement.mode: time_share: {self.url} took /sleep and says that it is awake; {fix}")
        self.asleep = True

    def wake_up(self, part: Literal["weights", "kv_cache"]) -> None:
        """Wakes one part of a sleeping server: the weights, then the cache, after which it resumes automatically.

        Raises SyncError if it refuses, or stays asleep after its cache was woken.
        """
        fix = (
            "it needs the memory that it had: end what else uses its device, or give it less "
            "(server.gpu_memory_utilization; embedded: server.max_num_seqs or server.max_model_len), and go on with "
            "--resume"
        )
        try:
            self.post(f"/wake_up?tags={part}")
        except ServerGoneError:
            raise
        except SyncError as error:
            raise SyncError(f"placement.mode: time_share: the server does not wake up: {error}; {fix}") from error
        if part == "kv_cache":
            if self.is_sleeping():
                raise SyncError(
                    f"placement.mode: time_share: {self.url} took /wake_up and says that it is still asleep; {fix}"
                )
            self.asleep = False

    def is_sleeping(self) -> bool:
        """Returns the server's own answer."""
        return self.get("/is_sleeping").get("is_sleeping") is True

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        connection = self._connect(self._host, self._port, timeout=self._timeout)
        text = f"server {self.url} has not answered {method} {path} for {STALL_SECONDS:g} s"
        text += f"; the trainer waits up to {self._timeout:g} s"
        late = threading.Timer(STALL_SECONDS, tell, (logger, f"{self.url} is late", text))
        late.daemon = True
        late.start()
        try:
            headers = {"Content-Type": "application/json", **authorization(self.url, self._api_key_env)}
            connection.request(method, self._prefix + path, json.dumps(body or {}), headers)
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
        except OSError as error:
            raise ServerGoneError(f"{method} {self.url}{path}: {error!r}") from error
        except http.client.HTTPException as error:
            raise ServerGoneError(f"{method} {self.url}{path}: {error!r}") from error
        finally:
            late.cancel()
            connection.close()
        if response.status in (502, 503, 504):
            raise ServerGoneError(f"{method} {self.url}{path} answered {response.status}: {text[:500]}")
        if response.status == 401:
            raise SyncError(f"{method} {self.url}{path} answered 401: {lacking_key(self.url, self._api_key_env)}")
        if response.status != 200:
            raise SyncError(f"{method} {self.url}{path} answered {response.status}: {text[:500]}")
        # vLLM answers some of its routes with plain text or nothing
        try:
            answer = json.loads(text)
        except json.JSONDecodeError:
            return {}
        return answer if isinstance(answer, dict) else {}
