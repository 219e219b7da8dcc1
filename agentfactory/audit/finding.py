"""The results of an audit: findings with their evidence, and what could not be checked."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

READ = "its files"
"""Topic of findings about files that cannot be read."""
MOST_EVIDENCE = 5
"""Places of a finding that are kept; the text has the number of all."""


class Severity(StrEnum):
    """The severity of a finding."""

    WRONG = "wrong"
    """A figure, a mask or a weight is not what it should be: results of the run cannot be trusted."""
    WARNING = "warning"
    """The run is what it says, and will probably not learn, or not what its user wants."""
    NOTE = "note"
    """Worth knowing."""


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
        parts = [f"chain {self.chain}" if self.chain else f"group {self.group}" if self.group else ""]
        parts += [
            f"row {self.row + 1}" if self.row else "",
            f"token {self.position}" if self.position is not None else "",
        ]
        parts.append(self.file)
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class Finding:
    """Something that an audit found: its topic, the observation, the likely cause with the fix, and the evidence."""

    severity: Severity
    topic: str
    text: str
    fix: str
    evidence: Sequence[Evidence] = ()


@dataclass(frozen=True)
class Unchecked:
    """A topic that could not be checked, and why."""

    topic: str
    why: str


@dataclass(frozen=True)
class Report:
    """The results of the audit of a run. `looked_at` has the number of things that each check has compared."""

    run: str
    kind: str
    findings: Sequence[Finding] = ()
    unchecked: Sequence[Unchecked] = ()
    looked_at: dict[str, str] = field(default_factory=dict)

    @property
    def worst(self) -> Severity | None:
        """The highest severity of its findings; None without findings."""
        return next((level for level in Severity if any(one.severity is level for one in self.findings)), None)

    def of(self, severity: Severity) -> list[Finding]:
        """Return the findings of a severity."""
        return [finding for finding in self.findings if finding.severity is severity]


@dataclass
class Places:
    """Evidence as it is found: the first MOST_EVIDENCE places, and the number of all."""

    total: int = 0
    kept: list[Evidence] = field(default_factory=list)

    def add(self, evidence: Evidence) -> None:
        """Note a place."""
        self.total += 1
        if len(self.kept) < MOST_EVIDENCE:
            self.kept.append(evidence)

    def __bool__(self) -> bool:
        return self.total > 0
