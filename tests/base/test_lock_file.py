"""Tests of lock files: who can open them, and the named holder. With root, the second user is a real one."""

import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentfactory.base.files.lock_file import open_lock
from agentfactory.launching.run_folder import Hold, RunFolder, RunFolderError
from agentfactory.worlds.browse.database import Database

NOBODY = 65534
LOCKS = (
    "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_SH); print(1, flush=True); sys.stdin.read()"
)


@pytest.fixture
def public() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@contextmanager
def locked_by_nobody(file: Path) -> Iterator[int | None]:
    """Let a process of another user open a file for reading and lock it. Yield its pid; None if it could not."""
    command = ["/usr/bin/python3", "-I", "-S", "-c", LOCKS, str(file)]
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
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user, too")
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
