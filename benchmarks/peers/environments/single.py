"""A single-turn environment for verifiers. Run by `rollouts.py` with `vf-eval`."""

import verifiers as vf
from datasets import Dataset


async def is_four(completion, answer) -> float:
    return float(completion[-1]["content"] == answer)


def load_environment(n: int = 100):
    rows = Dataset.from_list([{"question": "How much is 2 + 2?", "answer": "4"}] * n)
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows, rubric=vf.Rubric(funcs=[is_four], weights=[1.0]))
