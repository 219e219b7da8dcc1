"""Access control: only the viewer's own page, in a browser of the user who started it, may make requests."""

import hmac
from collections.abc import Iterable

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# the plots need inline styles; scripts must be our own files, so that no text can ever run as one
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class PrivatePath:
    """ASGI middleware that serves an application below the secret path `/KEY/`, which other users of the machine do not
    know. The page's own links are relative, so it needs no cookie, which browsers would send to all ports."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given, _, inside = scope["path"].removeprefix("/").partition("/")
            if not hmac.compare_digest(given.encode("utf-8", "replace"), self._key):
                reason = "the address lacks this viewer's key; open the one that `agentfactory view` has printed"
                await PlainTextResponse(f"refused: {reason}\n", 403, {"connection": "close"})(scope, receive, send)
                return
            scope = {**scope, "path": f"/{inside}", "raw_path": f"/{inside}".encode()}
        await self._app(scope, receive, send)


class Guard:
    """ASGI middleware that refuses requests from other origins, and keeps the page from loading anything from them. A
    foreign page can make a browser send requests to loopback addresses, even under its own host name (DNS rebinding).
    Therefore `Host` must be ours, and the origin of a request, if the browser sends it, the page itself."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}
        if port == 80:
            self._hosts |= {"127.0.0.1", "localhost", "[::1]"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "only HTTP is supported"})
            return
        if reason := self._refusal(scope["headers"]):
            await PlainTextResponse(f"refused: {reason}\n", 403)(scope, receive, send_guarded)
            return
        await self._app(scope, receive, send_guarded)

    def _refusal(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        given: dict[str, list[str]] = {}
        for name, value in headers:
            given.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1").lower())
        hosts = given.get("host", [])
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return "the Host header is not this server's"
        if any(origin != f"http://{hosts[0]}" for origin in given.get("origin", [])):
            return "the request comes from another origin"
        if any(site not in ("same-origin", "none") for site in given.get("sec-fetch-site", [])):
            return "the request comes from another site; open the address in a new tab"
        return None
