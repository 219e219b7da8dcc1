"""The bookkeeping of a pool: waiters, holders, and due steps. Pure: without tasks or a clock."""

from asyncio import Future
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from agentfactory.base.config import PoolConfig

T = TypeVar("T")


@dataclass(eq=False)
class Instance(Generic[T]):
    """One member of a pool."""

    value: T
    uses: int = 0
    """Number of chains that it has served, including the present one."""


class Act(StrEnum):
    """An action that a ledger requests."""

    MAKE = "make"
    CHECK = "check"
    RETIRE = "retire"


class Step(NamedTuple, Generic[T]):
    """An action and its instance."""

    act: Act
    instance: Instance[T] | None = None


class Ledger(Generic[T]):
    """Tracks waiters, holders and due steps.

    Report each event to it, then execute the steps that `steps` returns. Waiters are served first come, first served.
    Every instance takes a place of `capacity`, even while it is being created, checked, reset or retired.
    """

    def __init__(self, config: PoolConfig) -> None:
        self.waiting: deque[Future[Instance[T]]] = deque()
        self.idle: deque[Instance[T]] = deque()
        self.held: set[Instance[T]] = set()
        self.making = self.checking = self.resetting = self.retiring = 0
        self.made = self.recycled = self.broken = 0
        self.capacity = config.capacity
        self._config = config
        self._paused = False  # creating one in advance failed: no more are created in advance until one succeeds

    def steps(self) -> list[Step[T]]:
        """Return the steps that are due; they count as begun."""
        steps: list[Step[T]] = []
        while self.idle and len(self.waiting) > self.checking:
            self.checking += 1
            steps.append(Step(Act.CHECK, self.idle.popleft()))
        while self._is_short():
            self.making += 1
            steps.append(Step(Act.MAKE))
        return steps

    def has_made(self, instance: Instance[T]) -> Future[Instance[T]] | None:
        """Note that a new instance is ready. Return the waiter who gets it, or None if it stays idle."""
        self.making -= 1
        self.made += 1
        self._paused = False
        return self._place(instance)

    def has_failed_to_make(self) -> Future[Instance[T]] | None:
        """Note that an instance could not be created. Return the waiter who gets the error, if there is one."""
        self.making -= 1
        self._paused = True
        return self._next_waiter()

    def has_checked(self, instance: Instance[T], sound: bool) -> Future[Instance[T]] | Step[T] | None:
        """Note that an idle instance was checked. Return the waiter who gets it, None if it stays idle, or its
        retirement."""
        self.checking -= 1
        if sound:
            return self._place(instance)
        self.broken += 1
        return self._retire(instance)

    def has_let_go(self, instance: Instance[T], broken: bool) -> Step[T] | None:
        """Note that its holder released an instance. Return its retirement; None if it should be reset."""
        self.held.discard(instance)
        if broken:
            self.broken += 1
            return self._retire(instance)
        if self._config.max_uses is not None and instance.uses >= self._config.max_uses:
            self.recycled += 1
            return self._retire(instance)
        self.resetting += 1
        return None

    def has_reset(self, instance: Instance[T], sound: bool) -> Step[T] | None:
        """Note that an instance was reset. Return its retirement if that failed."""
        self.resetting -= 1
        if sound:
            self.idle.append(instance)
            return None
        self.broken += 1
        return self._retire(instance)

    def has_not_used(self, instance: Instance[T]) -> None:
        """Note that a holder returned an instance that it never used."""
        self.held.discard(instance)
        instance.uses -= 1
        self.idle.appendleft(instance)

    def has_retired(self) -> None:
        """Note that a retired instance is gone."""
        self.retiring -= 1

    def withdraw(self, waiter: Future[Instance[T]]) -> None:
        """Remove a waiter."""
        if waiter in self.waiting:
            self.waiting.remove(waiter)

    def retire_all(self) -> list[Step[T]]:
        """Close the pool: return the retirement of every instance, including those in use."""
        instances = [*self.idle, *self.held]
        self.idle.clear()
        self.held.clear()
        return [self._retire(instance) for instance in instances]

    @property
    def places(self) -> int:
        """Number of occupied places of `capacity`."""
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
            if not waiter.done():  # a cancelled waiter withdraws only when its task runs
                return waiter
        return None

    def _retire(self, instance: Instance[T]) -> Step[T]:
        self.retiring += 1
        return Step(Act.RETIRE, instance)

    def _is_short(self) -> bool:
        if self.capacity is not None and self.places >= self.capacity:
            return False
        coming = len(self.idle) + self.checking + self.making
        ahead = not self._paused and coming + self.resetting < len(self.waiting) + (self._config.warm or 0)
        return coming < len(self.waiting) or ahead
