"""Key authentication for our HTTP servers, because other users of a machine reach its loopback addresses too."""

import base64
import hmac
import socket
from binascii import Error
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from agentfactory.base.errors import SettingError
from agentfactory.base.http.loopback import bound_socket
from agentfactory.base.http.server_keys import key_file, key_of_environment, published_key

HEALTH = "/health"


class KeyGuard:
    """ASGI middleware that answers requests without the key with status 401, WebSockets with 403. The key comes as
    `Authorization: Bearer KEY`, or as the password of a URL."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"] != HEALTH:
            given = _key_in(Headers(scope=scope).get("authorization", ""))
            if not hmac.compare_digest(given, self._key):
                error = "this server takes requests only with its key, as Authorization: Bearer KEY"
                refusal = JSONResponse({"error": error}, 401, {"connection": "close"})
                await (WebSocketClose() if scope["type"] == "websocket" else refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _key_in(authorization: str) -> bytes:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("utf-8", "replace")
    if scheme.lower() == "basic":
        with suppress(Error, ValueError):
            return base64.b64decode(value, validate=True).partition(b":")[2]
    return b""


def listen(host: str, port: int, option: str) -> socket.socket:
    """Listen on an address; port 0 takes a free one. Raises SettingError, for the port's `option`, if it cannot."""
    try:
        listener = bound_socket(host, port)
    except (OSError, OverflowError) as error:
        problem = f"{host}:{port} cannot be used: {error}"
        raise SettingError(option, problem, "choose another; 0 takes a free one") from None
    listener.listen(1024)
    return listener


@contextmanager
def server_key(host: str, port: int, variable: str | None) -> Iterator[tuple[str, str]]:
    """Yield a server's key and where it is: the `variable`, or a file of this user alone. Raises SettingError."""
    if variable is not None:
        yield key_of_environment("--api-key-env", variable), f"its key is in the variable {variable}"
        return
    with ExitStack() as stack:
        try:
            key = stack.enter_context(published_key(host, port))
        except OSError as error:
            problem = f"the key file for this server's clients cannot be written: {error}"
            raise SettingError("--api-key-env", problem, "name a variable that holds one") from error
        yield key, f"its key is in {key_file(host, port)}, where your recipes find it"
