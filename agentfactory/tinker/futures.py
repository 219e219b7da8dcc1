"""Futures of requests: each is carried out once, however often it is sent, in the order of its model's requests, and
its answer is kept until it was fetched. Everything here runs on the event loop."""

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple

from agentfactory.base.errors import SettingError
from agentfactory.rollout.inference.http_transport import InferenceError
from agentfactory.tinker.messages import RequestError

logger = logging.getLogger(__name__)

Answer = bytes | dict[str, Any]
"""Protobuf or JSON."""
Work = Callable[[], Awaitable[Answer]]

_MOST_BYTES, _KEPT_SECONDS = 1 << 28, 1800.0
_MOST_WAITING = 4096
"""Requests of a model that arrive before those with lower numbers."""
_GAP_SECONDS = 60.0
"""Time that a request waits for one before it that has not arrived: the SDK sends them one after the other."""
_USERS_FAULTS = (RequestError, SettingError, InferenceError, FloatingPointError)


class _Kept(NamedTuple):
    name: str
    size: int
    ended: float


class Futures:
    """The tasks of all requests by name: the model or sampling session, and the request's number in it."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Answer]] = {}
        self._kept: deque[_Kept] = deque()
        self._bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._tasks

    def __getitem__(self, name: str) -> asyncio.Task[Answer]:
        """Raises RequestError if there is no such future."""
        if (found := self._tasks.get(name)) is None:
            raise RequestError(f"request_id: {name!r:.120} is unknown, or was answered long ago", 410)
        return found

    def begin(self, name: str, work: Work) -> dict[str, Any]:
        """Begin `work`, unless the request was sent before; return the API's note of it."""
        if name not in self._tasks:
            self._tasks[name] = asyncio.get_running_loop().create_task(self._carry_out(name, work))
        return {"request_id": name}

    async def _carry_out(self, name: str, work: Work) -> Answer:
        try:
            answer = await work()
        except _USERS_FAULTS as error:
            answer = {"error": str(error), "category": "user"}
        except Exception as error:  # boundary: a request must not end the service
            logger.exception("%s failed", name)
            answer = {"error": f"{type(error).__name__}: {error}", "category": "server"}
        ended = _Kept(name, len(answer) if isinstance(answer, bytes) else 1024, time.monotonic())
        self._kept.append(ended)
        self._bytes += ended.size
        oldest = ended.ended - _KEPT_SECONDS
        while self._kept[0] is not ended and (self._bytes > _MOST_BYTES or self._kept[0].ended < oldest):
            forgotten = self._kept.popleft()
            self._bytes -= forgotten.size
            del self._tasks[forgotten.name]
        return answer


class Turns:
    """The turns of one model's requests: each begins when that with the number before has ended."""

    def __init__(self) -> None:
        self._next = 1
        self._turns: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._turns[1].set()
        self._begun: set[int] = set()
        self._closed: str | None = None

    def wait_for(self, number: int, work: Work) -> Work:
        """Return `work` at its turn. Raises RequestError if that has passed, or too many wait."""
        if number < self._next:
            raise RequestError(f"seq_id: {number} was answered long ago", 410)
        if number != self._next and len(self._turns) > _MOST_WAITING:
            problem = f"seq_id: {number} waits for {self._next}, as do {_MOST_WAITING} others"
            raise RequestError(f"{problem}; send that first")
        turn = self._turns[number]
        self._begun.add(number)
        if self._closed is not None:
            turn.set()

        async def at_its_turn() -> Answer:
            missing = -1
            while not turn.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(turn.wait(), _GAP_SECONDS)
                if not turn.is_set() and self._next == missing and missing not in self._begun:
                    # later ones fail, too: a step would be made without the pass that is missing
                    fix = "create the model again, or load its weights"
                    self.close(f"seq_id: {missing} was refused, or never came, and {number} waited for it; {fix}")
                missing = self._next
            try:
                if self._closed is not None:
                    raise RequestError(self._closed)
                return await work()
            finally:
                del self._turns[number]
                self._begun.discard(number)
                self._next = number + 1
                self._turns[self._next].set()

        return at_its_turn

    def close(self, reason: str) -> None:
        """Fail the requests that wait, and later ones."""
        self._closed = reason
        for turn in self._turns.values():
            turn.set()
