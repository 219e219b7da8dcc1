"""Finds a run's best checkpoint by the metric that `train.keep_best` names. Does not need torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentfactory.tools.files.untrusted_files import RefusedFileError
from agentfactory.trainers.checkpoints.checkpoint_folder import read_info, step_of

AUTO = "auto"
BY_EVALUATION = ("eval/sampled/success", "eval/sampled/reward")
"""Metrics that AUTO stands for: the first that a run has."""


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint with the highest value of the metric."""

    path: Path
    step: int
    metric: str
    value: float


def find_best(checkpoints: Sequence[Path], metric: str | None, within: Path | None = None) -> BestCheckpoint | None:
    """Returns the checkpoint with the highest value (of several, the newest); `metric` is the value of
    `train.keep_best`. None if no checkpoint has a finite value. A checkpoint has one if it was written in a step that
    measured the metric. Links below the folder `within` (None: in the checkpoint) are not followed: they raise
    RefusedFileError."""
    measured = {}
    for path in checkpoints:
        try:
            measured[path] = read_info(path, within)["metrics"]
        except RefusedFileError:
            raise
        except (OSError, ValueError, LookupError):
            continue  # deleted in the meantime, or written by another program
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
    """Returns the metrics that a value of `train.keep_best` stands for; the first one that exists is used."""
    if wanted is None:
        return ()
    return BY_EVALUATION if wanted == AUTO else (wanted,)


def figure(figures: Any, name: str) -> float | None:
    """Returns the finite number called `name`. NaN is excluded: it compares with nothing, so the maximum would depend
    on the order."""
    value = figures.get(name) if isinstance(figures, Mapping) else None
    return value if isinstance(value, int | float) and math.isfinite(value) else None
