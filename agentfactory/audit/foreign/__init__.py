"""Readers of other projects' runs, one project per file.

A reader turns the files that a project saves into a Record, without that project's packages, and says in `Record.lacks`
what these files do not have. It is a function `read(path) -> Record | None`, None if the files at `path` are not its
project's. To add a format, write a file with such a function and name it in FORMATS.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from agentfactory.audit.foreign import prime_rl, trl, verifiers, verl
from agentfactory.audit.record import Record
from agentfactory.base.errors import SettingError

FORMATS: Sequence[Callable[[Path], Record | None]] = (trl.read, prime_rl.read, verifiers.read, verl.read)
"""In this order, because a folder of prime-rl's also has the files of verifiers."""


def read(path: Path) -> Record | None:
    """Return the record of another project's run in the folder `path`, or of a file of it; None if no reader knows it.
    Raises SettingError with the file, the line and a fix if a file is damaged. The last line of a file may be
    incomplete, because the run may still be writing it."""
    for reader in FORMATS:
        if (record := reader(path)) is not None:
            if not record.size and not record.problems:
                raise SettingError("", f"{path}: no chain in its files is complete", "audit it when it has saved one")
            return record
    return None
