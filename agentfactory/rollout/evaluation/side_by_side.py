"""Two evaluations of the same tasks beside each other: means, and the mean difference over tasks."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean

from agentfactory.base.errors import SettingError
from agentfactory.rollout.data import Task
from agentfactory.rollout.evaluation.pass_at_k import Estimate, Share, mean_figures, of_mean
from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.images.store import url_of

OPTION = "--beside"
MODES = ("sampled", "greedy")
METRICS = ("success", "reward")
_RESIZED = re.compile(re.escape(url_of("")) + "[0-9a-f]{32}")

TaskMeans = dict[tuple[str, int], dict[str, float]]
"""Task, with its number among equal tasks -> metric -> mean over the task's chains that did not fail."""


@dataclass(frozen=True)
class Difference:
    """A metric in two evaluations, as means over the tasks that both have, and the first minus the second."""

    this: float
    other: float
    difference: Estimate


@dataclass(frozen=True)
class OtherEvaluation:
    """An earlier evaluation: its run folder, and its means by mode."""

    folder: Path
    means: dict[str, TaskMeans]


def read_other(evaluation: Path) -> OtherEvaluation:
    """Return the evaluation in a run folder. Raise SettingError unless it is one that has finished."""
    folder = evaluation.expanduser()
    if not (folder / "trajectories" / "final-sampled.jsonl").is_file():
        fix = "name the run folder that `agentfactory eval` has written, such as runs/NAME/eval"
        raise SettingError(OPTION, f"{evaluation} is not the run folder of an evaluation", fix)
    # the tasks that ended first are no fair part of all
    if not (folder / "summary.json").is_file():
        problem = f"the evaluation in {evaluation} has not finished: it has no summary.json"
        raise SettingError(OPTION, problem, "wait for its end, or evaluate again")
    try:
        return OtherEvaluation(folder, read_means(folder / "trajectories"))
    except (OSError, ValueError) as error:
        raise SettingError(OPTION, f"{evaluation} cannot be read: {error}", "name another evaluation") from error


def read_means(chains: Path) -> dict[str, TaskMeans]:
    """Return the means of an evaluation by mode, from the folder of its chains."""
    files = {mode: chains / f"final-{mode}.jsonl" for mode in MODES}
    return {mode: _means(path) for mode, path in files.items() if path.is_file()}


def differences(these: dict[str, TaskMeans], those: dict[str, TaskMeans]) -> dict[str, dict[str, Difference]]:
    """Compare two evaluations. Return mode -> metric -> difference; a mode without a common task is left out. Intervals
    are Student's t intervals of the mean difference over tasks."""
    found = {}
    for mode in (mode for mode in MODES if mode in these and mode in those):
        pairs = [(means, those[mode][task]) for task, means in these[mode].items() if task in those[mode]]
        compared = {name: _difference(pairs, name) for name in METRICS}
        if known := {name: difference for name, difference in compared.items() if difference}:
            found[mode] = known
    return found


def _means(path: Path) -> TaskMeans:
    groups = [(g.id, _as_text(g.task), mean_figures(g.trajectories)) for g in read_groups(path)]
    seen: dict[str, Iterator[int]] = defaultdict(count)
    # in the order of the tasks, and not of their ends
    groups.sort(key=lambda group: group[0])
    return {(task, next(seen[task])): means for _, task, means in groups}


def _as_text(task: Task) -> str:
    """Return a task as text that does not depend on the run: images by name, without their sizes for its model."""
    if "images" in task:
        task = task | {"images": [Path(path).name for path in task["images"]]}
    return _RESIZED.sub("", json.dumps(task, sort_keys=True))


def _difference(pairs: list[tuple[dict[str, float], dict[str, float]]], name: str) -> Difference | None:
    both = [(these[name], those[name]) for these, those in pairs if name in these and name in those]
    if not both:
        return None
    low, high = of_mean([Share(this - other, 1) for this, other in both]) or (None, None)
    this, other = (fmean(side) for side in zip(*both, strict=True))
    return Difference(this, other, Estimate(this - other, low, high, len(both)))
