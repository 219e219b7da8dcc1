"""Check Harbor tasks without a model: each task's solution must pass its tests, and doing nothing must fail them.

`python -m agentfactory.worlds.harbor.check FOLDER IMAGE=ROOT ...`, such as `ubuntu:24.04=/`. Exits with status 1 if a
task fails this check.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentfactory.base.errors import SettingError
from agentfactory.base.processes.environment import name_variables
from agentfactory.worlds.harbor.harbor import Harbor
from agentfactory.worlds.harbor.harbor_task import Image
from agentfactory.worlds.harbor.tasks import load_rows


async def play(row: dict[str, Any], commands: Sequence[str] = (), solve: bool = False) -> dict[str, float]:
    """Play a task with commands or with its solution, and return the rewards of its tests."""
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
    """Print each task's rewards for its solution and for doing nothing; return whether all are as expected."""
    good = True
    for row in rows:
        solved, idle = await play(row, solve=True), await play(row)
        fine = solved["success"] == 1.0 and idle["success"] == 0.0
        good &= fine
        print(f"{row['task']:30} solution {solved['reward']:g}  nothing {idle['reward']:g}  {'' if fine else 'WRONG'}")
    return good


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m agentfactory.worlds.harbor.check", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("images", nargs="*", metavar="IMAGE=ROOT")
    parser.add_argument("--run-done", action="store_true", help="the roots already have the results of RUN")
    parser.add_argument("--env", nargs="*", default=[], metavar="NAME", help="variables that tasks may use, as ${NAME}")
    arguments = parser.parse_args()
    pairs = (text.rpartition("=") for text in arguments.images)
    images = {image: Image(str(Path(root).resolve()), arguments.run_done) for image, _, root in pairs}
    name_variables(arguments.env)
    try:
        rows = load_rows(arguments.folder, images, "data.harbor")
    except SettingError as error:
        sys.exit(str(error))
    sys.exit(0 if asyncio.run(check(rows)) else 1)


if __name__ == "__main__":
    main()
