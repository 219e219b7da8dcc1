"""An OpenEnv server (0.10): its descriptions over HTTP, and its sessions, each a WebSocket with one environment."""

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from agentfactory.base.errors import SettingError
from agentfactory.base.http.clients import AnswerError, answer_within, open_session, redirected
from agentfactory.base.http.loopback import is_http_address
from agentfactory.base.http.proxies import proxy_for, through
from agentfactory.base.http.server_keys import key_header, key_of_environment, pinned
from agentfactory.base.messages import ToolInfrastructureError, is_finite_number

MESSAGE_BYTES = 32 << 20
_OPEN_SECONDS = 10.0
"""Time limit of a request, and of opening a WebSocket."""
_CLOSE_SECONDS = 5.0
"""Time for a server to end a session, after which its place is free."""
_DESCRIPTION_BYTES = 4 << 20
_SHOWN = 200
_NO_SERVER = "give the address of an OpenEnv server, without /ws, /web or /schema"
_BROKEN = "look at the server's log"


class ServerFault(ToolInfrastructureError):
    """A server that cannot be used. `field` is the setting of its source that the fix concerns."""

    def __init__(self, problem: str, fix: str, field: str = "url") -> None:
        super().__init__(f"{problem}; fix: {fix}")
        self.problem, self.fix, self.field = problem, fix, field


class RefusedAction(Exception):
    """An action, or a reset, that the server or its environment refuses; the message is the server's."""


@dataclass(frozen=True)
class Step:
    observation: dict[str, Any]
    reward: float | None
    done: bool


@dataclass(frozen=True)
class Server:
    """The server at `url`. Its key is in the environment variable `api_key_env`; without one, in the address or in the
    file of a server of ours. Raises SettingError if the address, the variable or a proxy for it cannot be used."""

    url: str
    api_key_env: str | None = None

    def __post_init__(self) -> None:
        if not is_http_address(self.url):
            raise SettingError("url", f"got {self.url!r}, which is no address", "write it as http://127.0.0.1:8000")
        if self.api_key_env is not None and urlsplit(self.url).password:
            raise SettingError("api_key_env", f"got {self.api_key_env!r}, and url has a key, too", "remove one")
        self._headers()
        proxy_for(self.url)

    def __str__(self) -> str:
        """The address without a password."""
        parts = urlsplit(self.url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()

    async def get(self, path: str) -> dict[str, Any]:
        """Return the object at a path. Raises ServerFault."""
        proxy = proxy_for(self.url)
        try:
            async with (
                open_session(proxy, timeout=aiohttp.ClientTimeout(total=_OPEN_SECONDS)) as session,
                session.get(self._at(path), headers=self._headers(), allow_redirects=False) as response,
            ):
                content = await answer_within(response, _DESCRIPTION_BYTES)
        except TimeoutError:
            raise self._silent(f"no answer within {_OPEN_SECONDS:g} s") from None
        except AnswerError as error:
            raise ServerFault(f"{self}{path}: {error}", _NO_SERVER) from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._silent(str(error) or repr(error)) from None
        text = " ".join(content[: 4 * _SHOWN].decode("utf-8", "replace").split())[:_SHOWN]
        if response.status in (401, 403, 407):
            raise self._refused(response.status)
        if response.status >= 500:
            raise ServerFault(f"{self}{path} fails with status {response.status}: {text}", _BROKEN)
        try:
            found = json.loads(content) if response.status == 200 else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ServerFault(f"{self}{path} is no description (status {response.status}): {text}", _NO_SERVER)
        return found

    async def connect(self, seconds: float) -> "Session":
        """Open a session, whose answers have the time limit `seconds`. Raises ServerFault."""
        # of an extra
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidStatus, WebSocketException

        class Direct(connect):
            def process_redirect(self, exc: Exception) -> Exception:
                return exc  # another server would get the session

        proxy = proxy_for(self.url)
        try:
            socket = await Direct(
                self._at("/ws").replace("http", "ws", 1),
                additional_headers=self._headers(),
                proxy=None if proxy is None else proxy.url,
                open_timeout=_OPEN_SECONDS,
                close_timeout=1,
                max_size=MESSAGE_BYTES,
                compression=None,
                # a step may block the server's event loop for longer than any time limit of pings
                ping_timeout=None,
            )
        except InvalidStatus as error:
            status = error.response.status_code
            if status in (401, 403, 407):
                raise self._refused(status) from None
            if 300 <= status < 400 and (place := error.response.headers.get("Location")):
                raise ServerFault(f"{self}/ws {redirected(place)}", _NO_SERVER) from None
            raise ServerFault(f"{self}/ws is no WebSocket (status {status})", _NO_SERVER) from None
        except TimeoutError:
            raise self._silent(f"no WebSocket within {_OPEN_SECONDS:g} s") from None
        except (WebSocketException, OSError, EOFError) as error:
            raise self._silent(str(error) or repr(error)) from None
        return Session(str(self), socket, seconds)

    def _at(self, path: str) -> str:
        parts = urlsplit(pinned(self.url))
        return parts._replace(path=parts.path.rstrip("/") + path).geturl()

    def _headers(self) -> dict[str, str]:
        if self.api_key_env is None:
            return key_header(pinned(self.url))
        return {"Authorization": f"Bearer {key_of_environment('api_key_env', self.api_key_env)}"}

    def _silent(self, why: str) -> ServerFault:
        told = f"{self} does not answer: {why}{through(proxy_for(self.url))}"
        return ServerFault(told, "start the server, or correct the address")

    def _refused(self, status: int) -> ServerFault:
        if self.api_key_env is None:
            fix = "name the environment variable with the server's key"
            return ServerFault(f"got null, and {self} needs a key (status {status})", fix, "api_key_env")
        told = f"got {self.api_key_env!r}, whose key {self} refuses (status {status})"
        return ServerFault(told, "correct the variable", "api_key_env")


@dataclass
class Session:
    """A session of the server `name`. An abandoned request is answered before the next one is sent."""

    name: str
    socket: Any
    seconds: float
    _order: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def reset(self, data: dict[str, Any]) -> Step:
        """Begin an episode. Raises like `step`."""
        return await self._ask({"type": "reset", "data": data})

    async def step(self, action: dict[str, Any]) -> Step:
        """Take an action. Raises RefusedAction (it is invalid, or raised), ServerFault (the session is lost)."""
        return await self._ask({"type": "step", "data": action})

    async def close(self) -> None:
        """End the session, and wait until the server has given its place back."""
        from websockets.exceptions import ConnectionClosed

        with suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self.socket.send('{"type": "close"}')
                await self.socket.wait_closed()
        await self.socket.close()

    async def _ask(self, message: dict[str, Any]) -> Step:
        from websockets.exceptions import ConnectionClosed

        kind = message["type"]
        async with self._order:
            try:
                async with asyncio.timeout(self.seconds):
                    with suppress(ConnectionClosed):  # a full server closes at once: its reason waits to be received
                        await self.socket.send(json.dumps(message))
                    text = await self.socket.recv()
                return self._read(kind, text)
            except RefusedAction:
                raise
            except TimeoutError:
                told = f"{self.name} did not answer a {kind} within {self.seconds:g} s"
                fault = ServerFault(told, f"{_BROKEN}, or raise data.openenv.seconds")
            except ConnectionClosed as error:
                fault = ServerFault(f"{self.name} closed the connection before it answered a {kind}: {error}", _BROKEN)
            except ServerFault as error:
                fault = error
            # an answer that comes later is not the next request's
            self.socket.transport.abort()
            raise fault

    def _read(self, kind: str, text: str | bytes) -> Step:
        try:
            answer: Any = json.loads(text) if isinstance(text, str) else None
        except (ValueError, RecursionError):
            answer = None
        match answer:
            case {"type": "error", "data": {"code": str(code)}}:
                raise self._error(kind, code, answer["data"])
            case {"type": "observation", "data": {"observation": dict(observation)}}:
                data = answer["data"]
                reward, done = data.get("reward"), data.get("done", False)
                if isinstance(done, bool) and (reward is None or is_finite_number(reward)):
                    return Step(observation, None if reward is None else float(reward), done)
        raise ServerFault(f"{self.name} answered a {kind} with {text[:_SHOWN]!r}, which is no observation", _BROKEN)

    def _error(self, kind: str, code: str, data: dict[str, Any]) -> Exception:
        told = str(data.get("message", ""))
        if code == "CAPACITY_REACHED":
            most = data.get("max_sessions")
            pool = f"mcp_servers: {{openenv: {{module: openenv, pool: {{capacity: {most}}}}}}}"
            fix = f"raise the server's max_concurrent_envs, or make chains wait: {pool}"
            return ServerFault(f"{self.name} has no free session: {told}", fix)
        if code in ("VALIDATION_ERROR", "EXECUTION_ERROR"):  # the session continues
            faults = data.get("errors") if isinstance(data.get("errors"), list) else None
            return RefusedAction("; ".join(map(_told, faults)) if faults else told)
        return ServerFault(f"{self.name} answered a {kind} with {code}: {told[:_SHOWN]}", _BROKEN)


def _told(fault: Any) -> str:
    if not isinstance(fault, dict):
        return str(fault)
    place = fault.get("loc")
    return f"{'.'.join(map(str, place if isinstance(place, list) else ())) or 'action'}: {fault.get('msg')}"
