"""Test `exact_answer`: exact comparison except for the configured normalizations."""

from __future__ import annotations

import re
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit.errors import ConfigError, RewardError
from reward_kit.reward_calls import with_options
from reward_kit.rewards.answers import SQUAD, exact_answer
from tests.profiles import examples
from tests.rewards.answers import MEGABYTE, ask, histories, wild_text

SAME: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "same": ("Paris", "Paris", ()),
    "strip": ("  Paris\n", "Paris", ("strip",)),
    "casefold": ("PARIS", "paris", ("casefold",)),
    "casefold-sharp-s": ("STRASSE", "straße", ("casefold",)),
    "nfkc-ligature": ("ﬁne", "fine", ("nfkc",)),
    "nfkc-full-width": ("１２", "12", ("nfkc",)),
    "nfkc-accent": ("e\u0301", "é", ("nfkc",)),
    "whitespace": ("New\n  York ", "New York", ("whitespace",)),
    "punctuation": ("It's, well: done!", "Its well done", ("punctuation",)),
    "punctuation-unicode": ("“Paris”", "Paris", ("punctuation",)),
    "punctuation-dollar": ("$5", "5", ("punctuation",)),
    "articles": ("the Eiffel Tower", "Eiffel Tower", ("articles", "whitespace")),
    "squad-all": ("The  Eiffel-Tower!", "eiffeltower", SQUAD),
    "squad-article": ("An apple.", "apple", SQUAD),
    "numbers": ("1,000.0", "1000", ("numbers",)),
    "numbers-fraction": ("1/2", "0.5", ("numbers",)),
}
DIFFERENT: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "case": ("paris", "Paris", ("strip",)),
    "space": ("Paris ", "Paris", ()),
    "inner-space": ("New  York", "New York", ("strip",)),
    "punctuation-kept": ("Paris.", "Paris", ("strip", "casefold")),
    "longer": ("Paris, France", "Paris", SQUAD),
    "shorter": ("Par", "Paris", SQUAD),
    "article-in-a-word": ("theatre", "atre", SQUAD),
    "accent": ("resume", "résumé", ("nfkc", "casefold")),
    "ligature-kept": ("ﬁne", "fine", ("strip",)),
    "empty": ("", "Paris", SQUAD),
    "only-an-article": ("the", "Paris", SQUAD),
    "numbers-kept": ("1000.0", "1000", ("strip",)),
    "near": ("9", "10", SQUAD),
    "thought": ("<think>Paris</think>", "Paris", ("strip",)),
    "order": ("York New", "New York", SQUAD),
}


@pytest.mark.parametrize(("reply", "truth", "steps"), SAME.values(), ids=SAME)
def test_texts_are_equal_after_named_normalization_steps(reply: str, truth: str, steps: tuple[str, ...]) -> None:
    assert ask(exact_answer, reply, truth, normalise=steps).score == 1.0


@pytest.mark.parametrize(("reply", "truth", "steps"), DIFFERENT.values(), ids=DIFFERENT)
def test_other_differences_score_zero(reply: str, truth: str, steps: tuple[str, ...]) -> None:
    assert ask(exact_answer, reply, truth, normalise=steps).score == 0.0


def test_any_of_several_ground_truths_is_accepted() -> None:
    assert ask(exact_answer, "Paris", ["Lyon", "Paris"]).score == 1.0
    assert ask(exact_answer, "Nice", ["Lyon", "Paris"]).score == 0.0
    assert ask(exact_answer, "5", 5).score == 1.0


def test_marked_answer_option_compares_the_marked_answer() -> None:
    assert ask(exact_answer, "Well.\nThe answer is Paris.", "Paris", answer="marked").score == 1.0
    assert ask(exact_answer, "Well.\nThe answer is Paris.", "Paris").score == 0.0
    assert ask(exact_answer, "Well.\nParis it is.", "Paris", answer="marked").score == 0.0


@pytest.mark.parametrize("truth", [None, [], "..."])
def test_a_sample_without_a_truth_is_unscored(truth: Any) -> None:
    with pytest.raises(RewardError, match="ground_truth"):
        ask(exact_answer, "x", truth, normalise=SQUAD)


def test_unknown_normalization_step_is_rejected() -> None:
    with pytest.raises(ConfigError, match="normalise"):
        with_options(exact_answer, normalise=["lowercase"])


def squad_reference(text: str) -> str:
    """SQuAD 1.1's normalisation, from its description: lower case, no punctuation, no articles, single blanks."""
    kept = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


@given(
    st.text(string.ascii_letters + string.punctuation + " ", max_size=30), st.sampled_from(["the cat", "a. b", "An-x"])
)
def test_squad_normalization_matches_the_reference(reply: str, truth: str) -> None:
    expected = squad_reference(reply) == squad_reference(truth)
    assert ask(exact_answer, f"x{reply}", f"x{truth}", normalise=SQUAD).score == float(
        squad_reference(f"x{reply}") == squad_reference(f"x{truth}")
    )
    if "<think>" not in reply and squad_reference(truth):
        assert ask(exact_answer, reply, truth, normalise=SQUAD).score == float(expected)


@given(st.text(min_size=1, max_size=40).filter(lambda text: text.strip() and "think>" not in text))
def test_text_equals_only_itself(text: str) -> None:
    assert ask(exact_answer, text, text).score == 1.0
    assert ask(exact_answer, text + "x", text).score == 0.0


@settings(max_examples=examples(150), deadline=None)
@given(wild_text, histories)
def test_no_reply_raises(reply: str, messages: list[Any]) -> None:
    for steps in ((), SQUAD, ("nfkc", "numbers")):
        assert ask(exact_answer, reply, "x", normalise=steps).score in {0.0, 1.0}
    assert exact_answer(messages, "3").score in {0.0, 1.0}


def test_megabyte_reply_is_wrong_without_normalization() -> None:
    assert ask(exact_answer, "x" * MEGABYTE, "x", normalise=SQUAD).score == 0.0
