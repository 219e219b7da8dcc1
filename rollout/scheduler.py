"""Which groups may start: a pure state machine, so that the bound on staleness can be read and tested."""

from dataclasses import dataclass


@dataclass
class Admission:
    """Bounds how far generation runs ahead of training.

    A group may start while `started < (max_staleness + 1 + version) * batch_size`: the groups beyond what version
    `version` has consumed are at most `max_staleness + 1` batches, so none is older than `max_staleness` updates
    when its turn to be trained comes. `total` ends the run: no more groups than will be trained are started.
    """

    batch_size: int
    max_staleness: int
    total: int
    version: int = 0
    started: int = 0

    def may_start(self) -> bool:
        """Whether one more group may start now."""
        return self.started < min(self.total, (self.max_staleness + 1 + self.version) * self.batch_size)

    def start(self) -> None:
        """Count a group in."""
        if not self.may_start():
            raise ValueError(f"group {self.started} may not start at version {self.version}")
        self.started += 1

    def dropped(self) -> None:
        """A started group will not be delivered: another takes its place."""
        self.started -= 1

    def publish(self, version: int) -> None:
        """New weights are live."""
        if version <= self.version:
            raise ValueError(f"version {version} follows {self.version}: versions must rise")
        self.version = version
