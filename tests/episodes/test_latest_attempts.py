"""Test that the latest attempt of an episode counts among several lines."""

from __future__ import annotations

from reward_kit.episodes.record import LatestAttempts


def test_latest_attempt_counts_at_the_position_of_its_line() -> None:
    latest = LatestAttempts[str]()
    for place, (rollout_id, attempt) in enumerate([("a", 0), ("b", 1), ("a", 1), ("b", 0), ("c", 0), ("c", 0)]):
        latest.put(rollout_id, attempt, f"line {place}")
    assert list(latest.items().items()) == [("b", "line 1"), ("a", "line 2"), ("c", "line 5")]
    assert latest.values() == ["line 1", "line 2", "line 5"]
    assert latest.earlier == 3


def test_outdated_attempt_is_detected_before_the_line_is_read() -> None:
    latest = LatestAttempts[None]()
    assert latest.attempt("a") is None and not latest.is_outdated("a", 0)
    latest.put("a", 2, None)
    assert latest.attempt("a") == 2
    assert [latest.is_outdated("a", attempt) for attempt in (1, 2, 3)] == [True, False, False]
