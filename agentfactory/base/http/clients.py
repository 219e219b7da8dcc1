"""Sessions of requests and their bounded answers. Callers follow no redirect, which would give away body and key."""

from typing import Any

import aiohttp

from agentfactory.base.http.proxies import Proxy

_PLAIN = {"Accept-Encoding": "identity"}
_SHOWN = 200


class AnswerError(aiohttp.ClientError):
    """An answer that is too long, or compressed although that was not allowed."""


def open_session(
    proxy: Proxy | None, idle_seconds: float = 15.0, headers: dict[str, str] | None = None, **options: Any
) -> aiohttp.ClientSession:
    """Open a session that takes `proxy`, if any, asks for uncompressed answers, and closes idle connections."""
    options |= {"headers": _PLAIN | (headers or {}), "auto_decompress": False}
    if proxy is None or not proxy.is_socks:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=idle_seconds)
        return aiohttp.ClientSession(connector=connector, proxy=None if proxy is None else proxy.url, **options)
    from aiohttp_socks import ProxyConnector

    # the proxy resolves names, which may have no address on this machine
    url = proxy.url.replace("socks5h://", "socks5://", 1)
    socks = ProxyConnector.from_url(url, rdns=True, limit=0, keepalive_timeout=idle_seconds)
    return aiohttp.ClientSession(connector=socks, **options)


async def answer_within(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Return a response's body, or where it redirects. Raise AnswerError above `most` bytes, or if compressed."""
    if 300 <= response.status < 400 and (place := response.headers.get("Location")):
        return f"it {redirected(place)}".encode()
    if (coding := response.headers.get("Content-Encoding", "identity")) != "identity":
        raise AnswerError(f"it answers in {coding[:_SHOWN]}, although identity was requested")
    content = await content_of(response, most)
    if content is None:
        raise AnswerError(f"its answer has more than {most:,} bytes")
    return content


def redirected(place: str) -> str:
    return f"redirects to {place[:_SHOWN]}, which is not followed; fix: write that address"


async def content_of(response: aiohttp.ClientResponse, most: int, cut: bool = False) -> bytes | None:
    """Return the body; if it has more than `most` bytes, None, or the first of them if `cut`."""
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > most:
            return bytes(content[:most]) if cut else None
    return bytes(content)
