"""Futures of requests: started once however often they are sent, in the order of a model's sequence, and kept until
they have been fetched. Everything here runs on the event loop."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from agentfactory.base.errors import SettingError
from agentfactory.rollout.inference.http_transport import InferenceError
from agentfactory.tinker.messages import RequestError

logger = logging.getLogger(__name__)

Answer = bytes | dict[str, Any]
"""Protobuf or JSON."""
Work = Callable[[], Awaitable[Answer]]
Key = tuple[str, int]
"""A model or a sampling session, and a request's number in it."""

_MOST_BYTES = 1 << 28
_KEPT_SECONDS = 1800.0
_MOST_WAITING = 4096
"""Requests of a model that arrive before those with lower numbers."""
_USERS_FAULTS = (RequestError, SettingError, InferenceError, FloatingPointError)


class Future:
    """A request's answer, once `done` is set; then `seconds` is the time when it was set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = asyncio.Event()
        self.answer: Answer = {}
        self.seconds = 0.0

    async def run(self, work: Work) -> None:
        try:
            self.answer = await work()
        except Exception as error:  # boundary: a request must not end the service
            is_users = isinstance(error, _USERS_FAULTS)
            if not is_users:
                logger.exception("%s failed", self.name)
            told = str(error) if is_users else f"{type(error).__name__}: {error}"
            self.answer = {"error": told, "category": "user" if is_users else "server"}
        self.seconds = time.monotonic()
        self.done.set()


class Futures:
    """All futures, by their ids and by the keys of their requests."""

    def __init__(self) -> None:
        self._by_name: dict[str, Future] = {}
        self._by_key: dict[Key, str] = {}
        self._kept: OrderedDict[str, tuple[Key, int]] = OrderedDict()
        self._bytes = 0
        self._begun = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def known(self, key: Key) -> str | None:
        """Return the id of the future of a request that was sent before."""
        return self._by_key.get(key)

    def get(self, name: str) -> Future | None:
        return self._by_name.get(name)

    def begin(self, key: Key, work: Work) -> str:
        """Start `work`, unless the request was sent before; return the future's id."""
        if (known := self._by_key.get(key)) is not None:
            return known
        self._begun += 1
        name = f"{key[0]}:{key[1]}:{self._begun}"
        future = self._by_name[name] = Future(name)
        self._by_key[key] = name

        async def carry_out() -> None:
            await future.run(work)
            self._keep(key, future)

        task = asyncio.get_running_loop().create_task(carry_out())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return name

    def _keep(self, key: Key, future: Future) -> None:
        """Keep an answer, and forget the oldest ones that exceed the memory or the time."""
        size = len(future.answer) if isinstance(future.answer, bytes) else 1024
        self._kept[future.name] = key, size
        self._bytes += size
        while self._bytes > _MOST_BYTES or self._by_name[next(iter(self._kept))].seconds < future.seconds - _KEPT_SECONDS:
            name, (old, bytes_) = self._kept.popitem(last=False)
            self._bytes -= bytes_
            del self._by_name[name], self._by_key[old]


class Sequence:
    """The turns of one model's requests: each begins when all with lower numbers have ended."""

    def __init__(self, first: int) -> None:
        self._next = first
        self._waiting: dict[int, asyncio.Event] = {}
        self._closed: str | None = None

    def is_past(self, number: int) -> bool:
        return number < self._next

    def take(self, number: int, work: Work) -> Work:
        """Return `work` at its turn. Raises RequestError if too many wait."""
        if len(self._waiting) >= _MOST_WAITING:
            raise RequestError(f"seq_id: {number} waits for {self._next}, as do {_MOST_WAITING} others; send that first")
        turn = self._waiting[number] = asyncio.Event()
        if number == self._next:
            turn.set()

        async def at_its_turn() -> Answer:
            await turn.wait()
            try:
                if self._closed is not None:
                    raise RequestError(self._closed)
                return await work()
            finally:
                del self._waiting[number]
                self._next = number + 1
                if (following := self._waiting.get(self._next)) is not None:
                    following.set()

        return at_its_turn

    def close(self, reason: str) -> None:
        """Fail the requests that wait."""
        self._closed = reason
        for turn in self._waiting.values():
            turn.set()
