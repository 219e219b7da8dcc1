"""Tests of opening files in untrusted folders."""

import os
import re
from pathlib import Path

import pytest

from agentfactory.base.files import untrusted_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("secret")
    made = tmp_path / "run"
    (made / "below").mkdir(parents=True)
    (made / "below" / "file").write_text('{"a": 1}')
    (made / "link").symlink_to("below")
    (made / "below" / "link").symlink_to(tmp_path / "outside" / "file")
    os.mkfifo(made / "below" / "fifo")
    return made


def test_a_folder_may_be_reached_by_links_and_have_none(folder: Path) -> None:
    by_link = folder.with_name("by-link")
    by_link.symlink_to(folder)
    assert untrusted_files.read_file(by_link / "below" / "file", 100, by_link) == b'{"a": 1}'
    assert untrusted_files.read_json(by_link / "below" / "file", by_link) == {"a": 1}
    # a path from the user may be a link, unlike one in a folder
    assert untrusted_files.read_file(folder / "below" / "link", 100) == b"secret"
    for name, problem in {
        "link/file": f"{folder}/link is a link, which is not followed; fix: put the file or folder itself there",
        "below/link": f"{folder}/below/link is a link, which is not followed; fix: put the file",
        "below/fifo": f"{folder}/below/fifo is a FIFO; fix: replace it, or delete it",
        "below": f"{folder}/below is a folder; fix: ",
        "below/file/x": f"{folder}/below/file is a regular file; fix: ",
        "below/../below/file": "leads out of ",
    }.items():
        with pytest.raises(untrusted_files.RefusedFileError, match=re.escape(problem)):
            untrusted_files.open_file(folder / name, folder)


def test_what_is_no_file_is_refused_also_by_name(folder: Path) -> None:
    for path in (folder / "below" / "fifo", Path("/dev/zero"), folder):
        with pytest.raises(untrusted_files.RefusedFileError, match=r"is a (FIFO|device|folder); fix: "):
            untrusted_files.open_file(path)
    with pytest.raises(FileNotFoundError, match=str(folder / "below" / "none")):
        untrusted_files.open_file(folder / "below" / "none", folder)


def test_a_file_that_becomes_a_fifo_after_the_look_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, look = folder / "below" / "file", os.stat

    def swapped(*arguments: object, **options: object) -> os.stat_result:
        found = look(*arguments, **options)
        (folder / "below" / "fifo").replace(file)
        monkeypatch.setattr(os, "stat", look)
        return found

    monkeypatch.setattr(os, "stat", swapped)
    with pytest.raises(untrusted_files.RefusedFileError, match="is a FIFO"):
        untrusted_files.open_file(file, folder)


def test_sizes_and_lines_are_bounded(folder: Path) -> None:
    file = folder / "below" / "file"
    with pytest.raises(untrusted_files.RefusedFileError, match="has more than 7 bytes; fix: "):
        untrusted_files.read_file(file, 7, folder)
    # files of /proc have no size before they are read
    with pytest.raises(untrusted_files.RefusedFileError, match="has more than 7 bytes"):
        untrusted_files.read_file(Path("/proc/self/status"), 7)
    file.write_bytes(b"1234\n123\n12345")
    with file.open("rb") as content:
        lines = untrusted_files.lines_of(content, 5)
        assert [next(lines), next(lines), next(lines)] == [b"1234\n", b"123\n", b"12345"]
    with file.open("rb") as content, pytest.raises(ValueError, match="more than 4 bytes"):
        next(untrusted_files.lines_of(content, 4))


def test_a_tree_holds_files_and_folders_only(folder: Path) -> None:
    assert list(untrusted_files.entries_of(folder, folder)) == ["below", "link"]
    assert untrusted_files.entries_of(folder / "none", folder) == {}
    with pytest.raises(untrusted_files.RefusedFileError, match="below/fifo is a FIFO"):
        untrusted_files.check_tree(folder, folder)
    (folder / "below" / "fifo").unlink()
    with pytest.raises(untrusted_files.RefusedFileError, match="below/link is a link"):
        untrusted_files.check_tree(folder / "below", folder)
    with pytest.raises(untrusted_files.RefusedFileError, match="run/link is a link"):
        untrusted_files.check_tree(folder, folder, depth=0)
    (folder / "link").unlink()
    untrusted_files.check_tree(folder, folder, depth=0)
    (folder / "below" / "link").unlink()
    untrusted_files.check_tree(folder, folder)


def test_folders_nested_without_end_are_refused(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(70):
        deep /= "d"
    deep.mkdir(parents=True)
    with pytest.raises(untrusted_files.RefusedFileError, match="is more than 64 folders deep; fix: delete it"):
        untrusted_files.check_tree(tmp_path, tmp_path)


def test_a_message_holds_no_control_sequence_of_a_name(folder: Path) -> None:
    os.mkfifo(folder / "\x1b[31mred")
    with pytest.raises(untrusted_files.RefusedFileError) as refused:
        untrusted_files.check_tree(folder, folder)
    assert "\x1b" not in str(refused.value)


def test_a_file_is_written_below_a_folder_only(folder: Path) -> None:
    with untrusted_files.create_file(folder / "new" / "below" / "file", folder) as file:
        file.write(b"text")
    (folder / "below" / "file").chmod(0o755)
    with untrusted_files.create_file(folder / "below" / "file", folder) as file:
        file.write(b"x")
    assert (folder / "new" / "below" / "file").read_bytes() == b"text"
    changed = folder / "below" / "file"
    assert (changed.read_bytes(), changed.stat().st_mode & 0o777) == (b"x", 0o755)
    for name in ("below/link", "link/file", "below/fifo", "below", "below/../../outside/file"):
        with pytest.raises(untrusted_files.RefusedFileError):
            untrusted_files.create_file(folder / name, folder)
    assert (folder.parent / "outside" / "file").read_text() == "secret"


@pytest.mark.parametrize("name", ["up", "etc", "below/link", "below/../..", "/etc", "to-link"])
def test_links_are_followed_within_a_folder(folder: Path, name: str) -> None:
    for link, target in (("up", "below/../../outside"), ("etc", "/below"), ("to-link", "up"), ("circle", "circle")):
        (folder / link).symlink_to(target)
    assert untrusted_files.resolved("link/new/../file", folder) == folder / "below" / "file"
    with pytest.raises(untrusted_files.RefusedFileError, match="leads out of "):
        untrusted_files.resolved(name, folder)
    for is_root in (False, True):
        with pytest.raises(untrusted_files.RefusedFileError, match="leads to itself"):
            untrusted_files.resolved("circle/file", folder, is_root)
    # as after chroot
    found = {"up": "outside", "etc": "below", "below/../..": ".", "/etc": "below", "to-link": "outside"}
    expected = str(folder / "below/link").replace("run/below/link", "outside/file")[1:]
    assert untrusted_files.resolved(name, folder, is_root=True) == folder / found.get(name, expected)
