"""Test token segments: every turn returns exactly what its model saw and sampled."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.episodes.segments import FIRST_SEGMENT, REWRITTEN, EpisodeTokens
from reward_kit.errors import EpisodeError

ids = st.lists(st.integers(0, 5), max_size=4)
logprob = st.floats(max_value=0, allow_nan=False) | st.just(-float("inf"))


@st.composite
def conversations(draw):
    """Return (prompt, sampled, logprobs, version) by turn; a prompt extends all before it or starts again."""
    turns, context = [], draw(ids)
    for _ in range(draw(st.integers(1, 5))):
        sampled = draw(ids)
        logprobs = draw(st.none() | st.lists(logprob, min_size=len(sampled), max_size=len(sampled)))
        turns.append((context, sampled, logprobs, draw(st.integers(0, 3))))
        context = draw(st.just(context + sampled + draw(ids)) | ids)
    return turns


def stored(turns):
    tokens = EpisodeTokens()
    for step, (prompt, sampled, logprobs, version) in enumerate(turns):
        tokens.add_turn(step, prompt, sampled, logprobs, version)
    return tokens


@given(conversations())
def test_every_turn_returns_its_prompt_and_samples(turns):
    read = stored(turns).turns()
    for step, (prompt, sampled, logprobs, version) in enumerate(turns):
        turn = read[step]
        assert turn.prompt_ids.tolist() == prompt
        assert turn.token_ids.tolist() == sampled
        assert turn.policy_version == version
        if logprobs is None and sampled:
            assert turn.logprobs is None
        else:
            np.testing.assert_array_equal(turn.logprobs, logprobs or [])


@given(conversations())
def test_turn_reports_the_reason_of_a_rewritten_context(turns):
    read, context = stored(turns).turns(), turns[0][0]
    for step, (prompt, sampled, *_) in enumerate(turns):
        extends = prompt[: len(context)] == context
        assert read[step].segment_reason == (None if extends else REWRITTEN)
        context = prompt + sampled


def test_unknown_version_is_none():
    tokens = EpisodeTokens()
    tokens.add_turn(0, [1], [2])
    assert tokens.turns()[0].policy_version is None


@given(conversations())
def test_row_equals_the_context_of_its_last_turn(turns):
    tokens = stored(turns)
    last = {span.segment: span.step for span in tokens.spans}
    for segment, row in enumerate(tokens.rows()):
        prompt, sampled, *_ = turns[last[segment]]
        assert [*row.prompt_ids, *row.completion_ids] == prompt + sampled


@given(conversations())
def test_masks_steps_and_versions_mark_only_sampled_tokens(turns):
    rows = list(stored(turns).rows())
    for row in rows:
        sampled = row.action_mask == 1
        assert {len(row.action_mask)} == {len(part) for part in row[1:]}
        assert (row.logprobs[~sampled] == 0.0).all()
        assert (row.steps[~sampled] == -1).all()
        assert (row.policy_versions[~sampled] == -1).all()
        assert all(
            turns[step][3] == version for step, version in zip(row.steps, row.policy_versions, strict=True) if step >= 0
        )
    for step, (_, sampled, *_) in enumerate(turns):
        assert sum(int((row.steps == step).sum()) for row in rows) == len(sampled)


@given(conversations())
def test_only_new_tokens_are_stored(turns):
    tokens = stored(turns)
    expected, seen = 0, None
    for prompt, sampled, *_ in turns:
        extends = seen is not None and prompt[: len(seen)] == seen
        expected += len(sampled) + len(prompt) - (len(seen) if extends else 0)
        seen = prompt + sampled
    assert len(tokens) == len(tokens.ids) == len(tokens.logprobs) == expected


@given(conversations())
def test_state_survives_strict_json(turns):
    tokens = stored(turns)
    state = json.loads(json.dumps(tokens.get_state(), allow_nan=False))
    again = EpisodeTokens.from_state(state)
    assert again == tokens
    np.testing.assert_array_equal(again.logprobs, tokens.logprobs)


class TestSegments:
    def test_usual_episode_has_one_segment(self):
        tokens = stored([([1, 2], [3], [-0.1], 0), ([1, 2, 3, 4], [5], [-0.2], 0)])
        (row,) = tokens.rows()
        assert [segment.reason for segment in tokens.segments] == [FIRST_SEGMENT]
        assert row.prompt_ids.tolist() == [1, 2]
        assert row.completion_ids.tolist() == [3, 4, 5]
        assert row.action_mask.tolist() == [1, 0, 1]
        assert row.logprobs.tolist() == [-0.1, 0.0, -0.2]
        assert row.steps.tolist() == [0, -1, 1]

    def test_rewritten_context_opens_a_segment_with_its_reason(self):
        tokens = stored([([1, 2], [3], None, 0)])
        tokens.add_turn(1, [1, 9], [4], reason="reasoning stripped")
        tokens.add_turn(2, [7], [8])
        assert [segment.reason for segment in tokens.segments] == [FIRST_SEGMENT, "reasoning stripped", REWRITTEN]
        assert [row.completion_ids.tolist() for row in tokens.rows()] == [[3], [4], [8]]

    def test_shortened_prompt_opens_a_segment(self):
        tokens = stored([([1, 2], [3], None, 0), ([1, 2], [4], None, 0)])
        assert len(tokens.segments) == 2


class TestInvalidTurns:
    def test_mismatched_lengths_are_rejected(self):
        with pytest.raises(EpisodeError, match="step 0 has 2 token ids but 1 log-probabilities"):
            EpisodeTokens().add_turn(0, [1], [2, 3], [-1.0])

    @pytest.mark.parametrize("step", [0, 1])
    def test_steps_must_ascend(self, step):
        tokens = EpisodeTokens()
        tokens.add_turn(1, [1], [2])
        with pytest.raises(EpisodeError, match=f"step {step} must be greater than the last step 1"):
            tokens.add_turn(step, [1, 2], [3])

    @pytest.mark.parametrize("arguments", [([1, "x"], [2], None), ([1], [2, 2**40], None), ([1], [2], [None])])
    def test_invalid_token_is_rejected_and_nothing_changes(self, arguments):
        tokens = stored([([1], [2], [-0.5], 0)])
        before = tokens.get_state()
        with pytest.raises((TypeError, OverflowError)):
            tokens.add_turn(1, *arguments)
        assert tokens.get_state() == before
        assert len(tokens.ids) == len(tokens.logprobs)
