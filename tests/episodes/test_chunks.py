"""Test cut, slice and concatenation of episodes, in both states."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import EpisodeError
from reward_kit.models import Message

KINDS = {
    "number": lambda t: t,
    "vector": lambda t: np.full(2, t, np.float32),
    "text": lambda t: f"observation {t}" * t,
    "dict": lambda t: {"image": np.full(2, t), "n": t},
    "call": lambda t: {"name": "f", "arguments": {"x": t}} if t % 2 else {"content": "é" * t},
}


def built(steps=5, kind="number", **kwargs):
    episode = SingleAgentEpisode("e", **kwargs)
    make = KINDS[kind]
    episode.add_env_reset(make(0), {"t": 0})
    grow(episode, steps, kind)
    return episode


def grow(episode, steps, kind="number"):
    make = KINDS[kind]
    for _ in range(steps):
        t = episode.t
        episode.add_env_step(make(t + 1), make(t), t / 2, {"t": t + 1}, extra_model_outputs={"value": -t})


def spoken(steps, rewritten=()):
    """Return an episode with messages and tokens: two sampled tokens per action, one per answer."""
    episode = SingleAgentEpisode("e")
    episode.add_messages([Message(role="user", content="question")])
    episode.add_env_reset("question")
    speak(episode, steps, rewritten)
    return episode


def speak(episode, steps, rewritten=()):
    for _ in range(steps):
        t = episode.t
        episode.add_assistant_message(Message(role="assistant", content=f"action {t}"))
        stored = episode.tokens.ids.tolist() if len(episode.tokens) else [1]
        if t:
            stored = [7, t] if t in rewritten else [*stored[episode.tokens.segments[-1].start :], 50 + t]
        episode.tokens.add_turn(len(episode), stored, [100 + t, 200 + t], [-t - 0.5, -t - 0.25], policy_version=t)
        episode.add_messages([Message(role="tool", content=f"answer {t}")])
        episode.add_env_step(f"answer {t}", {"name": "f", "arguments": {"t": t}}, 1.0)


class TestSlice:
    @given(st.integers(-9, 9) | st.none(), st.integers(-9, 9) | st.none(), st.integers(0, 6), st.booleans())
    def test_slice_is_clipped_like_a_list_slice(self, start, stop, lookback, packed):
        # RLlib: ep[-100:] of ten steps has the right data and t_started -90, ep[20:30] is empty and has t 20.
        episode = built(5)
        if packed:
            episode.to_numpy()
        chunk = episode.slice(slice(start, stop), len_lookback_buffer=lookback)
        steps = list(range(5))[start:stop]
        assert list(chunk.get_actions()) == steps
        assert len(chunk) == len(steps) == chunk.t - chunk.t_started
        first = steps[0] if steps else chunk.t_started
        assert chunk.t_started == first and 0 <= first <= 5
        assert list(chunk.get_observations()) == [*steps, first + len(steps)]
        assert chunk.lookback == min(lookback, first)
        chunk.validate()

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("lookback", [0, 1, 3, 5])
    @pytest.mark.parametrize("start", [0, 1, 4])
    def test_both_states_give_equal_chunks(self, kind, lookback, start):
        # RLlib counts the keys of a dict as its steps, and fails on a lookback longer than that.
        plain, packed = built(5, kind), built(5, kind).to_numpy()
        part = slice(start, start + 2)
        chunks = [episode.slice(part, len_lookback_buffer=lookback) for episode in (plain, packed)]
        assert chunks[0] == chunks[1]
        assert [chunk.is_numpy for chunk in chunks] == [False, True]
        cuts = [episode.cut(lookback) for episode in (plain, packed)]
        assert cuts[0] == cuts[1] and cuts[0].lookback == lookback

    def test_chunk_keeps_identity_and_spaces(self):
        identity = {"agent_id": "a", "module_id": "m", "multi_agent_episode_id": "whole"}
        spaces = {"observation_space": object(), "action_space": object()}
        episode = built(3, **identity, **spaces)
        episode.custom_data["facts"] = {"k": 1}
        for chunk in (episode[1:2], episode.cut(1)):
            assert {name: getattr(chunk, name) for name in identity} == identity
            assert {name: getattr(chunk, name) for name in spaces} == spaces
            assert (chunk.id_, chunk.custom_data) == ("e", {"facts": {"k": 1}})
            chunk.custom_data["facts"]["k"] = 2
        assert episode.custom_data == {"facts": {"k": 1}}

    def test_only_the_last_chunk_has_the_end_flags(self):
        episode = built(2)
        episode.add_env_step(9, 9, 1.0, truncated=True)
        assert [episode[a:b].is_truncated for a, b in [(0, 2), (2, 3), (1, None)]] == [False, True, True]

    def test_slice_keeps_its_lookback_by_default(self):
        episode = built(4).cut(3)
        grow(episode, 4)
        assert [episode[k:].lookback for k in (0, 2)] == [3, 3]
        assert episode[2:].get_actions(-1, neg_index_as_lookback=True) == 5

    @pytest.mark.parametrize("index", [0, 1.5, "a", (1, 2)])
    def test_index_that_is_not_a_slice_is_rejected(self, index):
        with pytest.raises(TypeError, match=r"must be a slice of steps, episode\[a:b\].*get_observations\(i\)"):
            built()[index]

    @pytest.mark.parametrize("step", [2, 3, -1])
    def test_slice_step_is_rejected_for_any_length(self, step):
        # In RLlib ep[::2] works and ep[::3] of ten steps fails in an assertion.
        with pytest.raises(EpisodeError, match=f"the step of an episode slice must be 1, got {step}"):
            built(10)[::step]

    def test_writing_to_a_chunk_leaves_the_whole_unchanged(self):
        episode = built(4).to_numpy()
        chunk = episode[1:3]
        assert np.shares_memory(chunk.get_rewards(), episode.get_rewards())
        chunk.set_rewards(new_data=9.0, at_indices=0)
        episode.set_rewards(new_data=7.0, at_indices=2)
        assert (chunk.get_rewards().tolist(), episode.get_rewards().tolist()) == ([9.0, 1.0], [0.0, 0.5, 7.0, 1.5])


class TestCut:
    def test_successor_continues_where_the_chunk_stops(self):
        episode = built(4)
        after = episode.cut(2)
        assert (len(after), after.t_started, after.t, after.lookback) == (0, 4, 4, 2)
        assert (after.get_observations(), after.get_infos(-1)) == ([4], {"t": 4})
        assert after.get_actions(slice(-2, 0), neg_index_as_lookback=True) == [2, 3]
        assert after.get_duration_s() == 0.0

    def test_excess_lookback_is_clipped(self):
        assert built(2).cut(9).lookback == 2

    def test_invalid_cut_reports_the_reason(self):
        over = built(1)
        over.add_env_step(2, 1, 1.0, terminated=True)
        with pytest.raises(EpisodeError, match=r"is over .*and cannot be cut"):
            over.cut()
        with pytest.raises(EpisodeError, match="the lookback must not be negative, got -1"):
            built().cut(-1)
        with pytest.raises(EpisodeError, match="call add_env_reset before cut"):
            SingleAgentEpisode().cut()


class TestConcat:
    @given(
        st.sampled_from(sorted(KINDS)),
        st.lists(st.integers(0, 5), min_size=1, max_size=3),
        st.integers(0, 3),
        st.lists(st.booleans(), min_size=4, max_size=4),
    )
    def test_slices_concatenate_to_the_whole(self, kind, ends, lookback, packed):
        whole, ends = built(5, kind), [0, *sorted(ends), 5]
        chunks = [whole.slice(slice(a, b), len_lookback_buffer=lookback) for a, b in pairwise(ends)]
        for chunk, pack in zip(chunks, packed, strict=False):
            if pack:
                chunk.to_numpy()
        first = chunks[0]
        for chunk in chunks[1:]:
            first.concat_episode(chunk)
        assert first == whole

    def test_cut_chunks_concatenate_to_the_whole(self):
        # RLlib issues 54659 and 49916: dict observations broke this.
        chunk = first = built(2, "dict")
        for _ in range(3):
            chunk = chunk.cut(1)
            grow(chunk, 2, "dict")
            first.concat_episode(chunk)
        assert first == built(8, "dict")

    def test_later_custom_data_wins_and_outputs_may_begin_late(self):
        episode = built(2)
        episode.custom_data |= {"a": 1, "b": 1}
        after = episode.cut()
        after.custom_data["b"] = 2
        after.add_env_step(3, 2, 1.0, extra_model_outputs={"late": 5})
        episode.concat_episode(after)
        assert episode.custom_data == {"a": 1, "b": 2}
        assert episode.get_extra_model_outputs("late") == [None, None, 5]
        assert episode.get_extra_model_outputs("value") == [0, -1, None]

    def refused(self, other, match, episode=None):
        episode = episode or built(3)
        before = episode.get_state()
        with pytest.raises(EpisodeError, match=match):
            episode.concat_episode(other)
        assert episode.get_state() == before

    def test_non_adjacent_chunk_is_rejected_and_nothing_changes(self):
        whole = built(5)
        other = whole[3:]
        other.id_ = "other"
        self.refused(other, "other is a different episode")
        self.refused(whole[4:], "it stops at t=3, but the chunk begins at t=4")
        drifted = whole[3:]
        drifted.set_observations(new_data=99, at_indices=0)
        self.refused(drifted, "its last observation is not the chunk's first")
        over = built(2)
        over.add_env_step(3, 2, 1.0, terminated=True)
        self.refused(whole[3:], "it is over", over)
        self.refused(SingleAgentEpisode("e", t_started=3), "both chunks need at least one observation")


class TestConversation:
    def test_chunk_has_the_conversation_up_to_its_end(self):
        whole = spoken(4)
        chunk = whole[1:3]
        assert [message.content for message in chunk.messages][-2:] == ["action 2", "answer 2"]
        assert [chunk.messages[turn].content for turn in chunk.assistant_turns] == ["action 1", "action 2"]
        assert whole[0:0].messages == whole.messages[:1]

    def test_tokens_of_earlier_actions_are_context(self):
        whole = spoken(4)
        (row,) = whole[1:3].tokens.rows()
        assert row.prompt_ids.tolist() == [1, 100, 200, 51]
        assert row.completion_ids.tolist() == [101, 201, 52, 102, 202]
        assert row.action_mask.tolist() == [1, 1, 0, 1, 1]
        assert row.steps.tolist() == [0, 0, -1, 1, 1]
        assert row.logprobs.tolist() == [-1.5, -1.25, 0.0, -2.5, -2.25]

    def test_tokens_of_lookback_actions_are_context(self):
        (row,) = spoken(3).slice(slice(2, 3), len_lookback_buffer=2).tokens.rows()
        assert row.completion_ids.tolist() == [102, 202]

    def test_every_action_is_trained_once_over_all_chunks(self):
        whole = spoken(6, rewritten={2, 4})
        rows = [row for k in range(0, 6, 2) for row in whole[k : k + 2].tokens.rows()]
        sampled = [token for row in rows for token in row.completion_ids[row.action_mask == 1].tolist()]
        assert sampled == [token for t in range(6) for token in (100 + t, 200 + t)]

    @given(st.sets(st.integers(1, 5)), st.lists(st.integers(0, 6), min_size=1, max_size=3))
    def test_slices_concatenate_to_the_same_conversation_and_tokens(self, rewritten, ends):
        whole, ends = spoken(6, rewritten), [0, *sorted(ends), 6]
        chunks = [whole[a:b] for a, b in pairwise(ends)]
        for chunk in chunks[1:]:
            chunks[0].concat_episode(chunk)
        assert chunks[0] == whole

    @given(
        st.lists(st.none() | st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=6),
        st.lists(st.integers(0, 6), max_size=3),
    )
    def test_steps_without_tokens_and_empty_prompts_survive_slicing(self, turns, ends):
        whole, context = SingleAgentEpisode("e"), []
        whole.add_env_reset("o")
        for t, turn in enumerate(turns):
            if turn is not None:  # no step of a policy that tells no tokens
                is_rewritten, new, sampled = turn
                prompt = ([] if is_rewritten else context) + [1] * new
                whole.tokens.add_turn(t, prompt, [2] * sampled)
                context = prompt + [2] * sampled
            whole.add_env_step("o", "a", 0.0)
        chunks = [whole[a:b] for a, b in pairwise([0, *sorted(ends), len(turns)])]
        for chunk in chunks:
            assert chunk.tokens.turns().keys() <= set(range(len(chunk)))
            assert SingleAgentEpisode.from_state(json.loads(json.dumps(chunk.get_state()))) == chunk
        for chunk in chunks[1:]:
            chunks[0].concat_episode(chunk)
        assert chunks[0] == whole

    def test_cut_episode_continues_and_concatenates_to_the_whole(self):
        first = spoken(2)
        after = first.cut(1)
        speak(after, 2, rewritten={3})
        (row, _) = after.tokens.rows()
        assert row.completion_ids.tolist() == [102, 202]
        first.concat_episode(after)
        assert first == spoken(4, rewritten={3})

    def test_chunk_with_another_conversation_or_tokens_is_rejected(self):
        whole = spoken(3)
        strange = whole[2:]
        strange.messages = [Message(role="user", content="another"), *whole.messages[1:]]
        with pytest.raises(EpisodeError, match="its conversation does not begin with the episode's"):
            whole[:2].concat_episode(strange)
        strange = whole[2:]
        strange.tokens.ids[0] = 9
        with pytest.raises(EpisodeError, match="tokens of a chunk do not begin with the tokens of the preceding chunk"):
            whole[:2].concat_episode(strange)

    def test_state_of_a_chunk_survives_json(self):
        chunk = spoken(4, rewritten={1}).slice(slice(1, 3), len_lookback_buffer=1)
        assert SingleAgentEpisode.from_state(json.loads(json.dumps(chunk.get_state()))) == chunk
