"""Test `InfiniteLookbackBuffer` alone and as an episode's track, as RLlib programs use it."""

import numpy as np
import pytest

from reward_kit.episodes import InfiniteLookbackBuffer, MultiAgentEpisode, SingleAgentEpisode


def counted(steps: int = 3, **outputs: float) -> SingleAgentEpisode:
    episode = SingleAgentEpisode("e")
    episode.add_env_reset(0, {"t": 0})
    for t in range(steps):
        episode.add_env_step(t + 1, t, 0.5, {"t": t + 1}, extra_model_outputs=outputs)
    return episode


def test_items_are_appended_concatenated_and_removed():
    buffer = InfiniteLookbackBuffer([0, 1, 2, 3], lookback=2)
    buffer.append(4)
    buffer.extend([5, 6])
    buffer.concat(InfiniteLookbackBuffer([5, 6, 7], lookback=2))
    buffer.pop()
    assert (buffer.get(), len(buffer), buffer.len_incl_lookback()) == ([2, 3, 4, 5, 6], 5, 7)
    more = [7]
    assert (buffer + more).get(slice(-2, None)) == [6, 7]
    assert (buffer + InfiniteLookbackBuffer([6, 7, 8], lookback=1))[-2:] == [7, 8]
    assert (buffer + 10).get(-1, neg_index_as_lookback=True) == 11
    assert buffer[0] == 2, "an addition leaves the buffer as it is"


def test_empty_buffers_are_independent():
    first, second = InfiniteLookbackBuffer(), InfiniteLookbackBuffer()
    first.append(1)
    assert (len(first), len(second)) == (1, 0)


@pytest.mark.parametrize("finalized", [False, True])
def test_state_restores_the_buffer(finalized):
    buffer = InfiniteLookbackBuffer([1.0, 2.0, 3.0], lookback=1, space="any")
    if finalized:
        buffer.finalize()
    again = InfiniteLookbackBuffer.from_state(buffer.get_state())
    assert again == buffer
    assert (again.finalized, again.lookback, again.space) == (finalized, 1, "any")
    again.append(4.0)
    assert len(buffer) == 2


def test_finalized_buffer_returns_arrays_and_accepts_items():
    buffer = InfiniteLookbackBuffer([{"n": 1}, {"n": 2}], lookback=1)
    buffer.finalize()
    assert isinstance(buffer.get([0, -1])["n"], np.ndarray)
    buffer.append({"n": 3})
    assert buffer.finalized
    assert buffer.get()["n"].tolist() == [2, 3]


@pytest.mark.parametrize("track", ["observations", "infos", "actions", "rewards", "logp"])
def test_episode_with_one_finalized_track_reads_cuts_and_continues(track):
    plain, episode = counted(logp=-0.5), counted(logp=-0.5)
    buffer = episode.extra_model_outputs[track] if track == "logp" else getattr(episode, track)
    buffer.finalize()
    assert buffer.finalized
    assert episode.is_finalized == episode.is_numpy == (track not in ("infos", "logp"))
    assert episode == plain
    assert episode[1:] == plain[1:]
    assert SingleAgentEpisode.from_state(episode.get_state()) == plain
    for each in (episode, plain):
        each.add_env_step(4, 3, 1.0, {"t": 4}, extra_model_outputs={"logp": -1.0}, terminated=True)
        each.validate()
    assert episode == plain


def test_finalize_sets_is_finalized():
    episode = counted()
    assert not episode.is_finalized
    assert episode.finalize() is episode
    assert episode.is_finalized
    assert episode.observations.finalized
    assert isinstance(episode.get_rewards(), np.ndarray)


def waiting() -> MultiAgentEpisode:
    episode = MultiAgentEpisode()
    episode.add_env_reset(observations={"a": 0, "b": 10})
    episode.add_env_step({"a": 1, "b": 11}, {"a": 0, "b": 100}, {"a": 0.5, "b": 1.0})
    outputs = {"a": {"logp": -1.0}, "b": {"logp": -2.0}}
    episode.add_env_step({"b": 12}, {"a": 1, "b": 101}, {"a": 0.25, "b": 2.0}, extra_model_outputs=outputs)
    return episode


@pytest.mark.parametrize("numpy", [False, True])
def test_agent_steps_contain_only_complete_steps(numpy):
    episode = waiting()
    if numpy:
        episode.to_numpy()

    def by_own_steps(getter, *args):
        return {agent: list(items) for agent, items in getter(*args, env_steps=False).items()}

    assert by_own_steps(episode.get_actions) == {"a": [0], "b": [100, 101]}
    assert by_own_steps(episode.get_rewards) == {"a": [0.5], "b": [1.0, 2.0]}
    assert by_own_steps(episode.get_extra_model_outputs, "logp") == {"a": [None], "b": [None, -2.0]}
    assert by_own_steps(episode.get_observations) == {"a": [0, 1], "b": [10, 11, 12]}
    # The hanging step has an index, and is one of the environment's.
    assert episode.get_actions(-1, env_steps=False) == {"a": 1, "b": 101}
    assert list(episode.get_rewards()["a"]) == [0.5, 0.25]


def test_agent_with_only_a_hanging_step_is_left_out():
    episode = MultiAgentEpisode()
    episode.add_env_reset(observations={"a": 0, "b": 0})
    episode.add_env_step({"b": 1}, {"a": 7, "b": 8}, {"b": 1.0})
    assert episode.get_actions(env_steps=False) == {"b": [8]}
    assert episode.get_actions() == {"a": [7], "b": [8]}
