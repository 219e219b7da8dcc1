"""Sandboxes for code that nobody has read: bubblewrap around one Python each. docs/sandbox.md says what they hold."""

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
