"""The anchors of a chain's turns, by which the estimator `gigpo` compares them (train.advantage.options.anchors)."""

import logging
from statistics import fmean
from typing import Any, Literal

from agentfactory.rollout.trajectory import Trajectory
from agentfactory.tools.calls.run_notices import tell
from agentfactory.tools.environments.environment import anchor_text
from agentfactory.trainers.loop.advantages import Groups, step_groups

logger = logging.getLogger(__name__)

Anchors = Literal["environment", "observation"]


def turn_anchors(trajectory: Trajectory, kind: Anchors) -> list[str | None]:
    """Return an anchor for each turn, or an empty list if there are none: those of the environment, or digests of what
    the model was shown before each turn."""
    return list(trajectory.anchors) if kind == "environment" else _observed(trajectory)


def _observed(trajectory: Trajectory) -> list[str | None]:
    """Return digests of the messages between one turn and the next. A turn that could not be read changed nothing: what
    was shown before it still holds, and not the complaint. None where nothing was shown, as after a summary."""
    if not trajectory.turns:
        return []
    messages = trajectory.messages
    said = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    # the task itself may have messages of an assistant, which come before
    said = said[-trajectory.turns :]
    anchors: list[str | None] = []
    before = 0
    for turn, place in enumerate(said):
        if turn - 1 in trajectory.malformed_turns:
            anchors.append(anchors[-1])
        else:
            seen = [_seen(message) for message in messages[before:place]]
            anchors.append(anchor_text(seen) if seen else None)
        before = place + 1
    return anchors


def _seen(message: dict[str, Any]) -> list[Any]:
    return [message["role"], message.get("name"), message.get("content")]


def step_metrics(groups: Groups) -> dict[str, float]:
    """Return how many of a batch's turns have others to be compared with, and how many there are together. If none has
    an anchor, a person is told: nothing tells `gigpo` from `grpo` then."""
    anchored = turns = 0
    sizes: list[int] = []
    for group in groups:
        anchored += sum(anchor is not None for chain in group for anchor in chain.anchors)
        turns += sum(len(chain.turn_ends) for chain in group)
        sizes += [len(members) for members in step_groups([chain.anchors for chain in group]) if len(members) > 1]
    if turns and not anchored:
        problem = "train.advantage.estimator=gigpo: no turn of a batch has an anchor, so it trains as grpo does"
        fix = "fix: let the environment give anchors, or set train.advantage.options.anchors=observation"
        tell(logger, "no anchors", f"{problem}; {fix}", see="docs/algorithms.md")
    shared = {"step_groups/turns": sum(sizes) / turns} if turns else {}
    return shared | ({"step_groups/size": fmean(sizes)} if sizes else {})
