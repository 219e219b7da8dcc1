"""The limits of a sandbox, and the error for machines that cannot run one."""

import os
from dataclasses import dataclass
from enum import StrEnum

from agentfactory.base.messages import ToolInfrastructureError


def sandbox_user() -> int | None:
    """Return the user id of sandboxes: nobody for root; None for the user of this process."""
    return 65534 if os.geteuid() == 0 else None


NO_SANDBOX = "or set `sandbox: none` if the code may do everything that this process may"
"""The last fix for a machine, or a user, without sandboxes."""


class SandboxUnavailable(ToolInfrastructureError):
    """This machine cannot run a sandbox; the message gives the reason and a fix."""

    def __init__(self, problem: str, fix: str = "") -> None:
        super().__init__("; ".join(filter(None, (problem, fix))))
        self.problem, self.fix = problem, fix


def check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name}: got {value}; it has to be from {least} to {most}")


class SandboxKind(StrEnum):
    """The isolation between the code and the machine."""

    BUBBLEWRAP = "bubblewrap"
    """Namespaces, a system call filter, limits."""
    NONE = "none"
    """Limits only: the code can read, write and reach everything that this process can."""


@dataclass(frozen=True)
class SandboxSettings:
    """Limits of one sandbox, checked on creation."""

    kind: SandboxKind = SandboxKind.BUBBLEWRAP
    memory_mb: int = 512
    disk_mb: int = 64
    """Total size of the workspace's and /tmp's files, and of each file, in MiB. The files are in memory."""
    output_characters: int = 10_000
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_range("memory_mb", self.memory_mb, 64, 1 << 20)
        check_range("disk_mb", self.disk_mb, 1, 1 << 16)
        check_range("output_characters", self.output_characters, 200, 100_000)

    @property
    def limits(self) -> dict[str, int]:
        """Resource limits that the process inside sets, by their names in `resource`."""
        limits = {"RLIMIT_AS": self.memory_mb << 20, "RLIMIT_FSIZE": self.disk_mb << 20, "RLIMIT_NOFILE": 64}
        limits |= dict.fromkeys(("RLIMIT_CORE", "RLIMIT_MEMLOCK", "RLIMIT_MSGQUEUE"), 0)
        # counted in the sandbox's own user namespace; without one it would count all processes of this user
        return limits if self.kind is SandboxKind.NONE else {**limits, "RLIMIT_NPROC": 64}


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of a program in a sandbox together with its descendants, checked on creation."""

    processes: int = 256
    memory_mb: int = 2048
    """Memory of all processes together, in MiB; `/tmp` and `/dev/shm` may take the same again, each."""
    disk_mb: int = 1024
    """MiB of all files and folders in writable folders, each counted as at least 4 KiB; also the limit of each file."""

    def __post_init__(self) -> None:
        check_range("processes", self.processes, 4, 1 << 16)
        check_range("memory_mb", self.memory_mb, 64, 1 << 24)
        check_range("disk_mb", self.disk_mb, 1, 1 << 24)
