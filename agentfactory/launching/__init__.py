"""Training on one machine: its processes and the run folder; here, the option --resume."""

import argparse
from pathlib import Path


def add_resume_option(parser: argparse._ActionsContainer) -> None:
    """Add the option --resume [PATH]; `settle_resume` corrects how argparse parses it."""
    about = "continue the run in `output`, from this checkpoint (default: the newest)"
    parser.add_argument("--resume", nargs="?", const="auto", metavar="PATH", help=about)


def settle_resume(options: argparse.Namespace) -> None:
    """Treat a key=value after a bare --resume as an override, not as a path."""
    if options.resume and "=" in options.resume and not Path(options.resume).exists():
        options.overrides.append(options.resume)
        options.resume = "auto"
