"""Objects that all chains of a process use together, such as connections and caches, and files of all processes."""

import fcntl
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from agentfactory.base.files.lock_file import holder

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Shared(Generic[T]):
    """Reference-counted objects, keyed by their settings."""

    def __init__(self) -> None:
        self._values: dict[Hashable, T] = {}
        self._users: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    def acquire(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the object of `key`, created on first use; pair with `release`. Raises what `make` raises."""
        with self._lock:
            if key not in self._values:
                self._values[key] = make()
            self._users[key] += 1
            return self._values[key]

    def release(self, key: Hashable) -> T | None:
        """End a use of the object of `key`. Return the object if this was its last use, so the caller can close it."""
        with self._lock:
            self._users[key] -= 1
            return None if self._users[key] else self._values.pop(key)

    def __len__(self) -> int:
        return len(self._values)


@contextmanager
def locked(opened: int) -> Iterator[None]:
    """Hold the lock of an open file in this context, and close it. Wait for other processes that hold it."""
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("waiting for %s, which holds %s", holder(opened), os.readlink(f"/proc/self/fd/{opened}"))
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)
