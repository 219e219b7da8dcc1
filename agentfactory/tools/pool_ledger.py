"""The bookkeeping of a pool: who waits, who holds what, what has to be done next. Pure: no task and no clock in it."""

from asyncio import Future
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from agentfactory.tools.config import PoolConfig

T = TypeVar("T")


@dataclass(eq=False)
class Instance(Generic[T]):
    """One member of a pool."""

    value: T
    made_at: float
    uses: int = 0
    """Chains that it has served, the present one included."""


class Act(StrEnum):
    """What a ledger asks for."""

    MAKE = "make"
    CHECK = "check"
    RETIRE = "retire"


class Step(NamedTuple, Generic[T]):
    """An act, and the instance that it is about."""

    act: Act
    instance: Instance[T] | None = None


class Ledger(Generic[T]):
    """Who waits, who holds what, and what has to be done next.

    Tell it what happened, then do what `steps` says. Waiting is first come, first served: instances that become free go
    to the one who has waited longest. Every instance that exists takes a place of `capacity`, also while it is made,
    checked, reset or retired.
    """

    def __init__(self, config: PoolConfig) -> None:
        self.waiting: deque[Future[Instance[T]]] = deque()
        self.idle: deque[Instance[T]] = deque()
        self.held: set[Instance[T]] = set()
        self.making = self.checking = self.resetting = self.retiring = 0
        self.made = self.recycled = self.broken = 0
        self._config = config
        self._paused = False  # making one ahead failed: no more are made ahead until one could be made

    def steps(self, now: float) -> list[Step[T]]:
        """What has to be done at the time `now`, in seconds; it counts as begun."""
        steps: list[Step[T]] = []
        for instance in [instance for instance in self.idle if self._is_worn(instance, now)]:
            self.idle.remove(instance)
            self.recycled += 1
            steps.append(self._retire(instance))
        while self.idle and len(self.waiting) > self.checking:
            self.checking += 1
            steps.append(Step(Act.CHECK, self.idle.popleft()))
        while self._is_short():
            self.making += 1
            steps.append(Step(Act.MAKE))
        return steps

    def has_made(self, instance: Instance[T]) -> Future[Instance[T]] | None:
        """A new instance is there. Returns the waiter who gets it, or None when it stays idle."""
        self.making -= 1
        self.made += 1
        self._paused = False
        return self._place(instance)

    def has_failed_to_make(self) -> Future[Instance[T]] | None:
        """An instance could not be made. Returns the waiter who is to be told, if there is one."""
        self.making -= 1
        self._paused = True
        return self._next_waiter()

    def has_checked(self, instance: Instance[T], sound: bool) -> Future[Instance[T]] | Step[T] | None:
        """An idle instance was checked. Returns the waiter who gets it, None when it stays idle, or its retirement."""
        self.checking -= 1
        if sound:
            return self._place(instance)
        self.broken += 1
        return self._retire(instance)

    def has_let_go(self, instance: Instance[T], broken: bool, now: float) -> Step[T] | None:
        """Its holder has no more use for an instance. Returns its retirement; None when it is to be reset."""
        self.held.discard(instance)
        if broken:
            self.broken += 1
            return self._retire(instance)
        if self._is_worn(instance, now):
            self.recycled += 1
            return self._retire(instance)
        self.resetting += 1
        return None

    def has_reset(self, instance: Instance[T], sound: bool) -> Step[T] | None:
        """An instance was reset. Returns its retirement where that went wrong."""
        self.resetting -= 1
        if sound:
            self.idle.append(instance)
            return None
        self.broken += 1
        return self._retire(instance)

    def has_not_used(self, instance: Instance[T]) -> None:
        """Its holder was given an instance and never touched it."""
        self.held.discard(instance)
        instance.uses -= 1
        self.idle.appendleft(instance)

    def has_retired(self) -> None:
        """A retired instance is gone."""
        self.retiring -= 1

    def withdraw(self, waiter: Future[Instance[T]]) -> None:
        """Someone waits no more."""
        if waiter in self.waiting:
            self.waiting.remove(waiter)

    def retire_all(self) -> list[Step[T]]:
        """The pool closes: every instance is retired, those that are held too."""
        instances = [*self.idle, *self.held]
        self.idle.clear()
        self.held.clear()
        return [self._retire(instance) for instance in instances]

    @property
    def places(self) -> int:
        """Places of `capacity` that are taken."""
        return len(self.idle) + len(self.held) + self.making + self.checking + self.resetting + self.retiring

    def _place(self, instance: Instance[T]) -> Future[Instance[T]] | None:
        waiter = self._next_waiter()
        if waiter is None:
            self.idle.append(instance)
            return None
        instance.uses += 1
        self.held.add(instance)
        return waiter

    def _next_waiter(self) -> Future[Instance[T]] | None:
        while self.waiting:
            waiter = self.waiting.popleft()
            if not waiter.done():  # a cancelled one withdraws only when its task has its turn
                return waiter
        return None

    def _retire(self, instance: Instance[T]) -> Step[T]:
        self.retiring += 1
        return Step(Act.RETIRE, instance)

    def _is_worn(self, instance: Instance[T], now: float) -> bool:
        uses, seconds = self._config.max_uses, self._config.max_seconds
        return (uses is not None and instance.uses >= uses) or (
            seconds is not None and now - instance.made_at >= seconds
        )

    def _is_short(self) -> bool:
        if self._config.capacity is not None and self.places >= self._config.capacity:
            return False
        coming = len(self.idle) + self.checking + self.making
        ahead = not self._paused and coming + self.resetting < len(self.waiting) + self._config.warm
        return coming < len(self.waiting) or ahead
