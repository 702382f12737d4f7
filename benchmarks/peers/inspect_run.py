"""Seconds that inspect-ai takes for N episodes, as a line of JSON. Run by `rollouts.py`.

BENCH_BASE_URL=URL python inspect_run.py single|tools N LOG_DIR
"""

from __future__ import annotations

import json
import sys
import time

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.agent import react
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
from inspect_ai.tool import tool


@tool
def add():
    async def execute(x: int, y: int) -> int:
        """Sum of two numbers.

        Args:
            x: one number.
            y: another number.
        """
        return x + y

    return execute


def main() -> None:
    kind, count, log_dir = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    samples = [Sample(id=number, input="How much is 2 + 2?", target="4") for number in range(count)]
    solver = generate() if kind == "single" else react(tools=[add()], submit=False)
    task = Task(dataset=MemoryDataset(samples), solver=solver, scorer=includes())
    began = time.perf_counter()
    (log,) = evaluate(
        task,
        model="openai-api/bench/bench",
        display="none",
        log_dir=log_dir,
        max_connections=32,
        max_samples=32,
    )
    seconds = time.perf_counter() - began
    assert log.status == "success", log.error
    print(json.dumps({"episodes": count, "seconds": seconds, "mean": log.results.scores[0].metrics["accuracy"].value}))


main()
