"""Test that a choice trie allows exactly the continuations of its choices and reports the chosen one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.agent.policies.hf.constraints import Choices, ChoiceTrie
from reward_kit.errors import PolicyError

STOP = 99
ids = st.lists(st.integers(0, 3), max_size=5).map(tuple)
choices = st.sets(ids, min_size=1, max_size=12).map(lambda found: {str(each): each for each in sorted(found)})


@given(choices, ids)
def test_allowed_tokens_are_exactly_the_continuations(choices, said):
    constraint, so_far = Choices(ChoiceTrie(choices, STOP)), ()
    for token in (*said, STOP):
        continuing = {(*each, STOP)[len(so_far)] for each in choices.values() if (*each, STOP)[: len(so_far)] == so_far}
        assert constraint.allowed().tolist() == sorted(continuing)
        if token not in continuing:
            with pytest.raises(PolicyError, match="is not allowed here"):
                constraint.advance(token)
            return
        constraint.advance(token)
        so_far = (*so_far, token)
    assert constraint.is_done
    assert constraint.chosen == str(said)
    assert not len(constraint.allowed())


@given(choices)
def test_every_choice_can_be_made_even_a_prefix_of_another(choices):
    trie = ChoiceTrie(choices, STOP)
    for text, tokens in choices.items():
        constraint = Choices(trie)
        for token in (*tokens, STOP):
            assert not constraint.is_done
            assert constraint.chosen is None
            constraint.advance(token)
        assert constraint.chosen == text
    assert trie.longest == 1 + max(map(len, choices.values()))


def test_choices_with_equal_token_ids_are_rejected():
    with pytest.raises(PolicyError, match="'open Fridge' and 'open fridge' have the same token ids"):
        ChoiceTrie({"open Fridge": [1, 2], "look": [3], "open fridge": [1, 2]}, STOP)


def test_empty_choices_and_stop_tokens_in_choices_are_rejected():
    with pytest.raises(PolicyError, match="at least one choice"):
        ChoiceTrie({}, STOP)
    with pytest.raises(PolicyError, match="'a' contains the token 99"):
        ChoiceTrie({"a": [1, STOP, 2]}, STOP)


def test_turns_sharing_a_trie_are_independent():
    trie = ChoiceTrie({"a": [1, 2], "b": [1, 3]}, STOP)
    one, two = Choices(trie), Choices(trie)
    one.advance(1)
    assert two.allowed().tolist() == [1]
    assert one.allowed().tolist() == [2, 3]
