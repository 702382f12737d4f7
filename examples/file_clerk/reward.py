"""Is the directory, at the end, what it should be? Credit for each file in its place; nothing the agent says counts."""

from __future__ import annotations

from typing import Any

from reward_kit import EvaluateResult, reward_function
from reward_kit.environments import CompositeState, FilesState

TOTALS = "SELECT region, sum(amount) FROM sales WHERE status = 'paid' GROUP BY region ORDER BY region"


@reward_function
def in_order(messages: list, ground_truth: dict[str, str], state: FilesState) -> EvaluateResult:
    """The share of files in their places. A copy left elsewhere halves a file's credit; a strange file counts as wrong.

    Args:
        messages: the conversation.
        ground_truth: the path that each text belongs at.
        state: the files at the end.
    """
    credit, problems = 0.0, []
    for path, text in ground_truth.items():
        found = sorted(place for place in state if state[place] == text)
        credit += 1.0 if found == [path] else 0.5 if path in found else 0.0
        if found != [path]:
            problems.append(f"{path}: found at {', '.join(found) or 'no place'}")
    strange = [place for place in state if state[place] not in ground_truth.values()]
    problems += [f"{place}: not one of the files" for place in strange]
    in_place = len(ground_truth) - len(problems) + len(strange)
    reason = f"{in_place} of {len(ground_truth)} files are in order. {'; '.join(problems[:3])}".strip()
    return EvaluateResult(score=credit / (len(ground_truth) + len(strange)), reason=reason)


@reward_function
def right_report(messages: list, state: CompositeState) -> EvaluateResult:
    """The share of right lines in `reports/totals.csv`, which has one for each region of the database."""
    expected = ["region,total", *(f"{region},{total}" for region, total in state["db"].query(TOTALS))]
    written: Any = state["filesystem"].get("reports/totals.csv", "")
    lines = written.strip().splitlines() if isinstance(written, str) else []
    right = sum(found.strip() == wanted for found, wanted in zip(lines, expected, strict=False))
    score = right / max(len(expected), len(lines))
    return EvaluateResult(score=score, reason=f"{right} of {len(expected)} lines are right; the file has {len(lines)}")
