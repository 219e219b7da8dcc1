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
    """Objects by the settings that they were made with; each exists while somebody uses it."""

    def __init__(self) -> None:
        self._uses: dict[Hashable, _Use[T]] = {}
        self._lock = threading.Lock()

    def acquire(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the object of `key`, made if nobody has it yet; give it back by `release`. Raises what `make` does."""
        with self._lock:
            if key not in self._uses:
                self._uses[key] = _Use(make())
            self._uses[key].users += 1
            return self._uses[key].value

    def release(self, key: Hashable) -> T | None:
        """Give the object of `key` back. Return it if this was the last use, so that the caller closes it."""
        with self._lock:
            use = self._uses[key]
            use.users -= 1
            if use.users:
                return None
            del self._uses[key]
            return use.value

    def __len__(self) -> int:
        return len(self._uses)
