"""`python -m agentfactory.rollout.inference.sglang MODEL --port N [FLAG ...]`: serve a model with SGLang, which is
started here, or already runs. Flags that are not listed are passed to it."""

import argparse
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
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from agentfactory.base.errors import SettingError
from agentfactory.base.http.loopback import bound_socket, listeners_users
from agentfactory.base.http.server_keys import key_of_environment
from agentfactory.base.user_code.import_path import own_python
from agentfactory.rollout.inference.http_server import ApiError, answer_requests, run_server, server_parser
from agentfactory.rollout.inference.sglang.front import Front
from agentfactory.rollout.inference.sglang.upstream import Sglang, attach

_POLL_SECONDS = 0.2
_END_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


class SglangProcess:
    def __init__(self, python: str | None, flags: Sequence[str]) -> None:
        """Start `python -m sglang.launch_server` with `flags`, on a free port of loopback."""
        self.api_key = secrets.token_urlsafe(32)
        with bound_socket("127.0.0.1", 0) as probe:
            self._port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self._port}"
        # as a flag, any process list would show the key
        with tempfile.NamedTemporaryFile("w", prefix="agentfactory-sglang-", suffix=".yaml", delete=False) as file:
            json.dump({"api-key": self.api_key}, file)
        self._config = Path(file.name)
        own = ["--host", "127.0.0.1", "--port", str(self._port), "--config", file.name]
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
        self._config.unlink(missing_ok=True)
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _check_running(self) -> None:
        if (status := self._process.poll()) is not None:
            problem = f"SGLang ended with status {status}"
            raise SettingError("server.engine", problem, "its own error is in the log above")


def _nccl_of(python: str | None) -> str | None:
    """Return the version of NCCL that a Python has; None if it has none."""
    code = "from importlib.metadata import distributions as found\n"
    code += "print(*{each.version for each in found() if each.metadata['Name'].startswith('nvidia-nccl')})"
    command = own_python("-c", code, executable=python)
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


async def _serve(
    args: argparse.Namespace, flags: list[str], listener: socket.socket, api_key: str, cleanup: ExitStack
) -> None:
    process = None
    if args.attach is None:
        own = ["--model-path", args.model, "--served-model-name", args.served_model_name, "--dtype", args.dtype]
        own += ["--context-length", str(args.max_model_len), "--max-running-requests", str(args.max_num_seqs)]
        process = SglangProcess(args.python, [*own, "--enable-metrics", *flags])
        cleanup.callback(process.end)
        await process.wait_until_ready()
        url, key = process.url, process.api_key
    else:
        url, key = args.attach, args.api_key_env and key_of_environment("--api-key-env", args.api_key_env)
    async with Sglang(url, key) as sglang:
        served = await attach(sglang)
        if served.max_model_len < args.max_model_len:
            problem = f"got {args.max_model_len}, but {url} takes {served.max_model_len} tokens"
            raise SettingError("server.max_model_len", problem, "lower it, or start SGLang with --context-length")
        nccl = None if process is None else await asyncio.to_thread(_nccl_of, args.python)
        await answer_requests(listener, Front(sglang, served, args.served_model_name, api_key, nccl))
        await (process.watch() if process is not None else asyncio.Event().wait())


def main() -> None:
    """Serve until SIGTERM or SIGINT. Exit status 2 and one line on stderr when it cannot start, or SGLang ends."""
    parser = server_parser("agentfactory.rollout.inference.sglang", __doc__)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--python", help="Python that has SGLang (default: this one)")
    parser.add_argument("--attach", metavar="URL", help="address of a running SGLang server, instead of starting one")
    args, flags = parser.parse_known_args()
    run_server(args, partial(_serve, args, flags))


if __name__ == "__main__":
    main()
