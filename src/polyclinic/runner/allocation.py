"""Freed memory is kept for the next step, instead of being given back to the system and fetched again.

A training step on a CPU allocates and frees the same large blocks again and again. glibc returns them to the system,
and every page of the next ones costs a page fault: up to a fifth of the time of small networks. What is computed is
the same. Other C libraries are left alone, and so is whoever has set glibc's own variables.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

#: options of glibc's `mallopt`
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
#: blocks up to so many bytes come from memory that is kept, the largest that glibc allows; and what is kept at its end
KEPT_BLOCKS, KEPT_AT_END, AHEAD = 2**25, 2**28, 2**24


@functools.cache
def keep_freed_memory(processes: int = 1) -> bool:
    """For this process, one of so many on this machine that keep their freed memory. Whether it was done."""
    if not sys.platform.startswith("linux") or _is_set_by_user():
        return False
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.gnu_get_libc_version  # noqa: B018  (another C library has no such function)
        chosen = ((MMAP_THRESHOLD, KEPT_BLOCKS), (TRIM_THRESHOLD, kept_at_end(processes)), (TOP_PAD, AHEAD))
        return sum(bool(libc.mallopt(option, value)) for option, value in chosen) == len(chosen)
    except (OSError, AttributeError):
        return False


def kept_at_end(processes: int) -> int:
    """Freed bytes that each of so many processes keeps at the end of its memory: together at most a 32nd of the
    machine's, where that is less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(AHEAD, min(KEPT_AT_END, memory // 32 // max(1, processes)))


def _is_set_by_user() -> bool:
    return any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ)
