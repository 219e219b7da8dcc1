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
from tests.worlds.harbor.test_harbor import NO_REWARD, STANDARD, make, opened, rows

pytestmark = pytest.mark.processes

CONTENT, SECRET = "what-the-machine-holds", "planted-key-of-the-machine"
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
        path = self.task / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def file(self, path: str | Path, text: str = "x", mode: int | None = None, size: int | None = None) -> "Place":
        """Write a file, of this mode, and sparse if its size is given."""
        path = self.write(path, text)
        if mode is not None:
            path.chmod(mode)
        if size is not None:
            os.truncate(path, size)
        return self

    def link(self, path: str | Path, target: str | Path) -> "Place":
        path = self.task / path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.rename(path.with_name("unused"))
        path.symlink_to(target)
        return self

    def copies(self, *lines: str, workdir: str = "/app") -> "Place":
        """Write the Dockerfile."""
        return self.file("environment/Dockerfile", "\n".join(("FROM ubuntu:24.04", f"WORKDIR {workdir}", *lines)))

    def tests(self, *lines: str) -> "Place":
        return self.file("tests/test.sh", "\n".join(("#!/bin/bash", *lines)))

    def settings(self, text: str) -> "Place":
        return self.file("task.toml", text)

    def variable(self, section: str, value: str) -> "Place":
        """Set a variable, which the tests print and save."""
        self.settings(f"[{section}]\nenv = {{KEY = {value}}}\n")
        return self.tests("echo $KEY; env; env > /app/env; echo 0 > /logs/verifier/reward.txt")

    def inner_links(self) -> "Place":
        """Links that stay in the task folder, and lead outside from where they are copied to."""
        outside = "../" * 6 + str(self.outside).lstrip("/")
        self.link("environment/a/b/c/d/e/out", outside).link("environment/a/b/c/d/e/file", f"{outside}/file")
        return self.file("environment/evil")

    def root_link(self, target: str | Path) -> "Place":
        """Make /app of the image's root file system a link."""
        return self.link(self.root / "app", target).file("environment/evil")

    def pipe(self, path: str) -> "Place":
        (self.task / path).unlink(missing_ok=True)
        os.mkfifo(self.task / path)
        return self


def a_socket(p: Place) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(p.task / "environment/socket"))
    p.copies("COPY . .")


def a_device(p: Place) -> None:
    try:
        os.mknod(p.task / "environment/zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    except PermissionError:
        p.link("environment/zero", "/dev/zero")
        pytest.skip("only root makes devices")
    p.copies("COPY zero .")


def another_name_of_a_file_outside(p: Place) -> None:
    # it is the folder's own content, whose mode and bytes stay
    os.link(p.write(p.outside / "shared"), p.task / "environment/shared")
    p.copies("COPY --chmod=777 shared /app/shared", "COPY Dockerfile /app/shared")


def names_of_any_bytes(p: Place) -> None:
    for name in (b"new\nline", b"\xff\xfe", b"\x1b[31mred", b"-rf", b" "):
        (p.task / "environment" / os.fsdecode(name)).write_text("x")
    p.copies("COPY . /app/odd")


def a_task_by_a_link(p: Place) -> None:
    p.task.rename(p.outside.parent / "elsewhere")
    p.task.symlink_to("../elsewhere")


LINK = "is a link, which is not followed"
NOT_NAMED = "env.KEY: the recipe does not name the variable PLANTED"
DATA, VERIFIER = "environment/data", "/logs/verifier"
CASES: dict[str, tuple[str, Callable[[Place], object]]] = {
    # sources of COPY
    "link_to_file": (
        "environment: environment/data leads out of .*; fix: put the file itself there",
        lambda p: p.link(DATA, p.outside / "file").copies("COPY data ."),
    ),
    "relative_link": ("leads out of ", lambda p: p.link(DATA, "../../../outside/file").copies("COPY data .")),
    "link_to_folder": ("leads out of ", lambda p: p.link(DATA, p.outside).copies("COPY data /app/data")),
    "link_on_the_way": ("leads out of ", lambda p: p.link(DATA, p.outside).copies("COPY data/folder/file .")),
    "chain_of_links": (
        "leads out of ",
        lambda p: (
            p.link("environment/a", "b").link("environment/b", "below/../c").link("environment/c", p.outside),
            p.copies("COPY a /app/a"),
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
    "source_above": (
        "COPY ../../../outside/file: there is no such file",
        lambda p: p.copies("COPY ../../../outside/file ."),
    ),
    "pattern_through_a_link": ("leads out of ", lambda p: p.link(DATA, p.outside).copies("COPY */file .")),
    "link_within_the_folder": (
        f"environment/inner {LINK}; fix: put the file",
        lambda p: p.file("environment/own/file").link("environment/inner", "own").copies("COPY inner/file ."),
    ),
    "link_as_the_context": (
        f"environment: it {LINK}",
        lambda p: p.file(p.outside / "Dockerfile", STANDARD).link("environment", p.outside),
    ),
    "pipe": ("pipe is a FIFO; fix: replace it", lambda p: p.pipe("environment/pipe").copies("COPY pipe .")),
    "socket": ("socket is a socket; fix: ", a_socket),
    "device": ("zero is a device; fix: ", a_device),
    "sparse_file_of_a_terabyte": (
        "more than .* has left; fix: make them smaller, or set TMPDIR|does not fit: a chain has room for",
        lambda p: p.file("environment/huge", size=1 << 40).copies("COPY huge ."),
    ),
    "more_than_the_disk_limit": (
        "does not fit: a chain has room for 8 MiB of copies; fix: make it smaller",
        lambda p: (
            p.file("environment/huge", size=3 << 20).settings("[environment]\nstorage_mb = 8\n"),
            p.copies(*["COPY huge ."] * 4),
        ),
    ),
    "files_without_end": (
        "does not fit: ",
        lambda p: (
            [p.file(f"environment/many/{number}", "") for number in range(600)],
            p.settings("[environment]\nstorage_mb = 2\n").copies("COPY many /app/many"),
        ),
    ),
    "folders_without_end": (
        "is more than 64 folders deep; fix: delete it",
        lambda p: p.file(f"environment/{'d/' * 80}file").copies("COPY d /app/d"),
    ),
    "another_name_of_a_file_outside": ("", another_name_of_a_file_outside),
    "names_of_any_bytes": ("", names_of_any_bytes),
    # targets of COPY, and WORKDIR
    "reserved_target_in_other_words": (
        "COPY to /tests: this path is reserved",
        lambda p: p.copies("COPY Dockerfile //app/..//tests/"),
    ),
    "setuid_by_chmod": (
        "--chmod=4755; fix: give the permissions in three octal digits",
        lambda p: p.copies("COPY --chmod=4755 Dockerfile /app/x"),
    ),
    "setuid_by_its_mode": ("", lambda p: p.file("environment/tool", mode=0o6777).copies("COPY tool /app/tool")),
    "workdir_above": ("", lambda p: p.copies(workdir=f"../../../../..{p.outside}")),
    "workdir_of_the_kernel": (
        "environment/Dockerfile: WORKDIR /proc/self: this path is reserved",
        lambda p: p.copies(workdir="/app/../proc/self"),
    ),
    "target_below_a_copied_link": (
        f"out {LINK}",
        lambda p: p.inner_links().copies("COPY a/b/c/d/e /app/", "COPY evil /app/out/evil"),
    ),
    "target_that_is_a_copied_link": (
        f"file {LINK}",
        lambda p: p.inner_links().copies("COPY a/b/c/d/e /app/", "COPY evil /app/file"),
    ),
    "workdir_below_a_copied_link": (
        f"out {LINK}",
        lambda p: p.inner_links().settings("[environment]\nworkdir = '/app/out/made'\n").copies("COPY a/b/c/d/e /app/"),
    ),
    "target_above": (
        "",
        lambda p: p.file("environment/evil").copies(
            "COPY evil /app/../../../../../opt/evil", "COPY evil ../../../../../../srv/evil"
        ),
    ),
    # links in the root file system
    "root_with_an_absolute_link": ("", lambda p: p.root_link(p.outside)),
    "root_with_a_relative_link": ("", lambda p: p.root_link("../outside")),
    "root_with_a_circle": ("leads to itself", lambda p: p.root_link("app")),
    "workdir_above_the_root": (
        "",
        lambda p: p.root_link("usr").copies("COPY evil ../../../outside/folder/", workdir="/app/../../outside"),
    ),
    "target_through_a_link_of_the_root": (
        "",
        lambda p: p.root_link(p.outside).copies("COPY --chmod=777 evil /app/folder/file", "COPY evil /app/evil"),
    ),
    "root_that_leads_to_where_bwrap_keeps_the_machine": (
        "",
        lambda p: p.root_link(f"../oldroot{p.outside}").copies(workdir="/app/made/by/bwrap"),
    ),
    # files of the format
    "task_by_a_link": (f"task.toml: the task's folder {LINK}", a_task_by_a_link),
    "instruction_by_a_link": (
        f"instruction.md: it {LINK}",
        lambda p: p.link("instruction.md", p.outside / "instruction.md"),
    ),
    "settings_by_a_link": (f"task.toml: it {LINK}", lambda p: p.link("task.toml", p.outside / "task.toml")),
    "tests_by_a_link": (f"tests: it {LINK}", lambda p: p.link("tests", p.outside)),
    "test_by_a_link": ("tests/test.sh leads out of ", lambda p: p.link("tests/test.sh", p.outside / "test.sh")),
    "solution_by_a_link": (
        "solution: solution/solve.sh leads out of ",
        lambda p: p.link("solution/solve.sh", p.outside / "solve.sh"),
    ),
    "instruction_without_end": ("instruction.md: it is a FIFO", lambda p: p.pipe("instruction.md")),
    "instruction_of_a_terabyte": (
        "instruction.md: it has more than 262,144 bytes",
        lambda p: p.file("instruction.md", size=1 << 40),
    ),
    "variables_that_double": (
        "environment/Dockerfile: its variables expand to more than 1 MiB",
        lambda p: p.copies("ENV A=xx", *["ENV A=$A$A"] * 60),
    ),
    "source_without_end": (
        "environment/Dockerfile, line 3: it cannot be read: it has a path of 5001 characters",
        lambda p: p.copies(f"COPY {'d' * 5000} ."),
    ),
    "path_that_grows": (
        "environment/Dockerfile: it has a path of ",
        lambda p: p.copies(*["WORKDIR " + "d" * 200] * 40),
    ),
    "workdir_without_end": (
        "environment/Dockerfile: WORKDIR: it has a path of ",
        lambda p: p.settings(f"[environment]\nworkdir = '{'d/' * 5000}'\n"),
    ),
    "settings_nested_without_end": ("task.toml: it is not TOML", lambda p: p.settings(f"metadata = {'[' * 5000}")),
    "number_without_end": (
        "environment.memory_mb: got 10000.*; fix: give a number above 0",
        lambda p: p.settings(f"[environment]\nmemory_mb = 1{'0' * 400}\n"),
    ),
    "time_without_end": (
        "verifier.timeout_sec: got inf; fix: give a number above 0",
        lambda p: p.settings("[verifier]\ntimeout_sec = inf\n"),
    ),
    # variables
    "variable_of_the_machine_for_all": (
        f"environment.{NOT_NAMED}; fix: add it .*: env: .PLANTED.",
        lambda p: p.variable("environment", "'${PLANTED}'"),
    ),
    "variable_of_the_machine_for_tests": (
        f"verifier.{NOT_NAMED}",
        lambda p: p.variable("verifier", "'x${PLANTED:-d}${PLANTED}'"),
    ),
    "variable_of_the_machine_for_the_solution": (
        f"solution.{NOT_NAMED}",
        lambda p: p.variable("solution", "'${PLANTED}'"),
    ),
    "variable_with_a_default": ("", lambda p: p.variable("environment", "'${PLANTED:-default}'")),
    "variable_in_a_default": ("", lambda p: p.variable("environment", "'${NONE:-${PLANTED}}'")),
    "variable_put_together_by_the_dockerfile": (
        "",
        lambda p: p.copies("ENV D=$", "ENV KEY=$D{PLANTED} B='\\${PLANTED}' C=${PLANTED}"),
    ),
    "arguments_of_bwrap_in_a_value": (
        "environment.env: got .*; fix: correct it",
        lambda p: p.variable("environment", json.dumps(f"x\0--bind\0{p.outside}\0/srv")),
    ),
    "arguments_of_bwrap_in_the_dockerfile": (
        "environment/Dockerfile: it has a null character",
        lambda p: p.copies(f'ENV KEY="x\0--bind\0{p.outside}\0/srv"'),
    ),
    # what the tests leave
    "reward_by_a_link": ("", lambda p: p.tests(f"ln -s {p.outside}/folder/reward.txt {VERIFIER}/reward.txt")),
    "reward_by_a_pipe": ("", lambda p: p.tests(f"mkfifo {VERIFIER}/reward.json; echo 1 > {VERIFIER}/reward.txt")),
    "reward_by_a_folder": ("", lambda p: p.tests(f"mkdir {VERIFIER}/reward.json; echo 1 > {VERIFIER}/reward.txt")),
    "reward_of_a_gigabyte": ("", lambda p: p.tests(f"truncate -s 1G {VERIFIER}/reward.json")),
    "folder_of_links_for_the_next_step": (
        "",
        lambda p: p.tests(
            f"rm -rf /app/*; for n in tests verifier solution 0 1 2; do ln -s {p.outside} /app/$n; done; chmod 0 /app"
        ),
    ),
}
"""The folders by name, each with the error that refuses it; "" if it is played."""


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
    for path in workspace.rglob("*"):
        assert not path.is_symlink() or not path.lstat().st_mode & stat.S_ISUID
        if stat.S_ISREG((about := path.lstat()).st_mode):
            assert not about.st_mode & (stat.S_ISUID | stat.S_ISGID), path
            with path.open("rb") as file:
                yield file.read(1 << 16).decode(errors="replace")


async def played(row: dict[str, Any], seen: list[str]) -> None:
    """Play a task, and add all texts that it brings into the chain, or out of it, to `seen`."""
    seen.append(json.dumps(row))
    async with opened(row) as shell:
        seen += contents(shell.workspace)
        seen.append((await shell.shell(LOOK))["observation"])
        seen.append((await shell.solve()).stdout)
        seen.append(json.dumps(await shell.reward()))
        seen += contents(shell.workspace)


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
    if name.startswith("reward"):
        assert json.dumps(NO_REWARD) in seen


async def test_a_folder_that_changes_after_the_check(place: Place) -> None:
    place.write("environment/data/file")
    place.copies("COPY --chmod=777 data /app/data")
    row = rows(place.task.parent)["a-task"]
    place.link("environment/data", place.outside)
    before = state(place.outside)
    with pytest.raises(OSError, match="environment/data is a link, which is not followed"):
        await played(row, [])
    assert state(place.outside) == before


async def test_named_variables_reach_processes_and_nothing_that_is_saved(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place.settings("[environment]\nenv = {KEY = 'k=${PLANTED}'}\n[verifier]\nenv = {TOO = '${PLANTED}'}\n")
    place.tests('echo "{\\"reward\\": ${#TOO}, \\"$KEY\\": ${#KEY}}" > /logs/verifier/reward.json; echo $TOO')
    environment.name_variables(["PLANTED"])
    row = rows(place.task.parent)["a-task"]
    assert row["harbor"]["environment_env"] == {"KEY": "k=${PLANTED}"}
    caplog.set_level("DEBUG")
    texts = [call("I look.", "shell", command='echo "$KEY ${#KEY} $TOO"; env > all; cat all'), "It is done."]
    async with scripted_chains(tmp_path, texts, tools=["harbor"], rewards=[]) as chains:
        await chains.runner.check([row])
        chain = await chains.run(**row)
    assert next(m["content"] for m in chain.messages if m["role"] == "tool").startswith(f"k=*** {len(SECRET) + 2} \n")
    assert chain.reward == len(SECRET)
    assert chain.metrics["k=***"] == len(SECRET) + 2
    saved = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert not [text for text in (*saved, json.dumps(row), repr(chain), caplog.text) if SECRET in text]


async def test_a_variable_that_is_missing_in_the_chain_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.settings("[verifier]\nenv = {TOO = '${PLANTED}'}\n")
    environment.name_variables(["PLANTED"])
    row = rows(place.task.parent)["a-task"]
    monkeypatch.delenv("PLANTED")
    with pytest.raises(SettingError, match=r"harbor: .*verifier\.env\.TOO: .* PLANTED is not set; fix: export it"):
        rows(place.task.parent)
    with pytest.raises(ValueError, match="PLANTED is not set, or not named in the recipe"):
        await Harbor().reset(**row)
