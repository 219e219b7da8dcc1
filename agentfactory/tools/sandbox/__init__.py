"""Sandboxes for unreviewed code: each runs one Python in bubblewrap. docs/sandbox.md says what they prevent."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Load `run_script` on first use: every process imports the settings, and few start a sandbox."""
    if name != "run_script":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agentfactory.tools.sandbox.session import run_script

    return run_script
