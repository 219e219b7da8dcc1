"""Available memory, memory of processes, and reuse of freed memory."""

import ctypes
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil


def memory_room() -> int:
    """Return the available memory in bytes, of the machine and of this process's control groups."""
    return min([psutil.virtual_memory().available, *_group_rooms()])


ENDS = "ends"
"""Key of the last answer of a process of `KillableProcesses` that ends because it has grown."""


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def memory_of(pid: int) -> int:
    """Return the memory of a process and its descendants in bytes, with shared pages divided (PSS)."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += one.memory_full_info().pss
    return total


def _group_rooms() -> Iterator[int]:
    try:
        path = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
    except OSError:
        return
    folder = Path("/sys/fs/cgroup") / path.lstrip("/")
    for place in (folder, *folder.parents):
        try:
            limit = (place / "memory.max").read_text().strip()
            used = int((place / "memory.current").read_text())
        except (OSError, ValueError):
            continue
        if limit != "max":
            yield max(0, int(limit) - used)


# glibc's numbers for mallopt, and the largest value that it accepts for the first
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -3, -1, -2
_LARGEST_MMAP_THRESHOLD = 1 << 25


def keep_freed_memory() -> None:
    """Let glibc reuse freed blocks of up to 32 MiB: by default, each tensor on a CPU costs a page fault per 4 KiB."""
    _set_malloc({_MMAP_THRESHOLD: _LARGEST_MMAP_THRESHOLD, _TRIM_THRESHOLD: (1 << 31) - 1, _TOP_PAD: 1 << 26})


def return_freed_memory() -> None:
    """Let glibc return freed blocks of 1 MiB or more: by default, a trainer's heap grows with each micro-batch."""
    _set_malloc({_MMAP_THRESHOLD: 1 << 20})


def give_back_freed() -> None:
    """Return free memory that was kept for reuse to the kernel. Does nothing without glibc."""
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


def _set_malloc(options: dict[int, int]) -> None:
    if (mallopt := _of_glibc("mallopt")) is not None:
        for option, value in options.items():
            mallopt(option, value)


def _of_glibc(function: str) -> Callable[..., int] | None:
    # other C libraries, such as musl, do not have it
    return getattr(ctypes.CDLL(None), function, None) if sys.platform.startswith("linux") else None
