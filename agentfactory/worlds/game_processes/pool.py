"""`Pool`: processes that play several games each, for engines that start too slowly to have a process per game."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from agentfactory.base.messages import ToolInfrastructureError


class Pooled(Protocol):
    @property
    def pid(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    def end(self) -> None:
        """Kill the process; its games are lost."""


P = TypeVar("P", bound=Pooled)


@dataclass(eq=False)
class Place(Generic[P]):
    """A slot for a process, which starts with its first game."""

    starting: threading.Lock = field(default_factory=threading.Lock)
    process: P | None = None
    games: int = 0
    """Games being played in it, or about to begin."""
    played: int = 0


class Pool(Generic[P]):
    """Processes that play several games each, started on demand. One that has ended is replaced at the next game; one
    that is worn, after `played` games, gets no new games and ends with its last one. Thread-safe.

    At most `at_once` games share a process. Up to `spread` processes, a new one starts instead of sharing one.
    """

    def __init__(
        self,
        start: Callable[[], P],
        is_worn: Callable[[P, int], bool],
        at_once: float = math.inf,
        spread: int = 0,
    ) -> None:
        self._start, self._is_worn, self._at_once, self._spread = start, is_worn, at_once, spread
        self._lock = threading.Lock()
        self._places: list[Place[P]] = []
        self._leaving: list[Place[P]] = []
        self._closed = False
        self.started = self.lost = self.replaced = 0

    def enter(self) -> tuple[Place[P], P]:
        """Return the process with the fewest games, and the place in it, to `leave` later. Raises as `start` does."""
        with self._lock:
            self._retire()
            free = [place for place in self._places if place.games < self._at_once]
            place = min(free, key=lambda place: place.games, default=None)
            if place is None or (place.games and len(free) < self._spread):
                self._places.append(place := Place())
            place.games += 1
            place.played += 1
        try:
            with place.starting:
                if self._closed:
                    raise ToolInfrastructureError("the environment was closed")
                if place.process is None:
                    place.process = self._start()
                    self.started += 1
                return place, place.process
        except BaseException:
            self.leave(place)
            raise

    def leave(self, place: Place[P]) -> None:
        with self._lock:
            place.games -= 1
            if place.process is None and place.games == 0 and place in self._places:
                self._places.remove(place)  # its process did not start
            self._end_if_empty(place)

    def games(self) -> int:
        with self._lock:
            return sum(place.games for place in (*self._places, *self._leaving))

    def pids(self) -> list[int]:
        with self._lock:
            processes = [place.process for place in (*self._places, *self._leaving)]
            return [process.pid for process in processes if process is not None and process.alive]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            places = [*self._places, *self._leaving]
            self._places, self._leaving = [], []
        for place in places:
            with place.starting:
                if place.process is not None:
                    place.process.end()

    def _retire(self) -> None:
        for place in [place for place in self._places if place.process is not None]:
            assert place.process is not None
            if not place.process.alive:
                self.lost += 1
                self._places.remove(place)
                place.process.end()
            elif self._is_worn(place.process, place.played):
                self.replaced += 1
                self._places.remove(place)
                self._leaving.append(place)
                self._end_if_empty(place)

    def _end_if_empty(self, place: Place[P]) -> None:
        if place in self._leaving and place.games == 0:
            self._leaving.remove(place)
            assert place.process is not None
            place.process.end()
