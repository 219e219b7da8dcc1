"""Reading of the files in data/, and copies of them to damage."""

import shutil
from pathlib import Path

from agentfactory.audit.audit import audit
from agentfactory.audit.foreign import read
from agentfactory.audit.record import Record, Seen
from agentfactory.audit.reports import Report

DATA = Path(__file__).parent / "data"


def record_of(path: str | Path) -> Record:
    return read(DATA / path)


def groups_of(path: str | Path) -> list[Seen]:
    """Return the groups, after a second pass that has to give the same."""
    record = record_of(path)
    groups = list(record.groups())
    assert list(record.groups()) == groups
    assert len(groups) == record.size
    return groups


async def audited(path: str | Path) -> Report:
    return await audit(record_of(path))


def copied(name: str, to: Path) -> Path:
    return Path(shutil.copytree(DATA / name, to / Path(name).name))
