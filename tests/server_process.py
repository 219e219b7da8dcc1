"""Inference servers for tests: start the engine's own command from a recipe, wait for it, and end it."""

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from agentfactory.base.http.loopback import is_loopback
from agentfactory.base.processes import parent_watch
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.inference import server_command_line as serving
from agentfactory.rollout.inference.inference_client import InferenceClient
from tests.forked import Forked, start_engine

VLLM_PYTHON = os.environ.get("AGENTFACTORY_VLLM_PYTHON")
"""A Python that has vLLM, set by `make test-vllm`."""

EMBEDDED = "agentfactory.rollout.inference.embedded"
_START_SECONDS = 300.0


def listening(pid: int) -> list[Any]:
    """The addresses on which a process and its descendants listen, and receive datagrams."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    found = []
    for process in family:
        with suppress(psutil.NoSuchProcess):
            found += [each.laddr for each in process.net_connections("inet") if not each.raddr]
    return found


def only_loopback(pid: int) -> bool:
    """Return True if a process and its descendants listen, and on loopback only."""
    addresses = listening(pid)
    return bool(addresses) and all(is_loopback(address.ip) for address in addresses)


@contextmanager
def sglang_stand_in(model: Path, folder: Path, *flags: str, **environment: str) -> Iterator[str]:
    """Run the stand-in for SGLang with its log in `folder`/sglang.log; yield its address."""
    log = folder / "sglang.log"
    own = ("--model-path", str(model), "--dtype", "float32", "--enable-metrics")
    server = Forked("tests.sglang_server", *own, *flags, log=log, HF_HUB_OFFLINE="1", **environment)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not (ready := re.search(r"ready to roll! (\S+)", text := log.read_text() if log.exists() else "")):
            assert server.is_running(), text
            assert time.monotonic() < deadline, text
            time.sleep(0.05)
        yield ready[1]
    finally:
        server.kill(signal.SIGTERM)


@contextmanager
def serve(recipe: dict[str, Any], folder: Path, weight_transfer: str | None = None) -> Iterator[str]:
    """Run the server that `recipe` describes, with its log in `folder`/server.log; yield its address. An embedded
    engine on the CPU is forked, to save the seconds of its imports; CUDA does not work in a fork."""
    command = serving.server_command(RolloutRecipe.model_validate(recipe), weight_transfer=weight_transfer)
    log = folder / "server.log"
    if EMBEDDED in command and not torch.cuda.is_available():
        model, *flags = command[command.index(EMBEDDED) + 1 :]
        engine, url = start_engine(Path(model), *flags, log=log, HF_HUB_OFFLINE="1")
        try:
            yield url
        finally:
            engine.kill(signal.SIGTERM)
        return
    env = {**os.environ, **parent_watch.environment(), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while (url := serving.ready_url(lines := log.read_text(errors="replace").splitlines())) is None:
            assert server.poll() is None, serving.explain(lines) or lines[-20:]
            assert time.monotonic() < deadline, lines[-20:]
            time.sleep(0.1)
        # also what vLLM's own processes use to find each other
        assert only_loopback(server.pid), listening(server.pid)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:  # vLLM waits for requests held by a pause
            server.kill()
            server.wait()


async def busy(url: str, running: int = 1, api_key_env: str | None = None) -> None:
    """Wait until a server is decoding `running` requests."""
    async with InferenceClient(url, api_key_env) as client, asyncio.timeout(30):
        while sum(load.running for load in (await client.loads()).values()) < running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
