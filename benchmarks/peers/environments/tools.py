"""A tool environment for verifiers: four tool calls, then the answer. Run by `rollouts.py` with `vf-eval`."""

import verifiers as vf
from datasets import Dataset


async def add(x: int, y: int) -> int:
    """Sum of two numbers.

    Args:
        x: one number.
        y: another number.
    """
    return x + y


async def is_four(completion, answer) -> float:
    return float(completion[-1]["content"] == answer)


def load_environment(n: int = 100):
    rows = Dataset.from_list([{"question": "How much is 2 + 2?", "answer": "4"}] * n)
    rubric = vf.Rubric(funcs=[is_four], weights=[1.0])
    return vf.ToolEnv(dataset=rows, eval_dataset=rows, tools=[add], max_turns=10, rubric=rubric)
