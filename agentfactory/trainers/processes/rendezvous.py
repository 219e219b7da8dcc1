"""Connect the ranks of one machine over loopback, and their store through a private file.

torch's default store is a TCP server on all interfaces without authentication. Anyone who writes to it can redirect
gloo's connections, and object collectives unpickle the data that arrives, which can run code."""

import logging
import os
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torch.distributed import FileStore, Store, TCPStore
from torch.distributed.rendezvous import register_rendezvous_handler

from agentfactory.base.http.loopback import is_loopback, loopback_interface
from agentfactory.base.processes.supervised import starter
from agentfactory.base.run_notices import notify
from agentfactory.trainers.config import PORTLESS_ENVIRONMENT, PORTLESS_OPTIONS

logger = logging.getLogger(__name__)

_SCHEME = "agentfactory"
_PAGE = "docs/multi-node.md"


class LaunchError(Exception):
    """The launch does not match the recipe, or another user could interfere; the message contains the fix."""


def on_one_machine() -> bool:
    """Return whether all ranks run on this machine. False if the launcher does not say."""
    world = os.environ.get("WORLD_SIZE", "1")
    return world == "1" or os.environ.get("LOCAL_WORLD_SIZE") == world


def init_method(urls: Iterable[str]) -> str | None:
    """Return torch's `init_method` for this launch; None keeps torch's own: for one process, or for several machines.
    On one machine, bind gloo and NCCL to loopback, unless the user names an interface; NCCL only if it also reaches the
    inference servers at `urls` there. Warn, on rank 0, about ports that are open to the network. Raises LaunchError."""
    first = os.environ.get("RANK", "0") == "0"
    if not on_one_machine():
        if first:
            address = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
            notify(logger, "open ports", _REACHABLE.format(address), see=_PAGE)
        return None
    loopback = loopback_interface()
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        if all(is_loopback(urlsplit(url).hostname or "") for url in urls):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={loopback}")
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    if first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        notify(logger, "open ports", _LAUNCHER.format(os.environ.get("MASTER_PORT")), see=_PAGE)
    file = _store_file() if "TORCHELASTIC_RUN_ID" in os.environ else None
    return f"{_SCHEME}://{file or ''}"


_LOOPBACK = "127.0.0.1"
_REACHABLE = (
    "torch's store at {0} and the connections of gloo and NCCL have no authentication: anyone who reaches these ports "
    "can run code as you; protect them by a firewall or a private network"
)
_LAUNCHER = (
    "the launcher's store listens on all interfaces, port {0}, without authentication: others can end this run; "
    "`agentfactory train` opens no such port, and neither does "
    f"`{' '.join(f'{name}={value}' for name, value in PORTLESS_ENVIRONMENT.items())} accelerate launch "
    f"{' '.join(PORTLESS_OPTIONS)} ...`"
)


def _store_file() -> Path:
    """Return the file for this launch, named by the launcher's process. Files of earlier launches are removed."""
    # containers that share the folder number their processes independently
    processes = os.stat("/proc/self/ns/pid").st_ino
    folder = Path(tempfile.gettempdir(), f"agentfactory-ranks-{os.geteuid()}-{processes}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        fix = "remove it, or set TMPDIR to a folder of yours"
        raise LaunchError(f"{folder}: another user could read or change this folder of the ranks' store; {fix}")
    for file in folder.iterdir():
        pid, started, _ = file.name.split("-")
        if _start_of(int(pid)) != started:
            file.unlink(missing_ok=True)
    launcher, restart = starter(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return folder / f"{launcher}-{_start_of(launcher)}-{restart}"


def _start_of(pid: int) -> str | None:
    """Return the start of a process in clock ticks since boot; None if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def _rendezvous(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield store, rank and number of ranks. For ranks started by hand, the store is a TCP server on loopback."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if file := urlsplit(url).path:
        yield FileStore(file, world), rank, world
        return
    port = int(os.environ.get("MASTER_PORT", "29500"))
    if rank > 0:
        yield TCPStore(_LOOPBACK, port, world, is_master=False, timeout=timeout), rank, world
        return
    # torch itself binds to all interfaces, whatever the host's name
    listener = socket.create_server((_LOOPBACK, port), backlog=max(world, 128))
    store = TCPStore(
        _LOOPBACK, port, world, is_master=True, timeout=timeout, multi_tenant=True, master_listen_fd=listener.detach()
    )
    yield store, rank, world


register_rendezvous_handler(_SCHEME, _rendezvous)
