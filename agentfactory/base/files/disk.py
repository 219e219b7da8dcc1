"""Full or read-only disks: errors that name the file, unlike those of the system and of libraries."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

_FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room"),
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    **dict.fromkeys(
        (errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n), or lower rollout.concurrency"
    ),
}
_PROBE = 1 << 16


class DiskError(OSError):
    """A file cannot be written; the message gives the file, the reason and a fix."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise DiskError if writing `path`, a file or a folder, fails in this context because of the disk."""
    try:
        yield
    except DiskError:
        raise
    except Exception as error:  # boundary: libraries report a full disk in different ways, torch as a wrong position
        told = _reason(error) or (refusal(path.parent) if path.parent.is_dir() else None)
        if told is None:
            raise
        free = shutil.disk_usage(path.parent).free
        fix = _FIXES.get(told.errno or 0, "choose a folder that can be written")
        problem = f"{path} cannot be written: {told.strerror} ({free >> 10:,} KiB are free there)"
        raise DiskError(f"{problem}; fix: {fix}") from error


def _reason(error: Exception) -> OSError | None:
    """Return the system's error for a full disk that `error` is, or that it quotes as Rust libraries do; else None."""
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        if getattr(error, "errno", None) == number or f"(os error {number})" in str(error):
            return OSError(number, os.strerror(number))
    return None


def append(path: Path, content: str | bytes) -> None:
    """Append `content`, text as UTF-8, to a file. Follow no link in its place. Raises DiskError."""
    with writing(path), open(path, "ab", opener=_open_itself) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def _open_itself(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        problem = "it is a link, which is not followed; fix: put the file itself there"
        raise DiskError(f"{path} cannot be written: {problem}") from None


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: under a temporary name, renamed once its bytes are on the disk. Raises DiskError."""
    aside = path.with_name(f"{path.name}.new")
    with writing(path):
        # never write through a link in its place
        aside.unlink(missing_ok=True)
        with aside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)


def refusal(folder: Path) -> OSError | None:
    """Return the error of writing a small temporary file in the existing `folder`; None if that works."""
    try:
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE))
            file.flush()
    except OSError as error:
        return error
    return None


@contextmanager
def filled(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that the context fills. It is renamed to `folder`, missing or empty, once complete."""
    aside = folder.with_name(f".{folder.name}.partial")
    if aside.exists():  # left by an earlier run that was killed
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    yield aside
    set_usual_modes(aside)
    aside.rename(folder)


def set_usual_modes(folder: Path) -> None:
    """Give the weights in `folder` the umask's usual mode: safetensors writes them for their owner alone."""
    for file in folder.rglob("*.safetensors"):
        # the umask decided the mode of the folder too
        file.chmod(folder.stat().st_mode & 0o666)
