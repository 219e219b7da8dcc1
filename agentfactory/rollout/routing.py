"""Routing of requests to servers: a pure state machine, without a clock or I/O."""

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable
from enum import StrEnum
from typing import Any

REMEMBERED = 1 << 15
"""Number of chains, and of prompts, to remember the server for; forgetting one costs a prefill, not a token."""


class ServerState(StrEnum):
    """Whether a server gets requests."""

    SERVING = "serving"
    DOWN = "down"
    """Nothing answers at its address."""
    UNPROVEN = "unproven"
    """It answers, but has not proven yet that it has the current weights."""


class Router:
    """Chooses servers by their cache and load.

    A chain's turns go to the server that has its prefix. A new chain goes to a server that has its prompt, unless that
    server has a far higher load. Everything else goes to the server with the lowest load, in requests.
    """

    def __init__(self, urls: Collection[str]):
        self.states = dict.fromkeys(urls, ServerState.SERVING)
        self.load: Counter[str] = Counter()
        self.silent_since: float | None = None
        """Time since which no server has answered; None while one does."""
        self.last_success: float | None = None
        """Time at which a server last completed a request."""
        self._chains: OrderedDict[str, str] = OrderedDict()
        self._prompts: OrderedDict[Hashable, set[str]] = OrderedDict()

    def choose(self, chain: str, prompt: Hashable, avoid: Collection[str] = ()) -> str | None:
        """Return the server for a turn of `chain`, with the first prompt's key `prompt`; None while no server serves.

        Servers in `avoid` are used only if no other server serves.
        """
        serving = [url for url, state in self.states.items() if state is ServerState.SERVING]
        serving = [url for url in serving if url not in avoid] or serving
        if not serving:
            return None
        home = self._chains.get(chain)
        if home not in serving:
            home = self._choose_for_prompt(prompt, serving)
        _remember(self._chains, chain, home)
        _remember(self._prompts, prompt, self._prompts.get(prompt, set()) | {home})
        return home

    def _choose_for_prompt(self, prompt: Hashable, serving: list[str]) -> str:
        idlest = min(serving, key=lambda url: self.load[url])
        homes = [url for url in serving if url in self._prompts.get(prompt, ())]
        if homes:
            home = min(homes, key=lambda url: self.load[url])
            if self.load[home] <= 2 * self.load[idlest] + 8:
                return home
        return idlest

    def started(self, url: str) -> None:
        """Note that a request is on its way to `url`."""
        self.load[url] += 1

    def ended(self, url: str) -> None:
        """Note that a request to `url` was answered or lost."""
        self.load[url] -= 1

    def succeeded(self, now: float) -> None:
        """Note that a server completed a request."""
        self.last_success = now

    def lost(self, url: str, now: float) -> None:
        """Note that the connection to `url` failed: it gets no requests until it is proven."""
        self.states[url] = ServerState.DOWN
        if self.silent_since is None and set(self.states.values()) == {ServerState.DOWN}:
            self.silent_since = now

    def answers(self, url: str) -> None:
        """Note that `url` answers, or turned out to have other weights than the current ones."""
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
