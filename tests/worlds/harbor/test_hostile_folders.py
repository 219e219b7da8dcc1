"""Task folders made to reach out: nothing outside is read, written or changed, and no secret of this machine leaks."""

import asyncio
import json
import os
import re
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.processes import environment
from agentfactory.worlds.harbor.harbor import Harbor
from tests.command_line_agents import call
from tests.scripted_chains import scripted_chains
from tests.worlds.harbor.test_harbor import STANDARD, make, rows

CONTENT, SECRET = "what-the-machine-holds", "planted-key-of-the-machine"
NO_REWARD = {"reward": 0.0, "success": 0.0, "no_reward": 1.0}
WRITE = """for f; do
chmod 777 "$f"; if [ -d "$f" ]; then echo made > "$f/made"; elif [ ! -p "$f" ]; then echo changed >> "$f"; fi
done"""
LOOK = f"""find /app /root /tmp /srv /opt -type f -exec cat {{}} + 2>&1
find /app /root /tmp /srv /opt -exec sh -c '{WRITE}' _ {{}} + 2>&1
env"""


class Place:
    """A task folder, the root file system of its image, and a guarded folder outside of both."""

    def __init__(self, base: Path) -> None:
        self.outside, self.root = base / "outside", base / "root"
        self.task = make(base / "tasks") / "a-task"
        for name in ("file", "test.sh", "solve.sh", "task.toml", "instruction.md", "folder/file", "folder/reward.txt"):
            self.write(self.outside / name, f"#!/bin/sh\n# {CONTENT}\n").chmod(0o666)
        self.write(self.root / "bin/sh", "")
        for folder in (base, self.outside, self.outside / "folder"):
            folder.chmod(0o777)

    def write(self, path: str | Path, text: str = "x") -> Path:
        """Write a file of the task, or of another place."""
        path = self.task / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def link(self, path: str | Path, target: str | Path) -> "Place":
        """Put a link in place of a file or folder of the task."""
        path = self.task / path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.rename(path.with_name("unused"))
        path.symlink_to(target)
        return self

    def copies(self, *lines: str, workdir: str = "/app") -> "Place":
        """Write the Dockerfile."""
        self.write("environment/Dockerfile", "\n".join(("FROM ubuntu:24.04", f"WORKDIR {workdir}", *lines)))
        return self

    def tests(self, *lines: str) -> "Place":
        """Write the tests."""
        self.write("tests/test.sh", "\n".join(("#!/bin/bash", *lines)))
        return self


CASES: dict[str, tuple[str, Callable[[Place], object]]] = {
    "a_link_to_a_file": (
        "environment: environment/data leads out of .*; fix: put the file itself there",
        lambda p: p.link("environment/data", p.outside / "file").copies("COPY data ."),
    ),
    "a_relative_link": (
        "leads out of ",
        lambda p: p.link("environment/data", "../../../outside/file").copies("COPY data ."),
    ),
    "a_link_to_a_folder": (
        "leads out of ",
        lambda p: p.link("environment/data", p.outside).copies("COPY data /app/data"),
    ),
    "a_link_on_the_way": (
        "leads out of ",
        lambda p: p.link("environment/data", p.outside).copies("COPY data/folder/file ."),
    ),
    "a_chain_of_links": (
        "leads out of ",
        lambda p: (
            p.link("environment/a", "b")
            .link("environment/b", "below/../c")
            .link("environment/c", p.outside)
            .copies("COPY a /app/a")
        ),
    ),
    "links_in_a_circle": (
        "leads to itself; fix: remove it",
        lambda p: p.link("environment/a", "b").link("environment/b", "a").copies("COPY a /app/a"),
    ),
    "chmod_through_a_link": (
        "environment/deep/link leads out of ",
        lambda p: p.link("environment/deep/link", p.outside / "file").copies("COPY --chmod=777 deep /app/deep"),
    ),
    "a_source_above": (
        r"COPY \.\./\.\./\.\./outside/file: there is no such file",
        lambda p: p.copies("COPY ../../../outside/file ."),
    ),
    "a_pattern_through_a_link": (
        "leads out of ",
        lambda p: p.link("environment/data", p.outside).copies("COPY */file ."),
    ),
    "a_reserved_target_in_other_words": (
        "COPY to /tests: this path is reserved",
        lambda p: p.copies("COPY Dockerfile //app/..//tests/"),
    ),
    "setuid_by_chmod": (
        "--chmod=4755; fix: give the permissions in three octal digits",
        lambda p: p.copies("COPY --chmod=4755 Dockerfile /app/x"),
    ),
    "a_workdir_above": ("", lambda p: p.copies(workdir=f"../../../../..{p.outside}")),
    "a_workdir_of_the_kernel": (
        "environment/Dockerfile: WORKDIR /proc/self: this path is reserved",
        lambda p: p.copies(workdir="/app/../proc/self"),
    ),
    "an_instruction_by_a_link": (
        "instruction.md: it is a link, which is not followed",
        lambda p: p.link("instruction.md", p.outside / "instruction.md"),
    ),
    "settings_by_a_link": (
        "task.toml: it is a link, which is not followed",
        lambda p: p.link("task.toml", p.outside / "task.toml"),
    ),
    "tests_by_a_link": ("tests: it is a link, which is not followed", lambda p: p.link("tests", p.outside)),
    "a_test_by_a_link": (
        "tests: tests/test.sh leads out of ",
        lambda p: p.link("tests/test.sh", p.outside / "test.sh"),
    ),
    "a_solution_by_a_link": (
        "solution: solution/solve.sh leads out of ",
        lambda p: p.link("solution/solve.sh", p.outside / "solve.sh"),
    ),
    "variables_that_double": (
        "environment/Dockerfile: its variables expand to more than 1 MiB",
        lambda p: p.copies("ENV A=xx", *["ENV A=$A$A"] * 60),
    ),
    "a_source_without_end": (
        "environment/Dockerfile, line 3: it cannot be read: it has a path of 5001 characters",
        lambda p: p.copies(f"COPY {'d' * 5000} ."),
    ),
    "a_path_that_grows": (
        "environment/Dockerfile: it has a path of ",
        lambda p: p.copies(*["WORKDIR " + "d" * 200] * 40),
    ),
    "a_variable_put_together_by_the_dockerfile": (
        "",
        lambda p: p.copies("ENV D=$", "ENV KEY=$D{PLANTED} B='\\${PLANTED}' C=${PLANTED}"),
    ),
    "arguments_of_bwrap_in_the_dockerfile": (
        "environment/Dockerfile: it has a null character",
        lambda p: p.copies(f'ENV KEY="x\0--bind\0{p.outside}\0/srv"'),
    ),
    "a_reward_by_a_link": ("", lambda p: p.tests(f"ln -s {p.outside}/folder/reward.txt /logs/verifier/reward.txt")),
    "a_reward_by_a_pipe": (
        "",
        lambda p: p.tests("mkfifo /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt"),
    ),
    "a_reward_by_a_folder": (
        "",
        lambda p: p.tests("mkdir /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt"),
    ),
    "a_reward_of_a_gigabyte": ("", lambda p: p.tests("truncate -s 1G /logs/verifier/reward.json")),
    "a_folder_of_links_for_the_next_step": (
        "",
        lambda p: p.tests(
            f"rm -rf /app/*; for n in tests verifier solution 0 1 2; do ln -s {p.outside} /app/$n; done; chmod 0 /app"
        ),
    ),
}
"""The folders by name, each with the error that refuses it; "" if it is played. Others are added below."""


def case(told: str = "") -> Callable[[Callable[[Place], None]], None]:
    def add(build: Callable[[Place], None]) -> None:
        CASES[build.__name__] = (told, build)

    return add


# sources of COPY


@case("environment/inner is a link, which is not followed; fix: put the file")
def a_link_within_the_folder_as_a_source(p: Place) -> None:
    p.write("environment/own/file")
    p.link("environment/inner", "own")
    p.copies("COPY inner/file .")


@case("environment: it is a link, which is not followed")
def a_link_as_the_context(p: Place) -> None:
    p.write(p.outside / "Dockerfile", STANDARD)
    p.link("environment", p.outside)


@case("pipe is a FIFO; fix: replace it, or delete it")
def a_pipe(p: Place) -> None:
    os.mkfifo(p.task / "environment/pipe")
    p.copies("COPY pipe .")


@case("socket is a socket; fix: ")
def a_socket(p: Place) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(p.task / "environment/socket"))
    p.copies("COPY . .")


@case("zero is a device; fix: ")
def a_device(p: Place) -> None:
    try:
        os.mknod(p.task / "environment/zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    except PermissionError:
        p.link("environment/zero", "/dev/zero")
        pytest.skip("only root makes devices")
    p.copies("COPY zero .")


@case("more than .* has left; fix: make them smaller, or set TMPDIR|does not fit: a chain has room for")
def a_sparse_file_of_a_terabyte(p: Place) -> None:
    os.truncate(p.write("environment/huge"), 1 << 40)
    p.copies("COPY huge .")


@case("does not fit: a chain has room for 8 MiB of copies; fix: make it smaller")
def more_than_the_disk_limit(p: Place) -> None:
    os.truncate(p.write("environment/huge"), 3 << 20)
    p.write("task.toml", "[environment]\nstorage_mb = 8\n")
    p.copies(*["COPY huge ."] * 4)


@case("does not fit: ")
def files_without_end(p: Place) -> None:
    for number in range(600):
        p.write(f"environment/many/{number}", "")
    p.write("task.toml", "[environment]\nstorage_mb = 2\n")
    p.copies("COPY many /app/many")


@case("is more than 64 folders deep; fix: delete it")
def folders_without_end(p: Place) -> None:
    p.write("environment/" + "d/" * 80 + "file")
    p.copies("COPY d /app/d")


@case()
def another_name_of_a_file_outside(p: Place) -> None:
    # it is the folder's own content, whose mode and bytes stay
    os.link(p.write(p.outside / "shared"), p.task / "environment/shared")
    p.copies("COPY --chmod=777 shared /app/shared", "COPY Dockerfile /app/shared")


@case()
def names_of_any_bytes(p: Place) -> None:
    for name in (b"new\nline", b"\xff\xfe", b"\x1b[31mred", b"-rf", b" "):
        (p.task / "environment" / os.fsdecode(name)).write_text("x")
    p.copies("COPY . /app/odd")


# targets of COPY, and WORKDIR


def _with_links(p: Place) -> None:
    """Links that stay in the task folder, and lead outside from where they are copied to."""
    outside = "../" * 6 + str(p.outside).lstrip("/")
    p.link("environment/a/b/c/d/e/out", outside)
    p.link("environment/a/b/c/d/e/file", f"{outside}/file")
    p.write("environment/evil")


@case("out is a link, which is not followed")
def a_target_below_a_copied_link(p: Place) -> None:
    _with_links(p)
    p.copies("COPY a/b/c/d/e /app/", "COPY evil /app/out/evil")


@case("file is a link, which is not followed")
def a_target_that_is_a_copied_link(p: Place) -> None:
    _with_links(p)
    p.copies("COPY a/b/c/d/e /app/", "COPY evil /app/file")


@case("out is a link, which is not followed")
def a_workdir_below_a_copied_link(p: Place) -> None:
    _with_links(p)
    p.write("task.toml", "[environment]\nworkdir = '/app/out/made'\n")
    p.copies("COPY a/b/c/d/e /app/")


@case()
def a_target_above(p: Place) -> None:
    p.write("environment/evil")
    p.copies("COPY evil /app/../../../../../opt/evil", "COPY evil ../../../../../../srv/evil")


@case()
def setuid_by_its_mode(p: Place) -> None:
    p.write("environment/tool").chmod(0o6777)
    p.copies("COPY tool /app/tool")


# links in the root file system


def _in_root(p: Place, target: str | Path) -> None:
    p.link(p.root / "app", target)
    p.write("environment/evil")


@case()
def a_root_with_an_absolute_link(p: Place) -> None:
    _in_root(p, p.outside)


@case()
def a_workdir_above_the_root(p: Place) -> None:
    _in_root(p, "usr")
    p.copies("COPY evil ../../../outside/folder/", workdir="/app/../../outside")


@case()
def a_root_with_a_relative_link(p: Place) -> None:
    _in_root(p, "../outside")


@case()
def a_target_through_a_link_of_the_root(p: Place) -> None:
    _in_root(p, p.outside)
    p.copies("COPY --chmod=777 evil /app/folder/file", "COPY evil /app/evil")


@case()
def a_root_that_leads_to_where_bwrap_keeps_the_machine(p: Place) -> None:
    _in_root(p, f"../oldroot{p.outside}")
    p.copies(workdir="/app/made/by/bwrap")


@case("leads to itself")
def a_root_with_a_circle(p: Place) -> None:
    _in_root(p, "app")


# files of the format


@case("task.toml: the task's folder is a link, which is not followed")
def a_task_by_a_link(p: Place) -> None:
    p.task.rename(p.outside.parent / "elsewhere")
    p.task.symlink_to("../elsewhere")


@case("instruction.md: it is a FIFO")
def an_instruction_without_end(p: Place) -> None:
    (p.task / "instruction.md").unlink()
    os.mkfifo(p.task / "instruction.md")


@case("instruction.md: it has more than 262,144 bytes")
def an_instruction_of_a_terabyte(p: Place) -> None:
    os.truncate(p.task / "instruction.md", 1 << 40)


@case("environment/Dockerfile: WORKDIR: it has a path of ")
def a_workdir_without_end(p: Place) -> None:
    p.write("task.toml", f"[environment]\nworkdir = '{'d/' * 5000}'\n")


@case("task.toml: it is not TOML")
def settings_nested_without_end(p: Place) -> None:
    p.write("task.toml", f"metadata = {'[' * 5000}")


@case(r"environment\.memory_mb: got 10000.*; fix: give a number above 0")
def a_number_without_end(p: Place) -> None:
    p.write("task.toml", f"[environment]\nmemory_mb = 1{'0' * 400}\n")


@case(r"verifier\.timeout_sec: got inf; fix: give a number above 0")
def a_time_without_end(p: Place) -> None:
    p.write("task.toml", "[verifier]\ntimeout_sec = inf\n")


# variables


def _with_env(p: Place, section: str, value: str) -> None:
    p.write("task.toml", f"[{section}]\nenv = {{KEY = {value}}}\n")
    p.tests("echo $KEY; env; env > /app/env; echo 0 > /logs/verifier/reward.txt")


@case(r"environment\.env\.KEY: the recipe does not name the variable PLANTED; fix: add it .*: env: \[PLANTED\]")
def a_variable_of_the_machine_for_all(p: Place) -> None:
    _with_env(p, "environment", "'${PLANTED}'")


@case(r"verifier\.env\.KEY: the recipe does not name the variable PLANTED")
def a_variable_of_the_machine_for_tests(p: Place) -> None:
    _with_env(p, "verifier", "'x${PLANTED:-d}${PLANTED}'")


@case(r"solution\.env\.KEY: the recipe does not name the variable PLANTED")
def a_variable_of_the_machine_for_the_solution(p: Place) -> None:
    _with_env(p, "solution", "'${PLANTED}'")


@case()
def a_variable_with_a_default(p: Place) -> None:
    _with_env(p, "environment", "'${PLANTED:-default}'")


@case()
def a_variable_in_a_default(p: Place) -> None:
    _with_env(p, "environment", "'${NONE:-${PLANTED}}'")


@case(r"environment\.env: got .*; fix: correct it")
def arguments_of_bwrap_in_a_value(p: Place) -> None:
    _with_env(p, "environment", json.dumps(f"x\0--bind\0{p.outside}\0/srv"))


# what the tests leave


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("PLANTED", SECRET)
    with tempfile.TemporaryDirectory() as base:
        yield Place(Path(base))


def state(folder: Path) -> list[tuple[Any, ...]]:
    """Everything of a folder that must not change."""
    found = []
    for path in sorted((folder, *folder.rglob("*"))):
        about = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(about.st_mode) and about.st_size < 1 << 20 else b""
        found.append((path, about.st_mode, about.st_size, about.st_mtime_ns, about.st_uid, about.st_nlink, content))
    return found


def contents(workspace: Path | None) -> Iterator[str]:
    """The text of all files of a chain."""
    assert workspace is not None
    for path in workspace.rglob("*"):
        assert not path.is_symlink() or not path.lstat().st_mode & stat.S_ISUID
        if stat.S_ISREG((about := path.lstat()).st_mode):
            assert not about.st_mode & (stat.S_ISUID | stat.S_ISGID), path
            with path.open("rb") as file:
                yield file.read(1 << 16).decode(errors="replace")


async def played(row: dict[str, Any], seen: list[str]) -> None:
    """Play a task, and add all texts that it brings into the chain, or out of it, to `seen`."""
    shell = Harbor()
    seen.append(json.dumps(row))
    try:
        await shell.reset(**row)
        seen += contents(shell.workspace)
        seen.append((await shell.shell(LOOK))["observation"])
        seen.append((await shell.solve()).stdout)
        seen.append(json.dumps(await shell.reward()))
        seen += contents(shell.workspace)
    finally:
        await shell.close()


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
async def test_a_hostile_folder_reaches_nothing_outside(name: str, place: Place) -> None:
    told, build = CASES[name]
    build(place)
    before = state(place.outside.parent)
    images = {"root": str(place.root)} if os.path.lexists(place.root / "app") else {}
    seen: list[str] = []
    error: Exception | None = None
    try:
        async with asyncio.timeout(20):
            await played(rows(place.task.parent, **images)["a-task"], seen)
    except (SettingError, OSError, ValueError) as raised:
        error = raised
    except ToolInfrastructureError:
        assert images  # the root has no programs
    assert re.search(told, str(error)) if told else error is None, error
    assert state(place.outside.parent) == before
    assert not [text for text in (*seen, str(error)) if CONTENT in text or SECRET in text]
    if name.startswith("a_reward"):
        assert json.dumps(NO_REWARD) in seen


@pytest.mark.processes
async def test_a_folder_that_changes_after_the_check(place: Place) -> None:
    place.write("environment/data/file")
    place.copies("COPY --chmod=777 data /app/data")
    row = rows(place.task.parent)["a-task"]
    place.link("environment/data", place.outside)
    before = state(place.outside)
    with pytest.raises(OSError, match="environment/data is a link, which is not followed"):
        await played(row, [])
    assert state(place.outside) == before


@pytest.mark.processes
async def test_named_variables_reach_processes_and_nothing_that_is_saved(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place.write("task.toml", "[environment]\nenv = {KEY = 'k=${PLANTED}'}\n[verifier]\nenv = {TOO = '${PLANTED}'}\n")
    place.tests('echo "{\\"reward\\": ${#TOO}, \\"$KEY\\": ${#KEY}}" > /logs/verifier/reward.json; echo $TOO')
    environment.name_variables(["PLANTED"])
    row = rows(place.task.parent)["a-task"]
    assert row["harbor"]["environment_env"] == {"KEY": "k=${PLANTED}"}
    caplog.set_level("DEBUG")
    texts = [call("I look.", "shell", command='echo "$KEY ${#KEY} $TOO"; env > all; cat all'), "It is done."]
    async with scripted_chains(tmp_path, texts, tools=["harbor"], rewards=[]) as chains:
        await chains.runner.check([row])
        trajectory = await chains.run(**row)
    assert next(m["content"] for m in trajectory.messages if m["role"] == "tool").startswith(
        f"k=*** {len(SECRET) + 2} \n"
    )
    assert trajectory.reward == len(SECRET)
    assert trajectory.metrics["k=***"] == len(SECRET) + 2
    saved = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert not [text for text in (*saved, json.dumps(row), repr(trajectory), caplog.text) if SECRET in text]


@pytest.mark.processes
async def test_a_variable_that_is_named_but_missing_where_the_chain_runs_is_named(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write("task.toml", "[verifier]\nenv = {TOO = '${PLANTED}'}\n")
    environment.name_variables(["PLANTED"])
    row = rows(place.task.parent)["a-task"]
    monkeypatch.delenv("PLANTED")
    with pytest.raises(SettingError, match=r"harbor: .*verifier\.env\.TOO: .* PLANTED is not set; fix: export it"):
        rows(place.task.parent)
    with pytest.raises(ValueError, match="PLANTED is not set, or not named in the recipe"):
        await Harbor().reset(**row)
