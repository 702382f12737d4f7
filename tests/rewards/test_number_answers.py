"""Test `number_answer` notations; test_math_answers.py tests the extraction of the answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.rewards.math_answers import number_answer
from tests.rewards.answers import MEGABYTE, REPEATED, ask

NUMBERS_RIGHT = [
    "#### 72", "#### $72", "The answer is 72.", "The answer is $72.00.", "The answer is $72$.",
    r"So the answer is \$72.", "72", "$72", "72 dollars", "The answer is 72 apples.", "x = 72", "**72**",
    "The answer is **72**", "7.2e1", "144/2", "72.0", "+72", "72.", r"\boxed{72}", r"\boxed{\frac{144}{2}}",
    r"$7.2 \times 10^1$", "７２", "The final answer is 72. I hope it is correct.", "7200%",
]  # fmt: skip
NUMBERS_WRONG = [
    "#### 73", "The answer is 7", "720", "-72", "72 or 73", "between 72 and 73", "seventy-two", "nan", "inf", "72x",
    "#### ", "72 + 1", "7 2", "1e999999999", "9" * 500, r"\boxed{72} or \boxed{73}", "72/0", "(72", "72, 73",
    "The answer is not 72", "72 thousand",
]  # fmt: skip


@pytest.mark.parametrize("reply", NUMBERS_RIGHT)
def test_number_is_correct_in_every_notation(reply: str) -> None:
    assert ask(number_answer, reply, "72").score == 1.0


@pytest.mark.parametrize("reply", NUMBERS_WRONG)
def test_different_or_missing_number_is_wrong(reply: str) -> None:
    assert ask(number_answer, reply, "72").score == 0.0


@given(st.integers(-(10**12), 10**12))
def test_thousands_separators_change_nothing(number: int) -> None:
    assert ask(number_answer, f"#### {number:,}", number).score == 1.0


@pytest.mark.parametrize("repeated", REPEATED[::3])
def test_megabyte_reply_is_read_in_linear_time(repeated: str) -> None:
    reply = (repeated * (MEGABYTE // len(repeated)))[:MEGABYTE]
    assert ask(number_answer, reply, "-7").score == 0.0
