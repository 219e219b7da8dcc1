"""`agentfactory serve RECIPE --as tinker` as a process, and programs of the real SDK that call it."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.server_process import only_loopback
from tests.tinker.offline_hub import BASE
from tests.waiting import wait_for

PYTHON = os.environ.get("AGENTFACTORY_TINKER_PYTHON", "")
"""A Python that has the SDK and the cookbook, set by `make test-tinker`."""

CLIENTS = Path(__file__).parent / "clients"


class Service:
    """A service on the base model of `hub`, whose output is `folder`/output and stays when it ends."""

    def __init__(self, hub: Path, folder: Path, **server: Any) -> None:
        self.hub, self.log = hub, folder / "service.log"
        recipe = {
            "model": {"path": str(hub / BASE), "dtype": "float32", "lora": {"rank": 32}},
            "server": {"engine": "embedded", "max_model_len": 2048, **server},
            "output": str(folder / "output"),
        }
        (folder / "tinker.yaml").write_text(yaml.safe_dump(recipe))
        command = [sys.executable, "-m", "agentfactory", "serve", str(folder / "tinker.yaml"), "--as", "tinker"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            self.environment = wait_for(self._exports, 240)
        except BaseException:
            self.end()
            raise
        self.url = self.environment["TINKER_BASE_URL"]

    def _exports(self) -> dict[str, str]:
        text = self.log.read_text(errors="replace")
        assert self.process.poll() is None, text
        exports = dict(re.findall(r"^\s*export (TINKER_\w+)=(\S+)$", text, re.MULTILINE))
        return exports if {"TINKER_BASE_URL", "TINKER_API_KEY"} <= exports.keys() else {}

    def family(self) -> list[psutil.Process]:
        """Return the service's process and all that it started, such as its inference server."""
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def end(self) -> int:
        """End the service as Ctrl-C does; return its exit status."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """End all of its processes at once, as a failing machine does."""
        for process in self.family():
            process.kill()
        self.process.wait()

    def start(self, *arguments: str, stdout: Any, stderr: Any = None, **environment: str) -> subprocess.Popen[str]:
        """Start a program of the SDK's Python in the hub's folder, where the cookbook finds its model and data."""
        assert PYTHON, "AGENTFACTORY_TINKER_PYTHON names no Python that has the Tinker SDK; fix: run `make test-tinker`"
        own = {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": ""}
        env = {**os.environ, **self.environment, **own, **environment}
        return subprocess.Popen([PYTHON, *arguments], cwd=self.hub, env=env, text=True, stdout=stdout, stderr=stderr)

    def program(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program to its end."""
        pipe = subprocess.PIPE
        with self.start(*arguments, stdout=pipe, stderr=pipe, **environment) as program:
            try:
                out, err = program.communicate(timeout=280)
            except BaseException:
                program.kill()
                raise
        return subprocess.CompletedProcess(program.args, program.returncode, out, err)

    def cases(self, client: str, *arguments: str, **environment: str) -> Callable[[str], Any]:
        """Run a program of clients/; return a function that gives the result of a case, and raises if it failed."""
        ended = self.program(str(CLIENTS / client), *arguments, **environment)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        results: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])

        def result(case: str) -> Any:
            found = results[case]
            assert not (isinstance(found, dict) and "failed" in found), found["failed"]
            return found

        return result


@contextmanager
def service(hub: Path, folder: Path, **server: Any) -> Iterator[Service]:
    """Run a service, which listens on loopback only. `server` has fields of the recipe."""
    running = Service(hub, folder, **server)
    try:
        assert only_loopback(running.process.pid)
        yield running
    finally:
        if running.process.poll() is None:
            assert running.end() == 130, running.log.read_text()
