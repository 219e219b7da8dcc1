"""`python -P -m agentfactory.prepare FILE.py:NAME FOLDER SEED`: run a recipe's `prepare` in a process of its own."""

import shutil
import sys
from pathlib import Path

from tools import lifeline
from tools.user_code import load_object


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
    lifeline.follow_parent()
    prepare(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
