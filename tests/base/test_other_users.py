"""Tests of what keeps other users out: lock files, and their named holder; the identity of a loopback connection's
peer; the key that a server stores for clients of its own user. With root, the second user is a real one."""

import fcntl
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.files.lock_file import open_lock
from agentfactory.base.http import server_keys
from agentfactory.base.http.loopback import (
    has_foreign_peer,
    is_loopback,
    listeners_users,
    loopback_interface,
    own_sockets,
)
from agentfactory.base.http.server_keys import find_key, key_file, key_folder, pinned, published_key
from agentfactory.launching.run_folder import Hold, RunFolder, RunFolderError
from agentfactory.rollout.inference.http_transport import authorization
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.trainers.sync.server_control import ServerControl
from agentfactory.worlds.browse.database import Database

NOBODY = 65534
LOCK = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_SH); print(1, flush=True); sys.stdin.read()"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user, too")


@pytest.fixture
def public() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@contextmanager
def locked_by_nobody(file: Path) -> Iterator[int | None]:
    """Let a process of another user open a file for reading and lock it. Yield its pid; None if it could not."""
    command = ["/usr/bin/python3", "-I", "-S", "-c", LOCK, str(file)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, user=NOBODY, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, cwd="/") as process:
        try:
            yield process.pid if process.stdout.readline() else None
        finally:
            process.stdin.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_nobody_else_can_open_one(public: Path) -> None:
    os.close(open_lock(public / "new"))
    (public / "old").touch(0o644)
    os.close(open_lock(public / "old"))
    assert (mode(public / "new"), mode(public / "old")) == (0o600, 0o600)
    public.chmod(0o775)
    os.close(open_lock(public / "new"))
    assert mode(public / "new") == 0o660, "who may write in the folder could also remove it"
    (public / "link").symlink_to(public / "target")
    with pytest.raises(OSError, match="symbolic links"):
        open_lock(public / "link")
    assert not (public / "target").exists()
    with pytest.raises(FileNotFoundError):
        open_lock(public / "none", make=False)


def test_a_cache_is_private_too(public: Path) -> None:
    (public / "cache.sqlite").touch(0o644)
    cache = Database(public / "cache.sqlite", "CREATE TABLE IF NOT EXISTS a (b)")
    with cache.transaction() as connection:
        connection.execute("INSERT INTO a VALUES (1)")
    assert {path.name: mode(path) for path in public.iterdir()} == {
        f"cache.{kind}": 0o600 for kind in ("sqlite", "sqlite-wal", "sqlite-shm", "lock")
    }
    cache.close()


@pytest.mark.processes
@needs_root
def test_another_user_cannot_block_a_run(public: Path) -> None:
    folder = RunFolder.create(public / "run", "")
    lock = folder.path / ".lock"
    with Hold(folder.path) as hold:
        hold.take(make=True)
    with locked_by_nobody(lock) as pid:
        assert pid is None, "it cannot be opened"
    # the mode of a lock file from an earlier version
    lock.chmod(0o644)
    with locked_by_nobody(lock) as pid:
        told = rf"pid {pid} of user \w+ holds the lock .lock, but the run .* fix: end that process, or remove {lock}"
        with Hold(folder.path) as hold, pytest.raises(RunFolderError, match=told):
            hold.take()
        assert mode(lock) == 0o600
        lock.unlink()
        with Hold(folder.path) as hold:
            hold.take(make=True)
        with locked_by_nobody(lock) as again:
            assert again is None
    subprocess.run(["cat", folder.recipe], user=NOBODY, check=True)  # others can still view it


# ---- connections


AS_NOBODY = """
import os, socket, sys
os.setuid(65534)
mine = socket.socket()
mine.connect(("127.0.0.1", int(sys.argv[1])))
mine.send(b"x")
if sys.argv[2] == "stays":
    sys.stdin.read()
"""
LISTENS_AS_NOBODY = """
import os, socket, sys
os.setuid(65534)
mine = socket.socket()
mine.bind(("127.0.0.1", 0))
mine.listen()
print(mine.getsockname()[1], flush=True)
sys.stdin.read()
"""


def test_addresses() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost", "::ffff:127.0.0.1"))
    assert not any(map(is_loopback, ("::ffff:192.0.2.1", "0.0.0.0", "192.0.2.1", "example.com", "")))
    assert Path("/sys/class/net", str(loopback_interface())).exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_connection_to_oneself_is_no_strangers(host: str) -> None:
    earlier = own_sockets()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        assert listeners_users(port) == {os.geteuid()}
        with socket.create_connection((host, port)), server.accept()[0]:
            assert len(own_sockets() - earlier) == 3
            assert not has_foreign_peer(earlier)
    assert listeners_users(port) == set()


@needs_root
@pytest.mark.processes
@pytest.mark.parametrize("way", ["stays", "has sent and left"])
def test_another_users_connection_is_found(way: str) -> None:
    earlier = own_sockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        command = [sys.executable, "-c", AS_NOBODY, str(server.getsockname()[1]), way]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as stranger:
            with server.accept()[0] as accepted:
                assert accepted.recv(1) == b"x"
                if way != "stays":
                    stranger.wait()
                assert has_foreign_peer(earlier)
                assert not has_foreign_peer(own_sockets()), "what was there before is not this one's concern"
            stranger.communicate()


@needs_root
@pytest.mark.processes
def test_another_users_listener_is_found() -> None:
    command = [sys.executable, "-c", LISTENS_AS_NOBODY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as thief:
        assert listeners_users(int(thief.stdout.readline())) == {65534}
        thief.communicate()


# ---- keys


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return key_folder()


def test_a_key_is_there_while_its_server_runs(runtime: Path) -> None:
    with published_key("127.0.0.1", 4001) as key:
        assert len(key) >= 32
        assert find_key("http://127.0.0.1:4001/v1/models") == key
        assert authorization("http://127.0.0.1:4001", None) == {"Authorization": f"Bearer {key}"}
        assert find_key("http://127.0.0.1:4002") is None
        assert find_key("http://127.0.0.2:4001") is None
        file = key_file("127.0.0.1", 4001)
        assert (runtime.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    assert find_key("http://127.0.0.1:4001") is None
    assert not list(runtime.iterdir())


def test_a_server_that_took_the_address_keeps_its_key(runtime: Path) -> None:
    with published_key("::1", 4003) as first, published_key("::1", 4003) as second:
        assert first != second == find_key("http://[::1]:4003")
    first_ends = published_key("::1", 4003)
    first_ends.__enter__()
    with published_key("::1", 4003) as second:
        first_ends.__exit__(None, None, None)
        assert find_key("http://[::1]:4003") == second


def test_a_name_is_pinned_to_the_address_of_the_server(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that keys go only to the server's address: at another address of the name, another user may listen."""
    monkeypatch.setattr(server_keys, "loopback_addresses", lambda url: (("::1", 4011), ("127.0.0.1", 4011)))
    assert pinned("http://localhost:4011/v1") == "http://localhost:4011/v1"
    with published_key("127.0.0.1", 4011):
        assert find_key("http://localhost:4011") is None
        assert pinned("http://localhost:4011/v1") == "http://127.0.0.1:4011/v1"
        assert InferenceClient("http://localhost:4011").urls == ["http://127.0.0.1:4011"]
        assert ServerControl("http://localhost:4011").url == "http://127.0.0.1:4011"
        assert pinned("http://127.0.0.2:4011") == "http://127.0.0.2:4011"


@pytest.mark.processes
def test_a_killed_server_leaves_nothing_for_long(runtime: Path) -> None:
    code = "import os\nfrom agentfactory.base.http.server_keys import published_key\n"
    code += "held = published_key('127.0.0.1', 4004)\nheld.__enter__()\nos._exit(1)"
    subprocess.run([sys.executable, "-c", code])
    alive = runtime / "127.0.0.1:4005"
    alive.write_text("a key")
    with alive.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert find_key("http://127.0.0.1:4004") is not None
        with published_key("127.0.0.1", 4006):
            assert {file.name for file in runtime.iterdir()} == {"127.0.0.1:4005", "127.0.0.1:4006"}


@pytest.mark.parametrize("how", ["open to others", "a link", "another user's"])
def test_a_folder_that_others_could_write_is_refused(runtime: Path, how: str) -> None:
    if how == "a link":
        runtime.parent.joinpath("theirs").mkdir(mode=0o700)
        runtime.symlink_to(runtime.parent / "theirs")
    else:
        runtime.mkdir(mode=0o700)
    (runtime / "127.0.0.1:4007").write_text("theirs")
    if how == "open to others":
        runtime.chmod(0o770)
    elif how == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(runtime, 65534, 65534)
    with pytest.raises(SettingError, match=f"{runtime}.*another user; fix: remove it"):
        find_key("http://127.0.0.1:4007")
    with pytest.raises(SettingError, match="another user"), published_key("127.0.0.1", 4007):
        pass
