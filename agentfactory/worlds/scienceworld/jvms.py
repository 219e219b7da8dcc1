"""`Jvms`: a pool of Java processes that play games."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from agentfactory.worlds.scienceworld.jvm import Game, GameLost, Jvm

_MOST_GAMES = 500
"""Games after which a process is retired, in case its engine leaks memory of old games."""
_BESIDES_HEAP_MB = 320
"""Allowed memory of a process beyond its heap (measured: 130 to 170 MiB); a larger one is retired."""


@dataclass(eq=False)
class _Place:
    """A slot for a process, which starts with its first game."""

    starting: threading.Lock = field(default_factory=threading.Lock)
    jvm: Jvm | None = None
    games: int = 0
    """Games being played in it, or about to begin."""
    played: int = 0


class Jvms:
    """A pool of Java processes with a heap of `heap_mb` for `games_per_jvm` games each, started on demand. A process
    that has ended is replaced at the next game. A process that has grown, or has played many games, is retired: it gets
    no new games and ends with its last one. Thread-safe."""

    def __init__(self, heap_mb: int, games_per_jvm: int) -> None:
        self._heap_mb = heap_mb
        self._most = games_per_jvm
        self._lock = threading.Lock()
        self._places: list[_Place] = []
        self._leaving: list[_Place] = []
        self._closed = False
        self.users = 0
        self.lost = 0
        self.replaced = 0

    @contextmanager
    def _place(self) -> Iterator[_Place]:
        """Reserve a place for a game, and release it if the game does not begin."""
        with self._lock:
            self._sort_out()
            free = [place for place in self._places if place.games < self._most]
            place = min(free, key=lambda place: place.games, default=None) or _Place()
            if place not in self._places:
                self._places.append(place)
            place.games += 1
            place.played += 1
        try:
            yield place
        except BaseException:
            self._leave(place)
            raise

    def play(self, task: str, variation: int, simplifications: tuple[str, ...], gold: bool = False) -> "Play":
        """Begin a game. Raises GameLost."""
        with self._place() as place:
            with place.starting:
                if self._closed:
                    raise GameLost("the environment was closed")
                if place.jvm is None:
                    place.jvm = Jvm(self._heap_mb)
            return Play(self, place, Game(place.jvm, task, variation, simplifications, gold))

    def gauges(self) -> dict[str, float]:
        """Return the numbers of processes and of their games, and of processes lost and replaced since the start."""
        with self._lock:
            places = [*self._places, *self._leaving]
            return {
                "jvms": float(sum(place.jvm is not None and place.jvm.alive for place in places)),
                "games": float(sum(place.games for place in places)),
                "jvms_lost": float(self.lost),
                "jvms_replaced": float(self.replaced),
            }

    def pids(self) -> list[int]:
        """Return the process ids."""
        with self._lock:
            return [place.jvm.pid for place in (*self._places, *self._leaving) if place.jvm is not None]

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            self._closed = True
            places = [*self._places, *self._leaving]
            self._places, self._leaving = [], []
        for place in places:
            with place.starting:
                if place.jvm is not None:
                    place.jvm.end()

    def _sort_out(self) -> None:
        """Retire the processes that should get no new games."""
        for place in list(self._places):
            if place.jvm is None:
                continue
            if not place.jvm.alive:
                self.lost += 1
                self._places.remove(place)
                place.jvm.end()
            elif place.played >= _MOST_GAMES or place.jvm.resident_mb() > self._heap_mb + _BESIDES_HEAP_MB:
                self.replaced += 1
                self._places.remove(place)
                self._leaving.append(place)
                self._end_if_empty(place)

    def _leave(self, place: _Place) -> None:
        with self._lock:
            place.games -= 1
            if place.jvm is None and place.games == 0 and place in self._places:
                self._places.remove(place)  # its process did not start
            self._end_if_empty(place)

    def _end_if_empty(self, place: _Place) -> None:
        if place in self._leaving and place.games == 0:
            self._leaving.remove(place)
            assert place.jvm is not None
            place.jvm.end()


class Play:
    """A game and its place in the pool."""

    def __init__(self, jvms: Jvms, place: _Place, game: Game) -> None:
        self._jvms, self._place = jvms, place
        self.game = game

    def end(self) -> None:
        """Release the game. Further calls have no effect."""
        self.game.close()
        self._jvms._leave(self._place)


_shared: dict[tuple[int, int], Jvms] = {}
_sharing = threading.Lock()


def open_jvms(heap_mb: int, games_per_jvm: int) -> Jvms:
    """Return this process's shared pool with these settings; release it by `close_jvms`."""
    with _sharing:
        jvms = _shared.setdefault((heap_mb, games_per_jvm), Jvms(heap_mb, games_per_jvm))
        jvms.users += 1
        return jvms


def close_jvms(jvms: Jvms) -> None:
    """Release the pool; its processes end with the last user."""
    with _sharing:
        jvms.users -= 1
        if jvms.users > 0:
            return
        for key, shared in list(_shared.items()):
            if shared is jvms:
                del _shared[key]
    jvms.close()
