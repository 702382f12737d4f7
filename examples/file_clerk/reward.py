"""Compare the final state of the directory with the expected one. The agent's messages do not count."""

from __future__ import annotations

from typing import Any

from reward_kit import EvaluateResult, reward_function
from reward_kit.environments import CompositeState, FilesState

TOTALS = "SELECT region, sum(amount) FROM sales WHERE status = 'paid' GROUP BY region ORDER BY region"


@reward_function
def in_order(messages: list, ground_truth: dict[str, str], state: FilesState) -> EvaluateResult:
    """Return the share of files at their paths. Copies halve the credit of a file, unexpected files count as wrong.

    Args:
        messages: the conversation.
        ground_truth: the expected path of each text.
        state: the final files.
    """
    credit, problems = 0.0, []
    for path, text in ground_truth.items():
        found = sorted(name for name in state if state[name] == text)
        credit += 1.0 if found == [path] else 0.5 if path in found else 0.0
        if found != [path]:
            problems.append(f"{path}: found at {', '.join(found) or 'no place'}")
    unexpected = [name for name in state if state[name] not in ground_truth.values()]
    problems += [f"{name}: not one of the files" for name in unexpected]
    in_place = len(ground_truth) - len(problems) + len(unexpected)
    reason = f"{in_place} of {len(ground_truth)} files are in order. {'; '.join(problems[:3])}".strip()
    return EvaluateResult(score=credit / (len(ground_truth) + len(unexpected)), reason=reason)


@reward_function
def right_report(messages: list, state: CompositeState) -> EvaluateResult:
    """Return the share of correct lines in `reports/totals.csv`, which has one per region."""
    expected = ["region,total", *(f"{region},{total}" for region, total in state["db"].query(TOTALS))]
    written: Any = state["filesystem"].get("reports/totals.csv", "")
    lines = written.strip().splitlines() if isinstance(written, str) else []
    right = sum(line.strip() == wanted for line, wanted in zip(lines, expected, strict=False))
    score = right / max(len(expected), len(lines))
    return EvaluateResult(score=score, reason=f"{right} of {len(expected)} lines are right; the file has {len(lines)}")
