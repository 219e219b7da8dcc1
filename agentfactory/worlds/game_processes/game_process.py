"""`GameProcess`: a game in a process of its own, forked by a server that all games of a kind share."""

import os
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.processes import environment
from agentfactory.base.user_code.import_path import own_python
from agentfactory.worlds.game_processes.refused import Refused
from agentfactory.worlds.shared import Shared

CALL_SECONDS = 50.0
"""Time limit of a call, after which the game's process is killed; a tool's own limit is 60 by default."""


class GameProcess:
    """A process that has one object of `place`, `MODULE:NAME`, and calls its methods. It starts with the first call,
    and again when lost. Not thread-safe. `title`: the game's name in errors. `seconds`: time limit of a call."""

    def __init__(self, place: str, title: str, seconds: float = CALL_SECONDS) -> None:
        self._key, self._title, self._seconds = (place, seconds), title, seconds
        self._server = _servers.acquire(self._key, lambda: _ForkServer(place, seconds))
        self._connection: Connection | None = None

    def call(self, method: str, *arguments: Any) -> Any:
        """Return the method's result. Raises Refused as it does, ToolInfrastructureError for any other failure."""
        began = time.monotonic()
        try:
            if self._connection is None:
                self._connection = self._server.fork()
            self._connection.send((method, arguments))
            kind, answer = self._connection.recv()
        except (EOFError, OSError) as error:
            self.end()
            late = time.monotonic() - began >= self._seconds
            problem = f"did not answer within {self._seconds:g} s" if late else "ended its process"
            raise ToolInfrastructureError(f"{self._title} {problem} in {method}()") from error
        if kind == "refused":
            raise Refused(*answer)
        if kind == "failed":
            self.end()
            raise ToolInfrastructureError(f"{self._title} failed in {method}(): {answer}")
        return answer

    def end(self) -> None:
        """End the process; the next call starts a new one."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def close(self) -> None:
        """End the process, and the server with its last user."""
        self.end()
        if (server := _servers.release(self._key)) is not None:
            server.close()


class _ForkServer:
    def __init__(self, place: str, seconds: float) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._process = subprocess.Popen(
                own_python("-m", f"{__package__}.fork_server", place, str(seconds), str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment.for_others(
                    {
                        # modules of the recipe's folder, too
                        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                        # a fork has none of the threads of its parent
                        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
                    }
                ),
                # Ctrl-C in a terminal does not reach it
                start_new_session=True,
            )
        if not self._socket.recv(1):
            self.close()
            raise ToolInfrastructureError(f"{place} cannot be imported; the process's output is in the log")

    def fork(self) -> Connection:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, self._lock:
            socket.send_fds(self._socket, [b"!"], [theirs.fileno()])
        return Connection(ours.detach())

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


_servers: Shared[_ForkServer] = Shared()
