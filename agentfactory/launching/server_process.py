"""An inference server as a child of a script or notebook: started, awaited, and ended with it."""

import asyncio
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from agentfactory.launching.processes import POLL_SECONDS, Child, ChildFailed
from agentfactory.rollout import serving
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.tools import parent_watch

_END_SECONDS = 10.0


@asynccontextmanager
async def serve(recipe: RolloutRecipe, adapters: Mapping[str, Path]) -> AsyncIterator[tuple[Child, str]]:
    """A server on `recipe.model`, and its address. It ends with the context, or with this process, however that ends.

    Raises ChildFailed, with the server's reason, where it does not come up. Its log stays where it ended by itself.
    """
    child = _start(recipe, adapters)
    try:
        url = await _ready(child, recipe.server.startup_seconds)
        try:
            yield child, url
        finally:
            if child.process.poll() is None:
                child.log.unlink()
    finally:
        await asyncio.to_thread(_end, child.process)


def _start(recipe: RolloutRecipe, adapters: Mapping[str, Path]) -> Child:
    descriptor, name = tempfile.mkstemp(prefix="agentfactory-server-", suffix=".log")
    with os.fdopen(descriptor, "ab") as file:
        process = subprocess.Popen(
            serving.server_command(recipe, adapters),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={"OMP_WAIT_POLICY": "passive", **os.environ, **parent_watch.environment()},
            # a notebook's or a terminal's interrupt is not for the server
            start_new_session=True,
        )
    return Child("server", process, Path(name), 0, serving.explain)


async def _ready(child: Child, seconds: float) -> str:
    """The address of the server, once it answers."""
    try:
        async with asyncio.timeout(seconds):
            while (url := serving.ready_url(child.tail(1000))) is None:
                if child.process.poll() is not None:
                    raise child.failure()
                await asyncio.sleep(POLL_SECONDS)
            return url
    except TimeoutError:
        raise ChildFailed(
            f"the server was not ready after server.startup_seconds={seconds:g} (log: {child.log})"
        ) from None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server and what it started."""
    try:
        processes = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        processes = []
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(processes, timeout=1.0)
    for one in left:
        one.kill()
