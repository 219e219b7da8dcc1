"""How this process keeps its memory."""

import ctypes
import sys

# glibc's numbers for mallopt, and the largest size that it takes for the first
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -3, -1, -2
_LARGEST_MMAP_THRESHOLD = 1 << 25


def keep_freed_memory() -> None:
    """Let glibc reuse freed blocks of up to 32 MiB in place of returning them to the kernel; elsewhere do nothing.

    Tensors on a CPU come and go with each operation; by default every one above a few hundred KiB costs a page fault
    per 4 KiB, which takes several times as long as the operation itself.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    # other C libraries, such as musl, have no mallopt
    if hasattr(libc, "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
        libc.mallopt(_TOP_PAD, 1 << 26)


def give_back_freed() -> None:
    """Return to the kernel what is free, and was kept for later; with other C libraries than glibc do nothing."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
