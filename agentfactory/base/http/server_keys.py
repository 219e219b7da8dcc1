"""Keys of the servers that a user runs here, since other users reach loopback too: each generates one, in a file that
only its user can read, named after its address. It needs only the standard library, for vLLM's Python."""

import fcntl
import functools
import ipaddress
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from agentfactory.base.errors import SettingError


def key_folder() -> Path:
    """Return the folder of this user's keys, which need not exist."""
    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{user}"
    # not TMPDIR, which may differ between a server and its clients
    parent = runtime if os.path.isdir(runtime) and os.access(runtime, os.W_OK) else "/tmp"
    return Path(parent, f"agentfactory-{user}")


def key_file(host: str, port: int) -> Path:
    """Return the file for the key of the server that listens on the address `host`, an IP, and `port`."""
    return key_folder() / f"{host}:{port}"


@contextmanager
def published_key(host: str, port: int) -> Iterator[str]:
    """Keep a new key for the server at `host` and `port` in its file during the context. Raises SettingError."""
    file = key_file(host, port)
    with suppress(FileExistsError):
        file.parent.mkdir(mode=0o700)
    _check_private(file.parent)
    key = secrets.token_urlsafe(32)
    # files of servers that were killed; one that begins with a dot is still being written
    for old in file.parent.glob("[!.]*"):
        with suppress(FileNotFoundError, BlockingIOError), old.open() as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(old, opened.fileno()):
                old.unlink()
    # written under another name, so a client never reads half a key
    passing = file.with_name(f".{secrets.token_hex(8)}")
    with os.fdopen(os.open(passing, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as stream:
        stream.write(key)
        stream.flush()
        # the system releases this lock however the server ends: a file without it is stale
        fcntl.flock(stream, fcntl.LOCK_EX)
        passing.rename(file)
        try:
            yield key
        finally:
            if _same_file(file, stream.fileno()):
                file.unlink()


def pinned(url: str) -> str:
    """Replace a host name in `url`, such as localhost, with the IP address of this user's server: a name can mean
    several addresses, and another user may listen for keys at the others. Unchanged if no server has stored a key."""
    parts = urlsplit(url)
    if parts.hostname is None or _is_address(parts.hostname):
        return url
    for host, port in loopback_addresses(url):
        if _is_left(key_file(host, port)):
            return parts._replace(netloc=f"[{host}]:{port}" if ":" in host else f"{host}:{port}").geturl()
    return url


def key_file_of(url: str) -> Path | None:
    """Return the file with the key that the server at `url` has stored for this user; None if there is none."""
    return next((file for address in loopback_addresses(url) if _is_left(file := key_file(*address))), None)


def _is_left(file: Path) -> bool:
    """Return whether a server has stored its key. Raises SettingError if the folder is another user's."""
    with suppress(PermissionError):
        return file.exists()
    _check_private(file.parent)
    return False


def find_key(url: str) -> str | None:
    """Return the key that the server at `url` has stored for this user; None if there is none, or if `url` has a name
    instead of an IP address (see `pinned`). Raises SettingError if another user could have written it."""
    if not _is_address(urlsplit(url).hostname or ""):
        return None
    with suppress(FileNotFoundError):
        if (file := key_file_of(url)) is not None:
            status = file.stat()
            return _read(file, status.st_ino, status.st_mtime_ns)
    return None


def key_header(url: str) -> dict[str, str]:
    """Return the HTTP header with the key that `find_key` finds; empty if there is none, or `url` contains one."""
    key = None if urlsplit(url).password else find_key(url)
    return {"Authorization": f"Bearer {key}"} if key else {}


def key_of_environment(field: str, variable: str) -> str:
    """Return the key in an environment variable, which `field` names. Raises SettingError if it is not set."""
    if not (key := os.environ.get(variable)):
        raise SettingError(field, f"the variable {variable} is not set", "export it")
    return key


@functools.lru_cache(maxsize=256)
def loopback_addresses(url: str) -> tuple[tuple[str, int], ...]:
    """Return the loopback addresses (IP, port) that `url` resolves to; none for another machine."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    addresses = [(str(address[0]), int(address[1])) for *_, address in found]
    return tuple((host, port) for host, port in addresses if host == "::1" or host.startswith("127."))


@functools.lru_cache(maxsize=256)
def _read(file: Path, inode: int, changed: int) -> str:
    """Read a key. The cache rereads only changed files, because clients call this before each request."""
    _check_private(file.parent)
    return file.read_text(encoding="ascii")


def _check_private(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        problem = f"the folder {folder}, where servers store their keys, could be read or changed by another user"
        raise SettingError("server", problem, "remove it, or set XDG_RUNTIME_DIR to a folder of your own")


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


def _same_file(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
