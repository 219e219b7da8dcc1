"""The system call filter of a sandbox, as the BPF program that `bwrap --seccomp` loads.

It is an allowlist: all other calls, including those of future kernels, return ENOSYS. So there is no ptrace, no mount,
no namespace, no io_uring, no bpf, no keyring, and no memory outside RLIMIT_AS (memfd, System V). Creating a process or
a socket returns EPERM: a sandbox is a single process, which makes its memory limit effective. The filter for
multi-process programs allows processes, and sockets of the families Unix, IPv4 and IPv6.
"""

import errno
import platform
import struct

from agentfactory.tools.sandbox.syscalls import AARCH64, PROCESSES_AARCH64, PROCESSES_X86_64, SPECIAL, X86_64

MACHINES = {
    "x86_64": (0xC000003E, X86_64, PROCESSES_X86_64),
    "aarch64": (0xC00000B7, AARCH64, PROCESSES_AARCH64),
}
"""`platform.machine()` -> the kernel's AUDIT_ARCH, the system calls, and further ones for multi-process programs."""

_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
# linux/bpf_common.h: load a word at an absolute offset, jumps by comparison with a constant, return a constant
_LOAD, _EQUAL, _GREATER_EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06
# struct seccomp_data; the lower half of the first argument, since both machines are little-endian
_NUMBER, _MACHINE, _ARGUMENT = 0, 4, 16
_CLONE_THREAD, _CLONE_NAMESPACES = 0x00010000, 0x7E020080
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10


def program(machine: str = platform.machine(), processes: bool = False) -> bytes:
    """Return the filter for `machine`, an array of struct sock_filter. `processes`: True to allow new processes and
    sockets.

    Raises:
        KeyError: `machine` is not in `MACHINES`.
    """
    arch, numbers, further = MACHINES[machine]
    allowed = {name: number for name, number in numbers.items() if name not in SPECIAL}
    if processes:
        free = ("fork", "vfork", "connect")
        allowed |= further | {name: numbers[name] for name in free if name in numbers}
    code = [_step(_LOAD, _MACHINE), _step(_EQUAL, arch, then=1), _step(_RETURN, _KILL_PROCESS), _step(_LOAD, _NUMBER)]
    for first, last in _ranges(sorted(allowed.values())):
        code += [
            _step(_GREATER_EQUAL, first, otherwise=2),
            _step(_GREATER, last, then=1),
            _step(_RETURN, _ALLOW),
        ]
    for name in ("fork", "vfork", "connect"):
        if name in numbers and not processes:
            code += [_step(_EQUAL, numbers[name], otherwise=1), _refuse(errno.EPERM)]
    # threads share the process's memory, and so its RLIMIT_AS; a process in new namespaces would be root in them
    code += [
        _step(_EQUAL, numbers["clone"], otherwise=5),
        _step(_LOAD, _ARGUMENT),
        _step(_ANY_BIT, _CLONE_NAMESPACES, then=2),
        _step(_ANY_BIT, 0xFFFFFFFF if processes else _CLONE_THREAD, otherwise=1),
        _step(_RETURN, _ALLOW),
        _refuse(errno.EPERM),
    ]
    # asyncio wakes its loop through a socket pair
    families = (_AF_UNIX, _AF_INET, _AF_INET6) if processes else ()
    code += _of_families(numbers["socket"], families) + _of_families(numbers["socketpair"], families or (_AF_UNIX,))
    # also clone3: its flags are in memory that a filter cannot read, and libraries fall back to clone
    code.append(_refuse(errno.ENOSYS))
    return b"".join(code)


def _of_families(number: int, families: tuple[int, ...]) -> list[bytes]:
    """Return instructions that let the call `number` create sockets of these families only."""
    tests = [_step(_EQUAL, family, then=len(families) - place) for place, family in enumerate(families)]
    allow = [_step(_RETURN, _ALLOW)] if families else []
    # the tests jump over the refusal
    body = [_step(_LOAD, _ARGUMENT), *tests, _refuse(errno.EPERM), *allow]
    return [_step(_EQUAL, number, otherwise=len(body)), *body]


def _step(operation: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """Return one instruction; `then` and `otherwise` are the numbers of following instructions that a comparison
    skips."""
    return struct.pack("=HBBI", operation, then, otherwise, value)


def _refuse(number: int) -> bytes:
    return _step(_RETURN, _ERRNO | number)


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    """Convert ascending `numbers` to the (first, last) of each contiguous run."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges
