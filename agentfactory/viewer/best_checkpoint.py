"""Which checkpoint of a run is the best, by the figure that `train.keep_best` names."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentfactory.trainers.checkpoint_folder import read_info, step_of


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint of the highest figure."""

    path: Path
    step: int
    metric: str
    value: float


def find_best(checkpoints: Sequence[Path], metric: str) -> BestCheckpoint | None:
    """The checkpoint whose figure is the highest (of several, the newest), as the trainer chooses what it keeps. None
    where no checkpoint has a finite figure; it has one if it was written in a step that measured it."""
    found = []
    for path in checkpoints:
        try:
            value = read_info(path)["metrics"][metric]
        except (OSError, ValueError, LookupError, TypeError):
            continue  # deleted meanwhile, or written by something else
        if isinstance(value, int | float) and -math.inf < value < math.inf:
            found.append(BestCheckpoint(path, step_of(path), metric, value))
    return max(found, key=lambda best: (best.value, best.step), default=None)
