"""`DiskCache`: a cache on disk for engines' answers and pages' texts, shared by all chains, workers and steps."""

import asyncio
import hashlib
import json
import time
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agentfactory.base.processes.threads import run_in_thread
from agentfactory.worlds.browse.database import Database

_ROOM = 0.9
"""Eviction removes the oldest entries down to this fraction of the maximum size."""
_REMOVED = 256
_TABLES = """
CREATE TABLE IF NOT EXISTS entries (key BLOB PRIMARY KEY, value BLOB, stored REAL);
CREATE INDEX IF NOT EXISTS ages ON entries (stored);
CREATE TABLE IF NOT EXISTS total (bytes INTEGER);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM total);
"""


class DiskCache:
    """A cache from JSON keys to JSON values, in a folder that any number of processes on one machine share. Keys are
    stored as digests, so they cannot be read back. Entries expire, and the oldest are evicted when the total size
    exceeds `max_bytes`. `hits` and `misses` count this object's lookups. `folder`: folder of the cache; created if it
    does not exist. `seconds`: lifetime of an entry. `max_bytes`: maximum size of all entries together."""

    def __init__(self, folder: Path, seconds: float = 30 * 86400.0, max_bytes: int = 4 << 30) -> None:
        self._database = Database(folder / "cache.sqlite", _TABLES)
        self._seconds, self._most = seconds, max_bytes
        self._making: dict[bytes, asyncio.Task[Any]] = {}
        self.hits = self.misses = 0

    async def get(self, key: Any, make: Callable[[], Awaitable[Any]]) -> Any:
        """Return the value of `key`; on a miss, store and return the value of `make`. Concurrent lookups of one key
        share one call; if it raises, all of them do. Raises ToolInfrastructureError if the file fails."""
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).digest()
        making = self._making.get(digest)
        if making is None:
            making = self._making[digest] = asyncio.create_task(self._get(digest, make), name="cached answer")
            making.add_done_callback(lambda task: self._made(digest, task))
        else:
            self.hits += 1
        return await asyncio.shield(making)

    async def close(self) -> None:
        """Cancel pending calls of `make`, and close the file."""
        making = list(self._making.values())
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)
        self._database.close()

    async def _get(self, digest: bytes, make: Callable[[], Awaitable[Any]]) -> Any:
        kept = await run_in_thread(lambda: self._load(digest))
        if kept is not None:
            self.hits += 1
            return json.loads(zlib.decompress(kept))
        self.misses += 1
        value = await make()
        await run_in_thread(lambda: self._store(digest, zlib.compress(json.dumps(value).encode())))
        return value

    def _made(self, digest: bytes, task: "asyncio.Task[Any]") -> None:
        del self._making[digest]
        if not task.cancelled():
            task.exception()  # avoids asyncio's warning if every waiter was cancelled

    def _load(self, digest: bytes) -> bytes | None:
        with self._database.reading() as connection:
            statement = "SELECT value FROM entries WHERE key = ? AND stored > ?"
            row = connection.execute(statement, (digest, time.time() - self._seconds)).fetchone()
        return row and row[0]

    def _store(self, digest: bytes, value: bytes) -> None:
        with self._database.transaction() as connection:
            before = connection.execute("SELECT LENGTH(value) FROM entries WHERE key = ?", (digest,)).fetchone()
            connection.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", (digest, value, time.time()))
            total = connection.execute("SELECT bytes FROM total").fetchone()[0]
            total += len(value) - (before[0] if before else 0)
            least = self._most if total <= self._most else _ROOM * self._most
            while total > least:
                statement = "SELECT key, LENGTH(value) FROM entries ORDER BY stored LIMIT ?"
                for key, size in connection.execute(statement, (_REMOVED,)).fetchall():
                    if total > least:
                        connection.execute("DELETE FROM entries WHERE key = ?", (key,))
                        total -= size
            connection.execute("UPDATE total SET bytes = ?", (total,))
