"""`data.tau2`: tasks of tau2-bench, as data rows."""

from typing import Any, ClassVar

from agentfactory.base.config import PositiveInt
from agentfactory.people.tau2.domain import Domain, Tau2
from agentfactory.rollout.config import TaskSource


class Tau2Source(TaskSource):
    """Tasks of tau2-bench (docs/tau2.md)."""

    world = "tau2"
    paths: ClassVar[tuple[str, ...]] = ("folder",)

    domain: Domain
    """mock (for tests), airline, retail or telecom."""
    folder: str | None = None
    """Folder with `tau2/domains/DOMAIN` and `tau2/user_simulator`, in place of the package's own data."""
    split: str = "base"
    """Split of the domain's tasks: base, train or test; telecom also has small and full."""
    tasks: PositiveInt | None = None
    """Use only this many tasks, from the start of the split. Null: all."""

    def rows(self) -> list[dict[str, Any]]:
        field, value = ("domain", self.domain) if self.folder is None else ("folder", self.folder)
        with Tau2.checks("tau2", field, value) as process:
            rows: list[dict[str, Any]] = process.call("rows", self.domain, self.folder, self.split)
        return rows[: self.tasks]
