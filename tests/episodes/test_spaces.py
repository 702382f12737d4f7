"""Test fills and one-hot vectors of spaces, with and without Gymnasium."""

import numpy as np
import pytest

from reward_kit.episodes.columns import dummy, one_hot
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import EpisodeError

spaces = pytest.importorskip("gymnasium.spaces")


def test_one_hot_vectors_count_from_the_start_of_the_space():
    # RLlib fails on the last of them.
    assert one_hot(np.array([1, 3]), spaces.Discrete(3, start=1)).tolist() == [[1, 0, 0], [0, 0, 1]]


def test_multi_discrete_vectors_are_concatenated():
    assert one_hot(np.array([[1, 0]]), spaces.MultiDiscrete([2, 3])).tolist() == [[0, 1, 1, 0, 0]]


def test_non_discrete_item_is_unchanged():
    item = np.ones(3, np.int8)
    assert one_hot(item, spaces.MultiBinary(3)) is item


def test_value_outside_the_space_and_missing_space_are_rejected():
    with pytest.raises(EpisodeError, match=r"a number is outside the space Discrete\(3\)"):
        one_hot(3, spaces.Discrete(3))
    episode = SingleAgentEpisode(observations=[0, 1], actions=[0], rewards=[0.0], len_lookback_buffer=0)
    with pytest.raises(EpisodeError, match="one_hot_discrete=True requires the space"):
        episode.get_actions(0, one_hot_discrete=True)


def test_dummy_has_the_structure_of_its_space():
    space = spaces.Dict(a=spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (2,)))), b=spaces.Text(3))
    made = dummy(space, 0.0, one_hot=True)
    assert made["a"][0].tolist() == [0.0, 0.0]
    assert (made["a"][1].tolist(), made["a"][1].dtype, made["b"]) == ([0.0, 0.0], np.float32, 0.0)
