"""Sources of scored groups: the rollout workers (rollout's workers.RolloutWorkers), or files of saved groups."""

from pathlib import Path
from typing import Protocol

from agentfactory.base.errors import SettingError
from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.inference.weight_versions import Published
from agentfactory.rollout.trajectory import Group


class GroupSource(Protocol):
    """The interface of a source for the training loop. Only rank 0 has a source; the code that opens it closes it."""

    def next_batch(self, groups: int) -> list[Group]:
        """Wait for the next groups to train on, and return them."""

    def published(self, published: Published) -> None:
        """Note that these weights are live. The first call has the version with which the run begins."""

    def figures(self) -> dict[str, float]:
        """Return counts from the production of the last batch, by metric name."""

    def acknowledge(self, group_ids: list[str]) -> None:
        """Note that a durable checkpoint includes the training on these groups."""

    def evaluate(self) -> dict[str, float]:
        """Return metrics of the published weights on held-out tasks; empty if there are none."""


class SavedGroups:
    """Groups from trajectories files, in order, each once: for training without a worker or server."""

    def __init__(self, path: Path, needed: int, skip: int = 0) -> None:
        """`needed` groups are read in all; the first `skip` were already trained. Raises ValueError if `path` contains
        fewer, or a line that is not a group."""
        if not path.exists():
            raise SettingError(
                "train.from_trajectories", f"{path} does not exist", "name a file or folder of saved groups"
            )
        held = sum(1 for _ in read_groups(path))
        if held < needed:
            problem = f"{path} holds {held} groups, and train.steps x train.batch_size asks for {needed}"
            raise SettingError("train.from_trajectories", problem, "lower one of them")
        self._groups = read_groups(path)
        for _ in range(skip):
            next(self._groups)

    def next_batch(self, groups: int) -> list[Group]:
        """Return the next groups of the file."""
        return [next(self._groups) for _ in range(groups)]

    def published(self, published: Published) -> None:
        """Do nothing: saved groups do not depend on the weights."""

    def figures(self) -> dict[str, float]:
        """Return nothing: there are no counts."""
        return {}

    def acknowledge(self, group_ids: list[str]) -> None:
        """Do nothing: the files do not change."""

    def evaluate(self) -> dict[str, float]:
        """Return nothing: evaluation needs generation."""
        return {}
