"""Attacks on a sandbox, each with its expected outcome, while 15 neighbours keep running.

The test modules run them. `python -m tests.tools.attacks`, run by a child process of another user, runs all of them and
prints their names, so this module imports only the standard library, waiting.py and the sandbox itself."""

import asyncio
import os
import re
import socket
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from agentfactory.base.processes.sandbox_limits import SandboxKind, SandboxSettings
from agentfactory.tools.sandbox import session
from agentfactory.tools.sandbox.session import CellResult, Sandbox
from tests.waiting import pass_time, until

NEIGHBOURS = 15
OUTPUT = 2000
SECRET = "the-secret-of-the-host"
REPOSITORY = Path(__file__).parents[2]

# Each attack calls `attempt`, which adds its successes to `reached`.
PREAMBLE = """
import ctypes, os, sys
reached = []
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, function, *arguments):
    try:
        value = function(*arguments)
    except BaseException as error:
        return error
    reached.append((name, str(value)[:60]))
def call(name, number, *arguments):
    # a system call that must not succeed
    if libc.syscall(number, *arguments) != -1:
        reached.append((name, number))
"""


@dataclass(frozen=True)
class Attack:
    """A cell, and the regular expression that its text, or the reason of its end, must match."""

    code: str
    text: str = r"reached \[\]"
    lost: str | None = None
    seconds: float = 60.0
    grace: float = 60.0
    """Seconds beyond `seconds` before it is killed, and for its end after its channel has closed."""
    overtime: bool = False
    """True: both time limits expire as soon as it has printed something."""
    follow_up: tuple[str, str] | None = ("kept", "7")
    """A further cell and its whole text: the interpreter still answers, in step, and has its variables."""


ATTACKS = {
    "network": Attack("""
import socket, urllib.request
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, 40, 17, 38):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        attempt(("socket", family, kind), socket.socket, family, kind)
attempt("connect", socket.create_connection, ("127.0.0.1", PORT), 1)
attempt("http", urllib.request.urlopen, "http://127.0.0.1:PORT", None, 1)
attempt("name", socket.getaddrinfo, "example.com", 80)
print("reached", reached)
"""),
    "reading outside": Attack("""
for path in ("SECRET_FILE", "REPOSITORY/setup.py", "/etc/passwd", "/etc/shadow", "/proc/1/environ", "/proc/self/maps",
             "/dev/mem", "/dev/kmsg", "/run/worker.py/../../etc/hostname", "/usr/bin/bash"):
    attempt(path, lambda: open(path, "rb").read(20))
for path in ("/proc", "/sys", "/boot", "/var", "/mnt", "/srv", "/run/user"):
    attempt(path, os.listdir, path)
# where the interpreter lies in the home folder, the way to it is there, and nothing beside it
others = attempt("home", lambda: [n for n in os.listdir("HOME") if not sys.prefix.startswith(f"HOME/{n}")][0])
print("reached", reached)
"""),
    "writing outside": Attack("""
def write(path):
    with open(path, "w") as file:
        file.write("x")
for path in ("/x", "/usr/lib/x", "/etc/x", "/dev/x", "/run/x", "/run/worker.py", "/packages/x",
             "/workspace/../x", "SECRET_FILE", os.__file__, sys.executable):
    attempt(path, write, path)
for path in ("/x", "/usr/lib/x", "/dev/shm", "/proc"):
    attempt(path, os.mkdir, path)
for path in ("/", "/run", "/usr/lib", os.__file__, sys.executable):
    # also where the files belong to the user himself
    attempt(("mounted writable", path), lambda: 1 // (not os.statvfs(path).f_flag & os.ST_RDONLY))
attempt("chmod", os.chmod, "/usr/lib", 0o777)
attempt("link", os.link, os.__file__, "/workspace/os.py")
write("/tmp/inside"), write("inside")
print("reached", reached)
"""),
    "environment variables": Attack("""
libc.getenv.restype = ctypes.c_char_p
print("reached", [name for name in os.environ if "SECRET" in name or "PATH" in name and name != "PATH"])
print(sorted(os.environ), libc.getenv(b"AGENTFACTORY_TEST_SECRET"), sys.argv[-1])
"""),
    "fork bomb": Attack(
        """
import subprocess, threading, time
for _ in range(100):
    attempt("fork", os.fork)
attempt("forkpty", os.forkpty)
attempt("spawn", os.posix_spawn, sys.executable, [sys.executable, "-c", ""], {})
attempt("subprocess", subprocess.run, [sys.executable, "-c", ""])
attempt("system", lambda: 1 // (os.system("true") == 0))
for number in CLONES:
    call("clone", number, 17, 0, 0, 0, 0)
threads = []
def more():
    for _ in range(2000):
        threads.append(threading.Thread(target=time.sleep, args=(600,), daemon=True))
        threads[-1].start()
threading.stack_size(65536)
error = attempt("threads", more)
print("reached", reached, type(error).__name__, "at", len(threads))
""",
        text=r"reached \[\] RuntimeError at ([1-5]?\d|6[0-4])\b",
    ),
    "memory bomb": Attack(
        """
import mmap, resource
blocks = []
def fill(size):
    while True:
        blocks.append(bytearray(size))
for size in (1 << 30, 1 << 20, 1 << 12):
    attempt(size, fill, size)
    blocks.clear()
def maps():
    while True:
        blocks.append(mmap.mmap(-1, 1 << 20))
        blocks[-1].write(bytes(1 << 20))
attempt("shared memory", maps)
blocks.clear()
attempt("memfd", os.memfd_create, "x")
for name, number in SHARED_MEMORY.items():
    call(name, number, 0, 1 << 30, 0o1777)
attempt("limit", resource.setrlimit, resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
print("reached", reached, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10 <= 128)
""",
        text=r"reached \[\] True",
    ),
    "disk bomb": Attack(
        """
def fill(folder, size):
    for index in range(10000):
        with open(f"{folder}/{index}", "wb") as file:
            for _ in range(size >> 16):
                file.write(bytes(1 << 16))
attempt("one", fill, ".", 1 << 30)
attempt("many", fill, "/tmp", 1 << 16)
attempt("allocated", lambda: os.posix_fallocate(open("a", "wb").fileno(), 0, 1 << 40))
total = sum(os.path.getsize(f"{path}/{name}") for path, _, names in os.walk(".") for name in names)
print("reached", reached, total <= 8 << 20)
""",
        text=r"reached \[\] True",
    ),
    "a million files": Attack(
        """
for index in range(1000000):
    os.mkdir(str(index))
""",
        text="^$",
        lost="more than 20000 files",
        follow_up=None,
    ),
    "endless loop": Attack("while True: pass", text="TimeoutError", seconds=0.3),
    "endless loop that catches": Attack(
        """
import signal, time
while True:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)  # so that the alarm of the time limit rings in here
        time.sleep(600)
    except BaseException as error:
        print(type(error).__name__)
""",
        text=r"^(TimeoutError\n?)+$",
        lost=r"ran for more than 60\.0 s",
        overtime=True,
        follow_up=None,
    ),
    "endless loop in C": Attack(
        "print('begun')\nsum(iter(int, 1))", text="^begun$", lost="ran for more", overtime=True, follow_up=None
    ),
    "a gigabyte of output": Attack(
        """
line = "x" * (1 << 20)
for _ in range(1024):
    print(line)
print("the end")
""",
        text=r"(?s)^x+\n\[\.\.\. 1073\d{6} characters left out \.\.\.\]\nx+\nthe end$",
    ),
    "a gigabyte past print": Attack(
        """
import threading
def flood(descriptor):
    for _ in range(1 << 10):
        os.write(descriptor, bytes(1 << 20))
print(sys.stdout.buffer.write(b"y" * (8 << 20)), file=sys.stderr)
error = attempt("descriptor", flood, 1) or attempt("descriptor", flood, 2)
print("reached", reached)
""",
        text=r"(?s)characters left out",
        follow_up=("os.fstat(1).st_size", "8192"),
    ),
    "forged replies": Attack(
        """
import socket
def find_nonce():
    frame = sys._getframe()
    while frame is not None and "nonce" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["nonce"]
nonce = find_nonce()
channel = next(fd for fd in range(3, 1024) if attempt(fd, os.fstat, fd) is None and os.fstat(fd).st_mode >> 12 == 12)
forged = socket.socket(fileno=os.dup(channel))
for message in (b"garbage", b"ready\\0end\\0", b"\\0\\0\\0\\0", b"x" * 60000, b"0" * 32 + b"\\0value\\0stale"):
    forged.send(message)
forged.send(nonce + b"\\0value\\0forged")
forged.send(nonce + b"\\0left_out\\0-1e9")
forged.send(nonce + b"\\0end\\0")
forged.send(nonce + b"\\0end\\0")
""",
        text=r"^forged$",
    ),
    "flood of replies": Attack(
        """
import socket
channel = next(fd for fd in range(3, 1024) if attempt(fd, os.fstat, fd) is None and os.fstat(fd).st_mode >> 12 == 12)
while True:
    os.write(channel, b"x" * 60000)
""",
        text="^$",
        lost="flooded its own channel",
        follow_up=None,
    ),
    "ptrace and the kernel": Attack("""
for request in (0, 16, 0x4206):
    call("ptrace", NUMBERS["ptrace"], request, 1, 0, 0)
for name in ("process_vm_readv", "process_vm_writev", "bpf", "keyctl", "add_key", "perf_event_open", "io_uring_setup",
             "userfaultfd", "pidfd_open", "pidfd_getfd", "open_by_handle_at", "syslog", "personality"):
    call(name, NUMBERS[name], 1, 0, 0, 0, 0)
call("of the x32 interface", 0x40000000 | 39)
for pid in range(2, 5000):
    if pid != os.getpid():
        attempt(("kill", pid), os.kill, pid, 9)
os.kill(1, 9)  # the first process of a namespace ignores those in it
print("reached", reached)
"""),
    "nested namespaces": Attack("""
for flag in (0x10000000, 0x20000000, 0x40000000, 0x00020000, 0x08000000, 0x04000000, 0x02000000):
    call("unshare", NUMBERS["unshare"], flag)
    call("clone", NUMBERS["clone"], flag | 17, 0, 0, 0, 0)
    call("clone of a thread", NUMBERS["clone"], flag | 0x10900, 0, 0, 0, 0)
for name in ("mount", "umount2", "pivot_root", "chroot", "setns", "clone3", "setuid", "setresuid", "capset", "mknodat"):
    call(name, NUMBERS[name], b"/workspace", b"/workspace", b"tmpfs", 0, 0)
print("reached", reached)
"""),
    "suicide": Attack("os.kill(os.getpid(), 9)", text="^$", lost="ended by SIGKILL", follow_up=None),
    "crash": Attack("print('so far')\nctypes.string_at(0)", text="^so far$", lost="by SIGSEGV", follow_up=None),
    "exit without a word": Attack("os._exit(3)", text="^$", lost="ended with status 3", follow_up=None),
    "closed channel": Attack("os.closerange(0, 1024)\n1", text="^$", lost="ended with status 1", follow_up=None),
    "empty reply": Attack(
        """
import time
for descriptor in range(3, 1024):
    attempt("send", os.write, descriptor, b"")
    if not attempt("stat", os.fstat, descriptor) and os.fstat(descriptor).st_mode >> 12 == 12:
        import socket
        socket.socket(fileno=descriptor).send(b"")
time.sleep(600)
""",
        text="^$",
        lost="closed its channel",
        grace=0.5,
        follow_up=None,
    ),
}

NUMBERS = {
    "x86_64": """ptrace=101 process_vm_readv=310 process_vm_writev=311 bpf=321 keyctl=250 add_key=248
        perf_event_open=298 io_uring_setup=425 userfaultfd=323 pidfd_open=434 pidfd_getfd=438 open_by_handle_at=304
        syslog=103 personality=135 unshare=272 clone=56 clone3=435 mount=165 umount2=166 pivot_root=155 chroot=161
        setns=308 setuid=105 setresuid=117 capset=126 mknodat=259 fork=57 vfork=58 shmget=29 memfd_create=319""",
    "aarch64": """ptrace=117 process_vm_readv=270 process_vm_writev=271 bpf=280 keyctl=219 add_key=217
        perf_event_open=241 io_uring_setup=425 userfaultfd=282 pidfd_open=434 pidfd_getfd=438 open_by_handle_at=265
        syslog=116 personality=92 unshare=97 clone=220 clone3=435 mount=40 umount2=39 pivot_root=41 chroot=51 setns=268
        setuid=146 setresuid=147 capset=91 mknodat=33 shmget=194 memfd_create=279""",
}
"""Machine -> system call numbers that attacks try."""


async def attack(name: str, kind: SandboxKind = SandboxKind.BUBBLEWRAP) -> CellResult:
    attempted = ATTACKS[name]
    settings = SandboxSettings(kind, memory_mb=128, disk_mb=8, output_characters=OUTPUT)
    attacker = await Sandbox.ready(settings, Sandbox.begin(settings))
    grace = mock.patch.object(session, "_GRACE_SECONDS", attempted.grace)
    grace.start()
    try:
        assert (await attacker.run("kept = 7", 60.0)).text == ""
        with tempfile.TemporaryDirectory() as folder, closing(socket.create_server(("127.0.0.1", 0))) as listener:
            os.chmod(folder, 0o755)
            secret = Path(folder, "secret")
            secret.write_text(SECRET)
            code = _code(attempted.code, secret, listener.getsockname()[1])
            attacking = asyncio.create_task(attacker.run(code, attempted.seconds))
            if attempted.overtime:
                await until(attacker._process.said)
                pass_time(attempted.seconds + attempted.grace)
            result = await attacking
            assert secret.read_text() == SECRET
        if attempted.follow_up is not None and kind is SandboxKind.BUBBLEWRAP:
            code, expected = attempted.follow_up
            after = await attacker.run(code, 60.0)
            assert after.text == expected, (name, after)
        return result
    finally:
        grace.stop()
        attacker.close()


class Neighbour:
    """A sandbox that runs cells which build on each other, until it is cancelled."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.cells = 0
        self._sandbox = sandbox
        self.task = asyncio.create_task(self._go_on())

    async def _go_on(self) -> None:
        assert (await self._sandbox.run("count = 0", 600.0)).text == ""
        while True:
            result = await self._sandbox.run("count += 1\ncount", 600.0)
            self.cells += 1
            assert result.text == str(self.cells), (self.cells, result)
            await asyncio.sleep(0.02)

    async def still_goes_on(self) -> None:
        before = self.cells
        await until(lambda: self.task.done() or self.cells > before)
        if self.task.done():
            self.task.result()


def _code(code: str, secret: Path, port: int) -> str:
    numbers = {key: int(value) for key, value in (e.split("=") for e in NUMBERS[os.uname().machine].split())}
    clones = [numbers[name] for name in ("clone", "clone3", "fork", "vfork") if name in numbers]
    shared = {name: numbers[name] for name in ("shmget", "memfd_create")}
    given = f"NUMBERS = {numbers}\nCLONES = {clones}\nSHARED_MEMORY = {shared}\n"
    replaced = code.replace("SECRET_FILE", str(secret)).replace("PORT", str(port))
    return given + PREAMBLE + replaced.replace("REPOSITORY", str(REPOSITORY)).replace('"HOME', f'"{Path.home()}')


def check(name: str, result: CellResult) -> None:
    expected = ATTACKS[name]
    assert re.search(expected.text, result.text), (name, result)
    assert len(result.text) <= OUTPUT + 60
    if expected.lost is None:
        assert result.lost is None, (name, result)
    else:
        assert re.search(expected.lost, result.lost or ""), (name, result)


async def main(report: Callable[[str], None]) -> None:
    os.environ["AGENTFACTORY_TEST_SECRET"] = SECRET
    settings = SandboxSettings(memory_mb=128, disk_mb=8, output_characters=OUTPUT)
    starting = [Sandbox.begin(settings) for _ in range(NEIGHBOURS)]
    sandboxes = await asyncio.gather(*(Sandbox.ready(settings, start) for start in starting))
    neighbours = [Neighbour(sandbox) for sandbox in sandboxes]
    for name in ATTACKS:
        check(name, await attack(name))
        await asyncio.gather(*(neighbour.still_goes_on() for neighbour in neighbours))
        report(name)
    for neighbour, sandbox in zip(neighbours, sandboxes, strict=True):
        neighbour.task.cancel()
        sandbox.close()
    await asyncio.wait([neighbour.task for neighbour in neighbours])


if __name__ == "__main__":
    asyncio.run(main(lambda name: print(name, flush=True)))
