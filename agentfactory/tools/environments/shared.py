"""`Shared`: objects that all chains of a process use together, such as connections and caches."""

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Use(Generic[T]):
    value: T
    users: int = 0


class Shared(Generic[T]):
    """Reference-counted objects, keyed by their settings."""

    def __init__(self) -> None:
        self._uses: dict[Hashable, _Use[T]] = {}
        self._lock = threading.Lock()

    def acquire(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the object of `key`, created on first use; pair with `release`. Raises what `make` raises."""
        with self._lock:
            if key not in self._uses:
                self._uses[key] = _Use(make())
            self._uses[key].users += 1
            return self._uses[key].value

    def release(self, key: Hashable) -> T | None:
        """End a use of the object of `key`. Return the object if this was its last use, so the caller can close it."""
        with self._lock:
            use = self._uses[key]
            use.users -= 1
            if use.users:
                return None
            del self._uses[key]
            return use.value

    def __len__(self) -> int:
        return len(self._uses)
