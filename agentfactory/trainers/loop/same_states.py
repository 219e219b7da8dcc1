"""The anchors of a chain's turns (train.advantage.options.anchors): `gigpo` compares turns with equal anchors."""

import logging
from statistics import fmean
from typing import Literal

from agentfactory.base.run_notices import notify
from agentfactory.rollout.trajectory import Trajectory
from agentfactory.tools.environments.environment import anchor_text
from agentfactory.trainers.loop.advantages import Groups, step_groups

logger = logging.getLogger(__name__)

Anchors = Literal["environment", "observation"]


def turn_anchors(trajectory: Trajectory, kind: Anchors) -> list[str | None]:
    """Return an anchor for each turn (the environment's, or a digest of the observation before it), or an empty
    list."""
    return list(trajectory.anchors) if kind == "environment" else _observed(trajectory)


def _observed(trajectory: Trajectory) -> list[str | None]:
    """Return digests of the messages between one turn and the next, None if there are none, as after a summary. A
    malformed turn changes nothing: the turn after it keeps its anchor, and the error message is ignored."""
    if not trajectory.turns:
        return []
    messages = trajectory.messages
    said = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    # the task itself may begin with assistant messages
    said = said[-trajectory.turns :]
    anchors: list[str | None] = []
    before = 0
    for turn, place in enumerate(said):
        if turn - 1 in trajectory.malformed_turns:
            anchors.append(anchors[-1])
        else:
            seen = [[m["role"], m.get("name"), m.get("content")] for m in messages[before:place]]
            anchors.append(anchor_text(seen) if seen else None)
        before = place + 1
    return anchors


def step_metrics(groups: Groups) -> dict[str, float]:
    """Return the share of a batch's turns that are compared with others, and the mean size of their step groups. If no
    turn has an anchor, warn that `gigpo` is then the same as `grpo`."""
    anchored = turns = 0
    sizes: list[int] = []
    for group in groups:
        anchored += sum(anchor is not None for chain in group for anchor in chain.anchors)
        turns += sum(len(chain.turn_ends) for chain in group)
        sizes += [len(members) for members in step_groups([chain.anchors for chain in group]) if len(members) > 1]
    if turns and not anchored:
        problem = "train.advantage.estimator=gigpo: no turn of a batch has an anchor, so it trains as grpo does"
        fix = "fix: let the environment give anchors, or set train.advantage.options.anchors=observation"
        notify(logger, "no anchors", f"{problem}; {fix}", see="docs/algorithms.md")
    shared = {"step_groups/turns": sum(sizes) / turns} if turns else {}
    return shared | ({"step_groups/size": fmean(sizes)} if sizes else {})
