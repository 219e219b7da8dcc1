"""What every way of bringing weights into the inference servers does, and what it reports."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from agentfactory.trainers.policy import Policy
from agentfactory.trainers.server_control import ServerControl, ServerGoneError, SyncError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SyncReport:
    """One version that the servers have taken."""

    version: int
    label: str
    """What the servers call the version in `weight_versions`; an adapter's label is its name."""
    model: str
    """The name to ask the servers for."""
    bytes: int
    """Size of the weights that travelled."""
    seconds: float
    digest: str
    """sha256 in hex of an adapter's file, or of full weights' names and checksums as a server lists them."""
    cache_salt: str | None = None
    """With what requests must keep apart from caches of older weights, where these are left in place."""

    @property
    def is_adapter(self) -> bool:
        """Whether the version is an adapter: then `weight_versions` may still name the base weights."""
        return self.label == self.model


class WeightSync(Protocol):
    """A way to bring weights into one or several servers."""

    def push(self, version: int, policy: Policy, state: dict[str, Tensor]) -> SyncReport:
        """Returns once the servers serve `state` (the policy's gathered weights) and have proven it; raises SyncError
        otherwise. Of several servers, those that are gone are passed over: they must be restored before they are used
        again. ServerGoneError: none is left, and nothing speaks against pushing the version again.

        Called in one process. A version may be pushed again: full weights are sent once more, an adapter gets a new
        name, which the report carries; where the first push did not end, this one goes on with it.
        """

    def restore(self, url: str) -> SyncReport:
        """Brings the version that was pushed last into the server at `url`, which was started again or passed over, and
        proves it as `push` does. Where the server has it still, nothing is sent.

        Needs neither the policy nor the other processes, so rank 0 may call it at any time between two pushes.
        """

    def close(self) -> None:
        """Removes what was written for the servers and is of no more use to them."""


def on_each(servers: Sequence[ServerControl], act: Callable[[ServerControl], None]) -> None:
    """Does the same on every server. One that is gone is passed over, unless none is left: ServerGoneError."""
    gone: list[ServerGoneError] = []
    for server in servers:
        try:
            act(server)
        except ServerGoneError as error:
            logger.warning("%s", error)
            gone.append(error)
    if gone and len(gone) == len(servers):
        raise gone[0]


def find(servers: Sequence[ServerControl], url: str) -> ServerControl:
    """The server at `url`. Raises KeyError where it is none of `servers`."""
    return {server.url: server for server in servers}[url.rstrip("/")]


def served_models(server: ServerControl) -> list[str]:
    """Names of the models that a server offers, the base model first."""
    cards = server.get("/v1/models").get("data", [])
    names = [card["id"] for card in sorted(cards, key=lambda card: card.get("parent") is not None)]
    if not names:
        raise SyncError(f"{server.url}/v1/models lists no model")
    return names


def base_model(servers: list[ServerControl]) -> str:
    """The name under which all servers offer the base model. Raises SyncError where they disagree."""
    names = {server.url: served_models(server)[0] for server in servers}
    if len(set(names.values())) > 1:
        listed = ", ".join(f"{url}: {name}" for url, name in names.items())
        raise SyncError(f"the servers call the model by different names ({listed}); start them with the same one")
    return next(iter(names.values()))
