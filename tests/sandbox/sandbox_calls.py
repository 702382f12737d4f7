"""Helpers of the sandbox tests: available strengths and calls of short programs."""

from __future__ import annotations

import asyncio
import os
import sys

from reward_kit.sandbox import Limits, Program, probe

AVAILABLE = {found.strength: found for found in asyncio.run(probe())} if sys.platform == "linux" else {}
QUICK = Limits(wall_s=5, cpu_s=2, memory_mb=200, disk_mb=2, output_kb=4, result_kb=4)


def missing(strength: str) -> str:
    return "" if strength in AVAILABLE and AVAILABLE[strength].is_available else f"{strength} is not available here"


def plain(body: str, **settings) -> Program:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return Program(f"import os, sys, time\ndef solve(x):\n{lines}\n", "solve", form="plain", **settings)


async def run(sandbox, body, x=None, limits=QUICK, level="isolated", **settings):
    return await sandbox.call(plain(body, **settings), x, limits=limits, level=level)


def is_gone(path: str) -> bool:
    return not os.path.lexists(path)
