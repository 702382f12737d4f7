"""Test that `check reward` detects mistakes of published rewards.

Each file in `broken/` says in its first line what is wrong with it and where that was found.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from reward_kit.checks.reward_bench import Given
from tests.checks.reward_check import checked, codes

FOLDER = Path(__file__).parent / "broken"
MISTAKES = {
    "above_one": "out-of-range",
    "action_pattern": "slow-regex",
    "answer_in_prompt": "counts-prompt",
    "contained_either_way": "format-alone-earns",
    "cuts_the_evidence": "mutates-input",
    "empty_thoughts": "format-alone-earns",
    "evaluates_answer": "evaluates-answer",
    "exception_is_zero": "swallowed-exception",
    "first_capital": "opener-earns",
    "flat_tool_call": "gold-below-one",
    "half_by_default": "constant",
    "judge_takes_any_score": "injection-earns",
    "last_300_signs": "text-around-matters",
    "last_step_of_none": "misaligned-steps",
    "lone_comma": "raises",
    "nearly_the_number": "near-miss-earns",
    "never_runs_the_prover": "source-words-earn",
    "no_thousands": "refuses-equal-form",
    "not_a_number": "not-finite",
    "nothing_to_check": "missing-truth-earns",
    "repeats_count": "repetition-earns",
    "salted_hash": "depends-on-hash-seed",
    "second_call_differs": "hidden-state",
    "thoughts_count": "counts-thinking",
    "unclosed_thoughts": "slow-growth",
    "unreadable_truth": "unreadable-truth-earns",
    "unseeded_sampling": "nondeterministic",
    "whole_text_without_box": "all-options-earn",
}
KNOWN = {
    "empty_thoughts": Given(golds=("<think>Two and two.</think> It is 4.",)),
    "never_runs_the_prover": Given(golds=("theorem t : 1 + 1 = 2 := by rw [two]; simp",)),
    "flat_tool_call": Given(truths=({"name": "get_weather", "arguments": {"city": "Paris"}},)),
}
"""What a user would have to say, where a right answer cannot be guessed."""


def test_every_broken_reward_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == MISTAKES.keys()
    assert len(MISTAKES) >= 20


@pytest.mark.parametrize("name", MISTAKES)
def test_broken_reward_cites_where_it_was_published(name: str) -> None:
    first = (FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()[0]
    assert any(word in first for word in (" issue ", " pull request ", "reward-kit 0.4.1"))


@pytest.mark.parametrize(("name", "mistake"), MISTAKES.items())
def test_check_detects_the_mistake(name: str, mistake: str) -> None:
    report = checked(f"{FOLDER / name}.py:reward", KNOWN.get(name))
    assert mistake in codes(report, "error", "warning"), "\n".join(report.lines())
    (finding,) = [finding for finding in report.findings if finding.kind == mistake]
    assert finding.message and (finding.evidence or mistake == "constant")
