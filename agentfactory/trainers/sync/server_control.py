"""An HTTP client for an inference server's control routes: rare, blocking JSON calls from the trainer."""

import http.client
import json
import logging
import select
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from agentfactory.base.errors import SettingError
from agentfactory.base.http.loopback import is_http_address
from agentfactory.base.http.server_keys import pinned
from agentfactory.base.run_notices import notify
from agentfactory.rollout.inference.http_transport import authorization, lacking_key, missing_routes
from agentfactory.rollout.inference.server_metrics import LOAD_FIX, METRICS_ROUTE, REPLICA_HEADER, parse_loads
from agentfactory.rollout.inference.stalls import STALL_SECONDS

logger = logging.getLogger(__name__)
_ANSWER_BYTES = 1 << 26
"""Maximum size of an answer; the largest are checksums and log-probabilities."""


class SyncError(Exception):
    """A server that did not accept new weights, or did not prove that it has them. This stops the run."""


class ServerGoneError(SyncError):
    """A server that does not answer. Another server, or the same one after a restart, may take its place."""


SLEEP_ROUTES = ("/sleep", "/wake_up", "/is_sleeping")
_SHARING = "placement.mode: time_share"


class ServerControl:
    """One inference server. The standard library's client ignores proxy variables, which would break loopback."""

    def __init__(self, url: str, api_key_env: str | None = None, timeout_seconds: float = 600.0) -> None:
        """`api_key_env` names the environment variable with the key; see `authorization`. Raises SettingError."""
        if not is_http_address(url):
            raise SettingError("server.url", f"{url!r} is not an address", "write it as http://127.0.0.1:8000")
        parts = urlsplit(url := pinned(url))
        self.url = url.rstrip("/")
        self.asleep = False
        """True if this object sent the server to sleep and it is not fully awake, so nothing runs on it."""
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._prefix = parts.hostname or "", parts.port, parts.path.rstrip("/")
        self._timeout = timeout_seconds
        self._api_key_env = api_key_env
        authorization(url, api_key_env)

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at `path`. Raises SyncError with the server's message, or ServerGoneError."""
        return _object(self._request("GET", path, None))

    def require(self, routes: Sequence[str]) -> None:
        """Raise SyncError, which names the option to set, unless the server describes all of `routes`."""
        problem = missing_routes(self.url, list(self.get("/openapi.json").get("paths", {})), routes)
        if problem:
            raise SyncError("; ".join(problem))

    def post(self, path: str, body: dict[str, Any] | None = None, replica: int | None = None) -> dict[str, Any]:
        """Post JSON; return the response if it is a JSON object, else {}. `replica` is the rank that must answer a
        generate request; other requests go to all replicas. Raises SyncError with the server's message."""
        return _object(self._request("POST", path, body, replica))

    def replicas(self) -> list[int | None]:
        """Return the ranks of the replicas behind the address; [None] for one, or if the server reports no load."""
        try:
            count = len(parse_loads(self._request("GET", METRICS_ROUTE, None)))
        except ServerGoneError:
            raise
        except (SyncError, ValueError) as error:
            text = f"server {self.url} does not report its load ({error}): if it has replicas, not all prove their "
            notify(logger, f"{self.url} reports no load", f"{text}weights; {LOAD_FIX}")
            count = 1
        return [*range(count)] if count > 1 else [None]

    def pause(self) -> None:
        """Freeze running requests while the server gets new weights. A server that sleeps is paused already."""
        if not self.asleep:
            # by default vLLM would drop the caches here, including those of running requests
            self.post("/pause?mode=keep&clear_cache=false")

    def resume(self) -> None:
        if not self.asleep:
            self.post("/resume")

    def sleep(self) -> None:
        """Move the server's weights to host memory, drop its caches, and abort running requests (level 1). Raises
        SyncError if it refuses or stays awake."""
        fix = "start the server by `agentfactory train` or `agentfactory serve` with placement.mode=time_share (vLLM: "
        fix += "--enable-sleep-mode), or use placement.mode=split"
        self._share("/sleep?level=1&mode=abort", "the server does not sleep", fix)
        if not self.is_sleeping():
            raise SyncError(f"{_SHARING}: {self.url} accepted /sleep, but reports that it is awake; {fix}")
        self.asleep = True

    def wake_up(self, part: Literal["weights", "kv_cache"]) -> None:
        """Wake one part of a sleeping server: the weights, then the cache, after which it resumes automatically. Raises
        SyncError if it refuses, or stays asleep after the cache wakes."""
        fix = "it needs its previous amount of memory: free its device from other processes, or lower its memory ("
        fix += "server.options.gpu_memory_utilization; embedded: server.max_num_seqs or max_model_len), and --resume"
        self._share(f"/wake_up?tags={part}", "the server does not wake up", fix)
        if part == "kv_cache":
            if self.is_sleeping():
                raise SyncError(f"{_SHARING}: {self.url} accepted /wake_up, but reports that it is asleep; {fix}")
            self.asleep = False

    def _share(self, path: str, problem: str, fix: str) -> None:
        try:
            self.post(path)
        except ServerGoneError:
            raise
        except SyncError as error:
            raise SyncError(f"{_SHARING}: {problem}: {error}; {fix}") from error

    def is_sleeping(self) -> bool:
        return self.get("/is_sleeping").get("is_sleeping") is True

    def _request(self, method: str, path: str, body: dict[str, Any] | None, replica: int | None = None) -> str:
        connection = self._connect(self._host, self._port, timeout=self._timeout)
        try:
            headers = {"Content-Type": "application/json", **authorization(self.url, self._api_key_env)}
            if replica is not None:
                headers[REPLICA_HEADER] = str(replica)
            connection.request(method, self._prefix + path, json.dumps(body or {}), headers)
            waiting = select.poll()
            waiting.register(connection.sock, select.POLLIN)  # it is readable, or was closed
            if not waiting.poll(1000 * STALL_SECONDS):
                text = f"server {self.url} has not answered {method} {path} for {STALL_SECONDS:g} s"
                notify(logger, f"{self.url} is late", f"{text}; the trainer waits up to {self._timeout:g} s")
            response = connection.getresponse()
            content = response.read(_ANSWER_BYTES + 1)
            if len(content) > _ANSWER_BYTES:
                raise SyncError(f"{method} {self.url}{path} answered with more than {_ANSWER_BYTES:,} bytes")
            text = content.decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise ServerGoneError(f"{method} {self.url}{path}: {error!r}") from error
        finally:
            connection.close()
        if response.status == 200:
            return text
        told = lacking_key(self.url, self._api_key_env) if response.status == 401 else text[:500]
        kind = ServerGoneError if response.status in (502, 503, 504) else SyncError
        raise kind(f"{method} {self.url}{path} answered {response.status}: {told}")


def _object(text: str) -> dict[str, Any]:
    """Parse a JSON object; return {} for anything else, which some of vLLM's routes return."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}
