"""SGLang as a child process on loopback: its key, its start, and its end with this process."""

import asyncio
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from agentfactory.base.errors import SettingError
from agentfactory.base.http.loopback import listeners_users
from agentfactory.base.user_code.import_path import own_python
from agentfactory.rollout.inference.sglang.upstream import ApiError, Sglang

_POLL_SECONDS = 0.2
_END_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


class SglangProcess:
    """A server that was started here."""

    def __init__(self, python: str | None, flags: Sequence[str]) -> None:
        """Start `python -m sglang.launch_server` with `flags`, on a free port of loopback."""
        self.api_key = secrets.token_urlsafe(32)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self._port}"
        # as a flag, any process list would show the key
        descriptor, name = tempfile.mkstemp(prefix="agentfactory-sglang-", suffix=".yaml")
        self._config = Path(name)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"api-key": self.api_key}, file)
        own = ["--host", "127.0.0.1", "--port", str(self._port), "--config", name]
        libc = ctypes.CDLL(None)
        self._process = subprocess.Popen(
            own_python("-m", "sglang.launch_server", *flags, *own, executable=python),
            stdin=subprocess.DEVNULL,
            # the trainer divides its logits by the temperature
            env={**os.environ, "SGLANG_RETURN_ORIGINAL_LOGPROB": "0"},
            # SGLang's own processes end with it
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
            start_new_session=True,
        )

    async def wait_until_ready(self) -> None:
        """Wait until the server answers. Raises SettingError if it ends, or if another user listens at its port."""
        async with Sglang(self.url) as stranger:
            while True:
                self._check_running()
                # the only route without a key
                with suppress(ApiError):
                    if (await stranger.request("GET", "/health"))[0] == 200:
                        break
                await asyncio.sleep(_POLL_SECONDS)
        if listeners_users(self._port) - {os.geteuid()}:
            raise SettingError("server.engine", f"another user listens on SGLang's port {self._port}", "start again")
        # read at its start
        self._config.unlink()

    async def watch(self) -> None:
        """Wait until the server ends. Raises SettingError then."""
        while True:
            self._check_running()
            await asyncio.sleep(_POLL_SECONDS)

    def end(self) -> None:
        """End the server and its descendants."""
        self._config.unlink(missing_ok=True)
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _check_running(self) -> None:
        if (status := self._process.poll()) is not None:
            raise SettingError(
                "server.engine", f"SGLang ended with status {status}", "its own error is in the log above"
            )
