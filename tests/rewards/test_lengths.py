"""Test length bounds and the published soft overlong penalty."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit import with_options
from reward_kit.errors import ConfigError
from reward_kit.rewards.lengths import length_within, measured_length
from tests.rewards.forms import ask, histories, long, turns

MOST = {"at_most": 10}
SOFT = {"at_least": 10, "at_most": 20, "below": 5, "above": 10}
WORDS = {"unit": "words", "at_most": 3}
CASES: dict[str, tuple[str | None, dict, float]] = {
    "inside": ("a" * 5, MOST, 1.0),
    "at the bound": ("a" * 10, MOST, 1.0),
    "one more": ("a" * 11, MOST, 0.0),
    "far more": ("a" * 1000, MOST, 0.0),
    "one": ("a", MOST, 1.0),
    "empty is no short answer": ("", MOST, 0.0),
    "no text": (None, MOST, 0.0),
    "too short": ("a" * 9, {"at_least": 10}, 0.0),
    "long enough": ("a" * 10, {"at_least": 10}, 1.0),
    "no upper bound": ("a" * 10_000, {"at_least": 10}, 1.0),
    "between": ("a" * 15, SOFT, 1.0),
    "lower bound": ("a" * 10, SOFT, 1.0),
    "upper bound": ("a" * 20, SOFT, 1.0),
    "a little below": ("a" * 9, SOFT, 0.8),
    "far below": ("a" * 6, SOFT, 0.2),
    "margin below ends": ("a" * 5, SOFT, 0.0),
    "below the margin": ("a", SOFT, 0.0),
    "a little above": ("a" * 21, SOFT, 0.9),
    "half above": ("a" * 25, SOFT, 0.5),
    "margin above ends": ("a" * 30, SOFT, 0.0),
    "above the margin": ("a" * 31, SOFT, 0.0),
    "exactly": ("aaaa", {"at_least": 4, "at_most": 4}, 1.0),
    "exactly, missed": ("aaaaa", {"at_least": 4, "at_most": 4}, 0.0),
    "at most nothing": ("a", {"at_most": 0}, 0.0),
    "words": ("one two three", WORDS, 1.0),
    "words, one more": ("one two three four", WORDS, 0.0),
    "words, white space": (" one\n\ttwo  three ", WORDS, 1.0),
    "words, no-break space": ("one\u00a0two three four", WORDS, 0.0),
    "words, blank": ("   ", WORDS, 0.0),
    "words without blanks are one": ("one,two,three,four", WORDS, 1.0),
    "characters are not bytes": ("é漢😀", {"at_most": 3}, 1.0),
    "characters of white space count": ("a         b", MOST, 0.0),
    "of the whole": ("<think>a</think>b", MOST, 0.0),
    "of the thought": ("<think>a</think>b", {**MOST, "of": "thought"}, 1.0),
    "of the answer": ("<think>" + "a" * 99 + "</think>b", {**MOST, "of": "answer"}, 1.0),
    "no answer behind the thought": ("<think>a</think>", {**MOST, "of": "answer"}, 0.0),
    "penalty, inside": ("a" * 5, {**MOST, "as_penalty": True}, 0.0),
    "penalty, outside": ("a" * 11, {**MOST, "as_penalty": True}, -1.0),
    "penalty, empty": ("", {**MOST, "as_penalty": True}, 0.0),
    "penalty, half above": ("a" * 25, {**SOFT, "as_penalty": True}, -0.5),
}


@pytest.mark.parametrize(("reply", "options", "score"), CASES.values(), ids=CASES)
def test_score_falls_linearly_outside_the_bounds(reply, options, score):
    assert ask(length_within, reply, **options).score == pytest.approx(score)


# DAPO, equation 13, with its L_max = 20480 and L_cache = 4096 divided by 1024, worked by hand.
DAPO = [(0, 0.0), (1, 0.0), (15, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (19, -0.75), (20, -1.0), (21, -1.0)]


@pytest.mark.parametrize(("length", "punishment"), DAPO)
def test_length_within_reproduces_the_soft_overlong_punishment(length, punishment):
    options = {"at_most": 20 - 4, "above": 4, "as_penalty": True}
    assert ask(length_within, "a" * length, **options).score == pytest.approx(punishment)
    assert ask(length_within, "a " * length, unit="words", **options).score == pytest.approx(punishment)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "set at_least, at_most or both"),
        ({"at_least": 2, "at_most": 1}, "greater than 'at_most'"),
        ({"at_most": -1}, "at_most"),
        ({"at_most": 1, "above": -1}, "above"),
        ({"at_most": 1, "unit": "tokens"}, "unit"),
    ],
)
def test_invalid_bounds_are_rejected(options, problem):
    with pytest.raises(ConfigError, match=problem):
        ask(with_options(length_within, **options), "a")


sizes = st.integers(0, 60)
bounds = st.tuples(sizes, sizes).map(sorted)


@given(st.integers(1, 100), bounds, sizes, sizes)
def test_length_within_is_bounded_and_monotonic(length, ends, below, above):
    options = {"at_least": ends[0], "at_most": ends[1], "below": below, "above": above}
    score = ask(length_within, "a" * length, **options).score
    assert 0 <= score <= 1
    assert (score == 1) == (ends[0] <= length <= ends[1])
    assert ask(length_within, "a" * length, **options, as_penalty=True).score == pytest.approx(score - 1)
    assert ask(length_within, "é " * length, unit="words", **options).score == score
    thrice = {name: value * 3 for name, value in options.items()}
    assert ask(length_within, "a" * (3 * length), **thrice).score == pytest.approx(score)
    nearer = length + (1 if length < ends[0] else -1 if length > ends[1] else 0)
    assert ask(length_within, "a" * max(1, nearer), **options).score >= score


@given(histories, turns, st.sampled_from(["words", "characters"]), st.sampled_from(["whole", "thought", "answer"]))
def test_length_within_scores_any_history(history, own, unit, part):
    assert 0 <= length_within(history, own, unit=unit, of=part, at_least=3, below=2, at_most=9, above=9).score <= 1
    assert measured_length(history, own, unit=unit, of=part).score >= 0


@pytest.mark.parametrize("piece", ["a", "a ", "\n"])
def test_megabyte_reply_is_measured(piece):
    assert ask(length_within, long(piece), unit="words", at_most=10**6).score == (piece != "\n")
