"""The choice of a run's best checkpoint by the metric of `train.keep_best`. Does not need torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentfactory.base.files.untrusted_files import RefusedFileError
from agentfactory.base.messages import is_finite_number
from agentfactory.trainers.checkpoints.checkpoint_folder import read_info, step_of

AUTO = "auto"
BY_EVALUATION = ("eval/sampled/success", "eval/sampled/reward")
"""Metrics for AUTO: the first one that a run has is used."""


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint with the highest value of the metric."""

    path: Path
    step: int
    metric: str
    value: float


def find_best(checkpoints: Sequence[Path], metric: str | None, within: Path | None = None) -> BestCheckpoint | None:
    """Return the checkpoint with the highest value (of several, the newest); `metric` is the value of
    `train.keep_best`. None if no checkpoint has a finite value; only checkpoints of steps that measured the metric have
    one. Links below the folder `within` (None: in the checkpoint) are not followed: they raise RefusedFileError."""
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
    """Return the metrics for a value of `train.keep_best`; the first one that exists is used."""
    if wanted is None:
        return ()
    return BY_EVALUATION if wanted == AUTO else (wanted,)


def figure(figures: Any, name: str) -> float | None:
    """Return the finite number called `name`, else None. NaN is excluded: no comparison with it is true, so the maximum
    would depend on the order."""
    value = figures.get(name) if isinstance(figures, Mapping) else None
    return value if is_finite_number(value) else None
