"""Test that defects of RLlib 2.60's class and complaints of its users do not occur here."""

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest

from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import EpisodeError


def chunk(**kwargs):
    """Return two steps with two more as lookback."""
    tracks = {"observations": [0, 1, 2, 3, 4], "actions": [10, 11, 12, 13], "rewards": [0.0, 1.0, 2.0, 3.0]}
    return SingleAgentEpisode("c", **{**tracks, "len_lookback_buffer": 2, **kwargs})


def built(observations, actions=None):
    episode = SingleAgentEpisode("e")
    episode.add_env_reset(observations[0])
    for t, observation in enumerate(observations[1:]):
        episode.add_env_step(observation, actions[t] if actions else t, 1.0)
    return episode


def assert_fits_msgpack(value):
    """Assert that only values are present that JSON and msgpack both support."""
    if isinstance(value, dict):
        assert all(isinstance(key, str) for key in value)
        value = [*value, *value.values()]
    if isinstance(value, list):
        for item in value:
            assert_fits_msgpack(item)
    elif isinstance(value, str):
        value.encode()
    else:
        assert value is None or type(value) in (bool, int, float)
        assert type(value) is not int or -(2**63) <= value < 2**64


class TestClassDefects:
    @pytest.mark.parametrize("packed", [False, True])
    def test_1_index_before_the_lookback_never_wraps_around(self, packed):
        episode = chunk().to_numpy() if packed else chunk()
        for read in (episode.get_observations, episode.get_actions, episode.get_rewards):
            with pytest.raises(IndexError, match=r"index -3 is out of range: [23] items and a lookback of 2"):
                read(-3, neg_index_as_lookback=True)

    @pytest.mark.parametrize("names", ["a", "abc"])
    def test_2_lookback_may_exceed_the_number_of_dict_keys(self, names):
        episode = built([dict.fromkeys(names, float(t)) for t in range(8)]).to_numpy()
        for part in (episode.cut(5), episode.slice(slice(5, 7), len_lookback_buffer=5)):
            assert part.lookback == 5
            back = part.get_observations(slice(-5, 0), neg_index_as_lookback=True)
            assert back["a"].tolist() == [t - 5.0 for t in range(part.t_started, part.t_started + 5)]

    def test_3_slice_out_of_range_has_the_right_times(self):
        episode = built(list(range(11)))
        assert [(part.t_started, part.t) for part in (episode[-100:], episode[20:30])] == [(0, 10), (10, 10)]
        with pytest.raises(EpisodeError, match="must be 1, got 2"):
            episode[::2]

    def test_4_sliced_tracks_keep_their_spaces(self):
        class Number:
            shape, dtype = (), np.dtype(np.float32)

        part = chunk(observation_space=Number(), action_space=Number())[0:1]
        assert part.get_actions(9, fill=4.0) == np.float32(4.0)
        assert isinstance(part.get_observations(9, fill=4.0), np.ndarray)

    def test_5_errors_have_messages_even_in_optimized_python(self):
        code = (
            "from reward_kit.episodes import SingleAgentEpisode as E\n"
            "try: E(observations=[1], rewards=[1.0])\nexcept Exception as e: print(type(e).__name__, e)"
        )
        done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("EpisodeError")
        assert "1 rewards require 1 actions and outputs, and 2 observations and infos; got" in done.stdout

    def test_6_text_stays_compact_and_complete(self):
        texts = ["trailing\0", "x" * 5_000, "", "é", "\ud800"]
        episode = built(texts).to_numpy()
        assert episode.get_observations() == texts
        assert all(type(text) is str for text in episode.get_observations([0, 1]))
        # NumPy takes 4 bytes for each of 5,000 characters, five times.
        assert len(pickle.dumps(episode)) < 7_000

    def test_6_dicts_with_varying_keys_and_ragged_tokens_are_stored(self):
        calls = [{"name": "f", "arguments": {"x": t}} if t % 3 else {"content": "say " * t} for t in range(9)]
        tokens = [list(range(t)) for t in range(10)]
        arrays = [np.arange(t) for t in range(10)]
        for observations in (tokens, arrays):
            episode, plain = built(observations, calls).to_numpy(), built(observations, calls)
            assert episode == plain
            assert episode.get_actions() == calls
            assert episode.get_actions([1, -1]) == [calls[1], calls[-1]]
            assert episode[2:5] == plain[2:5]

    def test_6_text_space_accepts_a_fill(self):
        spaces = pytest.importorskip("gymnasium.spaces")
        episode = SingleAgentEpisode("e", observation_space=spaces.Text(10))
        episode.add_env_reset("a")
        assert episode.get_observations([0, 1], fill="") == ["a", ""]


class TestComplaints:
    def test_dict_observations_concatenate_in_any_mix_of_states(self):  # 54659, 49916
        episode = built([{"image": np.full(2, t), "text": "x" * t} for t in range(5)])
        for first, last in ((False, True), (True, False), (True, True)):
            parts = [episode[:2], episode[2:]]
            for part, pack in zip(parts, (first, last), strict=True):
                if pack:
                    part.to_numpy()
            parts[0].concat_episode(parts[1])
            assert parts[0] == episode

    def test_is_numpy_is_kept_by_every_slice(self):  # 56614
        episode = built(list(range(5))).to_numpy()
        parts = [episode[1:3], episode[2:2], episode[:], episode.cut(), episode.cut(2)]
        assert all(part.is_numpy and part.is_finalized for part in parts)
        assert SingleAgentEpisode().to_numpy().is_numpy

    def test_observations_of_varying_length_are_stored(self):  # 52093
        rows = [[np.zeros(2)] * t for t in range(4)]
        assert built(rows).to_numpy() == built(rows)

    def test_adding_a_step_does_not_validate_the_episode(
        self,
    ):  # 61144: a check of the whole at each step was 13.9 % of sampling
        class Counted(SingleAgentEpisode):
            __slots__ = ()
            checks = 0

            def validate(self):
                Counted.checks += 1
                super().validate()

        episode = Counted("e")
        episode.add_env_reset(0)
        for _ in range(50):
            episode.add_env_step(1, 0, 1.0)
        assert Counted.checks == 0

    def test_state_needs_no_pickle(self):  # 47294: pickles are not portable over Python's versions
        episode = built([np.full(3, t, np.float32) for t in range(4)], [{"n": 2**70, "b": b"\0"}] * 3)
        episode.custom_data["tuple"] = (1, None)
        episode.custom_data["lone"] = "\ud800"
        state = episode.get_state()
        assert_fits_msgpack(state)
        assert SingleAgentEpisode.from_state(json.loads(json.dumps(state, allow_nan=False))) == episode

    def test_reading_never_changes_the_episode(self):  # the learner's connectors append to ids and steps
        episode = built(list(range(5))).to_numpy()
        before = pickle.dumps(episode)
        columns = episode.get_data_dict()
        columns["obs"] = columns["obs"] + 1
        columns["extra"] = 1
        episode.get_sample_batch().clear()
        assert pickle.dumps(episode) == before
