"""Tests of chains' folders, and of the fields of an MCP server's entry about isolation."""

import asyncio
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
from mcp import StdioServerParameters

from agentfactory.base.config import McpServerConfig
from agentfactory.base.errors import SettingError
from agentfactory.base.files.untrusted_files import remove
from agentfactory.base.user_code.row_files import write_files
from agentfactory.tools.environments import workspaces
from agentfactory.tools.environments.workspaces import ChainProgram, check_template
from agentfactory.tools.mcp_servers.server_entry import check_entry, target_of
from tests.conftest import REPOSITORY
from tests.waiting import wait_for

pytestmark = pytest.mark.processes  # the first folder starts the sweeper process


def entry(**fields: Any) -> McpServerConfig:
    return McpServerConfig.model_validate({"command": "server", **fields})


async def test_a_folder_lives_as_long_as_its_process(tmp_path: Path) -> None:
    template = tmp_path / "template"
    (template / "sub").mkdir(parents=True)
    (template / "sub" / "file").write_text("x")
    (template / "link").symlink_to("sub/file")
    params = StdioServerParameters(command="c", args=["${chain}/a", "b"], env={"A": "${chain}"}, cwd="${chain}/sub")
    program = ChainProgram(params, template)
    async with program.running() as one, program.running() as other:
        folder = Path(str(one.env["A"]))  # type: ignore[index]
        assert (one.args, one.cwd) == ([f"{folder}/a", "b"], f"{folder}/sub")
        assert other.cwd != one.cwd
        assert folder.stat().st_mode & 0o777 == 0o700
        assert ((folder / "link").readlink(), (folder / "link").read_text()) == (Path("sub/file"), "x")
    assert not folder.exists()


def test_read_only_folders_are_removed(tmp_path: Path) -> None:
    inner = tmp_path / "chain" / "locked" / "unreadable"
    inner.mkdir(parents=True)
    (inner / "file").write_text("x")
    inner.chmod(0o000)
    inner.parent.chmod(0o500)
    rights = "-dac_override,-dac_read_search"
    as_user = ["setpriv", "--bounding-set", rights, "--inh-caps", rights] if os.geteuid() == 0 else []
    code = "import sys; from pathlib import Path; from agentfactory.base.files.untrusted_files import remove\n"
    code += "print(remove(Path(sys.argv[1])))"
    command = [*as_user, sys.executable, "-c", code, str(tmp_path / "chain")]
    said = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert (said, (tmp_path / "chain").exists()) == ("[]\n", False)


def test_a_killed_process_leaves_no_folder() -> None:
    code = "from agentfactory.tools.environments import workspaces as w; print(w.make_folder(), flush=True); input()"
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        folder = Path(process.stdout.readline().strip())
        assert folder.is_dir()
        process.kill()
    wait_for(lambda: not folder.parent.exists())
    assert folder.parent.parent == Path(gettempdir()).resolve()


def test_a_folder_of_any_depth_is_removed(tmp_path: Path) -> None:
    script = "import os\nfor _ in range(1100): os.mkdir('folder'); os.chdir('folder')\nos.chmod('.', 0)"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    (tmp_path / "link").symlink_to(Path.home())
    assert remove(tmp_path) == []
    assert (tmp_path.exists(), Path.home().exists()) == (False, True)


def test_folders_beside_each_other_are_removed_and_links_are_not_followed(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "chain"
    outside.mkdir(mode=0o555)
    (folder / "read-only").mkdir(parents=True)
    for number in range(50):
        (folder / "read-only" / f"{number}" / "inner").mkdir(parents=True)
        (folder / "read-only" / f"{number}" / "link").symlink_to(outside)
    (folder / "read-only").chmod(0o500)
    assert remove(folder) == []
    assert (folder.exists(), stat.S_IMODE(outside.stat().st_mode)) == (False, 0o555)
    assert remove(folder) == [], "there is nothing left to do"
    folder.symlink_to(outside)
    assert remove(folder) == [f"{folder}: Not a directory"]
    assert outside.exists()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"env": {"A": "${NOPE_X}"}}, r"env\.A: the environment variable NOPE_X is not set; fix: export it"),
        ({"env": {"A": "${chian}"}}, r"env\.A: .* chian is not set; fix: export it"),
        ({"cwd": "${chain}/sub"}, r"cwd: got .*without `workspace` the chain's folder is empty; fix: write"),
        ({"args": ["${chain}"], "workspace": "none"}, r"workspace: .*none is not a folder"),
    ],
)
def test_checks_of_entries(fields: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("desk").mkdir()
    with pytest.raises(SettingError, match=rf"^mcp_servers\.x\.{said}"):
        check_entry("x", entry(**fields), Path())
    with pytest.raises(SettingError):
        target_of("x", entry(**fields), Path(), 1000)


def test_templates(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "file").write_bytes(b"12345")
    assert check_template("f", tmp_path / "good") == 5
    with pytest.raises(SettingError, match=r"f: .*none is not a folder; fix: name an existing one"):
        check_template("f", tmp_path / "none")
    for name, target in (("absolute", tmp_path / "good" / "file"), ("up", "../good"), ("etc", "/etc")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "link").symlink_to(target)
        with pytest.raises(SettingError, match=f"{name}/link leads out of .*; fix: put the file itself there"):
            check_template("f", tmp_path / name)
    with (tmp_path / "good" / "huge").open("wb") as file:
        file.truncate(2**43)
    with pytest.raises(SettingError, match=r"each chain gets a copy: .* MiB left; fix: make it smaller"):
        check_template("f", tmp_path / "good")


def test_files_of_rows_stay_in_the_workspace(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    (folder / "real").mkdir(parents=True)
    outside.mkdir()
    (folder / "inner").symlink_to("real")
    (folder / "up").symlink_to("../outside")
    (folder / "file").symlink_to(outside / "file")
    write_files({"inner/new/x": b"1", "real/y": b"2"}, folder)
    assert ((folder / "real/new/x").read_bytes(), (folder / "real/y").read_bytes()) == (b"1", b"2")
    for name in ("up/x", "file", "real"):
        with pytest.raises(OSError, match=r"leads out of |is a folder"):
            write_files({name: b"3"}, folder)
    assert not os.listdir(outside)


async def test_long_copies_do_not_keep_others_from_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(workspaces, "_copy", lambda *_: go_on.wait(30))
    ended: list[str] = []

    async def play(chain: str) -> None:
        program = ChainProgram(StdioServerParameters(command="", args=["${chain}"]), tmp_path)
        async with program.running():
            ended.append(chain)

    playing = asyncio.gather(*(play(f"c{number}") for number in range(2 * (os.cpu_count() or 1) + 8)))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        assert await asyncio.to_thread(int, "7") == 7
    assert not ended
    go_on.set()
    await playing
