"""Plays Harbor tasks without a model: the solution has to pass the tests, and doing nothing must not.

`python -m agentfactory.worlds.harbor.check FOLDER IMAGE=ROOT ...`, such as `ubuntu:24.04=/`. Exits with 1 if a task
does not behave.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentfactory.tools.errors import SettingError
from agentfactory.worlds.harbor.harbor import Harbor
from agentfactory.worlds.harbor.tasks import Image, load_rows


async def play(row: dict[str, Any], commands: Sequence[str] = (), solve: bool = False) -> dict[str, float]:
    """Play a task by commands, or by its solution, and return what its tests say."""
    shell = Harbor()
    try:
        await shell.reset(**row)
        for command in commands:
            await shell.shell(command)
        if solve:
            await shell.solve()
        return await shell.reward()
    finally:
        await shell.close()


async def check(rows: Sequence[dict[str, Any]]) -> bool:
    """Print the rewards of the solution and of doing nothing for each task; return whether all are as they should."""
    good = True
    for row in rows:
        solved, idle = await play(row, solve=True), await play(row)
        fine = solved["success"] == 1.0 and idle["success"] == 0.0
        good &= fine
        print(f"{row['task']:30} solution {solved['reward']:g}  nothing {idle['reward']:g}  {'' if fine else 'WRONG'}")
    return good


def main() -> None:
    """Check the tasks that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m agentfactory.worlds.harbor.check", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("images", nargs="*", metavar="IMAGE=ROOT")
    parser.add_argument("--run-done", action="store_true", help="RUN instructions were done in the roots")
    arguments = parser.parse_args()
    pairs = (text.rpartition("=") for text in arguments.images)
    images = {image: Image(str(Path(root).resolve()), arguments.run_done) for image, _, root in pairs}
    try:
        rows = load_rows(arguments.folder, images, "data.harbor")
    except SettingError as error:
        sys.exit(str(error))
    sys.exit(0 if asyncio.run(check(rows)) else 1)


if __name__ == "__main__":
    main()
