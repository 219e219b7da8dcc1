"""Futures of requests: each is carried out once, however often it is sent, in the order of its model's requests, and
its answer is kept until it was fetched. Everything here runs on the event loop."""

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

_MOST_BYTES, _KEPT_SECONDS = 1 << 28, 1800.0
_MOST_WAITING = 4096
"""Requests of a model that arrive before those with lower numbers."""
_USERS_FAULTS = (RequestError, SettingError, InferenceError, FloatingPointError)


class Future:
    """A request's answer of `size` bytes, once `done` is set; then `seconds` is the time when it was set."""

    def __init__(self, name: str) -> None:
        self.name, self.done = name, asyncio.Event()
        self.answer: Answer = {}
        self.seconds = self.size = 0.0


class Futures:
    """All futures, by their ids and by the keys of their requests."""

    def __init__(self) -> None:
        self._by_name: dict[str, Future] = {}
        self._by_key: dict[Key, str] = {}
        self._kept: OrderedDict[Key, Future] = OrderedDict()
        self._bytes, self._begun = 0.0, 0
        self._tasks: set[asyncio.Task[None]] = set()

    def known(self, key: Key) -> str | None:
        """Return the id of the future of a request that was sent before."""
        return self._by_key.get(key)

    def get(self, name: str) -> Future:
        """Raises RequestError if there is no such future."""
        if (found := self._by_name.get(name)) is None:
            raise RequestError(f"request_id: {name!r:.120} is unknown, or was answered long ago", 410)
        return found

    def begin(self, key: Key, work: Work) -> str:
        """Begin `work`, unless the request was sent before; return the future's id."""
        if (known := self._by_key.get(key)) is not None:
            return known
        self._begun += 1
        future = Future(f"{key[0]}:{key[1]}:{self._begun}")
        self._by_name[future.name], self._by_key[key] = future, future.name
        task = asyncio.get_running_loop().create_task(self._carry_out(key, future, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return future.name

    async def _carry_out(self, key: Key, future: Future, work: Work) -> None:
        try:
            future.answer = await work()
        except _USERS_FAULTS as error:
            future.answer = {"error": str(error), "category": "user"}
        except Exception as error:  # boundary: a request must not end the service
            logger.exception("%s failed", future.name)
            future.answer = {"error": f"{type(error).__name__}: {error}", "category": "server"}
        future.size = len(future.answer) if isinstance(future.answer, bytes) else 1024
        future.seconds = time.monotonic()
        future.done.set()
        self._kept[key] = future
        self._bytes += future.size
        while self._bytes > _MOST_BYTES or next(iter(self._kept.values())).seconds < future.seconds - _KEPT_SECONDS:
            old, forgotten = self._kept.popitem(last=False)
            self._bytes -= forgotten.size
            del self._by_name[forgotten.name], self._by_key[old]


class Turns:
    """The turns of one model's requests: each begins when that with the number before has ended."""

    def __init__(self) -> None:
        self._next = 1
        self._waiting: dict[int, asyncio.Event] = {}
        self._closed: str | None = None

    def wait_for(self, number: int, work: Work) -> Work:
        """Return `work` at its turn. Raises RequestError if that has passed, or too many wait."""
        if number < self._next:
            raise RequestError(f"seq_id: {number} was answered long ago", 410)
        if len(self._waiting) >= _MOST_WAITING:
            raise RequestError(
                f"seq_id: {number} waits for {self._next}, as do {_MOST_WAITING} others; send that first"
            )
        turn = self._waiting[number] = asyncio.Event()
        if number == self._next or self._closed is not None:
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
        """Fail the requests that wait, and later ones."""
        self._closed = reason
        for turn in self._waiting.values():
            turn.set()
