"""Sandboxes for code that nobody has read: bubblewrap around one Python each. docs/sandbox.md says what they hold."""

from tools.sandbox.script import ScriptResult, run_script
from tools.sandbox.session import CellResult, Sandbox, SandboxLost
from tools.sandbox.settings import SandboxKind, SandboxSettings, SandboxUnavailable

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
