"""Tests of unmodified third-party servers, driven from a recipe: every tool, every kind of result and of error; and no
chain sees another chain's state."""

import asyncio
import base64
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.messages import CallError, ToolCall, ToolResult
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.tools.sessions.toolset import open_toolset
from tests.third_party_servers import everything, everything_over_http, stateful
from tests.tools.conftest import ask, recipe_of

# ruff: noqa: ASYNC221, SIM117
pytestmark = [pytest.mark.processes, pytest.mark.extended]

__all__ = ["everything", "stateful"]  # fixtures

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


def thought(number: int) -> dict[str, Any]:
    return {"thought": "x", "nextThoughtNeeded": True, "thoughtNumber": number, "totalThoughts": 9}


async def test_sequential_thinking_without_a_word_about_isolation(stateful: dict[str, Any], tmp_path: Path) -> None:
    records: list[dict[str, Any]] = []
    entry = stateful["sequential-thinking"]
    async with (
        open_toolset(recipe_of(think=entry), tmp_path, records.append) as toolset,
        toolset.chain("a", {}) as one,
        toolset.chain("b", {}) as other,
    ):
        for number in (1, 2, 3):
            said = await ask(one, "sequentialthinking", **thought(number))
        assert '"thoughtHistoryLength": 3' in said
        assert '"thoughtHistoryLength": 1' in await ask(other, "sequentialthinking", **thought(1))
    [record] = [record for record in records if record["event"] == "tool_server_isolated"]
    assert record["processes"] >= 1
    assert record["mebibytes_each"] == 75

    both = recipe_of(think={**entry, "isolation": "shared"})
    async with open_toolset(both, tmp_path) as toolset, toolset.chain("a", {}) as one, toolset.chain("b", {}) as other:
        await ask(one, "sequentialthinking", **thought(1))
        assert '"thoughtHistoryLength": 2' in await ask(other, "sequentialthinking", **thought(1))


async def test_filesystem_with_a_template(stateful: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "desk").mkdir()
    (tmp_path / "desk" / "task.txt").write_text("sort the files")
    (tmp_path / "desk" / "same.txt").symlink_to("task.txt")
    program = stateful["filesystem"]
    entry = {**program, "args": [*program["args"], "${chain}"], "cwd": "${chain}", "workspace": "desk"}
    async with open_toolset(recipe_of(files=entry), tmp_path) as toolset:
        async with toolset.chain("a", {}) as one, toolset.chain("b/2", {}) as other:
            folders = [(await ask(chain, "list_allowed_directories")).split("\n")[1] for chain in (one, other)]
            assert len(set(folders)) == 2
            for chain, folder, word in ((one, folders[0], "mine"), (other, folders[1], "yours")):
                assert await ask(chain, "read_text_file", path=f"{folder}/same.txt") == "sort the files"
                await ask(chain, "write_file", path=f"{folder}/task.txt", content=word)
            assert await ask(one, "read_text_file", path=f"{folders[0]}/task.txt") == "mine"
            outside = await one.call(ToolCall("1", "read_text_file", {"path": f"{folders[1]}/task.txt"}))
            assert outside.error is not None
    assert (tmp_path / "desk" / "task.txt").read_text() == "sort the files"
    assert not any(Path(folder).exists() for folder in folders)


async def test_git_with_a_repository_of_the_chain(stateful: dict[str, Any], tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    name = ["-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q", "repository"], ["-C", "repository", *name, "commit", "-qm", "x", "--allow-empty"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    entry = {**stateful["git"], "cwd": "${chain}", "workspace": "repository"}
    async with (
        open_toolset(recipe_of(git=entry), tmp_path) as toolset,
        toolset.chain("a", {}) as one,
        toolset.chain("b", {}) as other,
    ):
        await ask(one, "git_create_branch", repo_path=".", branch_name="plum")
        assert "plum" in await ask(one, "git_branch", repo_path=".", branch_type="local")
        assert "plum" not in await ask(other, "git_branch", repo_path=".", branch_type="local")
    branches = subprocess.run(["git", "branch"], cwd=repository, check=True, capture_output=True, text=True).stdout
    assert "plum" not in branches
