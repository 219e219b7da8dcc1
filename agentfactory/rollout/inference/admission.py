"""Admission of chains to servers by the tokens that they will need in the KV caches: a pure state machine, without
tasks, clients or a clock.

A server that gets more contexts than its cache holds evicts prefixes while their chains are in tools, and computes them
again at each turn (ThunderAgent, arXiv:2602.13692). So a chain needs a *seat*: blocks in the cache of one replica, from
its start to its end. Seats go to the oldest groups first, which reach the staleness bound first. If contexts outgrow a
cache, the youngest chain between two turns loses its seat. Its next turn is held until it has one again, and chains
that begin meanwhile leave room for it."""

from bisect import bisect_right, insort
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

FULL = 0.95
"""Share of a cache that seats may take. The rest holds what ended chains leave until it is evicted."""
PEAKS = (1.05, 1.3)
"""Shares of a cache that the chains with seats may be expected to need when they need most: the lower one while more
than AGAIN of the tokens belong to chains that have lost their seats. More chains are faster, and those that then lose
their seats are young, with little to compute again."""
AGAIN = 0.1
REMEMBERED = 4
"""Tokens that are counted for AGAIN, in sizes of all caches; older ones count half, and so on."""
AHEAD, GROWS = 4, 2
"""The growth that is expected of a chain while no longer one has ended: so many turns, and so many times its tokens."""
AT_ONCE = 64
"""Most chains that are admitted at a time: thousands would take seconds."""
ENDS = 256
"""Number of ended chains whose lengths are remembered."""


class State(StrEnum):
    """The state of a chain."""

    NEW = "new"
    """It waits to begin."""
    STARTING = "starting"
    """It has begun, and has not yet requested a turn."""
    HELD = "held"
    """It requests a turn, and waits for a seat."""
    RUNNING = "running"
    """A server samples its turn."""
    IDLE = "idle"
    """It is between two turns, or has had its last one."""


class Cache(NamedTuple):
    """The KV cache of a replica, in blocks of `size` tokens. Contexts share whole blocks only. While chains wait to
    begin, `spare` blocks get no seats: what ended chains leave there is evicted, and not the contexts of others."""

    blocks: float
    size: float
    spare: float = 0


@dataclass(slots=True)
class Group:
    """The number of a group, how many chains it has, and the latest of their first prompts with its tokens."""

    number: int
    chains: int = 0
    opening: tuple[Hashable, float] = (None, 0)


@dataclass(slots=True, eq=False)
class Chain:
    """A chain, whose context has `tokens` tokens. `order` is lower for older groups. It has a seat of `taken` blocks at
    the replica `home`, unless that is None; `last` may still have the prefix of a chain that lost its seat there.
    Chains with equal first prompts (`opening`) share their `shared` tokens."""

    key: Hashable
    group: Hashable
    order: tuple[int, int]
    tokens: float
    state: State | None = None
    opening: Hashable = None
    shared: float = 0
    home: Hashable = None
    last: Hashable = None
    taken: float = 0
    requests: int = 0
    """Requests that are held or running."""


class Mean:
    """The mean of about the last hundred values."""

    value = count = 0.0

    def add(self, value: float) -> None:
        self.count = min(100.0, self.count + 1)
        self.value += (value - self.value) / self.count


class Admission:
    """The seats of chains in `caches`, which are named by replica. A context has at most `longest` tokens, as many as a
    new chain is expected to need until some have been seen. `slots` is the number of requests that the servers run at a
    time: no chain begins while as many others may request turns, or while `most` others have begun."""

    def __init__(self, caches: Mapping[Any, Cache], longest: float, slots: float = inf, most: float = inf) -> None:
        self.caches = dict(caches)
        self.longest, self.slots, self.most = longest, slots, most
        self.chains: dict[Hashable, Chain] = {}
        self.used: defaultdict[Hashable, float] = defaultdict(float)
        """Replica -> blocks of all its seats."""
        self.states: Counter[State | None] = Counter()
        self._seats = 0
        self._sharing: Counter[tuple[Hashable, Hashable]] = Counter()
        """Replica and opening -> its chains with a seat there."""
        self._waiting: list[tuple[bool, tuple[int, int], Chain]] = []
        """HELD chains, then NEW ones, each in their order."""
        self._serial = 0
        self._groups: dict[Hashable, Group] = {}
        self._first, self._growth = Mean(), Mean()
        """Tokens of a first prompt, and those that a turn and its results add."""
        self._ends: deque[float] = deque(maxlen=ENDS)
        self._sorted: list[float] = []
        self._sums: list[float] = []
        """Lengths of ended chains, sorted, and the sum of each and all longer ones."""
        self._once = self._again = 0.0
        """Tokens that are computed for the first time, and those of seats that were lost."""
        self._pause = 0
        """Calls of `admit` until the next forecast, which takes long for many chains."""

    # ---- events

    def enter(self, key: Hashable, group: Hashable) -> None:
        """Note that a chain of `group` waits to begin."""
        self._serial += 1
        of_group = self._groups.setdefault(group, Group(self._serial))
        of_group.chains += 1
        self.chains[key] = chain = Chain(key, group, (of_group.number, self._serial), self.longest)
        self._move(chain, State.NEW)

    def ask(self, key: Hashable, tokens: float, opening: Hashable = None) -> None:
        """Note that a chain requests a turn after `tokens` tokens. It is RUNNING then, or HELD until it is admitted.
        `opening` identifies the first prompt, which the first request has alone."""
        chain = self.chains[key]
        chain.requests += 1
        if chain.requests > 1:
            # the contexts of requests at the same time add up
            self._resize(chain, min(self.longest, chain.tokens + tokens))
            return
        home = self._rise(chain)
        if chain.state is State.STARTING:
            self._first.add(tokens)
            self._once += tokens if opening != self._groups[chain.group].opening[0] else 0.0
            chain.opening, chain.shared = self._groups[chain.group].opening = opening, tokens
        else:
            if tokens < chain.shared:  # another context of its agent
                chain.opening, chain.shared = None, 0
            self._growth.add(grown := max(0.0, tokens - chain.tokens))
            self._once += grown
            if self._once > REMEMBERED * sum(cache.blocks * cache.size for cache in self.caches.values()):
                self._once, self._again = self._once / 2, self._again / 2
        chain.tokens = tokens
        self._move(chain, State.HELD)
        self._sit(chain, home)
        if self._keeps_seat(chain):
            self._move(chain, State.RUNNING)

    def answer(self, key: Hashable) -> None:
        """Note that a request of a chain has ended, or is given up."""
        chain = self.chains[key]
        chain.requests -= 1
        if not chain.requests:
            self._move(chain, State.IDLE)

    def leave(self, key: Hashable) -> None:
        """Note that a chain has ended, in any state."""
        chain = self.chains.pop(key)
        self._rise(chain)
        if chain.state is State.IDLE:
            self._ends.append(chain.tokens)
            self._sorted = sorted(self._ends)
            self._sums = [*accumulate(reversed(self._sorted))][::-1]
        self._move(chain, None)
        self._groups[chain.group].chains -= 1
        if not self._groups[chain.group].chains:
            del self._groups[chain.group]
        self._pause = 0

    def resize(self, caches: Mapping[Any, Cache]) -> None:
        """Note other caches. Chains whose replica is gone lose their seats."""
        homes = [(chain, self._rise(chain)) for chain in self.chains.values()]
        self.caches = dict(caches)
        for chain, home in homes:
            self._sit(chain, home)
        self._pause = 0

    # ---- decisions

    def admit(self) -> list[Chain]:
        """Give seats to the first waiting chains, as long as there is room, and return them: they begin or run. Of
        AT_ONCE chains, further ones may follow."""
        admitted = list[Chain]()
        while self._waiting and len(admitted) < AT_ONCE:
            home = self._place_for(chain := self._waiting[0][2])
            if home is None:
                # chains that start may wait for environments that held ones have
                starting = [other for other in self._seated() if other.state is State.STARTING]
                if chain.state is State.NEW or not starting or len(starting) < self._seats:
                    break
                self._rise(max(starting, key=lambda other: other.order))
                continue
            self._move(chain, State.STARTING if chain.state is State.NEW else State.RUNNING)
            self._sit(chain, home)
            admitted.append(chain)
        return admitted

    def _place_for(self, chain: Chain) -> Hashable:
        """Return the replica with the most room for a waiting chain; None if it must wait."""
        if chain.state is State.NEW:
            busy = self.states[State.STARTING] + self.states[State.RUNNING]
            begun = len(self.chains) - self.states[State.NEW]
            if busy >= self.slots or begun >= self.most:
                return None
            chain.opening, chain.shared = self._groups[chain.group].opening
            chain.tokens = chain.shared or (self._first.value if self._first.count else self.longest)
        free = {home: self._limit(home) - self.used[home] - self._need(chain, home) for home in self.caches}
        if chain.state is State.NEW:
            for home in free:
                free[home] -= self._spared(home)
        shares = {home: free[home] >= 0 and self._sharing[home, chain.opening] > 0 for home in free}
        fits = {home: (free[home] >= 0 and home == chain.last, shares[home], free[home]) for home in free}
        home = max(free, key=lambda home: (*fits[home], -self.used[home]), default=None)
        if home is None or not self.used[home]:
            return home  # a context that is too long for its cache runs there alone
        if free[home] < 0 or self.caches[home].size >= self.longest:
            return home if free[home] >= 0 else None
        self._pause -= 1
        if self._pause > 0:
            return None
        peak = PEAKS[self._again <= AGAIN * self._once] * self.caches[home].blocks
        has_room = self._peak(chain, home) <= peak
        self._pause = 0 if has_room else self._seats // 4
        return home if has_room else None

    def _keeps_seat(self, chain: Chain) -> bool:
        """Make room for the context of a chain that has a seat, and return whether it still has it: chains that start
        lose theirs first, then younger ones, and the oldest one keeps its own even if the cache is too small."""
        home = chain.home
        if home is None or self.used[home] <= self._limit(home):
            return home is not None
        others = [other for other in self._seated() if other.home == home and other is not chain]
        last = [other for other in others if other.state is State.STARTING]
        younger = [other for other in others if other.state is State.IDLE and other.order > chain.order]
        victims = [*sorted(younger, key=lambda other: other.order), *sorted(last, key=lambda other: other.order)]
        while victims and self.used[home] > self._limit(home):
            self._lose(victims.pop())
        if self.used[home] > self._limit(home) and any(o.home == home and o.order < chain.order for o in others):
            self._lose(chain)
        return chain.home is not None

    def _lose(self, chain: Chain) -> None:
        self._again += chain.tokens
        self._rise(chain)

    def _seated(self) -> Iterator[Chain]:
        return (chain for chain in self.chains.values() if chain.home is not None)

    def _peak(self, chain: Chain, home: Hashable) -> float:
        """Return the most blocks that the chains at `home` and this one are expected to need at a time: all grow alike,
        and each ends when its length does."""
        need = [(self._left(chain), self._need(chain, home))]
        need += [(self._left(other), other.taken) for other in self.chains.values() if other.home == home]
        blocks, peak = self.used[home] + need[0][1], 0.0
        for ended, (left, taken) in enumerate(sorted(need)):
            peak = max(peak, blocks + left / self.caches[home].size * (len(need) - ended))
            blocks -= taken
        return peak

    def _left(self, chain: Chain) -> float:
        """Return how many tokens a context is expected to grow: to the mean of the longer ones that have ended."""
        at = bisect_right(self._sorted, chain.tokens)
        if at < len(self._sorted):
            return self._sums[at] / (len(self._sorted) - at) - chain.tokens
        # the first ones take half of what they may
        unknown = GROWS * chain.tokens if self._sorted else self.longest / 2 - chain.tokens
        return max(AHEAD * self._growth.value, unknown)

    def _limit(self, home: Hashable) -> float:
        """Return the blocks that seats may take."""
        cache = self.caches[home]
        return cache.blocks if cache.size >= self.longest else FULL * cache.blocks

    def _spared(self, home: Hashable) -> float:
        """Return the blocks that no new chain takes: spare ones, and those for chains that have lost their seats."""
        cache = self.caches[home]
        spare = cache.spare if len(self.chains) > sum(one.blocks for one in self.caches.values()) else 0
        begun = len(self.chains) - self.states[State.NEW]
        absent = (c for c in self.chains.values() if c.home is None and c.state is not State.NEW)
        return spare + (sum(self._need(c, home) for c in absent) if self._seats < begun else 0)

    def _need(self, chain: Chain, home: Hashable) -> float:
        """Return the blocks for a context and its next turn, without those that others have already."""
        size = self.caches[home].size
        blocks = -(-min(self.longest, chain.tokens + self._growth.value) // size)
        return blocks - (self._shared(chain, home) if self._sharing[home, chain.opening] else 0)

    def _shared(self, chain: Chain, home: Hashable) -> float:
        size = self.caches[home].size
        return chain.shared // size if chain.opening is not None and size < self.longest else 0

    # ---- bookkeeping

    def _move(self, chain: Chain, state: State | None) -> None:
        for waiting in (State.HELD, State.NEW):
            entry = (waiting is State.NEW, chain.order, chain)
            if chain.state is waiting:
                self._waiting.remove(entry)
            if state is waiting:
                insort(self._waiting, entry)
        self.states[chain.state] -= 1
        self.states[state] += 1
        chain.state = state

    def _resize(self, chain: Chain, tokens: float) -> None:
        home = self._rise(chain)
        chain.tokens = tokens
        self._sit(chain, home)

    def _sit(self, chain: Chain, home: Hashable) -> None:
        """Give a chain a seat at `home`, if there is such a replica. The blocks that it shares belong to no chain."""
        if home in self.caches:
            self.used[home] += (need := self._need(chain, home))
            self._sharing[home, chain.opening] += 1
            first = self._sharing[home, chain.opening] == 1
            chain.home, chain.taken = home, need - (self._shared(chain, home) if first else 0)
            self._seats += 1

    def _rise(self, chain: Chain) -> Hashable:
        """Take a chain's seat away, and return its replica; None if it had none."""
        home = chain.home
        if home is not None:
            chain.home, chain.last = None, home
            self.used[home] -= chain.taken
            self._sharing[home, chain.opening] -= 1
            self._seats -= 1
            if not self._sharing[home, chain.opening]:
                del self._sharing[home, chain.opening]
                self.used[home] -= self._shared(chain, home)
        return home
