"""`agentfactory launch`: its options; it writes the files of a scheduler and submits them."""

import argparse
import importlib
import os
import secrets
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

from agentfactory.base.errors import CommandFailed, SettingError
from agentfactory.recipe.composition import COMMAND_LINE, display

ABOUT = "run a recipe on several machines, by SLURM, Kubernetes or SkyPilot"
EXAMPLES = [
    "launch recipe.yaml --on slurm cluster.trainers=2 cluster.servers=1 --dry-run",
    "launch recipe.yaml --on kubernetes --cluster cluster.yaml train.steps=500",
]


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("recipe", metavar="RECIPE", help="a YAML file")
    about = "overrides of the recipe, and with the prefix `cluster.` of the description (docs/multi-node.md)"
    command.add_argument("overrides", metavar="key=value", nargs="*", help=about)
    command.add_argument("--on", required=True, choices=("slurm", "kubernetes", "skypilot"), help="the scheduler")
    about = "a YAML file that describes the machines"
    command.add_argument("--cluster", type=Path, metavar="FILE.yaml", help=about)
    command.add_argument("--dry-run", action="store_true", help="print the files; write and submit nothing")


def run(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Write the job's files and submit them. Raises SettingError, CommandFailed."""
    from agentfactory.cluster.description import read_job

    job = read_job(options.on, options.recipe, options.overrides, options.cluster)
    scheduler = importlib.import_module(f"agentfactory.cluster.{options.on}")
    files: dict[str, str] = scheduler.files(job)
    if options.dry_run:
        for name, text in files.items():
            say(f"# ---- {name}\n" * (len(files) > 1) + text.rstrip("\n"))
        return 0
    for name in job.cluster.secrets:
        if not os.environ.get(name):
            raise SettingError("cluster.secrets", f"${name} is not set", f"export {name}=...", source=COMMAND_LINE)
    folder = job.folder if options.on == "slurm" else Path(f"{job.name}-launch")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
            say(f"wrote {display(folder / name)}")
    except OSError as error:
        raise SettingError("output", f"{folder}: {error.strerror}", "choose another name", COMMAND_LINE) from None
    keys = {name: os.environ.get(name) or secrets.token_hex(32) for name in job.secrets}
    for command, stdin in scheduler.submit(job, folder, keys):
        say(shlex.join(command))
        try:
            done = subprocess.run(command, input=stdin, text=True, env={**os.environ, **keys})
        except FileNotFoundError:
            fix = "run this where the scheduler's tools are, or use --dry-run and submit the files there"
            raise SettingError("--on", f"{command[0]} is not installed", fix, source=COMMAND_LINE) from None
        if done.returncode:
            raise CommandFailed(f"`{shlex.join(command)}` ended with exit status {done.returncode}")
    return 0
