"""Pools of instances, each for one chain at a time. Tasks of the pool do all work, so cancelling loses no instance."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from agentfactory.base.config import PoolConfig
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.run_notices import inform, notify

logger = logging.getLogger(__name__)

T = TypeVar("T")

CARE_SECONDS = 30.0
"""Time limit of a health check, a reset or a retirement; after it the instance counts as broken, or as gone."""
QUIET_SECONDS = 10.0


_LABELS = {
    "make": "the creation of an instance",
    "reset": "the reset of an instance",
    "healthy": "the health check of an instance",
    "retire": "the retirement of an instance",
}


@dataclass(eq=False)
class _Instance(Generic[T]):
    value: T
    uses: int = 0
    """Number of chains that it has served, including the present one."""


class Pool(Generic[T]):
    """Instances of one kind, created by `make`, and reused in the order of asking if `healthy`; `reset` follows each
    chain, `retire` ends one. Each takes a place of `capacity` throughout. `labels` name these functions in errors."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Awaitable[T]],
        config: PoolConfig,
        *,
        reset: Callable[[T], Awaitable[None]] | None = None,
        healthy: Callable[[T], Awaitable[bool]] | None = None,
        retire: Callable[[T], Awaitable[None]] | None = None,
        labels: Mapping[str, str] = _LABELS,
    ) -> None:
        self.name, self._labels = name, labels
        self._make = make
        self._cares: dict[str, Callable[[T], Awaitable[Any]] | None]
        self._cares = {"reset": reset, "healthy": healthy, "retire": retire}
        self._config = config
        self.capacity = config.capacity
        """Maximum number of instances; None: one per chain. Above it, none is created until enough have ended."""
        self._waiting: deque[asyncio.Future[_Instance[T]]] = deque()
        self._idle: deque[_Instance[T]] = deque()
        self._held: set[_Instance[T]] = set()
        self._at_work: Counter[str] = Counter()
        self._made = self._recycled = self._broken = 0
        self._paused = False  # creating one in advance failed: no more are created in advance until one succeeds
        self._tasks: set[asyncio.Task[None]] = set()
        self._makers: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def replaces(self) -> bool:
        return self._config.max_uses == 1

    async def acquire(self) -> "Lease[T]":
        """Wait for an instance; await it directly. Raises ToolInfrastructureError if none came free within
        `PoolConfig.wait_seconds` or the pool is closed, and the errors of `make`."""
        if self._closed:
            raise ToolInfrastructureError(f"{self.name}: its pool is closed")
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[_Instance[T]] = loop.create_future()
        self._waiting.append(waiter)
        self.advance()
        timer = loop.call_later(self._config.wait_seconds, self._expire, waiter)
        try:
            instance = await waiter
        except BaseException:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._put_back(waiter.result())  # cancelled at the very moment when an instance became available
            raise
        finally:
            timer.cancel()
        return Lease(self, instance)

    async def close(self) -> None:
        """Retire every instance, including leased ones, and wait until they are gone. Waiting callers get an error."""
        self._closed = True
        while (waiter := self._next_waiter()) is not None:
            waiter.set_exception(ToolInfrastructureError(f"{self.name}: its pool is closed"))
        for task in self._makers:
            task.cancel()
        self.advance()
        try:
            while self._tasks:
                await asyncio.wait(self._tasks)
        except asyncio.CancelledError:
            for task in self._tasks:
                task.cancel()
            raise

    def gauges(self) -> dict[str, float]:
        """Return `in_use` (instances leased or being reset), `idle`, `waiting` (chains), and counts since the start:
        `made`, `recycled` (replaced for their uses or age), `broken` (replaced for a fault)."""
        in_use, idle = len(self._held) + self._at_work["reset"], len(self._idle) + self._at_work["healthy"]
        counts = {"made": self._made, "recycled": self._recycled, "broken": self._broken}
        return {"in_use": float(in_use), "idle": float(idle), "waiting": float(len(self._waiting)), **counts}

    async def _let_go(self, instance: _Instance[T], broken: bool) -> None:
        if instance not in self._held:
            return  # the pool was closed while the instance was in use
        self._held.discard(instance)
        resetting = None
        if broken:
            self._broken += 1
            self._take_care("retire", instance)
        elif self._config.max_uses is not None and instance.uses >= self._config.max_uses:
            self._recycled += 1
            self._take_care("retire", instance)  # nothing needs to wait for the end of an instance
        else:
            resetting = self._take_care("reset", instance)
        self.advance()
        if resetting is not None:
            await asyncio.shield(resetting)

    def _put_back(self, instance: _Instance[T]) -> None:
        if instance in self._held:
            self._held.discard(instance)
            instance.uses -= 1
            self._idle.appendleft(instance)
            self.advance()

    def advance(self) -> None:
        """Begin what is due, such as to create the `warm` instances. Called after each change, too."""
        if self._closed:
            for instance in (*self._idle, *self._held):
                self._take_care("retire", instance)
            self._idle.clear()
            self._held.clear()
            return
        while self._idle and len(self._waiting) > self._at_work["healthy"]:
            self._take_care("healthy", self._idle.popleft())
        while self._is_short():
            self._at_work["make"] += 1
            task = self._begin(self._supply())
            self._makers.add(task)
            task.add_done_callback(self._makers.discard)

    def _is_short(self) -> bool:
        if self.capacity is not None and self._places >= self.capacity:
            return False
        coming = len(self._idle) + self._at_work["healthy"] + self._at_work["make"]
        ahead = coming + self._at_work["reset"] < len(self._waiting) + (self._config.warm or 0)
        return coming < len(self._waiting) or (ahead and not self._paused)

    @property
    def _places(self) -> int:
        return len(self._idle) + len(self._held) + self._at_work.total()

    def _place(self, instance: _Instance[T]) -> None:
        if (waiter := self._next_waiter()) is None:
            self._idle.append(instance)
            return
        instance.uses += 1
        self._held.add(instance)
        waiter.set_result(instance)

    def _next_waiter(self) -> "asyncio.Future[_Instance[T]] | None":
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():  # a cancelled waiter withdraws only when its task runs
                return waiter
        return None

    def _begin(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name=f"pool {self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _supply(self) -> None:
        seconds = self._config.create_seconds
        text = f"{self.name}: {self._labels['make']} has not ended after {QUIET_SECONDS:g} s"
        text += f"; it is given {seconds:g} s (pool.create_seconds)"
        slow = asyncio.get_running_loop().call_later(QUIET_SECONDS, inform, logger, text)
        try:
            async with asyncio.timeout(seconds) as limit:
                instance = _Instance(await self._make())
        except (Exception, asyncio.CancelledError) as error:  # boundary: user code, processes, connections
            self._at_work["make"] -= 1
            self._paused = True
            if (waiter := self._next_waiter()) is not None:
                waiter.set_exception(self._reason(error, limit.expired()))
            elif not self._closed:
                self._warn(f"{self._labels['make']}, in advance,", error)
        else:
            self._at_work["make"] -= 1
            self._made += 1
            self._paused = False
            self._place(instance)
        finally:
            slow.cancel()
        self.advance()

    def _reason(self, error: BaseException, expired: bool) -> BaseException:
        text = f"{self.name}: {self._labels['make']}"
        if expired:
            late = f"did not end within {self._config.create_seconds:g} s"
            return ToolInfrastructureError(f"{text} {late}; fix: correct it, or raise pool.create_seconds")
        if isinstance(error, asyncio.CancelledError):  # not the waiter's own
            return ToolInfrastructureError(f"{text} was cancelled")
        return error

    def _take_care(self, kind: str, instance: _Instance[T]) -> "asyncio.Task[None] | None":
        """Begin to reset, check (`healthy`) or retire an instance; at once if the pool has no function for that."""
        if (care := self._cares[kind]) is None:
            self._pass_on(kind, instance)
            return None
        self._at_work[kind] += 1
        return self._begin(self._cared(kind, instance, care))

    async def _cared(self, kind: str, instance: _Instance[T], care: Callable[[T], Awaitable[Any]]) -> None:
        sound = False
        try:
            async with asyncio.timeout(CARE_SECONDS):
                sound = await care(instance.value) is not False
        except Exception as error:  # boundary: user code
            self._warn(self._labels[kind], error)
        finally:
            self._at_work[kind] -= 1
            if sound or kind == "retire":
                self._pass_on(kind, instance)
            else:
                self._broken += 1
                self._take_care("retire", instance)
            self.advance()

    def _pass_on(self, kind: str, instance: _Instance[T]) -> None:
        if kind == "healthy":
            self._place(instance)
        elif kind == "reset":
            self._idle.append(instance)

    def _warn(self, what: str, error: BaseException) -> None:
        told = f"{self.name}: {what} failed"
        is_late = isinstance(error, TimeoutError) and not str(error)
        reason = f"it did not end within {CARE_SECONDS:g} s" if is_late else f"{type(error).__name__}: {error}"
        notify(logger, told, f"{told}: {reason}")

    def _expire(self, waiter: "asyncio.Future[_Instance[T]]") -> None:
        if waiter.done():
            return
        self._waiting.remove(waiter)
        seconds, capacity = self._config.wait_seconds, self.capacity
        reason = f"{self._labels['make']} takes longer; fix: use pool.warm to begin earlier"
        if capacity is not None and self._places >= capacity:
            reason = f"all {capacity} (pool.capacity) are taken; fix: raise pool.capacity"
        problem = f"{self.name}: no instance within {seconds:g} s: {reason}"
        waiter.set_exception(ToolInfrastructureError(problem))


class Lease(Generic[T]):
    def __init__(self, pool: Pool[T], instance: _Instance[T]) -> None:
        self._pool = pool
        self._instance: _Instance[T] | None = instance
        self.value = instance.value

    async def release(self, broken: bool = False) -> None:
        """Reset the instance for the next holder, even if cancelled, or replace it if broken or worn. Idempotent."""
        instance, self._instance = self._instance, None
        if instance is not None:
            await self._pool._let_go(instance, broken)

    def give_back(self) -> None:
        """Return an unused instance, which is idle again."""
        instance, self._instance = self._instance, None
        if instance is not None:
            self._pool._put_back(instance)
