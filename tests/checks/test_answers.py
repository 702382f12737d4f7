"""Test where a ground truth occurs in an answer."""

from __future__ import annotations

import pytest

from reward_kit.checks.reward_cases import truth_positions


@pytest.mark.parametrize(
    ("truth", "text", "found"),
    [
        (8.0, "8.00", ["8.00"]),
        (8.0, "It is 8.00.", ["8.00"]),
        (8, "18 and 8", ["8"]),
        ("8", "8.0 or 8", ["8.0", "8"]),
        (1000, "1,000 apples", ["1,000"]),
        (8, "8kg and x8", []),
        ("tea", "tea, iced tea", ["tea", "tea"]),
        ("a.b", "a.b acb", ["a.b"]),
        ("", "nothing", []),
    ],
)
def test_numbers_match_by_value_and_texts_verbatim(truth: object, text: str, found: list[str]) -> None:
    assert [text[begin:end] for begin, end in truth_positions(truth, text)] == found
