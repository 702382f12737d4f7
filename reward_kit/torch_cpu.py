"""What makes a CPU slow for no gain: memory that is given back after each operation, and numbers near 0."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_MOST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Have the C library keep what tensors free for the tensors that follow; for the whole process, until its end.

    As delivered, the allocator of glibc maps every block above 32 MiB anew and gives the end of its heap back at once,
    so that an operation touches pages that the kernel first has to fill with zeros. Updates of a small model were 1.6
    times as fast without.

    Returns:
        Whether there was a glibc to tell; others are left alone.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 2**30)) and bool(mallopt(_M_TRIM_THRESHOLD, _MOST))


@contextmanager
def no_denormals() -> Iterator[None]:
    """Inside the block, in this thread, numbers too small to be normal count as 0; afterwards what was so before.

    A CPU takes a hundred times as long over them, and AdamW's second moments, which are squares, fade through them.
    """
    tiny = torch.full((1,), 1e-310, dtype=torch.float64)
    was = bool((tiny * 1.0 == 0.0).item())
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was)
