"""Is the database, at the end, what it should be? Nothing the agent says counts; only what a query finds."""

from __future__ import annotations

from typing import Any

from reward_kit import EvaluateResult, reward_function


@reward_function
def right_state(messages: list, ground_truth: list[list[Any]], sample: dict[str, Any], state: Any) -> EvaluateResult:
    """1 where the sample's `check_sql` finds the ground truth in the final database, 0 otherwise."""
    found = [list(row) for row in state.query(sample["check_sql"])]
    right = len(found) == len(ground_truth) and all(map(same_row, found, ground_truth))
    return EvaluateResult(score=float(right), reason=f"the query found {found}, expected {ground_truth}"[:300])


def same_row(found: list[Any], expected: list[Any]) -> bool:
    """Equal cell by cell; numbers within half a cent, and also where they were written as text."""
    return len(found) == len(expected) and all(map(same_value, found, expected))


def same_value(found: Any, expected: Any) -> bool:
    """Equal, as numbers where both can be read as numbers."""
    try:
        return abs(float(found) - float(expected)) < 0.005
    except (TypeError, ValueError):
        return str(found).strip() == str(expected)
