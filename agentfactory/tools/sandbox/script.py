"""`run_script`: one program in a fresh sandbox, for code tests whose verdict is computed outside."""

from dataclasses import dataclass

from agentfactory.tools.sandbox import process
from agentfactory.tools.sandbox.session import Sandbox
from agentfactory.tools.sandbox.settings import SandboxSettings

_STDOUT_BYTES, _STDERR_BYTES = 1 << 20, 1 << 16
_PROGRAM, _INPUT = "main.py", ".stdin"


@dataclass(frozen=True)
class ScriptResult:
    """What a program did: all of it is its own word, for it could have printed anything."""

    stdout: str
    """Its first MiB."""
    stderr: str
    """Its first 64 KiB."""
    status: int
    """Exit status; 128 and the signal's number when it was killed."""
    timed_out: bool


async def run_script(
    code: str,
    stdin: str = "",
    *,
    seconds: float = 10.0,
    memory_mb: int = 256,
    files: dict[str, bytes] | None = None,
    settings: SandboxSettings | None = None,
) -> ScriptResult:
    """Run the program `code` in a sandbox of its own, with `files` (name -> content) beside it, for at most `seconds`.

    Raises:
        SandboxUnavailable: there is no sandbox on this machine.
        ValueError: a file's name leads out of the workspace, or the files do not fit into it.
    """
    settings = settings or SandboxSettings(memory_mb=memory_mb)
    starting = process.start(settings, [_STDOUT_BYTES, _STDERR_BYTES])
    sandbox = await Sandbox.ready(settings, starting)
    try:
        for name, content in (files or {}).items():
            await sandbox.write(name, content)
        await sandbox.write(_PROGRAM, code.encode("utf-8", "replace"))
        await sandbox.write(_INPUT, stdin.encode("utf-8", "replace"))
        status = await sandbox.run_script(_PROGRAM, _INPUT, seconds)
        return ScriptResult(sandbox.said(0), sandbox.said(1), 137 if status is None else status, status is None)
    finally:
        sandbox.close()
