"""Addresses of HTTP servers, and loopback addresses: their interface, and the users at both ends of connections."""

import ipaddress
import os
import socket
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

_Address = tuple[str, int]
_ESTABLISHED, _CLOSE_WAIT, _LISTEN = "01", "08", "0A"


def is_http_address(url: str) -> bool:
    """Return whether `url` is http or https, with a host and a possible port."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port above 65,535, half an IPv6 address
        return False


def is_loopback(host: str) -> bool:
    try:
        return _plain(ipaddress.ip_address(host)).is_loopback
    except ValueError:
        return host == "localhost"


def loopback_interface() -> str | None:
    """Return the name of the interface that has 127.0.0.1; None if there is none."""
    # imported here, because every command imports this module
    import psutil

    addresses = psutil.net_if_addrs().items()
    return next((name for name, found in addresses if any(each.address == "127.0.0.1" for each in found)), None)


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket at an address (port 0: a free one), which does not listen. Raises OSError or OverflowError."""
    # name the protocol: asyncio turns off Nagle's algorithm, which costs 40 ms per call, only for sockets that name it
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError):
        bound.close()
        raise
    return bound


def listeners_users(port: int) -> set[int]:
    """Return the ids of users whose processes listen on a TCP port here; empty if the system reports none."""
    return {each.user for each in _sockets() if each.state == _LISTEN and each.here[1] == port}


def own_sockets() -> set[str]:
    """Return the inodes of this process's open sockets; empty if the system does not report them (Linux does)."""
    found = set()
    with suppress(FileNotFoundError):
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found.add(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix("socket:").strip("[]"))
    return found


def has_foreign_peer(earlier: Collection[str]) -> bool:
    """Return whether a loopback connection of this process, of no `earlier` socket, has a peer of another user."""
    new = own_sockets().difference(earlier)
    ours, trusted = set(), set()
    # the kernel's table is no snapshot: while others connect, a read can miss a row, but not the same one each time
    for each in (each for _ in range(5) for each in _sockets()):
        if each.inode in new and each.state in (_ESTABLISHED, _CLOSE_WAIT) and is_loopback(each.there[0]):
            ours.add((each.there, each.here))
        # a closed socket belongs to nobody
        if each.user == os.geteuid() and each.state == _ESTABLISHED:
            trusted.add((each.here, each.there))
    return not ours <= trusted


@dataclass(frozen=True)
class _Socket:
    here: _Address
    there: _Address
    state: str
    user: int
    inode: str


def _sockets() -> list[_Socket]:
    found = []
    for name in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):
            for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:]:
                _, here, there, state, _, _, _, user, _, inode, *_ = line.split()
                found.append(_Socket(_address(here), _address(there), state, int(user), inode))
    return found


def _address(text: str) -> _Address:
    """Return the address and the port of text such as 0100007F:1F90, whose words of 32 bits are little-endian."""
    words, _, port = text.partition(":")
    parts = (bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    return str(_plain(ipaddress.ip_address(b"".join(parts)))), int(port, 16)


def _plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Convert an IPv4-mapped IPv6 address, such as ::ffff:127.0.0.1, to IPv4; return others unchanged."""
    return getattr(address, "ipv4_mapped", None) or address
