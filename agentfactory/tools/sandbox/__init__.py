"""Sandboxes for unreviewed code: each runs one Python in bubblewrap. docs/sandbox.md says what they prevent."""

from agentfactory.tools.sandbox.script import ScriptResult, run_script
from agentfactory.tools.sandbox.session import CellResult, Sandbox, SandboxLost
from agentfactory.tools.sandbox.settings import SandboxKind, SandboxSettings, SandboxUnavailable

__all__ = [
    "CellResult",
    "Sandbox",
    "SandboxKind",
    "SandboxLost",
    "SandboxSettings",
    "SandboxUnavailable",
    "ScriptResult",
    "run_script",
]
