"""Folders of chains, and what an MCP server's entry may say about isolation."""

import os
from pathlib import Path
from typing import Any

import pytest
from mcp import StdioServerParameters
from pydantic import ValidationError

from agentfactory.tools.config import McpServerConfig
from agentfactory.tools.errors import SettingError
from agentfactory.tools.targets import target_of
from agentfactory.tools.workspaces import ChainProgram, check_template

pytestmark = pytest.mark.processes  # the first folder starts the process that removes what is left


def entry(**fields: Any) -> McpServerConfig:
    return McpServerConfig.model_validate({"command": "server", **fields})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"workspace": "desk"}, r"workspace: no chain has a folder: nothing refers to \$\{chain\}; fix: put"),
        ({"keep_workspaces": "kept"}, r"keep_workspaces: no chain has a folder"),
        ({"args": ["${chain}"], "isolation": "shared"}, r"isolation: \$\{chain\} needs a process for each chain"),
        ({"cwd": "${chain}", "cache": 10}, r"cache: \$\{chain\} needs a process for each chain"),
        ({"env": {"A": "${chain}/a"}, "pool": {"max_uses": 2}}, r"pool\.max_uses: got 2, but a process belongs to one"),
        ({"command": None, "container": "image", "args": ["${chain}"]}, "is a folder of this machine; fix: use"),
        ({"cache": 10, "isolation": "process"}, "cache: got 10, but the server keeps state per chain"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        entry(**fields)


def test_the_placeholder_is_no_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    config = entry(args=["--root", "${chain}/a"], env={"A": "${chain}", "B": "${TOKEN}"}, cwd="${chain}")
    target = target_of("x", config, tmp_path, 1000)
    assert isinstance(target, ChainProgram)
    assert target.program.env == {"A": "${chain}", "B": "secret"}
    assert isinstance(target_of("x", entry(), tmp_path, 1000), StdioServerParameters)


async def test_a_folder_lives_as_long_as_its_process(tmp_path: Path) -> None:
    template, kept = tmp_path / "template", tmp_path / "kept"
    (template / "sub").mkdir(parents=True)
    (template / "sub" / "file").write_text("x")
    (template / "link").symlink_to("sub/file")
    params = StdioServerParameters(command="c", args=["${chain}/a", "b"], env={"A": "${chain}"}, cwd="${chain}/sub")
    program = ChainProgram(params, template)
    async with program.running(lambda: "a") as one, program.running(lambda: "b") as other:
        folder = Path(str(one.env["A"]))  # type: ignore[index]
        assert (one.args, one.cwd) == ([f"{folder}/a", "b"], f"{folder}/sub")
        assert other.cwd != one.cwd
        assert folder.stat().st_mode & 0o777 == 0o700
        assert ((folder / "link").readlink(), (folder / "link").read_text()) == (Path("sub/file"), "x")
    assert not folder.exists()
    for name in ("a/1", "a/1", ""):
        async with ChainProgram(params, template, kept).running(lambda name=name: name):  # type: ignore[misc]
            pass
    assert sorted(os.listdir(kept)) == ["a-1", "a-1-2"]


async def test_a_folder_of_a_program_that_fails_is_removed(tmp_path: Path) -> None:
    found: list[Path] = []

    async def fail() -> None:
        async with ChainProgram(StdioServerParameters(command="c", cwd="${chain}")).running(lambda: "") as program:
            found.append(Path(str(program.cwd)))
            assert found[0].is_dir()
            raise RuntimeError("it failed")

    with pytest.raises(RuntimeError, match="it failed"):
        await fail()
    assert not found[0].exists()


def test_templates(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "file").write_bytes(b"12345")
    assert check_template("f", tmp_path / "good") == 5
    with pytest.raises(SettingError, match=r"f: .*none is not a folder; fix: name an existing one"):
        check_template("f", tmp_path / "none")
    for name, target in (("absolute", tmp_path / "good" / "file"), ("up", "../good"), ("etc", "/etc")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "link").symlink_to(target)
        with pytest.raises(SettingError, match="link is a link out of the folder; fix: put the file itself there"):
            check_template("f", tmp_path / name)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "fifo")
    with pytest.raises(SettingError, match="fifo is neither a file nor a folder"):
        check_template("f", tmp_path / "pipe")
    with (tmp_path / "good" / "huge").open("wb") as file:
        file.truncate(2**43)
    with pytest.raises(SettingError, match=r"each chain gets a copy: .* MiB left; fix: make it smaller"):
        check_template("f", tmp_path / "good")
