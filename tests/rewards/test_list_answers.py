"""`list_answer`: list notations and scores of inexact lists."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit.errors import RewardError
from reward_kit.rewards.answers import MOST_ITEMS, list_answer
from tests.profiles import examples
from tests.rewards.answers import MEGABYTE, REPEATED, ask, histories, wild_text

TRUTH = ["red", "blue", "green"]
RIGHT = {
    "commas": "red, blue, green",
    "another-order": "green, red, blue",
    "case": "Red, BLUE, green",
    "and": "red, blue and green.",
    "oxford-comma": "red, blue, and green",
    "semicolons": "Answer: red; blue; green",
    "marked": "I think.\nThe answer is red, blue, green.",
    "bullets": "- red\n- green\n- blue",
    "stars": "Here:\n* **red**\n* blue\n* green\n",
    "numbers": "1. red\n2. blue\n3. green",
    "brackets-behind-numbers": "1) red\n2) blue\n3) green",
    "bullets-behind-a-mark": "I thought.\nThe answer is:\n- red\n- blue\n- green",
    "last-block-of-bullets": "Steps:\n- look\n- think\nSo:\n- red\n- blue\n- green",
    "lines": "red\nblue\ngreen",
    "json": '["red", "green", "blue"]',
    "json-in-a-fence": 'Here:\n```json\n["red", "blue", "green"]\n```',
    "json-and-words": 'Answer:\n["red", "blue", "green"]\nThanks',
    "json-over-lines": '[\n  "red",\n  "blue",\n  "green"\n]',
    "braces": "{red, blue, green}",
    "box": r"\boxed{red, blue, green}",
    "tag": "<answer>red, blue, green</answer>",
    "quotes": "\"red\", 'blue', `green`",
    "thought": "<think>- pink</think>red, blue, green",
}
WRONG = {
    "one-missing": "red, blue",
    "one-more": "red, blue, green, black",
    "one-twice": "red, red, blue, green",
    "one-for-another": "red, blue, grey",
    "prose": "I like red blue green",
    "joined": "redbluegreen",
    "empty": "",
    "empty-list": "[]",
    "nested": '[["red", "blue", "green"]]',
    "json-is-no-list": '{"red": 1}',
    "brackets-only": "[" * 9_999,
    "everything": ", ".join(str(n) for n in range(MOST_ITEMS + 1)),
}


@pytest.mark.parametrize("reply", RIGHT.values(), ids=RIGHT)
def test_list_is_read_in_every_notation(reply: str) -> None:
    result = ask(list_answer, reply, TRUTH)
    assert result.score == 1.0, result.reason


@pytest.mark.parametrize("reply", WRONG.values(), ids=WRONG)
def test_inexact_list_scores_zero(reply: str) -> None:
    assert ask(list_answer, reply, TRUTH).score == 0.0


@pytest.mark.parametrize(
    ("reply", "partial", "score"),
    [
        ("red, blue", "none", 0.0),
        ("red, blue", "recall", 2 / 3),
        ("red, blue", "f1", 0.8),
        ("red, blue", "jaccard", 2 / 3),
        ("red, pink", "jaccard", 1 / 4),
        ("red, blue, green, a, b, c", "recall", 1.0),
        ("red, blue, green, a, b, c", "f1", 2 / 3),
        ("pink", "f1", 0.0),
        ("red, red, red", "f1", 1 / 3),
    ],
)
def test_partial_option_scores_the_share_of_items(reply: str, partial: str, score: float) -> None:
    result = ask(list_answer, reply, TRUTH, partial=partial)
    assert result.score == pytest.approx(score)
    assert set(result.metrics) == {"recall", "precision", "f1", "jaccard"}


def test_ordered_option_requires_the_order() -> None:
    assert ask(list_answer, "red, blue, green", TRUTH, ordered=True).score == 1.0
    assert ask(list_answer, "blue, red, green", TRUTH, ordered=True).score == 0.0
    assert ask(list_answer, "blue, red, green", TRUTH, ordered=True, partial="recall").score == pytest.approx(2 / 3)


def test_duplicates_option_ignores_duplicates() -> None:
    assert ask(list_answer, "red, red, blue, green", TRUTH, duplicates="ignore").score == 1.0
    assert ask(list_answer, "a, b", ["a", "a", "b"]).score == 0.0
    assert ask(list_answer, "a, b", ["a", "a", "b"], duplicates="ignore").score == 1.0


def test_normalise_option_applies_to_items() -> None:
    assert ask(list_answer, "Red, blue, green", TRUTH, normalise=("strip",)).score == 0.0
    assert ask(list_answer, "1,000; 2.0", ["1000", "2"], normalise=("strip", "numbers")).score == 1.0
    assert ask(list_answer, "1,000; 2.0", ["1000", "2"]).score == 0.0
    assert ask(list_answer, "[1, 2]", [2, 1]).score == 1.0
    assert ask(list_answer, '[{"b": 1, "a": 2}]', [{"a": 2, "b": 1}]).score == 1.0


def test_the_truth_may_be_a_text_a_set_or_empty() -> None:
    assert ask(list_answer, "b, a", "a, b").score == 1.0
    assert ask(list_answer, "b, a", {"a", "b"}).score == 1.0
    assert ask(list_answer, "[]", []).score == 1.0
    assert ask(list_answer, "a", [], partial="f1").score == 0.0
    with pytest.raises(RewardError, match="ground_truth"):
        ask(list_answer, "a", None)


items = st.lists(st.sampled_from(["red", "blue", "green", "pink"]), min_size=1, max_size=8)


@given(items, items)
def test_shares_are_computed_over_multisets(truth: list[str], stated: list[str]) -> None:
    result = ask(list_answer, "\n".join(f"- {item}" for item in stated), truth, partial="jaccard")
    both = (Counter(truth) & Counter(stated)).total()
    assert result.metrics["recall"].score == pytest.approx(both / len(truth))
    assert result.metrics["precision"].score == pytest.approx(both / len(stated))
    assert result.score == pytest.approx(both / (Counter(truth) | Counter(stated)).total())
    assert (result.score == 1.0) == (sorted(truth) == sorted(stated))


@given(items, items)
def test_correctly_ordered_list_is_correct_in_any_order(truth: list[str], stated: list[str]) -> None:
    reply = "\n".join(f"- {item}" for item in stated)
    ordered = ask(list_answer, reply, truth, ordered=True)
    assert ordered.score == float(truth == stated)
    assert ordered.metrics["recall"].score <= ask(list_answer, reply, truth).metrics["recall"].score


@settings(max_examples=examples(80), deadline=None)
@given(wild_text, histories)
def test_no_reply_raises(reply: str, messages: list[Any]) -> None:
    assert 0.0 <= ask(list_answer, reply, TRUTH, partial="f1").score <= 1.0
    assert list_answer(messages, TRUTH).score in {0.0, 1.0}


@pytest.mark.parametrize("repeated", REPEATED[1::4])
def test_megabyte_reply_is_read_in_linear_time(repeated: str) -> None:
    reply = (repeated * (MEGABYTE // len(repeated)))[:MEGABYTE]
    assert ask(list_answer, reply, TRUTH).score == 0.0
