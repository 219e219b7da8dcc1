"""The option --resume, of `agentfactory train` and of a trainer process."""

import argparse
from pathlib import Path


def add_resume_option(parser: argparse._ActionsContainer) -> None:
    """The option --resume [PATH]; `settle_resume` corrects what argparse makes of it."""
    about = "go on with the run in `output`, from this checkpoint of it (default: the newest)"
    parser.add_argument("--resume", nargs="?", const="auto", metavar="PATH", help=about)


def settle_resume(options: argparse.Namespace) -> None:
    """A key=value after a bare --resume is an override, not a path."""
    if options.resume and "=" in options.resume and not Path(options.resume).exists():
        options.overrides.append(options.resume)
        options.resume = "auto"
