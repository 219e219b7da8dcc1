"""Tests of the shell as an environment: the model's observations, persistence, containment and clean-up."""

import asyncio
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from agentfactory.base.config import ToolsRecipe
from agentfactory.base.messages import ToolCall
from agentfactory.base.processes.sandbox_limits import ProgramLimits, SandboxUnavailable
from agentfactory.tools.prebuilt.shell import PATH, Shell
from agentfactory.tools.sandbox import process, program
from agentfactory.tools.sandbox.bubblewrap import View, variables
from agentfactory.tools.sandbox.disk_use import measure
from agentfactory.tools.sandbox.program import run_program
from agentfactory.tools.sessions.toolset import open_toolset
from tests.waiting import until

pytestmark = pytest.mark.processes
MARK = f"shell-{os.getpid()}"


@pytest.fixture
async def shell() -> AsyncIterator[Shell]:
    made = Shell(seconds=20, processes=20, memory_mb=200, disk_mb=8, output_characters=400)
    await made.reset()
    yield made
    await made.close()


async def said(shell: Shell, command: str) -> str:
    return (await shell.shell(command))["observation"]


def left() -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if any(MARK in part for part in p.info["cmdline"] or [])]


async def test_files_stay_and_processes_end(shell: Shell) -> None:
    assert await said(shell, "echo tea > drink; cd /; true") == "(no output)"
    assert await said(shell, "pwd; cat drink | tr a-z A-Z") == "/workspace\nTEA"
    assert await said(shell, "echo to stdout; echo to stderr >&2; exit 3") == "to stdout\nto stderr\n[exit status 3]"
    marked = f"bash -c 'exec -a {MARK} sleep 600'"
    assert await said(shell, f"{marked} & setsid {marked} & echo ok") == "ok"
    assert not left()
    assert "left out" in await said(shell, "seq 100000")
    assert (shell.workspace / "drink").read_text() == "tea\n"


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("python3 -c 'import time; x = bytearray(600 << 20); time.sleep(60)'", "more than 200 MiB"),
        ("python3 -c 'import os, time; [os.fork() or time.sleep(60) for _ in range(40)]'", "temporarily unavailable"),
        ("head -c 20M /dev/zero > big", "File size limit exceeded"),
        ("for i in 1 2 3; do head -c 5M /dev/zero > part$i; done; sleep 60", "files took more than 8 MiB"),
        ("echo x > /usr/x", "Read-only file system"),
        ("ls /root /home 2>&1; cat /etc/shadow", "Permission denied"),
        ("unshare -U true", "Function not implemented"),
    ],
)
async def test_what_a_command_cannot_do(shell: Shell, command: str, text: str) -> None:
    assert text in await said(shell, command)
    assert (await said(shell, "echo on")).endswith("on"), "the next one works"


async def test_mount_points_do_not_leave_a_root_by_its_links() -> None:
    """bwrap keeps the machine in /oldroot while it makes mount points, and follows links there."""
    with tempfile.TemporaryDirectory() as made:
        root, outside = Path(made) / "root", Path(made) / "outside"
        for folder in (Path(made), root, outside, root / "bin"):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o777)
        (root / "bin/sh").touch()
        (root / "workspace").symlink_to(f"../oldroot{outside}/made")
        shell = Shell(root=str(root))
        await shell.reset()
        with pytest.raises(SandboxUnavailable, match="sh"):  # it is empty
            await shell.run("true", 5)
        await shell.close()
        assert not os.listdir(outside)


def test_a_variable_cannot_hold_arguments_of_bwrap() -> None:
    assert variables({"A": "b = c"}) == b"--setenv\0A\0b = c\0"
    for env in ({"A": "b\0--bind\0/\0/x"}, {"A\0--bind": "b"}, {"A=B": "c"}, {"": "c"}):
        with pytest.raises(ValueError, match="cannot be set as an environment variable"):
            variables(env)


async def test_what_listens_on_this_machine_is_out_of_reach(shell: Shell) -> None:
    """Try TCP, and a socket with an abstract name, which no file permissions protect."""
    name = f"\0{MARK}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(name)
        abstract.listen()
        for family, address in (("AF_INET", server.getsockname()), ("AF_UNIX", name)):
            code = f"import socket; socket.socket(socket.{family}).connect({address!r})"
            here = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
            assert await here.wait() == 0, "it can be reached from outside"
            assert "Connection refused" in await said(shell, shlex.join(["python3", "-c", code]))
    assert (await said(shell, "tail -n +3 /proc/net/dev | cut -d: -f1")).split() == ["lo"]


async def test_a_command_that_ends_before_its_process_is_known(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    read_init = process._read_init

    def late(descriptor: int) -> int | None:
        time.sleep(0.3)  # as on a busy machine
        return read_init(descriptor)

    monkeypatch.setattr(process, "_read_init", late)
    assert await said(shell, "echo quick; exit 3") == "quick\n[exit status 3]"


PAGE_TABLES = """python3 -c '
import mmap  # 0x4000 is MAP_NORESERVE
size = 256 << 30
pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, mmap.PROT_READ)
for at in range(0, size, 2 << 20): pages[at]
'"""
SOCKETS = """python3 -c '
import os, socket
os.fork()
kept = [socket.socketpair() for _ in range(2000)]
input()
' < /dev/zero"""
EMPTY_FILES = """python3 -c '
for number in range(10 ** 6): open(f"/dev/shm/{number}", "w").close()
'"""
LONG_LINKS = """python3 -c '
import os, time
for number in range(14000): os.symlink("x" * 4000, f"/dev/shm/{number}")  # below the size of the file system
time.sleep(60)
'"""


@pytest.mark.parametrize(
    ("command", "text"),
    [
        *((bomb, "more than 64 MiB") for bomb in (PAGE_TABLES, EMPTY_FILES, LONG_LINKS)),
        (SOCKETS, "more than 4096 sockets"),
    ],
)
async def test_memory_of_the_kernel_is_limited_too(command: str, text: str) -> None:
    shell = Shell(seconds=60, processes=20, memory_mb=64 if "MiB" in text else 200)
    await shell.reset()
    assert text in await said(shell, command)
    await shell.close()


def test_memory_is_limited_where_its_shares_may_not_be_read() -> None:
    """Drop capabilities, as for root in docker."""
    if os.geteuid() != 0:
        pytest.skip("for root")
    script = """
import asyncio
from agentfactory.tools.prebuilt.shell import Shell
async def main():
    shell = Shell(memory_mb=100)
    await shell.reset()
    print(await shell.shell("python3 -c 'import time; kept = bytearray(300 << 20); time.sleep(60)'"))
    await shell.close()
asyncio.run(main())
"""
    few = "-all,+chown,+dac_override,+fowner,+kill,+setgid,+setuid,+setpcap,+sys_chroot,+mknod"
    command = ["setpriv", "--bounding-set", few, sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "more than 100 MiB" in done.stdout


DELETED = """python3 -c '
import os, time
kept = [open(str(number), "wb") for number in range(3)]
for number, file in enumerate(kept):
    os.unlink(str(number))
    file.write(bytes(4 << 20))
    file.flush()
time.sleep(60)'"""


async def test_deleted_files_are_limited_too(shell: Shell) -> None:
    assert "files took more than 8 MiB" in await said(shell, DELETED)
    folder = shell.workspace
    await shell.release()
    assert not folder.exists()


async def test_short_commands_do_not_add_up(shell: Shell) -> None:
    for number in range(4):
        text = await said(shell, f"head -c 7M /dev/zero > {number}")
    assert "files take more than 8 MiB" in text
    assert "File too large" in text
    assert shell.workspace is not None
    assert measure([shell.workspace]).size < 15 << 20
    assert (await said(shell, "rm 0 1 2 3; echo room > 4; cat 4")).endswith("File too large")
    assert await said(shell, "echo room > 4; cat 4") == "room"


async def test_the_environment_is_on_no_command_line() -> None:
    waits = ["sleep", f"{os.getpid()}.25"]
    call = asyncio.create_task(run_program(waits, View(), ProgramLimits(), {"PATH": PATH, "KEY": "s3cret"}))

    def lines() -> list[list[str]]:
        found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        return [line for line in found if line[-1:] == waits[-1:]]

    await until(lambda: any("bwrap" in line[0] for line in lines()) and any(line[0] == "sleep" for line in lines()))
    told = lines()
    call.cancel()
    await asyncio.wait([call])
    assert "s3cret" not in str(told)


async def test_what_no_measure_finds_does_not_fill_the_disk(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = """python3 -c '
import os, socket, time
here, there = socket.socketpair()
for _ in range(100):
    with open("big", "wb") as file:
        os.unlink("big")
        file.write(bytes(4 << 20))
        file.flush()
        socket.send_fds(here, [b"x"], [file.fileno()])
time.sleep(60)
'"""
    monkeypatch.setattr(program, "_LEAST_FREE", (shutil.disk_usage(shell.workspace).free - (256 << 20), 1.0))
    assert re.search(r"the disk of its files has less than \d+ MiB left", await said(shell, hidden))
    monkeypatch.setattr(program, "_LEAST_FREE", (1 << 60, 1.0))
    assert await said(shell, "rm -f big; ls") == "(no output)", "a short command, such as one that makes room, works"


async def test_a_command_that_takes_too_long_and_one_that_is_cancelled(shell: Shell) -> None:
    shell._seconds = 1.0
    slow = f"echo begun; exec -a {MARK} sleep 600"
    assert await said(shell, slow) == "begun\n[The command was ended: it ran for more than 1 s.]"
    shell._seconds = 600.0
    call = asyncio.create_task(said(shell, slow))
    await until(left)
    call.cancel()
    await asyncio.wait([call])
    assert not left()


async def test_chains_share_nothing_and_rows_give_files(tmp_path: Path) -> None:
    recipe = ToolsRecipe.model_validate({"mcp_servers": {"terminal": {"module": "shell", "options": {"disk_mb": 8}}}})
    folders = Path("/tmp")
    async with open_toolset(recipe, tmp_path) as toolset:
        async with toolset.chain("a", {"files": {"notes/one.txt": "first"}}) as one, toolset.chain("b", {}) as two:
            call = ToolCall("1", "shell", {"command": "cat notes/one.txt; echo more > new; ls"})
            first, second = await asyncio.gather(one.call(call), two.call(call))
            assert first.content == "firstnew\nnotes"
            assert "No such file" in str(second.content)
            made = [path for path in folders.glob("agentfactory-chains-*/*/new")]
            assert len(made) >= 2
        assert not any(path.exists() for path in made)


@pytest.mark.parametrize(
    ("options", "problem"), [({"seconds": 0}, "seconds: got 0"), ({"root": "/etc"}, "root: /etc has no /bin/sh")]
)
def test_options_that_cannot_work(options: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Shell(**options)  # type: ignore[arg-type]
