"""An inference server as a child process of a command (`begin_server`), or of a script or notebook (`serve`)."""

import asyncio
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from agentfactory.base.processes.threads import run_in_thread
from agentfactory.base.run_notices import QUIET_SECONDS, doing
from agentfactory.launching.child_processes import POLL_SECONDS, Child, ChildFailed, Children, end_child, start_child
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.inference import server_command_line as serving
from agentfactory.rollout.model_hub import check_names, model_names

_END_SECONDS = 10.0


def begin_server(
    recipe: RolloutRecipe,
    command: Sequence[str],
    children: Children,
    log: Path,
    say: Callable[[str], None],
    adapters: Mapping[str, Path] | None = None,
    env: dict[str, str] | None = None,
) -> Child:
    """Start a server with `command`, which serves `recipe.model` and `adapters`."""
    beside = f" with {', '.join(str(path) for path in adapters.values())}" if adapters else ""
    say(f"starting the {recipe.server.engine} server on {recipe.server.model or recipe.model.path}{beside}")
    return children.start("server", command, log, env=env, explain=serving.explain)


def wait_for_server(
    recipe: RolloutRecipe, server: Child, children: Children, say: Callable[[str], None], early: bool = False
) -> str:
    """Wait until a new server is ready, or if `early`, until it listens at its address, where requests wait until it is
    ready; return the address. Raises ChildFailed if a child ends."""
    started, lines = time.monotonic(), list[str]()
    with doing(lambda seconds: f"waiting for the server, {seconds:.0f} s so far: {serving.stage(lines)}"):
        while (now := time.monotonic()) < started + recipe.server.startup_seconds:
            children.check_all()
            lines = server.tail(1000)
            # the server picks a free port, and logs its address
            if url := serving.ready_url(lines, early):
                if now - started > QUIET_SECONDS and not early:
                    say(f"the server is ready after {now - started:.0f} s")
                return url
            time.sleep(POLL_SECONDS)
    raise _not_ready(recipe.server.startup_seconds, server.log)


@asynccontextmanager
async def serve(recipe: RolloutRecipe, adapters: Mapping[str, Path]) -> AsyncIterator[tuple[Child, str]]:
    """Run a server on `recipe.model`; yield it with its address. Raises ChildFailed if it does not start."""
    await run_in_thread(partial(check_names, model_names(recipe)))
    descriptor, log = tempfile.mkstemp(prefix="agentfactory-server-", suffix=".log")
    os.close(descriptor)
    child = start_child("server", serving.server_command(recipe, adapters), Path(log), explain=serving.explain)
    try:
        try:
            async with asyncio.timeout(recipe.server.startup_seconds):
                while (url := serving.ready_url(child.tail(1000))) is None:
                    if child.process.poll() is not None:
                        raise child.failure()
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise _not_ready(recipe.server.startup_seconds, child.log) from None
        try:
            yield child, url
        finally:
            if child.process.poll() is None:
                child.log.unlink()
    finally:
        await asyncio.to_thread(end_child, child, _ends)


def _not_ready(seconds: float, log: Path) -> ChildFailed:
    return ChildFailed(f"the server was not ready after {seconds:g} s (log: {log})")


def _ends(child: Child) -> bool:
    with suppress(subprocess.TimeoutExpired):
        child.process.wait(_END_SECONDS)
    return child.process.poll() is not None
