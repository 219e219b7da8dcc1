"""Routing of requests to server replicas: a pure state machine, without a clock or I/O."""

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

REMEMBERED = 1 << 15
"""Number of chains, and of prompts, whose replica is remembered. Forgetting one costs a prefill, but loses no
tokens."""


class ServerState(StrEnum):
    """The state of a server; only SERVING ones get requests."""

    SERVING = "serving"
    DOWN = "down"
    """Nothing answers at its address."""
    UNPROVEN = "unproven"
    """The server answers, but has not yet proven that it has the current weights."""


class Replica(NamedTuple):
    """One copy of the model, with its own KV cache."""

    url: str
    """Address of its server."""
    rank: int | None = None
    """The data parallel rank among the replicas behind the address; None for a single replica."""


class Router:
    """A router that chooses replicas by prefix cache and load.

    A chain's turns go to the replica that has its prefix cached. A new chain goes to a replica that has its prompt
    cached, unless that replica has a far higher load. Everything else goes to the replica with the fewest requests.
    Ties go to the replica with the fewest assigned chains, since chains may spend most of their time in tools.
    """

    def __init__(self, urls: Collection[str]):
        self.states = dict.fromkeys(urls, ServerState.SERVING)
        self.load: Counter[Replica] = Counter()
        self.silent_since: float | None = None
        """Time since which no server has answered; None while one does."""
        self.last_success: float | None = None
        """Time at which a server last completed a request."""
        self._replicas = {url: [Replica(url)] for url in urls}
        self._given: Counter[Replica] = Counter()
        self._chains: OrderedDict[str, Replica] = OrderedDict()
        self._prompts: OrderedDict[int, set[Replica]] = OrderedDict()

    def has_replicas(self, url: str, count: int) -> None:
        """Note that `count` replicas answer at `url`."""
        self._replicas[url] = [Replica(url, rank) for rank in range(count)] if count > 1 else [Replica(url)]

    def choose(self, chain: str, prompt: Sequence[Hashable], avoid: Collection[str] = ()) -> Replica | None:
        """Return the replica for a turn of `chain` with the tokens `prompt`; None while no server serves.

        Servers in `avoid` are used only if no other server serves.
        """
        urls = [url for url, state in self.states.items() if state is ServerState.SERVING]
        urls = [url for url in urls if url not in avoid] or urls
        serving = [replica for url in urls for replica in self._replicas[url]]
        if not serving:
            return None
        home = self._chains.get(chain)
        if home not in serving:
            home = self._choose_for_prompt(prompt, serving) if len(serving) > 1 else serving[0]
            self._given[home] += 1
        _remember(self._chains, chain, home)
        return home

    def _choose_for_prompt(self, prompt: Sequence[Hashable], serving: list[Replica]) -> Replica:
        key = hash(tuple(prompt))
        homes = self._prompts.get(key, set())
        chosen = min(serving, key=lambda replica: (self.load[replica], self._given[replica]))
        if at_home := [replica for replica in serving if replica in homes]:
            home = min(at_home, key=lambda replica: self.load[replica])
            if self.load[home] <= 2 * self.load[chosen] + 8:
                chosen = home
        _remember(self._prompts, key, homes | {chosen})
        return chosen

    def started(self, replica: Replica) -> None:
        """Note that a request was sent to `replica`."""
        self.load[replica] += 1

    def ended(self, replica: Replica) -> None:
        """Note that a request to `replica` was answered or lost."""
        self.load[replica] -= 1

    def succeeded(self, now: float) -> None:
        """Note that a server completed a request."""
        self.last_success = now

    def lost(self, url: str, now: float) -> None:
        """Note that the connection to `url` failed. The server gets no requests until it has proven its weights."""
        self.states[url] = ServerState.DOWN
        if self.silent_since is None and set(self.states.values()) == {ServerState.DOWN}:
            self.silent_since = now

    def answers(self, url: str) -> None:
        """Note that `url` answers but may not have the current weights."""
        self.states[url] = ServerState.UNPROVEN
        self.silent_since = None

    def proven(self, url: str) -> None:
        """Note that `url` has the current weights."""
        self.states[url] = ServerState.SERVING
        self.silent_since = None


def _remember(memory: OrderedDict[Any, Any], key: Hashable, value: Any) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > REMEMBERED:
        memory.popitem(last=False)
