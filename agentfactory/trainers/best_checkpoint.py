"""Which checkpoint of a run is the best, by the figure that `train.keep_best` names. It needs no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentfactory.trainers.checkpoint_folder import read_info, step_of

AUTO = "auto"
BY_EVALUATION = ("eval/sampled/success", "eval/sampled/reward")
"""What AUTO stands for: the first that a run has."""


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint of the highest figure."""

    path: Path
    step: int
    metric: str
    value: float


def find_best(checkpoints: Sequence[Path], metric: str | None) -> BestCheckpoint | None:
    """The checkpoint whose figure is the highest (of several, the newest), `metric` being what `train.keep_best` says.
    None where no checkpoint has a finite figure; it has one if it was written in a step that measured it."""
    measured = {}
    for path in checkpoints:
        try:
            measured[path] = read_info(path)["metrics"]
        except (OSError, ValueError, LookupError):
            continue  # deleted meanwhile, or written by something else
    for name in metric_names(metric):
        found = [
            BestCheckpoint(path, step_of(path), name, value)
            for path, figures in measured.items()
            if (value := figure(figures, name)) is not None
        ]
        if found:
            return max(found, key=lambda best: (best.value, best.step))
    return None


def metric_names(wanted: str | None) -> tuple[str, ...]:
    """The metrics that a value of `train.keep_best` stands for, the first of which that there is counts."""
    if wanted is None:
        return ()
    return BY_EVALUATION if wanted == AUTO else (wanted,)


def figure(figures: Any, name: str) -> float | None:
    """A finite number of that name: NaN compares with nothing, and the highest would depend on the order."""
    value = figures.get(name) if isinstance(figures, Mapping) else None
    return value if isinstance(value, int | float) and math.isfinite(value) else None
