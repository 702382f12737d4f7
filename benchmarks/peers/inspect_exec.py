"""Latency and rate of inspect-ai's `local` sandbox, as a line of JSON. Run by `sandbox.py`.

python inspect_exec.py N TASKS PYTHON SCRIPT REQUEST
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from inspect_ai.util._sandbox.local import LocalSandboxEnvironment


async def main(request: bytes) -> None:
    count, tasks = int(sys.argv[1]), int(sys.argv[2])
    python, script = sys.argv[3:5]
    sandbox = LocalSandboxEnvironment()

    async def call() -> None:
        result = await sandbox.exec([python, "-I", script], input=request, timeout=10, concurrency=False)
        assert json.loads(result.stdout)["score"] == 1.0, result

    await call()
    latencies_s = []
    for _ in range(count):
        began = time.perf_counter()
        await call()
        latencies_s.append(time.perf_counter() - began)

    async def work() -> None:
        for _ in range(count // tasks):
            await call()

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(tasks)))
    rate = (count // tasks * tasks) / (time.perf_counter() - began)
    print(json.dumps({"latencies_s": latencies_s, "rate": rate}))


asyncio.run(main(Path(sys.argv[5]).read_bytes()))
