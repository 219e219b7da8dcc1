"""A push of weights with the canary's proof, and retries while servers are being restarted."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from agentfactory.trainers.networks.gathered_weights import Weights
from agentfactory.trainers.networks.policy import Policy
from agentfactory.trainers.sync.canary import Canary
from agentfactory.trainers.sync.canary_verdict import Scores
from agentfactory.trainers.sync.server_control import ServerGoneError
from agentfactory.trainers.sync.weight_sync import SyncReport, WeightSync

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5

Result = TypeVar("Result")


def push_proven(
    sync: WeightSync, canary: Canary | None, version: int, policy: Policy, state: Weights, scores: Scores | None
) -> tuple[SyncReport, dict[str, float]]:
    """Prove that the servers still have the previous version, push this one, and prove it by the canary; return the
    report and the canary's metrics. `scores` are the trainer's. If servers are gone by then, push again."""
    if canary is not None:
        canary.prove_unchanged()
    while True:
        report = sync.push(version, policy, state)
        if canary is None or scores is None:
            return report, {}
        try:
            return report, canary.prove(report, scores)
        except ServerGoneError as error:
            logger.warning("pushing version %d again: %s", version, error)


@dataclass
class RetryingSync:
    """A WeightSync that retries while no server answers; `canary` checks restored servers."""

    sync: WeightSync
    canary: Canary
    retry_seconds: float

    def push(self, version: int, policy: Policy, state: Weights) -> SyncReport:
        """Raise ServerGoneError when no server has answered for `retry_seconds`."""
        push = partial(self.sync.push, version, policy, state)
        return retry_until_answered(push, f"version {version}", self.retry_seconds)

    def restore(self, url: str) -> SyncReport:
        return self.sync.restore(url)

    def bring_back(self, url: str) -> bool:
        """Restore the server at `url`, which has just answered. Return False if it is gone again."""
        try:
            report = self.restore(url)
            self.canary.prove_again(report, url)
        except ServerGoneError as error:
            logger.warning("server %s is gone again: %s", url, error)
            return False
        logger.warning("server %s is back and has proven that it holds version %d", url, report.version)
        return True

    def close(self) -> None:
        self.sync.close()


def retry_until_answered(
    call: Callable[[], Result], what: str, retry_seconds: float, hurried: Callable[[], bool] = lambda: False
) -> Result:
    """Return the result of `call` once a server answers. Raises ServerGoneError if none has for `retry_seconds`, or
    immediately if `hurried`. `what` names the waiting operation in the log."""
    deadline = time.monotonic() + retry_seconds
    while True:
        try:
            return call()
        except ServerGoneError as error:
            if hurried():
                raise
            if time.monotonic() > deadline:
                raise ServerGoneError(f"{error} (no server answered for {retry_seconds:g} s)") from error
            logger.warning("%s waits for a server: %s", what, error)
            time.sleep(POLL_SECONDS)
