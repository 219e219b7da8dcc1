"""What `agentfactory doctor` says: one finding a line."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """It can work, but slowly, not for all, or not for long."""
    PROBLEM = "problem"
    """It cannot work."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what it is, what was found, and, unless all is well, what to do."""

    level: Level
    subject: str
    text: str
    fix: str = ""


def ok(subject: str, text: str) -> Finding:
    """All is well."""
    return Finding(Level.OK, subject, text)


def warning(subject: str, text: str, fix: str) -> Finding:
    """It can work, but."""
    return Finding(Level.WARNING, subject, text, fix)


def problem(subject: str, text: str, fix: str) -> Finding:
    """It cannot work."""
    return Finding(Level.PROBLEM, subject, text, fix)


def gib(size: float) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.1f} GiB"
