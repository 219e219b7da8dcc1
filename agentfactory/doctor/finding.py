"""The output of `agentfactory doctor`: one finding per line."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """The run can work, but slowly, in part, or not for long."""
    PROBLEM = "problem"
    """The run cannot work."""


@dataclass(frozen=True)
class Finding:
    """The result of one check: its subject, the observation, and, unless all is well, a fix."""

    level: Level
    subject: str
    text: str
    fix: str = ""


def ok(subject: str, text: str) -> Finding:
    """Create a finding that all is well."""
    return Finding(Level.OK, subject, text)


def warning(subject: str, text: str, fix: str) -> Finding:
    """Create a finding that the run can work with restrictions."""
    return Finding(Level.WARNING, subject, text, fix)


def problem(subject: str, text: str, fix: str) -> Finding:
    """Create a finding that the run cannot work."""
    return Finding(Level.PROBLEM, subject, text, fix)


def gib(size: float) -> str:
    """Format bytes as GiB."""
    return f"{size / 2**30:.1f} GiB"
