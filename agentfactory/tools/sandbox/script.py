"""`run_script`: one program in a fresh sandbox, for code tests whose output is judged outside."""

from dataclasses import dataclass

from agentfactory.tools.sandbox import process
from agentfactory.tools.sandbox.limits import SandboxSettings
from agentfactory.tools.sandbox.session import Sandbox

_STDOUT_BYTES, _STDERR_BYTES = 1 << 20, 1 << 16
_PROGRAM, _INPUT = "main.py", ".stdin"


@dataclass(frozen=True)
class ScriptResult:
    """The result of a program. None of it can be trusted: the program could have printed anything."""

    stdout: str
    """The first MiB."""
    stderr: str
    """The first 64 KiB."""
    status: int
    """Exit status; 128 plus the signal's number if it was killed."""
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
    """Run the program `code` in a fresh sandbox, with `files` (name -> content) in its folder, for at most `seconds`.

    Raises:
        SandboxUnavailable: this machine cannot run a sandbox.
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
