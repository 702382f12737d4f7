"""What tensors free stays with the process: later ones touch no page for the first time."""

from __future__ import annotations

import resource
import sys

import pytest
import torch

from reward_kit.rl.cpu_memory import keep_freed_memory


def faults() -> int:
    """Pages that ten tensors of 64 MiB, one after another, touch for the first time."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc is told")
def test_memory_is_kept() -> None:
    assert keep_freed_memory()
    faults()
    # As delivered it is 163,840 pages of 4 KiB.
    assert faults() < 20_000
