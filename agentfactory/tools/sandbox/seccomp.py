"""The system call filter of a sandbox, as the BPF program that `bwrap --seccomp` loads.

It is an allowlist: all other calls, including those of future kernels, answer ENOSYS. So there is no ptrace, no mount,
no namespace, no io_uring, no bpf, no keyring, and no memory outside RLIMIT_AS (memfd, System V). New processes and
sockets answer EPERM: a sandbox is a single process, which makes its memory limit effective.
"""

import errno
import platform
import struct

from agentfactory.tools.sandbox.syscalls import AARCH64, SPECIAL, X86_64

MACHINES = {"x86_64": (0xC000003E, X86_64), "aarch64": (0xC00000B7, AARCH64)}
"""`platform.machine()` -> the kernel's AUDIT_ARCH of it, and its system calls."""

_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
# linux/bpf_common.h: load a word at an absolute offset, jumps by comparison with a constant, return a constant
_LOAD, _EQUAL, _GREATER_EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06
# struct seccomp_data; the lower half of the first argument, since both machines are little-endian
_NUMBER, _MACHINE, _ARGUMENT = 0, 4, 16
_CLONE_THREAD, _CLONE_NAMESPACES, _AF_UNIX = 0x00010000, 0x7E020080, 1


def program(machine: str = platform.machine()) -> bytes:
    """Return the filter for `machine`, an array of struct sock_filter.

    Raises:
        KeyError: `machine` is not in `MACHINES`.
    """
    arch, numbers = MACHINES[machine]
    code = [_step(_LOAD, _MACHINE), _step(_EQUAL, arch, then=1), _step(_RETURN, _KILL_PROCESS), _step(_LOAD, _NUMBER)]
    for first, last in _ranges(sorted(number for name, number in numbers.items() if name not in SPECIAL)):
        code += [
            _step(_GREATER_EQUAL, first, otherwise=2),
            _step(_GREATER, last, then=1),
            _step(_RETURN, _ALLOW),
        ]
    for name in ("fork", "vfork", "socket", "connect"):
        if name in numbers:
            code += [_step(_EQUAL, numbers[name], otherwise=1), _refuse(errno.EPERM)]
    # threads share the process's memory, and so its RLIMIT_AS
    code += [
        _step(_EQUAL, numbers["clone"], otherwise=5),
        _step(_LOAD, _ARGUMENT),
        _step(_ANY_BIT, _CLONE_NAMESPACES, then=2),
        _step(_ANY_BIT, _CLONE_THREAD, otherwise=1),
        _step(_RETURN, _ALLOW),
        _refuse(errno.EPERM),
    ]
    # asyncio wakes its loop through a socket pair
    code += [
        _step(_EQUAL, numbers["socketpair"], otherwise=4),
        _step(_LOAD, _ARGUMENT),
        _step(_EQUAL, _AF_UNIX, otherwise=1),
        _step(_RETURN, _ALLOW),
        _refuse(errno.EPERM),
    ]
    # also clone3: its flags are in memory that a filter cannot read, and libraries fall back to clone
    code.append(_refuse(errno.ENOSYS))
    return b"".join(code)


def _step(operation: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """Return one instruction; `then` and `otherwise` are the numbers of following instructions that a comparison
    skips."""
    return struct.pack("=HBBI", operation, then, otherwise, value)


def _refuse(number: int) -> bytes:
    return _step(_RETURN, _ERRNO | number)


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    """Convert `numbers`, ascending, to (first, last) of each run without a gap."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges
