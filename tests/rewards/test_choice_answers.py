"""Test `choice_answer`: notations of options, and letters that are only words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit.errors import ConfigError, RewardError
from reward_kit.rewards.answers import choice_answer
from tests.profiles import examples
from tests.rewards.answers import MEGABYTE, REPEATED, ask, histories, wild_text

SAMPLE = {"question": "The capital of France?", "choices": ["London", "Paris", "A dog", "Rome"]}

CHOOSES_B = [
    "B",
    "b",
    "(B)",
    "B.",
    "**B**",
    "The answer is (B)",
    "The answer is B.",
    "the answer is b",
    "Answer: B",
    "answer: **B**",
    "**Answer: B**",
    "**Answer:** B",
    r"\boxed{B}",
    r"\boxed{\text{B}}",
    r"\boxed{\textbf{(B)}}",
    r"The final answer is $\boxed{(B)}$. I hope it is correct.",
    "B) Paris",
    "(B) Paris",
    "B. Paris",
    "The answer is (B) Paris.",
    "The answer is **B) Paris**",
    "The best answer is: B. Paris",
    "The correct answer is option B",
    "I thought for long.\nThe correct option is (B).",
    "A is wrong, C too.\nFinal answer: B",
    "The answer is B because A is wrong",
    "The answer is B, not A",
    "First I said the answer is C.\nBut the answer is B.",
    "Answer: B\n\nExplanation: A is not it.",
    "<think>The answer is A</think>The answer is B",
    "<answer>B</answer>",
    'The answer is "B"',
    "Paris",
    "The answer is Paris.",
]
CHOOSES_NOTHING_OR_ANOTHER = {
    "another": "A",
    "another-marked": "The answer is A",
    "hedged": "A or B",
    "hedged-boxes": r"\boxed{A} or \boxed{B}",
    "hedged-marked": "The answer is A or B",
    "hedged-brackets": "The answer is (A) and (B)",
    "hedged-behind": "The answer is B or C depending on the year",
    "both": "Both A and B",
    "list": "A, B",
    "all": "All of A, B, C, D",
    "side-by-side": "(A)(B)",
    "letters-run": "AB",
    "article": "A dog is a B",
    "article-in-answer": "The answer is a city",
    "pronoun": "I think so",
    "negated": "The answer is not B",
    "text-of-another": "B) London",
    "last-mark-counts": "The answer is B. The answer is A.",
    "unmarked-in-prose": "I would look at (B) first.\nThen at the rest.",
    "thought-only": "<think>The answer is B</think>",
    "unknown-letter": "K",
    "none": "none of these",
    "empty": "",
    "long": "B" * 3_000,
}


@pytest.mark.parametrize("reply", CHOOSES_B)
def test_stated_choice_is_read_in_every_form(reply: str) -> None:
    result = ask(choice_answer, reply, "B", sample=SAMPLE)
    assert result.score == 1.0, result.reason


@pytest.mark.parametrize("reply", CHOOSES_NOTHING_OR_ANOTHER.values(), ids=CHOOSES_NOTHING_OR_ANOTHER)
def test_wrong_multiple_or_missing_choice_scores_zero(reply: str) -> None:
    result = ask(choice_answer, reply, "B", sample=SAMPLE)
    assert result.score == 0.0, result.reason


@pytest.mark.parametrize("reply", ["A dog", "A cat sat on the mat.", "The answer is a cat", "A man\nwalked in."])
def test_article_is_not_a_choice(reply: str) -> None:
    assert ask(choice_answer, reply, "A").score == 0.0
    assert ask(choice_answer, reply, "A", unmarked="last_letter").score == 0.0


def test_letter_i_is_a_choice_only_if_it_stands_alone() -> None:
    assert ask(choice_answer, "I am sure.", "I").score == 0.0
    assert ask(choice_answer, "The answer is I.", "I").score == 1.0


def test_option_text_beginning_with_an_article_is_matched() -> None:
    assert ask(choice_answer, "The answer is a dog.", "C", sample=SAMPLE).score == 1.0
    assert ask(choice_answer, "A dog", "A", sample=SAMPLE).score == 0.0


@pytest.mark.parametrize(
    ("truth", "sample", "options"),
    [
        ("(B)", {}, {}),
        ("b", {}, {}),
        ("B) Paris", {}, {}),
        ("Paris", SAMPLE, {}),
        (1, {}, {}),
        (2, {}, {"zero_based": False}),
        ("B", {"options": {"A": "London", "B": "Paris"}}, {}),
        ("B", {"choices": {"label": ["A", "B"], "text": ["London", "Paris"]}}, {}),
        ("B", {"choices": ["A) London", "B) Paris"]}, {}),
    ],
)
def test_the_truth_may_be_a_letter_a_text_or_a_position(truth: Any, sample: Any, options: Any) -> None:
    assert ask(choice_answer, "The answer is B.", truth, sample=sample, **options).score == 1.0
    assert ask(choice_answer, "The answer is A.", truth, sample=sample, **options).score == 0.0
    if sample or truth == "B) Paris":
        assert ask(choice_answer, "Paris", truth, sample=sample, **options).score == 1.0


def test_last_letter_counts_only_with_the_option() -> None:
    reply = "We look at (A).\nThen **B** is it.\nDone."
    assert ask(choice_answer, reply, "B").score == 0.0
    assert ask(choice_answer, reply, "B", unmarked="last_letter").score == 1.0


@pytest.mark.parametrize("truth", [None, "", "London or Paris", 99, True])
def test_a_sample_without_a_letter_is_unscored(truth: Any) -> None:
    with pytest.raises(RewardError, match="ground_truth"):
        ask(choice_answer, "B", truth, sample=SAMPLE)


def test_letters_option_must_be_distinct_capitals() -> None:
    for letters in ("", "AA", "ab", "A-D"):
        with pytest.raises(ConfigError, match="letters"):
            ask(choice_answer, "B", "B", letters=letters)
    assert ask(choice_answer, "E", "B", letters="ABCD").score == 0.0


@given(st.sampled_from("ABCDEFGHIJ"), st.sampled_from("ABCDEFGHIJ"))
def test_stated_letter_is_correct_only_if_equal_to_the_truth(stated: str, truth: str) -> None:
    for form in ("{}", "({})", "The answer is {}.", r"\boxed{{{}}}", "**{}**"):
        assert ask(choice_answer, form.format(stated), truth).score == float(stated == truth)


@settings(max_examples=examples(80), deadline=None)
@given(wild_text, histories)
def test_no_reply_raises(reply: str, messages: list[Any]) -> None:
    for unmarked in ("refuse", "last_letter"):
        assert ask(choice_answer, reply, "A", sample=SAMPLE, unmarked=unmarked).score in {0.0, 1.0}
    assert choice_answer(messages, "B").score in {0.0, 1.0}


@pytest.mark.parametrize("repeated", REPEATED[1::4])
def test_megabyte_reply_is_read_in_linear_time(repeated: str) -> None:
    reply = (repeated * (MEGABYTE // len(repeated)))[:MEGABYTE]
    assert ask(choice_answer, reply, "J", unmarked="last_letter").score == 0.0
