"""Options of a reward, fixed and checked before it is called."""

from __future__ import annotations

import pytest

from reward_kit import EvaluateResult, Message, reward_function, with_options
from reward_kit.errors import ConfigError
from reward_kit.typed_interface import reward_spec


@reward_function
def length(messages: list[Message], *, longest: int = 10, words: tuple[str, ...] = ()) -> EvaluateResult:
    """Shorter is better."""
    text = messages[-1].text
    return EvaluateResult(score=float(len(text) <= longest and all(word in text for word in words)))


@reward_function
def needs(messages: list[Message], *, longest: int) -> EvaluateResult:
    return EvaluateResult(score=float(len(messages) <= longest))


@reward_function
class Counted:
    def score(self, messages: list[Message], *, wanted: int = 1) -> EvaluateResult:
        return EvaluateResult(score=float(len(messages) == wanted))


SAID = [Message(role="assistant", content="hello")]


def test_with_options_fixes_an_option_without_changing_the_reward():
    short = with_options(length, longest=4)
    assert short(messages=SAID).score == 0.0
    assert length(messages=SAID).score == 1.0
    assert short(messages=SAID, longest=5).score == 1.0
    assert reward_spec(short).id == "length"


def test_options_accumulate_and_are_converted_to_their_annotations():
    both = with_options(with_options(length, longest=4), words=["hell"], longest=5)
    assert both(messages=SAID).score == 1.0
    assert reward_spec(both).options == {"longest": 5, "words": ("hell",)}


def test_option_satisfies_a_required_parameter():
    assert reward_spec(needs).required == {"messages", "longest"}
    assert reward_spec(with_options(needs, longest=1)).required == {"messages"}


def test_options_apply_to_the_score_method_of_a_class():
    two = with_options(Counted, wanted=2)
    spec = reward_spec(two)
    assert spec.options == {"wanted": 2}
    assert reward_spec(Counted).options == {}
    assert two().score(messages=SAID, wanted=1).score == 1.0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"longset": 4}, "has no option 'longset'; did you mean 'longest'"),
        ({"messages": []}, "'messages' is filled from the rollout"),
        ({"longest": "four"}, "option 'longest'.*whole number.*'four'"),
        ({"words": 3}, "option 'words'"),
    ],
)
def test_invalid_options_of_a_reward_are_rejected(options, problem):
    with pytest.raises(ConfigError, match=problem):
        with_options(length, **options)
