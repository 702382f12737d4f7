"""Test the storage of allowed token ids: shared sets, JSON, slices and concatenation."""

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
    """Return (prompt, sampled, allowed) by turn; the context is extended or restarted."""
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
    """Return the expected sets of each turn in order, None for a turn without any."""
    sets = [[None if ids is None else sorted(set(ids)) for ids in allowed or []] for _, _, allowed in made]
    return [None if all(ids is None for ids in each) else each for each in sets]


@given(turns())
def test_every_turn_returns_its_allowed_ids(made):
    read = stored(made).turns()
    assert [read[step].allowed_ids for step in range(len(made))] == said(made)


@given(turns())
def test_tokens_survive_json(made):
    tokens = stored(made)
    assert EpisodeTokens.from_state(json.loads(json.dumps(tokens.get_state()))) == tokens


def test_unrestricted_turns_write_no_allowed_ids():
    assert "allowed_ids" not in stored([([1], [2], [None])]).get_state()


@given(turns(), st.data())
def test_parts_keep_their_allowed_ids_and_concatenate_to_the_whole(made, data):
    tokens = stored(made)
    cut = data.draw(st.integers(0, len(made)))
    first, second = tokens.part(0, cut), tokens.part(cut, None)
    assert [turn.allowed_ids for turn in first.turns().values()] == said(made)[:cut]
    assert [turn.allowed_ids for turn in second.turns().values()] == said(made)[cut:]
    assert [turn.allowed_ids for turn in first.continued(second, cut).turns().values()] == said(made)


def test_repeated_set_is_stored_once_and_written_as_runs():
    nearly_all = [token for token in range(50_000) if token % 1000]
    tokens = stored([([0], [5] * 100, [nearly_all] * 100)])
    assert len(tokens.allowed.sets) == 1
    assert len(json.dumps(tokens.get_state())) < 3_000
    again = EpisodeTokens.from_state(tokens.get_state())
    np.testing.assert_array_equal(again.allowed.sets[0], nearly_all)


def test_sampled_token_outside_its_set_and_missing_entries_are_rejected():
    tokens = stored([([1], [2], [[2, 3]])])
    before = tokens.get_state()
    with pytest.raises(EpisodeError, match="sampled token 4 is not among the 2 allowed ids"):
        tokens.add_turn(1, [1, 2, 9], [4], [0.0], allowed_ids=[[3, 5]])
    with pytest.raises(EpisodeError, match="2 token ids but 1 entries in allowed_ids"):
        tokens.add_turn(1, [1, 2, 9], [4, 4], [0.0, 0.0], allowed_ids=[None])
    assert tokens.get_state() == before


def test_flat_and_shared_allowed_ids_are_equal():
    shared = AllowedIds.shared([1, 4, 6], [1, 0, 1], [np.array([7], np.int32), np.array([2, 3], np.int32)])
    flat = AllowedIds(shared.places, shared.offsets, shared.ids)
    assert flat == shared
    assert shared.offsets.tolist() == [0, 2, 3, 5]
    assert shared.ids.tolist() == [2, 3, 7, 2, 3]
    assert shared.mask(8).nonzero()[1].tolist() == flat.mask(8).nonzero()[1].tolist() == [2, 3, 7, 2, 3]
    assert flat != AllowedIds([1, 4, 7], shared.offsets, shared.ids)
    assert flat != AllowedIds(shared.places, shared.offsets, [2, 4, 7, 2, 3])


def test_mismatched_offsets_are_rejected():
    with pytest.raises(EpisodeError, match="2 places and 1 ids do not match the offsets"):
        AllowedIds([0, 1], [0, 1], [5])


def test_state_with_a_missing_set_is_rejected():
    with pytest.raises(EpisodeError, match="a place refers to a missing set"):
        AllowedTrack.from_state({"places": [0], "which": [1], "sets": [[1]]})
