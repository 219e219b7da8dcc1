"""The runs at a path, of whatever kind, as records."""

from pathlib import Path

from agentfactory.audit.foreign.formats import read as read_foreign
from agentfactory.audit.record import Record
from agentfactory.audit.run_record import records_of
from agentfactory.base.errors import SettingError
from agentfactory.launching.run_folder import RECIPE, RunFolderError, check_run_of


def records_at(path: Path) -> list[Record]:
    """Return the records of the run at `path`, one for each of its stages. Raises SettingError if there is none, if
    another project's files are damaged, or if the folder of the run has links or other special files."""
    if not path.exists():
        raise SettingError("RUN", f"there is no {path}", "name the folder of a run, such as runs/quickstart")
    # first, because a folder with `logs` looks like a run of ours
    if (foreign := read_foreign(path)) is not None:
        return [foreign]
    try:
        check_run_of(path / RECIPE)
        found = records_of(path)
    except RunFolderError as error:
        problem, _, fix = str(error).partition("; fix: ")
        raise SettingError("RUN", problem, fix or "name another folder") from None
    if not found:
        fix = "name a folder that `agentfactory train` has written, or files of one of the projects in docs/audit.md"
        raise SettingError("RUN", f"{path} is no run", fix)
    return found
