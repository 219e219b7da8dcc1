"""Keeps what was used last, up to a number of bytes."""

from collections import OrderedDict
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class ByteCache(Generic[Key, Value]):
    """Values by key, with their sizes in bytes. A new value replaces those that were used longest ago, so that all
    together have at most `limit` bytes; one that is larger than that is kept alone."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        """Bytes of all values."""
        self._values: OrderedDict[Key, tuple[Value, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key) -> Value | None:
        """Return a value, which becomes the one used last; None if it is not kept."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: Key, value: Value, nbytes: int) -> None:
        """Keep a value under a new key."""
        self._values[key] = value, nbytes
        self.nbytes += nbytes
        while self.nbytes > self.limit and len(self._values) > 1:
            _, (_, dropped) = self._values.popitem(last=False)
            self.nbytes -= dropped

    def clear(self) -> None:
        """Forget all values."""
        self._values.clear()
        self.nbytes = 0
