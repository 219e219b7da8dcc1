"""Memory allocator settings of this process."""

import ctypes
import sys

# glibc's numbers for mallopt, and the largest value that it accepts for the first
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -3, -1, -2
_LARGEST_MMAP_THRESHOLD = 1 << 25


def keep_freed_memory() -> None:
    """Let glibc reuse freed blocks of up to 32 MiB instead of returning them to the kernel. Does nothing without glibc.

    Tensors on a CPU are allocated and freed with each operation. By default, each one above a few hundred KiB costs a
    page fault per 4 KiB, which takes several times as long as the operation itself.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    # other C libraries, such as musl, do not have mallopt
    if hasattr(libc, "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
        libc.mallopt(_TOP_PAD, 1 << 26)


def give_back_freed() -> None:
    """Return free memory that was kept for reuse to the kernel. Does nothing without glibc."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
