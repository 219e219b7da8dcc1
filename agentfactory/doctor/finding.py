"""The output of `agentfactory doctor`: one finding per line."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """It can work, but slowly, not for all, or not for long."""
    PROBLEM = "problem"
    """It cannot work."""


@dataclass(frozen=True)
class Finding:
    """The result of one check: its subject, what was found, and, unless all is well, what to do."""

    level: Level
    subject: str
    text: str
    fix: str = ""


def ok(subject: str, text: str) -> Finding:
    """Create a finding that all is well."""
    return Finding(Level.OK, subject, text)


def warning(subject: str, text: str, fix: str) -> Finding:
    """Create a finding that it can work, with restrictions."""
    return Finding(Level.WARNING, subject, text, fix)


def problem(subject: str, text: str, fix: str) -> Finding:
    """Create a finding that it cannot work."""
    return Finding(Level.PROBLEM, subject, text, fix)


def gib(size: float) -> str:
    """Format bytes for people."""
    return f"{size / 2**30:.1f} GiB"
