"""The interface of the checks of an audit."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from agentfactory.audit.opened import Opened
from agentfactory.audit.record import Record, Seen
from agentfactory.audit.reports import Unchecked
from agentfactory.base.findings import Evidence, Finding, Severity
from agentfactory.rollout.trajectory import Trajectory

NEAR = 1e-6
Parts = dict[tuple[bool, str], Opened]
"""(whether for held-out tasks, name of the source) -> the part of the recipe."""


class Check(ABC):
    """A check of one topic: it sees every saved group once, in order, and then gives its findings. It must not keep
    groups, of which a long run has millions of tokens."""

    topic: ClassVar[str]
    """Name of what is checked, in a report."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Streams of a record without which there is nothing to check (record.TOKENS, ...)."""

    def __init__(self, record: Record, parts: Parts) -> None:
        """`parts` is empty if the record has no recipe that can be opened."""
        self.record = record
        self.parts = parts
        self.unchecked: list[Unchecked] = []
        """Subjects that the check could not compare, known after all groups."""
        self._counted = 0

    @abstractmethod
    async def note(self, seen: Seen) -> None:
        """Look at a group."""

    @abstractmethod
    def findings(self) -> Iterator[Finding]:
        """Yield what was found, after all groups."""

    @property
    @abstractmethod
    def looked_at(self) -> str:
        """Number of compared chains, tokens or files, such as "1,200 chains"; empty if there was nothing to compare."""

    def some_of(self, seen: Seen, most: int) -> Iterator[Trajectory]:
        """Yield the chains of a group to look at, if all would take too long: of those of training about `most`, evenly
        over the run, and every tenth held-out one."""
        every = 10 if seen.held_out else max(1, self.record.size * len(seen.group.trajectories) // most)
        for chain in seen.group.trajectories:
            self._counted += 1
            if self._counted % every == 0:
                yield chain

    def part_of(self, seen: Seen) -> Opened:
        """Return the part of the recipe whose chains these are."""
        return self.parts[bool(seen.held_out), seen.group.source]

    def wrong(self, text: str, fix: str, evidence: Sequence[Evidence] = ()) -> Finding:
        """Return a finding of severity WRONG."""
        return Finding(Severity.WRONG, self.topic, text, fix, evidence)

    def warning(self, text: str, fix: str, evidence: Sequence[Evidence] = ()) -> Finding:
        """Return a finding of severity WARNING."""
        return Finding(Severity.WARNING, self.topic, text, fix, evidence)

    def remark(self, text: str, fix: str = "", evidence: Sequence[Evidence] = ()) -> Finding:
        """Return a finding of severity NOTE."""
        return Finding(Severity.NOTE, self.topic, text, fix, evidence)


def differ(found: float, saved: float) -> bool:
    """Return whether two figures differ by more than rounding."""
    return abs(found - saved) > NEAR * max(1.0, abs(found))
