"""Memory that is still available, and that of processes."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil


def memory_room() -> int:
    """Return the bytes that are still available: of the machine, and of the control group that we run in (a container's
    limit)."""
    return min([psutil.virtual_memory().available, *_group_rooms()])


def memory_of(pid: int) -> int:
    """Return the bytes that a process takes with all that it has started; what several share is divided among them
    (PSS). Processes that have ended take none."""
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
