"""Proxies from the environment; servers on this machine are always reached directly."""

import ipaddress
import os
import re
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from agentfactory.base.errors import SettingError
from agentfactory.base.http.loopback import is_http_address, is_loopback
from agentfactory.base.http.server_keys import loopback_addresses
from agentfactory.base.user_code.extras import check_extra

_SPARED = re.compile(r"(?:\*?\.)?(?P<host>\*|\[[^\]]+\]|[^:]+|[\da-f:/]+)(?::(?P<port>\d+))?")
"""An entry of NO_PROXY: a host, a domain, an address or a network, each with or without a port; or *."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Proxy:
    """The proxy in the environment variable `variable`. `url` may contain a password; `str` omits it."""

    variable: str
    url: str

    def __str__(self) -> str:
        parts = urlsplit(self.url)
        return f"the proxy {parts.scheme}://{parts.netloc.rpartition('@')[2]} ({self.variable})"

    @property
    def is_socks(self) -> bool:
        return self.url.startswith("socks")


def proxy_for(url: str) -> Proxy | None:
    """Return the proxy for requests to `url`; None for this machine and hosts in NO_PROXY. Raises SettingError."""
    parts = urlsplit(url)
    found = next(filter(None, map(_variable, (f"{parts.scheme}_proxy", "all_proxy"))), None)
    if found is None or parts.hostname is None or _spared(parts.hostname, parts.port):
        return None
    if is_loopback(parts.hostname) or loopback_addresses(url):
        return None
    variable, value = found
    proxy = Proxy(variable, value if "://" in value else f"http://{value}")
    scheme, _, rest = proxy.url.partition("://")
    if scheme.lower() not in ("http", "https", "socks5", "socks5h") or not is_http_address(f"http://{rest}"):
        shown = proxy.url.rpartition("@")[2]
        raise SettingError(proxy.variable, f"{shown!r} is no address of a proxy", "write http://HOST:PORT, or unset it")
    if proxy.is_socks:
        try:
            check_extra("socks")
        except SettingError as error:
            raise error.at(field=proxy.variable) from None
    return proxy


def through(proxy: Proxy | None) -> str:
    """Return the end of an error about a request: the proxy that it took, if any."""
    return "" if proxy is None else f"; it went through {proxy}: list the host in NO_PROXY if it needs none"


def spare_loopback(environment: MutableMapping[str, str]) -> None:
    """Add this machine to NO_PROXY if a proxy is set, for the libraries and child processes that read it."""
    if not any(_variable(f"{scheme}_proxy", environment) for scheme in ("http", "https", "all")):
        return
    for name in ("no_proxy", "NO_PROXY"):
        entries = _entries(environment, name)
        if "*" not in entries:
            environment[name] = ",".join([*entries, *(host for host in _LOOPBACK if host not in entries)])


def _entries(environment: Mapping[str, str], name: str) -> list[str]:
    other = name.upper() if name.islower() else name.lower()
    text = environment.get(name, environment.get(other, ""))
    return [entry for each in text.lower().split(",") if (entry := each.strip())]


def _variable(name: str, environment: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """Return the variable `name`, and its value unless it is empty. As in other programs, small letters win."""
    for spelled in (name, name.upper()):
        if spelled in environment:
            value = environment[spelled].strip()
            return (spelled, value) if value else None
    return None


def _spared(host: str, port: int | None) -> bool:
    for entry in filter(None, map(_SPARED.fullmatch, _entries(os.environ, "no_proxy"))):
        name = entry["host"].strip("[]")
        if entry["port"] is not None and int(entry["port"]) != port:
            continue
        if name in ("*", host) or host.endswith(f".{name}"):
            return True
        with suppress(ValueError):  # a name, not an address or a network
            if ipaddress.ip_address(host) in ipaddress.ip_network(name, strict=False):
                return True
    return False
