"""Where scored groups come from: the rollout worker (rollout's delivery.WorkerProcess), or files of saved groups."""

from pathlib import Path
from typing import Protocol

from agentfactory.rollout.trajectory import Group, read_groups
from agentfactory.tools.errors import SettingError


class GroupSource(Protocol):
    """What the loop asks of a source. Only rank 0 has one; its opener closes it."""

    def next_batch(self, groups: int) -> list[Group]:
        """The next groups to train on; waits for them."""

    def published(self, version: int, model: str) -> None:
        """Weights of this version are live: new turns ask the server for `model`. The first call is the version that
        the run begins with."""

    def figures(self) -> dict[str, float]:
        """What was counted while the last batch was made, by metric name."""

    def acknowledge(self, group_ids: list[str]) -> None:
        """A durable checkpoint holds what these groups taught."""

    def evaluate(self) -> dict[str, float]:
        """Metrics of the published weights on held-out tasks; empty if there are none."""


class SavedGroups:
    """Groups from trajectories files, in their order, each once: training without worker or server."""

    def __init__(self, path: Path, needed: int, skip: int = 0) -> None:
        """`skip` groups were trained already, of `needed` in all. Raises ValueError where `path` holds fewer, or a line
        that is no group."""
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
        """The next groups of the file."""
        return [next(self._groups) for _ in range(groups)]

    def published(self, version: int, model: str) -> None:
        """Saved groups do not depend on the weights."""

    def figures(self) -> dict[str, float]:
        """Nothing is counted."""
        return {}

    def acknowledge(self, group_ids: list[str]) -> None:
        """The files stay as they are."""

    def evaluate(self) -> dict[str, float]:
        """Nothing generates, so nothing can be evaluated."""
        return {}
