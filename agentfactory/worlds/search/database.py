"""`Database`: an SQLite file that several processes and threads of one machine use at once."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentfactory.tools.errors import SettingError
from agentfactory.tools.files.disk import writing
from agentfactory.tools.files.lock_file import locked, open_lock, private_mode
from agentfactory.tools.messages import ToolInfrastructureError

_BUSY_SECONDS = 30.0
"""How long a process waits for others that write."""


class Database:
    """An SQLite file in WAL mode: reading waits for nobody, and writing for other writers only.

    Args:
        path: On a disk of this machine, because SQLite's locks do not work over a network. Its folder is made.
        tables: SQL that makes the tables if they do not exist.

    Raises:
        SettingError: the file cannot be made, or is no such database.
        DiskError: the disk is full.
    """

    def __init__(self, path: Path, tables: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        with writing(path):
            try:
                self._open(tables)
            except (OSError, sqlite3.Error) as error:
                problem = f"{path} cannot be used: {error}"
                raise SettingError("cache", problem, "name another folder, or remove it") from error

    def _open(self, tables: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # one process after the other: SQLite may refuse to change a file's mode at once instead of waiting
        with locked(open_lock(self.path.with_suffix(".lock"))):
            # who may read a file of SQLite can lock it; new ones get the mode of the first
            self.path.touch(0o600)
            for file in self.path.parent.glob(f"{self.path.name}*"):
                with suppress(PermissionError):  # it is another user's
                    file.chmod(private_mode(self.path.parent))
            self._connection = sqlite3.connect(
                self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.executescript(tables)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Give the connection for one SELECT. Raises ToolInfrastructureError."""
        with self._lock, self._told():
            yield self._connection

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Give the connection for changes that are made together, after those of other processes, or not at all.

        Raises ToolInfrastructureError.
        """
        with self._lock, self._told():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise ToolInfrastructureError(f"{self.path}: {error}") from error
