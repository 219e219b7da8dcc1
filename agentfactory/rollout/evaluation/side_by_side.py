"""Two evaluations of the same tasks beside each other: means, and the mean difference over tasks."""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from agentfactory.rollout.evaluation.intervals import Share, of_mean
from agentfactory.rollout.evaluation.pass_at_k import Estimate
from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.trajectory import Trajectory
from agentfactory.tools.errors import SettingError

OPTION = "--beside"
MODES = ("sampled", "greedy")


@dataclass(frozen=True)
class Difference:
    """A metric in two evaluations, as means over the tasks that both have, and the first minus the second."""

    this: float
    other: float
    difference: Estimate


def chains_of(evaluation: Path) -> Path:
    """Return the folder with the chains of an evaluation's run folder. Raise SettingError if it has none."""
    folder = evaluation.expanduser() / "trajectories"
    if not any(_file(folder, mode).is_file() for mode in MODES):
        fix = "name the run folder that `agentfactory eval` has written, such as runs/NAME/eval"
        raise SettingError(OPTION, f"{evaluation} is not the run folder of an evaluation", fix)
    return folder


def differences(chains: Path, others: Path) -> dict[str, dict[str, Difference]]:
    """Compare the chains of two evaluations, from the folders of `chains_of`. Return mode -> metric -> difference, for
    `reward` and `success`; a mode without a common task is left out.

    A task's value is the mean over its chains. Intervals are Student's t intervals of the mean difference over tasks.
    """
    found = {}
    for mode in MODES:
        if not (_file(chains, mode).is_file() and _file(others, mode).is_file()):
            continue
        these, those = _by_task(_file(chains, mode)), _by_task(_file(others, mode))
        pairs = [(these[task], those[task]) for task in these if task in those]
        compared = {name: _difference(pairs, name) for name in ("success", "reward")}
        if known := {name: difference for name, difference in compared.items() if difference}:
            found[mode] = known
    return found


def _file(folder: Path, mode: str) -> Path:
    return folder / f"final-{mode}.jsonl"


def _by_task(path: Path) -> dict[tuple[str, int], list[Trajectory]]:
    """Return the chains that did not fail, by task; equal tasks are numbered."""
    seen: dict[str, int] = defaultdict(int)
    found = {}
    # in the order of the tasks, and not of their ends
    for group in sorted(read_groups(path), key=lambda group: group.id):
        task = json.dumps(group.task, sort_keys=True)
        found[task, seen[task]] = [chain for chain in group.trajectories if chain.reward is not None]
        seen[task] += 1
    return found


def _difference(pairs: list[tuple[list[Trajectory], list[Trajectory]]], name: str) -> Difference | None:
    values = [(_value(these, name), _value(those, name)) for these, those in pairs]
    both = [(this, other) for this, other in values if this is not None and other is not None]
    if not both:
        return None
    shares = [Share(this - other, 1) for this, other in both]
    low, high = of_mean(shares) or (None, None)
    this, other = (fmean(side) for side in zip(*both, strict=True))
    return Difference(this, other, Estimate(this - other, low, high, len(both)))


def _value(chains: list[Trajectory], name: str) -> float | None:
    values: list[Any] = [chain.reward if name == "reward" else chain.metrics.get(name) for chain in chains]
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
