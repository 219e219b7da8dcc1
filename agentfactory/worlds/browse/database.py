"""`Database`: an SQLite file that several processes and threads of one machine use concurrently."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentfactory.base.errors import SettingError
from agentfactory.base.files.disk import writing
from agentfactory.base.files.lock_file import open_lock, private_mode
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.worlds.shared import locked

_BUSY_SECONDS = 30.0


class Database:
    """An SQLite file in WAL mode: readers never wait, and writers wait only for other writers. `path` is on a local
    disk, because SQLite's locks do not work over a network; its folder is created. `tables`: SQL that creates the
    tables. Raises SettingError (the file is not such a database, or cannot be created), DiskError (a full disk)."""

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
        # one process at a time: SQLite may fail immediately, instead of waiting, when it changes the journal mode
        with locked(open_lock(self.path.with_suffix(".lock"))):
            # anyone who can read an SQLite file can lock it; SQLite gives further files the first one's mode
            self.path.touch(0o600)
            for file in self.path.parent.glob(f"{self.path.name}*"):
                with suppress(PermissionError):  # the file is another user's
                    file.chmod(private_mode(self.path.parent))
            self._connection = sqlite3.connect(
                self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.executescript(tables)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection for one SELECT. Raises ToolInfrastructureError."""
        with self._lock, self._errors_name_path():
            yield self._connection

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection for an atomic write, alone among all processes. Raises ToolInfrastructureError."""
        with self._lock, self._errors_name_path():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextmanager
    def _errors_name_path(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise ToolInfrastructureError(f"{self.path}: {error}") from error
