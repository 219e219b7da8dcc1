"""Brings weights to the servers and proves that they compute with them: push, then the canary."""

import logging

from agentfactory.trainers.networks.gathered_weights import Weights
from agentfactory.trainers.networks.policy import Policy
from agentfactory.trainers.sync.canary import Canary
from agentfactory.trainers.sync.canary_verdict import Scores
from agentfactory.trainers.sync.server_control import ServerGoneError
from agentfactory.trainers.sync.weight_sync import SyncReport, WeightSync

logger = logging.getLogger(__name__)


def push_proven(
    sync: WeightSync,
    canary: Canary | None,
    version: int,
    policy: Policy,
    state: Weights,
    scores: Scores | None,
) -> tuple[SyncReport, dict[str, float]]:
    """Pushes a version and proves it with the canary; also returns the canary's metrics. `scores` are the trainer's.
    Before that, the servers must prove the version before: nobody else has changed their weights.

    If servers are gone when the canary checks them, the version is pushed again as soon as `sync` finds one.
    """
    if canary is not None:
        canary.prove_unchanged()
    while True:
        report = sync.push(version, policy, state)
        if canary is None or scores is None:
            return report, {}
        try:
            return report, canary.prove(report, scores)
        except ServerGoneError as error:
            logger.warning("version %d is pushed again: %s", version, error)
