"""Checks of the addresses to fetch: only http(s), and no private network unless the recipe allows a host."""

import ipaddress
import re
import socket
from collections.abc import Collection

from aiohttp import ThreadedResolver
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from agentfactory.base.errors import SettingError, short
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.worlds.browse.documents import PageError

_MOST_CHARACTERS = 2000
_USUAL_PORTS = (80, 443)
_ENTRY = re.compile(r"(?P<host>[\w.-]+|\[[0-9A-Fa-f:]+\])(:(?P<port>\d{1,5}))?")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(?!\d)")
"""Start of an address with a scheme; does not match `host:8000`."""
_NUMBER = re.compile(r"\d+|0[xX][0-9a-fA-F]*")
"""A last label that makes some systems read the host as an IPv4 address (WHATWG URL, "ends in a number")."""
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")
_TUNNELS_V6 = [ipaddress.ip_network(each) for each in ("2001::/32", "2002::/16")]
"""Teredo and 6to4: tunnels to an IPv4 address embedded in the IPv6 address."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_PROTOCOLS_V4 = [ipaddress.ip_network(each) for each in ("192.0.0.0/24", "192.88.99.0/24")]
"""IETF protocol assignments, and 6to4 relays."""


class AllowedHosts:
    """Private hosts that a recipe allows, as `HOST` (ports 80 and 443) or `HOST:PORT`. Raises SettingError for
    others."""

    def __init__(self, entries: Collection[str]) -> None:
        self._ports: dict[str, set[int]] = {}
        for entry in entries:
            parts = _ENTRY.fullmatch(entry)
            port = int(parts["port"] or 0) if parts else -1
            if parts is None or not 0 <= port < 1 << 16:
                raise SettingError("allow_hosts", f"got {short(entry)}", "write HOST or HOST:PORT: localhost:8000")
            host = parts["host"].strip("[]").lower()
            self._ports.setdefault(host, set()).update({port} if port else _USUAL_PORTS)

    def include(self, host: str, port: int) -> bool:
        """Return whether the recipe allows this host, as written in an address, on this port."""
        return port in self._ports.get(host.lower(), ())


def parse_address(text: str, allowed: AllowedHosts) -> URL:
    """Parse an address written by a model or a page: drop its fragment, and add https if it lacks a scheme. Raises
    PageError if the address must not be fetched. Host names are checked later, when `CheckedResolver` resolves them."""
    text = text.strip()
    if len(text) > _MOST_CHARACTERS:
        raise PageError(f"The address has {len(text):,} characters; at most {_MOST_CHARACTERS:,} are possible.")
    if not text or any(character.isspace() or not character.isprintable() for character in text):
        raise PageError(f"{short(text)} is not an address; write one such as https://example.org/page.")
    if "://" not in text and not _SCHEME.match(text):
        text = f"https://{text.removeprefix('//')}"
    try:
        url = URL(text).with_fragment(None)
        host, port = url.raw_host, url.port
    except ValueError as error:
        raise PageError(f"{short(text)} is not an address: {error}.") from None
    if url.scheme not in ("http", "https"):
        raise PageError(f"{short(text)}: only addresses with http:// or https:// can be opened.")
    if url.raw_user is not None or url.raw_password is not None:
        raise PageError("Addresses with a user name or a password are not opened.")
    if not host or port is None:
        raise PageError(f"{short(text)} is not an address: it names no host.")
    if allowed.include(host, port):
        return url
    try:
        literal = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        if _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]):
            raise PageError(f"{short(host)} is not the name of a host.") from None
    else:
        if not is_public(literal):
            raise refusal(host)
    if port not in _USUAL_PORTS and port < 1024:
        raise PageError(f"Pages are not opened on port {port}.")
    return url


def refusal(host: str) -> PageError:
    """Return the error for a host outside the public internet."""
    return PageError(f"{short(host)} is not in the public internet, so it is not opened.")


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether the address is an ordinary unicast address of the public internet. False for private, shared
    (CGNAT), loopback, link-local, multicast and reserved addresses, and for IPv6 forms of IPv4 addresses. Exception: a
    NAT64 address, which networks without IPv4 need, is judged by its IPv4 address."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address not in _GLOBAL_V6 or any(address in tunnel for tunnel in _TUNNELS_V6):
            return False
    elif any(address in network for network in _PROTOCOLS_V4):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


class CheckedResolver(AbstractResolver):
    """A resolver that refuses names with an address outside the public internet. Connections go to the checked
    addresses, so DNS rebinding has no effect. `resolver`: the underlying resolver; None: the system's."""

    def __init__(self, allowed: AllowedHosts, resolver: AbstractResolver | None = None) -> None:
        self._allowed = allowed
        self._resolver = resolver or ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of `host`. Raises PageError (the host does not exist, or one of its addresses is not
        public), ToolInfrastructureError (name resolution fails at present)."""
        try:
            found = await self._resolver.resolve(host, port, family)
        except socket.gaierror as error:
            if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA) and not self._allowed.include(host, port):
                raise PageError(f"There is no host {host}.") from None
            raise ToolInfrastructureError(f"{host} cannot be resolved: {error.strerror}") from error
        except UnicodeError:  # a label is empty or too long
            raise PageError(f"{short(host)} is not the name of a host.") from None
        if not self._allowed.include(host, port):
            for result in found:
                if not is_public(ipaddress.ip_address(result["host"].partition("%")[0])):
                    raise refusal(host)
        return found

    async def close(self) -> None:
        await self._resolver.close()
