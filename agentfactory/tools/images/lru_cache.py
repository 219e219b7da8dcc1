"""An LRU cache, bounded by bytes or by the number of values."""

from collections import OrderedDict
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class ByteCache(Generic[Key, Value]):
    """An LRU cache of values with sizes in bytes, or 1 each, at most `limit` in all; a larger value is kept alone."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._values: OrderedDict[Key, tuple[Value, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key) -> Value | None:
        """Return a value and mark it as most recently used; None if it is not cached."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def drop(self, key: Key) -> None:
        self.nbytes -= self._values.pop(key, (None, 0))[1]

    def put(self, key: Key, value: Value, nbytes: int = 1) -> None:
        self.drop(key)
        self._values[key] = value, nbytes
        self.nbytes += nbytes
        while self.nbytes > self.limit and len(self._values) > 1:
            _, (_, dropped) = self._values.popitem(last=False)
            self.nbytes -= dropped

    def clear(self) -> None:
        self._values.clear()
        self.nbytes = 0
