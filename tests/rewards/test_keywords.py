"""Required and forbidden keywords."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.errors import ConfigError
from reward_kit.rewards.formats import contains_all, contains_none
from tests.rewards.forms import ask, histories, long, texts, turns

# Reply, keywords, options, whether each keyword is held.
HELD: dict[str, tuple[str, tuple[str, ...], dict, tuple[bool, ...]]] = {
    "a word": ("Paris is big", ("Paris",), {}, (True,)),
    "at the end": ("in Paris", ("Paris",), {}, (True,)),
    "all of it": ("Paris", ("Paris",), {}, (True,)),
    "before a point": ("It is Paris.", ("Paris",), {}, (True,)),
    "in brackets": ("(Paris)", ("Paris",), {}, (True,)),
    "in bold type": ("**Paris**", ("Paris",), {}, (True,)),
    "case": ("PARIS", ("paris",), {}, (True,)),
    "case counts": ("PARIS", ("paris",), {"ignore_case": False}, (False,)),
    "case counts, same": ("paris", ("paris",), {"ignore_case": False}, (True,)),
    "sharp s": ("STRASSE", ("Straße",), {}, (True,)),
    "in a longer word": ("a category", ("cat",), {}, (False,)),
    "begins a longer word": ("catalogue", ("cat",), {}, (False,)),
    "ends a longer word": ("bobcat", ("cat",), {}, (False,)),
    "in a longer word, allowed": ("a category", ("cat",), {"whole_words": False}, (True,)),
    "first in a longer word, then alone": ("category, cat", ("cat",), {}, (True,)),
    "with an underscore": ("cat_id", ("cat",), {}, (False,)),
    "with a digit": ("cat5", ("cat",), {}, (False,)),
    "with a hyphen": ("cat-like", ("cat",), {}, (True,)),
    "possessive": ("the cat's", ("cat",), {}, (True,)),
    "plural": ("cats", ("cat",), {}, (False,)),
    "a phrase": ("as an AI model", ("as an ai",), {}, (True,)),
    "a phrase over lines": ("as an\n  AI", ("as an AI",), {}, (True,)),
    "a phrase, other order": ("an as AI", ("as an AI",), {}, (False,)),
    "no-break space": ("as\u00a0an AI", ("as an AI",), {}, (True,)),
    "composed accent": ("cafe\u0301", ("café",), {}, (True,)),
    "accent is a letter": ("cafe", ("café",), {}, (False,)),
    "accent continues the word": ("cafe\u0301", ("cafe",), {}, (False,)),
    "mark continues the word": ("कि", ("क",), {}, (False,)),
    "keyword of signs": ("I know C++ well", ("C++",), {}, (True,)),
    "keyword of signs beside letters": ("a+b", ("+",), {}, (True,)),
    "keyword is no pattern": ("axb", ("a.b",), {}, (False,)),
    "chinese has no blanks": ("我住在巴黎市", ("巴黎",), {}, (True,)),
    "chinese beside latin": ("用Python写", ("Python",), {}, (True,)),
    "thai": ("กรุงเทพมหานคร", ("กรุงเทพ",), {}, (True,)),
    "cyrillic has blanks": ("котик", ("кот",), {}, (False,)),
    "only thought": ("<think>Paris</think>Lyon", ("Paris",), {}, (False,)),
    "thought counts": ("<think>Paris</think>Lyon", ("Paris",), {"of": "whole"}, (True,)),
    "two, both": ("Paris and the Seine", ("Seine", "Paris"), {}, (True, True)),
    "two, one": ("Paris and the Rhine", ("Seine", "Paris"), {}, (False, True)),
    "two, none": ("Metz", ("Seine", "Paris"), {}, (False, False)),
    "overlapping": ("aXa", ("aX", "Xa"), {"whole_words": False}, (True, True)),
    "surrogate": ("\ud800 Paris", ("Paris",), {}, (True,)),
}


@pytest.mark.parametrize(("reply", "keywords", "options", "held"), HELD.values(), ids=HELD)
def test_keywords_are_found_in_the_reply(reply, keywords, options, held):
    given = {"keywords": keywords, **options}
    assert ask(contains_all, reply, **given).score == float(all(held))
    assert ask(contains_all, reply, partial=True, **given).score == pytest.approx(sum(held) / len(held))
    assert ask(contains_none, reply, **given).score == float(not any(held))


@pytest.mark.parametrize("reply", ["", None, " \n", "<think>Paris"])
def test_empty_reply_scores_zero(reply):
    assert ask(contains_all, reply, keywords=("Paris",)).score == 0
    assert ask(contains_none, reply, keywords=("Lyon",)).score == 0


def test_the_reason_names_the_words():
    assert 'missing: "Seine"' in ask(contains_all, "Paris", keywords=("Seine", "Paris")).reason
    assert '"Paris"' in ask(contains_none, "Paris", keywords=("Seine", "Paris")).reason


@pytest.mark.parametrize("reward", [contains_all, contains_none])
@pytest.mark.parametrize("keywords", [(), ("",), ("a", " \n")])
def test_invalid_keywords_are_rejected(reward, keywords):
    with pytest.raises(ConfigError, match="keywords"):
        ask(reward, "x", keywords=keywords)


words = st.sampled_from(["cat", "Hund", "猫", "é", "e\u0301", "C++", "a b", "\ud800"])
WHOLE = {"whole_words": True}


@given(histories, turns, st.lists(words, min_size=1, max_size=3).map(tuple), st.booleans(), st.booleans())
def test_keyword_rewards_score_any_history(history, own, keywords, whole, fold):
    options = {"keywords": keywords, "whole_words": whole, "ignore_case": fold}
    every, none = contains_all(history, own, **options), contains_none(history, own, **options)
    share = contains_all(history, own, partial=True, **options)
    assert every.score in (0, 1) and none.score in (0, 1) and 0 <= share.score <= 1
    assert (every.score == 1) == (share.score == 1)
    assert not every.score or not none.score


@given(texts, st.lists(words, min_size=1, max_size=4).map(tuple))
def test_neither_order_nor_repetition_of_keywords_matters(text, keywords):
    for reward in (contains_all, contains_none):
        scores = {ask(reward, text, keywords=given).score for given in (keywords, keywords[::-1], keywords * 2)}
        assert len(scores) == 1
    more = {"keywords": keywords, "of": "whole"}
    assert ask(contains_all, text, whole_words=False, **more).score >= ask(contains_all, text, **more).score
    assert ask(contains_all, " ".join([text, *keywords]), **more).score == 1


@pytest.mark.parametrize("piece", ["a", "ab", "a ", "\u0315\u0300", "猫", "ﷺ"])
def test_a_megabyte_is_read_in_linear_time(piece):
    assert ask(contains_all, long(piece), keywords=("a" * 1000 + "b",)).score == 0
