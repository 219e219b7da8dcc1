"""The interface of the checks of an audit."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from agentfactory.audit.finding import Evidence, Finding, Severity
from agentfactory.audit.record import Record, Seen


class Check(ABC):
    """A check of one topic: it sees every saved group once, in order, and then gives its findings. It must not keep
    groups, of which a long run has millions of tokens."""

    topic: ClassVar[str]
    """Name of what is checked, in a report."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Streams of a record without which there is nothing to check (record.TOKENS, ...)."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def note(self, seen: Seen) -> None:
        """Look at a group."""

    @abstractmethod
    def findings(self) -> Iterator[Finding]:
        """Yield what was found, after all groups."""

    @property
    @abstractmethod
    def looked_at(self) -> str:
        """What was compared, in words and numbers, such as "1,200 chains"; empty if there was nothing to compare."""

    def wrong(self, text: str, fix: str, evidence: list[Evidence] | tuple[()] = ()) -> Finding:
        """Return a finding of severity WRONG."""
        return Finding(Severity.WRONG, self.topic, text, fix, evidence)

    def warning(self, text: str, fix: str, evidence: list[Evidence] | tuple[()] = ()) -> Finding:
        """Return a finding of severity WARNING."""
        return Finding(Severity.WARNING, self.topic, text, fix, evidence)

    def remark(self, text: str, fix: str = "", evidence: list[Evidence] | tuple[()] = ()) -> Finding:
        """Return a finding of severity NOTE."""
        return Finding(Severity.NOTE, self.topic, text, fix, evidence)
