"""Tests of stateful third-party servers: no chain sees another chain's state."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.messages import ToolCall
from agentfactory.tools.sessions.toolset import open_toolset
from tests.third_party_servers import stateful
from tests.tools.conftest import ask, recipe_of

# ruff: noqa: ASYNC221, SIM117
pytestmark = [pytest.mark.processes, pytest.mark.extended]

__all__ = ["stateful"]  # a fixture


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

    shared = recipe_of(think={**entry, "isolation": "shared"})
    async with (
        open_toolset(shared, tmp_path) as toolset,
        toolset.chain("a", {}) as one,
        toolset.chain("b", {}) as other,
    ):
        await ask(one, "sequentialthinking", **thought(1))
        assert '"thoughtHistoryLength": 2' in await ask(other, "sequentialthinking", **thought(1))


async def test_filesystem_with_a_template(stateful: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "desk").mkdir()
    (tmp_path / "desk" / "task.txt").write_text("sort the files")
    (tmp_path / "desk" / "same.txt").symlink_to("task.txt")
    program = stateful["filesystem"]
    entry = {**program, "args": [*program["args"], "${chain}"], "cwd": "${chain}", "workspace": "desk"}
    kept = tmp_path / "kept"
    async with open_toolset(recipe_of(files={**entry, "keep_workspaces": "kept"}), tmp_path) as toolset:
        async with toolset.chain("a", {}) as one, toolset.chain("b/2", {}) as other:
            assert [one.kept, other.kept] == [[str(kept / "files" / name)] for name in ("a", "b-2")]
            folders = [(await ask(chain, "list_allowed_directories")).split("\n")[1] for chain in (one, other)]
            assert len(set(folders)) == 2
            for chain, folder, word in ((one, folders[0], "mine"), (other, folders[1], "yours")):
                assert await ask(chain, "read_text_file", path=f"{folder}/same.txt") == "sort the files"
                await ask(chain, "write_file", path=f"{folder}/task.txt", content=word)
            assert await ask(one, "read_text_file", path=f"{folders[0]}/task.txt") == "mine"
            outside = await one.call(ToolCall("1", "read_text_file", {"path": f"{folders[1]}/task.txt"}))
            assert outside.error is not None
    assert [(kept / "files" / name / "task.txt").read_text() for name in ("a", "b-2")] == ["mine", "yours"]
    assert sorted(path.name for path in (kept / "files").iterdir()) == ["a", "b-2"], "spares are not kept"
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
