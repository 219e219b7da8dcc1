"""The interface of sync backends, and the report that they return."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from agentfactory.rollout.inference.weight_versions import Published
from agentfactory.trainers.networks.gathered_weights import Weights
from agentfactory.trainers.networks.handover import HandedOver
from agentfactory.trainers.networks.policy import Policy
from agentfactory.trainers.sync.server_control import ServerControl, ServerGoneError, SyncError

logger = logging.getLogger(__name__)


INITIAL_LABEL = "default"
"""A server's label of its initial weights."""


@dataclass(frozen=True)
class SyncReport:
    version: int
    label: str
    """The servers' name of the version in `weight_versions`: an adapter's name, or a common prefix and the version."""
    model: str
    bytes: int
    seconds: float
    digest: str
    """sha256 in hex of an adapter's file, or of full weights' names and checksums."""
    cache_salt: str | None = None
    """Salt by which requests must avoid caches of older weights, if those are kept."""

    @property
    def published(self) -> Published:
        return Published(self.version, self.model, self.label)

    @property
    def is_adapter(self) -> bool:
        """True if the version is an adapter; `weight_versions` may then still name the base weights."""
        return self.label == self.model


class ForeignWeightsError(SyncError):
    """A server with weights that this run did not push."""

    def __init__(self, server: ServerControl, what: str) -> None:
        fix = "if another process pushes weights to it, end that process, or give each run its own server"
        super().__init__(f"{server.url} {what}; fix: {fix}")


class WeightSync(Protocol):
    """A sync backend, which transfers weights to one or several servers."""

    def push(self, version: int, policy: Policy, state: Weights) -> SyncReport:
        """Load `state` (the policy's weights by name, gathered when they are read) into the servers; return once they
        have proven it, else raise SyncError. Servers that are gone are skipped, and must be restored before they are
        used again. Raises ServerGoneError if no server is left; the version may then be pushed again.

        Called in one process. When a version is pushed again, full weights are resent, and an adapter gets a new name.
        An incomplete push is continued."""

    def restore(self, url: str) -> SyncReport:
        """Load the last pushed version into the server at `url`, which was restarted or skipped, and prove it as `push`
        does, without policy or other processes. A server that still has it gets nothing."""

    def close(self) -> None:
        """Remove files written for the servers that they no longer need."""


def lock_for_others(folder: Path) -> None:
    """Let only this user change a folder of weights and its content, which a server reads by path."""
    for path in (folder, *folder.iterdir()):
        path.chmod(path.stat().st_mode & ~0o022)


def on_each(servers: Sequence[ServerControl], act: Callable[[ServerControl], None]) -> None:
    """Call `act` for all servers concurrently. A server that is gone is skipped. Raises ServerGoneError if none is
    left, and any other error when all calls have ended."""
    gone: list[ServerGoneError] = []
    with ThreadPoolExecutor(len(servers)) as pool:
        calls = [HandedOver(pool, partial(act, server)) for server in servers]
    for call in calls:
        try:
            call.result()
        except ServerGoneError as error:
            logger.warning("%s", error)
            gone.append(error)
    if gone and len(gone) == len(servers):
        raise gone[0]


def find(servers: Sequence[ServerControl], url: str) -> ServerControl:
    """Return the server at `url`. Raises KeyError if it is not one of `servers`."""
    return {server.url: server for server in servers}[url.rstrip("/")]


def served_models(server: ServerControl) -> list[str]:
    cards = server.get("/v1/models").get("data", [])
    names = [card["id"] for card in sorted(cards, key=lambda card: card.get("parent") is not None)]
    if not names:
        raise SyncError(f"{server.url}/v1/models lists no model")
    return names


def base_model(servers: list[ServerControl]) -> str:
    """Return the servers' common name of the base model. Raises SyncError if the names differ."""
    first, *others = {served_models(server)[0] for server in servers}
    if others:
        raise SyncError(f"the servers call the model {', '.join([first, *others])}; start them with the same name")
    return first
