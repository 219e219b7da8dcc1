"""Run a recipe's `prepare` in a process of its own: `python -m agentfactory.launching.prepare FILE.py:NAME FOLDER SEED
[IMPORT_PATH ...]`."""

import shutil
import sys
from pathlib import Path

from agentfactory.tools import import_path, parent_watch
from agentfactory.tools.user_code import UserCodeError, load_object


def prepare(reference: str, folder: Path, seed: int) -> None:
    """Call the user's function (folder, seed). `folder` gets its name when complete, so that it is all or none."""
    aside = folder.with_name(f".{folder.name}.partial")
    if aside.exists():
        # left by a run that was killed meanwhile
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    load_object(reference, Path.cwd())(aside, seed)
    aside.rename(folder)


if __name__ == "__main__":
    parent_watch.follow_parent()
    import_path.append_folders(map(Path, sys.argv[4:]))
    try:
        prepare(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    except UserCodeError as error:
        sys.exit(str(error))
