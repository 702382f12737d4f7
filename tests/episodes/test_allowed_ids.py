"""What a token was chosen from is kept once, and comes back as it was: through JSON, parts, and parts put together."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.episodes.allowed_ids import AllowedIds, AllowedTrack
from reward_kit.episodes.segments import EpisodeTokens
from reward_kit.errors import EpisodeError


@st.composite
def turns(draw):
    """(prompt, sampled, allowed) by turn; the context goes on, or is begun anew."""
    made, context = [], []
    for _ in range(draw(st.integers(1, 4))):
        context = ([] if draw(st.booleans()) else context) + draw(st.lists(st.integers(0, 9), max_size=3))
        sampled = draw(st.lists(st.integers(0, 9), max_size=4))
        others = [draw(st.none() | st.lists(st.integers(0, 9), max_size=4)) for _ in sampled]
        allowed = [None if other is None else [token, *other] for token, other in zip(sampled, others, strict=True)]
        made.append((context, sampled, draw(st.sampled_from([allowed, None]))))
        context = context + sampled
    return made


def stored(made):
    tokens = EpisodeTokens()
    for step, (prompt, sampled, allowed) in enumerate(made):
        tokens.add_turn(step, prompt, sampled, [0.0] * len(sampled), allowed_ids=allowed)
    return tokens


def said(made):
    """What each turn is to say: sets in order, None for a turn without any."""
    sets = [[None if ids is None else sorted(set(ids)) for ids in allowed or []] for _, _, allowed in made]
    return [None if all(ids is None for ids in each) else each for each in sets]


@given(turns())
def test_every_turn_says_what_was_allowed_at_its_tokens(made):
    read = stored(made).turns()
    assert [read[step].allowed_ids for step in range(len(made))] == said(made)


@given(turns())
def test_json_gives_back_the_same_tokens(made):
    tokens = stored(made)
    assert EpisodeTokens.from_state(json.loads(json.dumps(tokens.get_state()))) == tokens


def test_where_nothing_was_restricted_nothing_is_written():
    assert "allowed_ids" not in stored([([1], [2], [None])]).get_state()


@given(turns(), st.data())
def test_a_part_has_what_its_steps_have_and_parts_make_the_whole(made, data):
    tokens = stored(made)
    cut = data.draw(st.integers(0, len(made)))
    first, second = tokens.part(0, cut), tokens.part(cut, None)
    assert [turn.allowed_ids for turn in first.turns().values()] == said(made)[:cut]
    assert [turn.allowed_ids for turn in second.turns().values()] == said(made)[cut:]
    assert [turn.allowed_ids for turn in first.continued(second, cut).turns().values()] == said(made)


def test_a_set_that_stands_at_many_tokens_is_kept_once_and_written_in_runs():
    nearly_all = [token for token in range(50_000) if token % 1000]
    tokens = stored([([0], [5] * 100, [nearly_all] * 100)])
    assert len(tokens.allowed.sets) == 1
    assert len(json.dumps(tokens.get_state())) < 3_000
    again = EpisodeTokens.from_state(tokens.get_state())
    np.testing.assert_array_equal(again.allowed.sets[0], nearly_all)


def test_a_token_that_was_not_allowed_and_a_missing_entry_are_refused_and_change_nothing():
    tokens = stored([([1], [2], [[2, 3]])])
    before = tokens.get_state()
    with pytest.raises(EpisodeError, match="sampled token 4 is not among the 2 allowed ids"):
        tokens.add_turn(1, [1, 2, 9], [4], [0.0], allowed_ids=[[3, 5]])
    with pytest.raises(EpisodeError, match="2 token ids but 1 entries of allowed_ids"):
        tokens.add_turn(1, [1, 2, 9], [4, 4], [0.0, 0.0], allowed_ids=[None])
    assert tokens.get_state() == before


def test_places_offsets_and_ids_say_the_same_as_shared_sets():
    shared = AllowedIds.shared([1, 4, 6], [1, 0, 1], [np.array([7], np.int32), np.array([2, 3], np.int32)])
    flat = AllowedIds(shared.places, shared.offsets, shared.ids)
    assert flat == shared
    assert shared.offsets.tolist() == [0, 2, 3, 5]
    assert shared.ids.tolist() == [2, 3, 7, 2, 3]
    assert shared.mask(8).nonzero()[1].tolist() == flat.mask(8).nonzero()[1].tolist() == [2, 3, 7, 2, 3]
    assert flat != AllowedIds([1, 4, 7], shared.offsets, shared.ids)
    assert flat != AllowedIds(shared.places, shared.offsets, [2, 4, 7, 2, 3])


def test_offsets_of_other_places_are_refused():
    with pytest.raises(EpisodeError, match="2 places and 1 ids do not match the offsets"):
        AllowedIds([0, 1], [0, 1], [5])


def test_a_state_without_the_set_of_a_place_is_refused():
    with pytest.raises(EpisodeError, match="a position refers to a missing set"):
        AllowedTrack.from_state({"places": [0], "which": [1], "sets": [[1]]})
