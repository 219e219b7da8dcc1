"""Tests of the disk usage of folders, compared with the system's own."""

import os
import subprocess
from pathlib import Path

import pytest

from agentfactory.tools.sandbox import disk_use
from agentfactory.tools.sandbox.disk_use import DiskUse, add_deleted, measure


def du(folder: Path) -> int:
    said = subprocess.run(["du", "--summarize", "--block-size=1", folder], capture_output=True, text=True, check=True)
    return int(said.stdout.split()[0]) - (folder.stat().st_blocks << 9)


@pytest.mark.processes
def test_files_folders_holes_and_hard_links(tmp_path: Path) -> None:
    (tmp_path / "inner" / "empty").mkdir(parents=True)
    (tmp_path / "inner" / "file").write_bytes(os.urandom(100_000))
    os.link(tmp_path / "inner" / "file", tmp_path / "again")
    os.link(tmp_path / "inner" / "file", tmp_path / "inner" / "empty" / "again")
    with (tmp_path / "holes").open("wb") as file:
        file.write(os.urandom(5000))
        file.truncate(10 << 30)
    use = measure([tmp_path])
    assert (use.entries, use.problem, use.locked) == (6, None, False)
    assert 100_000 < use.size < 1 << 20
    # on other file systems a folder may have no block
    if (tmp_path / "inner").stat().st_blocks << 9 == 4096:
        assert use.size == du(tmp_path)


def test_paths_that_are_longer_than_the_system_takes(tmp_path: Path) -> None:
    opened = os.open(tmp_path, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("n" * 250, dir_fd=opened)
        inner = os.open("n" * 250, os.O_RDONLY, dir_fd=opened)
        os.close(opened)
        opened = inner
    file = os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=opened)
    os.write(file, os.urandom(1 << 20))
    assert measure([tmp_path]).size > 1 << 20
    os.unlink("file", dir_fd=opened)
    os.close(opened)
    use = measure([tmp_path])
    assert use.size < 1 << 20
    add_deleted(use, [tmp_path], [os.getpid()])
    assert use.size > 1 << 20, "it is deleted, but open"
    os.close(file)


def test_limits_are_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "/".join("n" * 150)).mkdir(parents=True)
    before = len(os.listdir("/proc/self/fd"))
    assert measure([tmp_path]).problem == "it had folders nested more than 128 deep"
    monkeypatch.setattr(disk_use, "_MOST_ENTRIES", 100)
    assert measure([tmp_path]).problem == "it had more than 100 files"
    assert len(os.listdir("/proc/self/fd")) == before


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "up").symlink_to(tmp_path)
    (tmp_path / "usr").symlink_to("/usr")
    assert measure([tmp_path]).entries == 3
    assert measure([]) == DiskUse(seconds=pytest.approx(0, abs=1))
