"""Test repetition against values by hand and the formula in three lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit import with_options
from reward_kit.errors import ConfigError
from reward_kit.rewards.formats import no_repetition
from tests.rewards.forms import ask, histories, long, texts, turns

SCORES: dict[str, tuple[str | None, dict, float]] = {
    "nothing again": ("a b c d e", {}, 1.0),
    "one word": ("yes", {}, 1.0),
    "shorter than an n-gram": ("a a", {}, 1.0),
    "as long as an n-gram": ("a a a", {}, 1.0),
    "one word again and again": ("a a a a", {}, 1 / 2),
    "one word a hundred times": (" ".join("a" * 100), {}, 1 / 98),
    "two words in turn": ("a b a b a b", {}, 2 / 4),
    "a phrase twice": ("a b c a b c", {}, 3 / 4),
    "a phrase three times": ("a b c a b c a b c", {}, 3 / 7),
    "the beginning again at the end": ("a b c d a b c", {}, 4 / 5),
    "other order is no repetition": ("a b c c b a", {}, 1.0),
    "case": ("A b C a B c", {}, 3 / 4),
    "white space": ("a  b\nc\ta b c", {}, 3 / 4),
    "sharp s": ("Straße a b STRASSE a b", {}, 3 / 4),
    "punctuation is part of a word": ("a b c. a b c", {}, 1.0),
    "unigrams": ("a b a b", {"ngram": 1}, 2 / 4),
    "unigrams of one": ("a", {"ngram": 1}, 1.0),
    "bigrams": ("a b a b", {"ngram": 2}, 2 / 3),
    "bigrams of one": ("a a a a a", {"ngram": 2}, 1 / 4),
    "four": ("a b c d a b c d", {"ngram": 4}, 4 / 5),
    "five": ("a b c d e a b c d e", {"ngram": 5}, 5 / 6),
    "seven": (" ".join("abcdefgh" * 2), {"ngram": 7}, 8 / 10),
    "twenty, long enough": (" ".join("ab" * 20), {"ngram": 20}, 2 / 21),
    "twenty, too short": (" ".join("ab" * 9), {"ngram": 20}, 1.0),
    "a thousand": (" ".join("a" * 1001), {"ngram": 1000}, 1 / 2),
    "half a penalty": ("a a a a", {"max_penalty": 0.5}, 3 / 4),
    "no penalty": ("a a a a", {"max_penalty": 0.0}, 1.0),
    "empty (no penalty in open-r1)": ("", {}, 0.0),
    "blank": (" \n\t ", {}, 0.0),
    "no text": (None, {}, 0.0),
    "characters": ("abcabc", {"unit": "characters"}, 3 / 4),
    "characters, case and blanks": ("aB c\nAbC", {"unit": "characters"}, 3 / 4),
    "chinese in words is one word": ("好的好的好的", {}, 1.0),
    "chinese in characters": ("好的好的好的", {"unit": "characters"}, 2 / 4),
    "japanese in characters": ("はい。はい。", {"unit": "characters"}, 3 / 4),
    "trap: without blanks": ("a" * 400, {}, 1 / 38),
    "trap: a phrase without blanks": ("wait,let-me-" * 100, {}, 6 / 118),
    "a long link is cut, and repeats nothing": ("https://example.org/a/long/path/with/many/parts/x", {}, 1.0),
    "of the thought": ("<think>a a a a</think>b c d e", {"of": "thought"}, 1 / 2),
    "of the answer": ("<think>a a a a</think>b c d e", {"of": "answer"}, 1.0),
    "surrogates": ("\ud800 \ud800 \ud800 \ud800", {}, 1 / 2),
}


@pytest.mark.parametrize(("reply", "options", "score"), SCORES.values(), ids=SCORES)
def test_the_score_is_the_share_of_new_n_grams(reply, options, score):
    assert ask(no_repetition, reply, **options).score == pytest.approx(score)


def test_reason_counts_repeated_n_grams():
    assert ask(no_repetition, "a a a a").reason == "1 of 2 3-grams of words are repetitions"


@pytest.mark.parametrize("options", [{"ngram": 0}, {"ngram": 1001}, {"max_penalty": -0.1}, {"max_penalty": 1.1}])
def test_invalid_options_are_rejected(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        with_options(no_repetition, **options)


few = st.lists(st.sampled_from("abc"), min_size=1, max_size=40)


def by_formula(words: list[str], ngram: int) -> float:
    grams = [tuple(words[start : start + ngram]) for start in range(len(words) - ngram + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


@given(few, st.integers(1, 12))
def test_no_repetition_agrees_with_the_formula(words, ngram):
    expected = pytest.approx(by_formula(words, ngram))
    assert ask(no_repetition, " ".join(words), ngram=ngram).score == expected
    assert ask(no_repetition, "".join(words), ngram=ngram, unit="characters").score == expected


@given(few, st.integers(1, 6))
def test_renaming_words_and_reversing_do_not_change_the_score(words, ngram):
    names = {"a": "cat", "b": "dog", "c": "ant"}
    score = ask(no_repetition, " ".join(words), ngram=ngram).score
    assert ask(no_repetition, " ".join(names[word] for word in words), ngram=ngram).score == score
    assert ask(no_repetition, " ".join(words[::-1]), ngram=ngram).score == pytest.approx(score)


@given(few, st.integers(1, 6), st.floats(0, 1))
def test_the_penalty_scales_and_longer_n_grams_are_rarer(words, ngram, penalty):
    text = " ".join(words)
    full = ask(no_repetition, text, ngram=ngram).score
    assert ask(no_repetition, text, ngram=ngram, max_penalty=penalty).score == pytest.approx(1 - penalty * (1 - full))
    assert ask(no_repetition, text, ngram=ngram + 1).score >= full - 1e-9


@given(histories, turns, st.sampled_from(["words", "characters"]), st.integers(1, 30))
def test_no_repetition_scores_any_history(history, own, unit, ngram):
    assert 0 <= no_repetition(history, own, unit=unit, ngram=ngram).score <= 1


@given(texts)
def test_repeating_the_text_never_raises_the_score(text):
    once = ask(no_repetition, text, ngram=1).score
    assert ask(no_repetition, f"{text} {text}", ngram=1).score <= once


@pytest.mark.parametrize("unit", ["words", "characters"])
@pytest.mark.parametrize("piece", ["a", "a ", "ab c ", "\n"])
def test_a_megabyte_is_read_in_bounded_time(piece, unit):
    assert ask(no_repetition, long(piece), ngram=20, unit=unit).score < 0.01
