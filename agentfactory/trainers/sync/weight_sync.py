"""The interface of sync backends, and the report that they return."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentfactory.rollout.inference.weight_versions import Published
from agentfactory.trainers.networks.gathered_weights import Weights
from agentfactory.trainers.networks.policy import Policy
from agentfactory.trainers.sync.server_control import ServerControl, ServerGoneError, SyncError

logger = logging.getLogger(__name__)


INITIAL_LABEL = "default"
"""What a server calls the weights that it was started with."""


@dataclass(frozen=True)
class SyncReport:
    """One version that the servers have taken."""

    version: int
    label: str
    """The servers' name for the version in `weight_versions`: an adapter's name, or for full weights a text that ends
    with the version and begins the same for all versions."""
    model: str
    """The model name for requests to the servers."""
    bytes: int
    """Size of the transferred weights."""
    seconds: float
    digest: str
    """sha256 in hex of an adapter's file, or of full weights' names and checksums as a server lists them."""
    cache_salt: str | None = None
    """Salt with which requests must avoid caches of older weights, if these are kept."""

    @property
    def published(self) -> Published:
        """What rollouts need to know of it."""
        return Published(self.version, self.model, self.label)

    @property
    def is_adapter(self) -> bool:
        """Whether the version is an adapter; `weight_versions` may then still name the base weights."""
        return self.label == self.model


class ForeignWeightsError(SyncError):
    """A server has weights that this run did not push."""

    def __init__(self, server: ServerControl, what: str) -> None:
        super().__init__(
            f"{server.url} {what}; fix: if another process pushes weights into it, end that process, or give each run "
            "a server of its own"
        )


class WeightSync(Protocol):
    """Transfers weights to one or several servers."""

    def push(self, version: int, policy: Policy, state: Weights) -> SyncReport:
        """Returns once the servers serve `state` (the policy's weights by name, gathered when they are read) and have
        proven it; raises SyncError otherwise. Servers that are gone are skipped, unless all are: they must be restored
        before they are used again. Raises ServerGoneError if none is left; the version may then be pushed again.

        Called in one process. A version may be pushed again: full weights are sent once more; an adapter gets a new
        name, which the report contains. If the first push did not end, this one continues it.
        """

    def restore(self, url: str) -> SyncReport:
        """Loads the version that was pushed last into the server at `url`, which was restarted or skipped, and proves
        it as `push` does. If the server still has it, nothing is sent.

        Needs neither the policy nor the other processes, so rank 0 may call it at any time between two pushes.
        """

    def close(self) -> None:
        """Removes files that were written for the servers and are no longer useful to them."""


def lock_for_others(folder: Path) -> None:
    """Lets only this user change a folder of weights and what it contains: a server reads them by their path."""
    for path in (folder, *folder.iterdir()):
        path.chmod(path.stat().st_mode & ~0o022)


def on_each(servers: Sequence[ServerControl], act: Callable[[ServerControl], None]) -> None:
    """Calls `act` for all servers at once. A server that is gone is skipped; raises ServerGoneError if none is left,
    and any other error when all calls have ended."""
    gone: list[ServerGoneError] = []
    with ThreadPoolExecutor(len(servers)) as pool:
        calls = [pool.submit(act, server) for server in servers]
    for call in calls:
        try:
            call.result()
        except ServerGoneError as error:
            logger.warning("%s", error)
            gone.append(error)
    if gone and len(gone) == len(servers):
        raise gone[0]


def find(servers: Sequence[ServerControl], url: str) -> ServerControl:
    """Returns the server at `url`. Raises KeyError if it is not one of `servers`."""
    return {server.url: server for server in servers}[url.rstrip("/")]


def served_models(server: ServerControl) -> list[str]:
    """Returns the names of the models that a server offers, the base model first."""
    cards = server.get("/v1/models").get("data", [])
    names = [card["id"] for card in sorted(cards, key=lambda card: card.get("parent") is not None)]
    if not names:
        raise SyncError(f"{server.url}/v1/models lists no model")
    return names


def base_model(servers: list[ServerControl]) -> str:
    """Returns the name under which all servers offer the base model. Raises SyncError if they disagree."""
    names = {server.url: served_models(server)[0] for server in servers}
    if len(set(names.values())) > 1:
        listed = ", ".join(f"{url}: {name}" for url, name in names.items())
        raise SyncError(f"the servers call the model by different names ({listed}); start them with the same one")
    return next(iter(names.values()))
