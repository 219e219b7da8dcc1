"""Tests of unmodified third-party servers, driven from a recipe: every tool, every kind of result and of error."""

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.messages import CallError, ToolCall, ToolResult
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.tools.sessions.toolset import open_toolset
from tests.third_party_servers import everything, everything_over_http
from tests.tools.conftest import recipe_of

pytestmark = [pytest.mark.processes, pytest.mark.extended]

__all__ = ["everything"]  # a fixture

ZIPPED = {"name": "a.gz", "data": "data:text/plain;base64,aGk=", "outputType": "resource"}
ANNOTATED = {"messageType": "error", "includeImage": True}


@contextmanager
def entry_of(way: str, everything: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if way == "process":
        yield {**everything, "type": "stdio", "isolation": "process"}
        return
    with everything_over_http(everything) as url:
        yield {"url": url, "type": "http", "isolation": "session"}


async def call(session: ToolSession, name: str, seconds: float | None = None, /, **arguments: Any) -> ToolResult:
    return await session.call(ToolCall("1", name, arguments), seconds)


@pytest.mark.parametrize("way", ["process", "session"])
async def test_every_tool_of_server_everything(way: str, everything: dict[str, Any], tmp_path: Path) -> None:
    with entry_of(way, everything) as entry:
        async with open_toolset(recipe_of(all=entry), tmp_path) as toolset, toolset.chain("a", {}) as session:
            used: set[str] = set()

            async def use(name: str, /, **arguments: Any) -> Any:
                used.add(name)
                result = await call(session, name, **arguments)
                assert result.error is None, result
                return result.content

            assert await use("echo", message="Grüße, 世界") == "Echo: Grüße, 世界"
            assert await use("get-sum", a=2, b=0.5) == "The sum of 2 and 0.5 is 2.5."
            for name, arguments in (("get-tiny-image", {}), ("get-annotated-message", ANNOTATED)):
                text, image, *_ = await use(name, **arguments)
                kind, _, data = image["image_url"]["url"].partition(";base64,")
                assert (text["type"], kind) == ("text", "data:image/png")
                assert base64.b64decode(data).startswith(b"\x89PNG")
            structured = await use("get-structured-content", location="Chicago")
            assert set(json.loads(str(structured))) == {"temperature", "conditions", "humidity"}
            links = str(await use("get-resource-links", count=2)).splitlines()
            assert [line.partition("(")[2].partition(")")[0] for line in links[1:]] == [
                "demo://resource/dynamic/blob/1",
                "demo://resource/dynamic/text/2",
            ]
            for kind, shown in (("Text", "Resource 3: This is a plaintext"), ("Blob", "resource demo://resource/dyn")):
                assert shown in str(await use("get-resource-reference", resourceType=kind, resourceId=3))
            zipped = await use("gzip-file-as-resource", **ZIPPED)
            assert zipped == "[application/gzip resource demo://resource/session/a.gz]"
            seen = json.loads(str(await use("get-env")))
            assert "PATH" in seen or way == "session"
            assert not any("AGENTFACTORY" in name for name in seen)
            for name in ("toggle-simulated-logging", "toggle-subscriber-updates"):
                assert str(await use(name)).startswith("Started")
            done = await use("trigger-long-running-operation", duration=0.1, steps=2)
            assert done == "Long running operation completed. Duration: 0.1 seconds, Steps: 2."
            late, other = await asyncio.gather(
                call(session, "trigger-long-running-operation", 0.3, duration=20, steps=2),
                call(session, "echo", message="meanwhile"),
            )
            assert (late.error, other.content) == (CallError.TIMEOUT, "Echo: meanwhile")

            # this tool requires a kind of request that a model's call never is
            refused = await call(session, "simulate-research-query", topic="x")
            assert refused.error is CallError.TOOL_ERROR
            assert "requires task augmentation" in str(refused.content)
            used.add("simulate-research-query")
            wrong = await call(session, "get-structured-content", location="Mars")
            assert wrong.error is CallError.INVALID_ARGUMENTS
            assert "location: 'Mars' is not one of ['New York', 'Chicago', 'Los Angeles']" in str(wrong.content)
            assert used == {spec.name for spec in toolset.specs}
