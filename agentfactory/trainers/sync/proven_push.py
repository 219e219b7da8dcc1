"""A push of weights to the servers, followed by the canary's proof that they compute with them."""

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
    """Push a version and prove it with the canary; return the report and the canary's metrics. `scores` are the
    trainer's. First, the servers must prove that they still have the previous version.

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
            logger.warning("pushing version %d again: %s", version, error)
