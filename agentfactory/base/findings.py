"""Findings of a diagnosis: of a run while it trains, of a saved run, or of a machine before the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial


class Severity(StrEnum):
    """The severity of a finding, the highest first."""

    WRONG = "wrong"
    """A figure, a mask or a weight is not what it should be: results of the run cannot be trusted."""
    PROBLEM = "problem"
    """The run cannot work."""
    WARNING = "warning"
    """The run can work, but probably does not learn, or only slowly, in part, or not for long."""
    NOTE = "note"
    """Worth knowing."""
    OK = "ok"


@dataclass(frozen=True)
class Evidence:
    """A place in the run's files that shows a finding. Rows of the chain and tokens of the row are counted from 0."""

    text: str
    group: str = ""
    chain: str = ""
    row: int | None = None
    position: int | None = None
    file: str = ""

    @property
    def place(self) -> str:
        """The place in words; the rows of a chain are counted from 1 there, as in the viewer."""
        parts = [
            f"chain {self.chain}" if self.chain else f"group {self.group}" if self.group else "",
            f"row {self.row + 1}" if self.row else "",
            f"token {self.position}" if self.position is not None else "",
            self.file,
        ]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class Finding:
    """One thing that was found: its topic, the observation, the fix if something is to be done, and the evidence."""

    severity: Severity
    topic: str
    text: str
    fix: str = ""
    evidence: Sequence[Evidence] = ()

    def __str__(self) -> str:
        return f"{self.text}; fix: {self.fix}" if self.fix else self.text


ok = partial(Finding, Severity.OK)
warning = partial(Finding, Severity.WARNING)
problem = partial(Finding, Severity.PROBLEM)
