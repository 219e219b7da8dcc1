"""`tools check` on servers of other people: what one chain sees of another."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from agentfactory.commands.main import main
from tests.third_party_servers import stateful

pytestmark = [pytest.mark.processes, pytest.mark.extended]

__all__ = ["stateful"]  # a fixture


def check(servers: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"mcp_servers": servers}))
    status = main(["tools", "check", str(folder / "recipe.yaml")])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_a_leak_and_its_remedy(stateful: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = {**stateful["memory"], "env": {"MEMORY_FILE_PATH": str(tmp_path / "memory.jsonl")}}
    status, said = check({"memory": memory}, tmp_path, capsys)
    assert status != 0
    assert "memory: calls create_entities, " in said
    assert "; its data may keep entries called check-..." in said
    assert "a second chain saw the first one's state: read_graph returned" in said
    assert "memory: chains share its state; fix: give each chain a folder by ${chain}" in said

    memory["env"] = {"MEMORY_FILE_PATH": "${chain}/memory.jsonl"}
    status, said = check({"memory": memory}, tmp_path, capsys)
    assert status == 0, said
    assert "each chain has a process, and a folder (${chain}); up to" in said
    assert "did not see each other's state" in said
    assert "its data may keep" not in said


def test_state_shared_on_purpose(stateful: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    think = stateful["sequential-thinking"]
    status, said = check({"think": {**think, "isolation": "shared"}}, tmp_path, capsys)
    assert status == 0, said
    assert "sequentialthinking answered the same call differently in a second chain" in said
    assert '"thoughtHistoryLength": 2' in said
    status, said = check({"think": think}, tmp_path, capsys)
    assert (status, "two chains that called sequentialthinking did not see each other's state" in said) == (0, True)


def test_shared_files_are_seen_and_calls_that_failed_prove_nothing(
    stateful: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    desk = tmp_path / "desk"
    desk.mkdir()
    program = stateful["filesystem"]
    files = {**program, "args": [*program["args"], str(desk)]}
    status, said = check({"files": {**files, "cwd": str(desk)}}, tmp_path, capsys)
    assert status != 0
    assert "a second chain saw the first one's state" in said

    # there is no repository, so that every call fails
    status, said = check({"git": {**stateful["git"], "cwd": str(tmp_path)}}, tmp_path, capsys)
    assert status == 0, said
    assert "isolation was not tried: no state-changing call succeeded: git_" in said
    assert said.splitlines()[-1] == "all right, except that isolation was not tried: git"
