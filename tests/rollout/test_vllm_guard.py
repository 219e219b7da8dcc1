"""The API key guards all of vLLM's routes, and a server that would be open without one is not started."""

import os
import subprocess
import sys
from typing import Any

import pytest

from agentfactory.rollout.inference.vllm.vllm_guard import KEY_VARIABLE, RequireKey

pytestmark = pytest.mark.processes

RIGHT = {"authorization": "Bearer s3cret"}


async def answers(monkeypatch: pytest.MonkeyPatch, path: str, headers: dict[str, str], kind: str = "http") -> Any:
    """The first message that a client gets from a guarded application that answers 200."""
    monkeypatch.setenv(KEY_VARIABLE, "s3cret")
    sent: list[dict[str, Any]] = []

    async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": kind} if kind == "lifespan" else {"type": kind, "path": path, "headers": encoded}
    await RequireKey(application)(scope, None, send)
    return sent[0]


@pytest.mark.parametrize("path", ["/update_weights", "/collective_rpc", "/pause", "/v1/models", "/metrics", "/health/"])
async def test_every_route_asks_for_the_key(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
        assert (await answers(monkeypatch, path, headers))["status"] == 401
    assert (await answers(monkeypatch, path, {"accept": "*/*", **RIGHT}))["status"] == 200


async def test_what_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await answers(monkeypatch, "/health", {}))["status"] == 200
    assert (await answers(monkeypatch, "", {}, kind="lifespan"))["status"] == 200
    assert (await answers(monkeypatch, "/v1/realtime", {}, kind="websocket"))["type"] == "websocket.close"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "0.0.0.0"], "error: --host 0.0.0.0 is a public address: it needs --api-key-env"),
        (["--api-key-env", "NOBODYS_KEY"], "error: --api-key-env NOBODYS_KEY: this environment variable is not set"),
        (["--weight-transfer-config", "ipc"], "error: --weight-transfer-config ipc: must be JSON"),
    ],
)
def test_a_server_that_would_be_open_is_not_started(flags: list[str], message: str) -> None:
    command = [sys.executable, "-m", "agentfactory.rollout.inference.vllm.vllm_server", "model", "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "NOBODYS_KEY": ""})
    assert done.returncode == 2
    assert done.stderr.startswith(message)
