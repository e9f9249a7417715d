"""Keeps freed memory in the process, so that a step does not fault its activations in again."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # <malloc.h>
_LARGEST_MMAP_THRESHOLD = 32 << 20
_KEEP = 1 << 30


def keep_freed_memory() -> bool:
    """Tell glibc to reuse freed blocks up to 32 MB instead of giving them back; returns whether it took the advice.

    By default every activation of more than 128 KB is mapped and unmapped anew, and the kernel clears its pages each time: a
    third of a small model's training step on a CPU. Results do not change. Other C libraries are left alone.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    advice = {_M_MMAP_THRESHOLD: _LARGEST_MMAP_THRESHOLD, _M_TRIM_THRESHOLD: _KEEP, _M_TOP_PAD: 64 << 20}
    taken = [mallopt(option, value) for option, value in advice.items()]
    return all(taken)
