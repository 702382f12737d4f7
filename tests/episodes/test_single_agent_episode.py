"""Test `SingleAgentEpisode`: RLlib's names and meanings, error messages, and a state that survives JSON."""

import copy
import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import EpisodeError
from reward_kit.models import Message


def built(n=3, **kwargs):
    episode = SingleAgentEpisode("e", **kwargs)
    episode.add_env_reset("o0", {"i": 0})
    for t in range(n):
        outputs = {"value": t / 2}
        episode.add_env_step(f"o{t + 1}", {"a": t}, float(t), {"i": t + 1}, extra_model_outputs=outputs)
    return episode


def chunk(**kwargs):
    tracks = {"observations": [0, 1, 2, 3], "actions": [10, 11, 12], "rewards": [0.5, 1.0, 2.0]}
    return SingleAgentEpisode("c", **{**tracks, **kwargs})


class TestBuilding:
    def test_t_steps_have_one_more_observation_and_info(self):
        episode = built(3)
        assert len(episode) == episode.env_steps() == episode.agent_steps() == episode.t == 3
        assert episode.get_observations() == ["o0", "o1", "o2", "o3"]
        assert episode.get_infos() == [{"i": 0}, {"i": 1}, {"i": 2}, {"i": 3}]
        assert episode.get_actions() == [{"a": 0}, {"a": 1}, {"a": 2}]
        assert episode.get_rewards() == [0.0, 1.0, 2.0]
        assert episode.get_extra_model_outputs("value") == [0.0, 0.5, 1.0]
        assert episode.get_return() == 3.0

    def test_default_ids_are_unique(self):
        assert SingleAgentEpisode().id_ != SingleAgentEpisode().id_

    def test_missing_infos_are_empty_and_never_shared(self):
        given = {"x": 1}
        episode = SingleAgentEpisode()
        episode.add_env_reset(0, given)
        episode.add_env_step(1, 0, 0.0)
        given["x"] = 2
        assert episode.get_infos() == [{"x": 1}, {}]

    def test_reset_comes_first_and_only_once(self):
        with pytest.raises(EpisodeError, match="call add_env_reset before add_env_step"):
            SingleAgentEpisode().add_env_step(0, 0, 0.0)
        with pytest.raises(
            EpisodeError,
            match="add_env_reset must be called once, before any step; the episode already has 2 steps, not over",
        ):
            built(2).add_env_reset(0)

    @pytest.mark.parametrize("flag", ["terminated", "truncated"])
    def test_step_after_the_end_is_rejected(self, flag):
        episode = built(1)
        episode.add_env_step("end", {}, 0.0, **{flag: True})
        assert (episode.is_done, getattr(episode, flag), getattr(episode, f"is_{flag}")) == (True, True, True)
        with pytest.raises(EpisodeError, match=rf"is over \(2 steps, {flag}\); no further step can be added"):
            episode.add_env_step("more", {}, 0.0)
        assert len(episode) == 2

    def test_output_may_begin_late_and_be_missing_later(self):
        # In RLlib either makes a later validate() fail.
        episode = built(1)
        episode.add_env_step("o2", {}, 0.0, extra_model_outputs={"logp": -1.0})
        assert episode.get_extra_model_outputs("logp") == [None, -1.0]
        assert episode.get_extra_model_outputs("value") == [0.0, None]
        episode.validate()

    def test_unknown_output_suggests_the_nearest(self):
        with pytest.raises(KeyError, match="did you mean 'value'"):
            built().get_extra_model_outputs("valeu")

    def test_outputs_keep_their_insertion_order(self):
        code = (
            "from reward_kit.episodes import SingleAgentEpisode as E; e = E('x'); e.add_env_reset(0); "
            "e.add_env_step(0, 0, 0.0, extra_model_outputs=dict.fromkeys('hgfedcba', 1)); print(*e.extra_model_outputs)"
        )
        for seed in "12":
            done = subprocess.run(
                [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
            )
            assert done.stdout.split() == list("hgfedcba")


class TestEnvironmentRewards:
    def test_missing_reward_differs_from_zero(self):
        episode = SingleAgentEpisode("e")
        episode.add_env_reset("o0")
        for reward in (None, 0.0, 2.5):
            episode.add_env_step("o", {}, reward, {"x": 1})
        assert episode.environment_rewards() == [None, 0.0, 2.5]
        assert (list(episode.get_rewards()), episode.get_return()) == ([0.0, 0.0, 2.5], 2.5)
        assert SingleAgentEpisode.from_state(episode.get_state()).environment_rewards() == [None, 0.0, 2.5]
        assert episode.to_numpy().environment_rewards() == [None, 0.0, 2.5]

    def test_given_infos_are_not_modified(self):
        episode, facts = SingleAgentEpisode("e"), {"x": 1}
        episode.add_env_reset("o0")
        episode.add_env_step("o", {}, None, facts)
        assert facts == {"x": 1} and episode.get_infos(1)["x"] == 1

    def test_lookback_is_left_out(self):
        assert chunk(len_lookback_buffer=1).environment_rewards() == [1.0, 2.0]


class TestAnswers:
    def test_answers_are_the_messages_between_two_actions(self):
        episode = SingleAgentEpisode("e")
        said = [Message(role="assistant", content=c) for c in "ab"]
        others = [Message(role="user", content=c) for c in "123"]
        episode.add_messages(others[:1])
        episode.add_assistant_message(said[0])
        episode.add_messages(others[1:])
        episode.add_assistant_message(said[1])
        assert [episode.answers_to(t) for t in range(2)] == [others[1:], []]
        assert [episode.turn_end(t) for t in range(2)] == [4, 5]
        episode.add_messages(others[:1])
        assert episode.answers_to(1) == others[:1]


class TestChunks:
    def test_all_given_steps_are_lookback_by_default(self):
        episode = chunk()
        assert len(episode) == 0
        assert episode.get_observations() == [3]
        assert episode.get_rewards(-1) == 2.0
        assert episode.get_return() == 0.0

    def test_lookback_of_two_leaves_one_step(self):
        episode = chunk(len_lookback_buffer=2, t_started=7)
        assert (len(episode), episode.t_started, episode.t) == (1, 7, 8)
        assert episode.get_rewards() == [2.0]
        assert episode.get_rewards(-1, neg_index_as_lookback=True) == 1.0
        assert episode.get_return() == 2.0

    def test_each_track_has_the_index_grammar(self):
        episode = chunk(len_lookback_buffer=1, extra_model_outputs={"v": [7, 8, 9]}, infos=[{"n": n} for n in range(4)])
        read = {"neg_index_as_lookback": True, "fill": -1}
        assert episode.get_observations([-2, -1, 0, 9], **read) == [-1, 0, 1, -1]
        assert episode.get_actions(slice(-1, 1), **read) == [10, 11]
        assert episode.get_rewards(slice(1, 4), **read) == [2.0, -1, -1]
        assert episode.get_infos(-1, **read) == {"n": 0}
        assert episode.get_extra_model_outputs("v", [-1, 1], **read) == [7, 9]

    def test_tracks_may_be_arrays(self):
        episode = chunk(observations=np.zeros((4, 2)), rewards=np.ones(3), actions=np.arange(3), len_lookback_buffer=0)
        assert (len(episode), episode.get_return()) == (3, 3.0)

    def test_tracks_of_mismatched_length_are_named(self):
        with pytest.raises(
            EpisodeError, match=r"3 rewards require 3 actions and outputs, and 4 observations.*actions 1"
        ):
            chunk(actions=[10])
        with pytest.raises(EpisodeError, match=r"got observations 2, infos 2"):
            chunk(observations=[0, 1])
        with pytest.raises(EpisodeError, match=r"got extra_model_outputs\['v'\] 1"):
            chunk(extra_model_outputs={"v": [1]})

    def test_negative_lookback_is_rejected(self):
        with pytest.raises(EpisodeError, match="the lookback must not be negative, got -1"):
            chunk(len_lookback_buffer=-1)


class TestConversation:
    def test_assistant_turns_are_the_positions_of_the_action_messages(self):
        episode = built(0)
        episode.add_messages([Message(role="system"), Message(role="user", content="q")])
        episode.add_assistant_message(Message(role="assistant", content="a"))
        episode.add_messages([Message(role="tool", content="r")])
        episode.add_assistant_message(Message(role="assistant", content="b"))
        assert episode.assistant_turns.tolist() == [2, 4]
        assert [episode.messages[turn].content for turn in episode.assistant_turns] == ["a", "b"]


class TestCompactState:
    def test_compact_episode_reads_and_grows_like_a_plain_episode(self):
        episode, plain = built(3), built(3)
        assert episode.to_numpy() is episode
        assert episode.is_numpy
        assert episode == plain
        for each in (episode, plain):
            each.add_env_step("o4", {"a": 3}, 3.0, extra_model_outputs={"value": None})
        assert episode == plain
        assert not episode.is_numpy
        assert episode.get_state() | {"duration_s": 0} == plain.get_state() | {"duration_s": 0}

    def test_ragged_text_stays_compact(self):
        episode = SingleAgentEpisode()
        episode.add_env_reset("x" * 20_000)
        for t in range(100):
            episode.add_env_step(chr(t), "z", 0.0)
        # A NumPy text array would take 4 bytes for 20,000 characters 101 times.
        assert len(episode.to_numpy().observations.data.blob) == 20_100


class TestClock:
    def test_clock_runs_from_the_reset_to_the_last_step(self):
        assert SingleAgentEpisode().get_duration_s() == built(0).get_duration_s() == 0.0
        assert built(3).get_duration_s() > 0.0

    def test_restored_episode_does_not_count_the_pause(self):
        episode = built(3)
        state = episode.get_state() | {"duration_s": 2.0}
        again = SingleAgentEpisode.from_state(state=state)  # RLlib's name of it
        assert again.get_duration_s() == 2.0
        again.add_env_step("o4", {}, 0.0)
        assert again.get_duration_s() == 2.0
        again.add_env_step("o5", {}, 0.0)
        assert 2.0 < again.get_duration_s() < 1_000.0

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda episode: pickle.loads(pickle.dumps(episode))])
    def test_copying_and_pickling_stop_the_clock(self, copied):
        episode = built(3)
        # Of another machine, whose clock is far ahead.
        episode._start_time += 1e6
        episode._last_step_time += 1e6
        again = copied(episode)
        assert again.get_duration_s() == episode.get_duration_s()
        again.add_env_step("o4", {}, 0.0)
        assert again.get_duration_s() == episode.get_duration_s()


def test_equality_ignores_the_clock():
    assert built() == built()
    assert built() != built(2)
    assert built() != "episode"
    with pytest.raises(TypeError):
        hash(built())


def test_equality_compares_arrays_and_nan():
    def with_arrays(value):
        episode = SingleAgentEpisode("a")
        episode.add_env_reset({"image": np.full(2, value)})
        episode.add_env_step({"image": np.zeros(2)}, np.array([1]), float("nan"))
        episode.custom_data["state"] = np.full(2, value)
        return episode

    assert with_arrays(1.0) == with_arrays(1.0)
    assert with_arrays(1.0) != with_arrays(2.0)


def test_copies_and_pickles_are_equal_and_independent():
    episode = built()
    for again in (copy.deepcopy(episode), pickle.loads(pickle.dumps(episode))):
        assert again == episode
        again.add_env_step("x", {}, 0.0)
        assert len(episode) == 3


def test_repr_shows_the_progress():
    assert repr(built(2)) == "SingleAgentEpisode('e', 2 steps, not over, return 1)"


items = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3) | st.just(np.arange(2.0)),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2) | st.just("__type__"), inner, max_size=2)
    ),
    max_leaves=4,
)
messages = st.builds(
    Message,
    role=st.sampled_from(["user", "assistant", "tool"]),
    content=st.none() | st.text(st.characters(), max_size=4) | st.just([{"type": "text", "text": "\ud800"}]),
    tool_calls=st.none() | st.just([]) | st.just([{"id": "1", "function": {"name": "f", "arguments": "{"}}]),
    reasoning_content=st.none() | st.text(max_size=2),
)


@st.composite
def episodes(draw):
    episode = SingleAgentEpisode("e", t_started=draw(st.integers(0, 3)), agent_id=draw(st.none() | st.just(("a", 1))))
    if draw(st.booleans()):
        episode.add_messages([draw(messages)])
        episode.add_env_reset(draw(items), {"k": draw(items)})
        for step in range(draw(st.integers(0, 3))):
            episode.add_assistant_message(draw(messages))
            if draw(st.booleans()):
                episode.tokens.add_turn(step, [1, 2], [3], draw(st.none() | st.just([-0.5])))
            outputs = draw(st.dictionaries(st.sampled_from(["v", "w"]), items))
            episode.add_env_step(
                draw(items), draw(items), draw(st.floats()), {"k": draw(items)}, extra_model_outputs=outputs
            )
    episode.is_terminated = draw(st.booleans())
    episode.custom_data = draw(st.dictionaries(st.text(max_size=2), items, max_size=2))
    return episode


@given(episodes(), st.booleans())
def test_state_survives_json(episode, packed):
    state = episode.get_state()
    if packed:
        assert episode.to_numpy().get_state() | {"is_numpy": False} == state
    written = json.dumps(state, allow_nan=False, ensure_ascii=False).encode("utf-8")
    again = SingleAgentEpisode.from_state(json.loads(written))
    assert again == episode
    assert again.get_state() == state


class TestState:
    def test_state_is_isolated_from_the_episode(self):
        episode = built()
        episode.custom_data["list"] = [1]
        state = episode.get_state()
        state["custom_data"]["list"].append(2)
        state["infos"][0]["new"] = 1
        assert episode.custom_data == {"list": [1]}
        assert episode.get_infos(0) == {"i": 0}

    def test_lookback_is_kept(self):
        episode = chunk(len_lookback_buffer=2, extra_model_outputs={"v": [1, 2, 3]})
        again = SingleAgentEpisode.from_state(episode.get_state())
        assert again == episode
        assert again.get_extra_model_outputs("v") == [3]

    def test_another_version_is_rejected(self):
        with pytest.raises(EpisodeError, match="version 99, but this release reads only versions 1 and 2"):
            SingleAgentEpisode.from_state({**built().get_state(), "schema_version": 99})

    @pytest.mark.parametrize("name", [name for name in built().get_state() if name != "schema_version"])
    def test_missing_field_is_named(self, name):
        state = built().get_state()
        del state[name]
        with pytest.raises(EpisodeError, match=f"the episode state is missing {name}"):
            SingleAgentEpisode.from_state(state)

    def test_version_1_can_be_loaded(self):
        episode = chunk(len_lookback_buffer=1, extra_model_outputs={"v": [1, 2, 3]})
        state = episode.get_state()
        del state["is_numpy"]
        old = state | {"schema_version": 1, "extra_model_outputs": {"v": [1, 2, 3]}}
        assert SingleAgentEpisode.from_state(old) == episode

    def test_numpy_state_is_restored_as_arrays(self):
        episode = SingleAgentEpisode("a")
        episode.add_env_reset(np.zeros(2, np.float32))
        episode.add_env_step(np.ones(2, np.float32), np.float32(0.5), 1.0, extra_model_outputs={"v": [1, 2]})
        packed = json.loads(json.dumps(episode.to_numpy().get_state()))
        again = SingleAgentEpisode.from_state(packed, observation_space="space")
        assert again == episode and again.is_numpy and again.observation_space == "space"
        assert (again.get_observations().dtype, again.get_actions().dtype) == (np.float32, np.float32)


class TestSetters:
    @pytest.mark.parametrize("packed", [False, True])
    def test_setters_accept_ints_slices_lists_and_all(self, packed):
        episode = chunk(len_lookback_buffer=1, extra_model_outputs={"v": [7, 8, 9]})
        if packed:
            episode.to_numpy()
        episode.set_rewards(new_data=[5.0, 6.0])
        episode.set_rewards(new_data=4.0, at_indices=-1, neg_index_as_lookback=True)
        episode.set_actions(new_data=[1, 2], at_indices=[1, -3])
        episode.set_observations(new_data=[8, 9], at_indices=slice(0, 2))
        episode.set_extra_model_outputs(key="v", new_data=0, at_indices=1)
        assert list(episode.rewards.data) == [4.0, 5.0, 6.0]
        assert list(episode.actions.data) == [2, 11, 1]
        assert list(episode.observations.data) == [0, 8, 9, 3]
        assert list(episode.get_extra_model_outputs("v")) == [8, 0]
        assert episode.is_numpy == packed

    @pytest.mark.parametrize("packed", [False, True])
    def test_mismatched_size_or_position_is_an_index_error(self, packed):
        episode = built(3).to_numpy() if packed else built(3)
        with pytest.raises(IndexError, match="2 new items for the 3 positions"):
            episode.set_rewards(new_data=[1.0, 2.0])
        with pytest.raises(IndexError, match="index 3 is out of range"):
            episode.set_actions(new_data=1, at_indices=3)
        with pytest.raises(KeyError, match="did you mean 'value'"):
            episode.set_extra_model_outputs(key="valeu", new_data=1, at_indices=0)
        assert episode == built(3)

    def test_value_that_an_array_would_round_is_kept(self):
        episode = chunk(len_lookback_buffer=0).to_numpy()
        episode.set_actions(new_data=0.5, at_indices=0)
        assert list(episode.get_actions()) == [0.5, 11, 12]

    def test_dicts_of_arrays_can_be_set(self):
        episode = SingleAgentEpisode("e", observations=[{"n": t} for t in range(3)], actions=[0, 0], rewards=[0, 0])
        episode.to_numpy().set_observations(new_data={"n": np.array([9])}, at_indices=slice(-1, None))
        assert episode.get_observations(-1) == {"n": 9}


class TestColumns:
    """The tracks that programs access directly, such as `episode.observations`."""

    @pytest.mark.parametrize("packed", [False, True])
    def test_items_appended_to_a_track_belong_to_the_episode(self, packed):
        episode = chunk(len_lookback_buffer=1, infos=[{"n": n} for n in range(4)])
        if packed:
            episode.to_numpy()
        for track in (episode.observations, episode.actions, episode.rewards, episode.infos):
            track.append(track[-1])
        episode.t += 1
        episode.validate()
        assert (list(episode.get_observations()), len(episode)) == ([1, 2, 3, 3], 3)
        assert episode.observations.pop() == 3
        episode.rewards[0] = 8.0
        assert (list(episode.get_observations()), episode.get_rewards(0)) == ([1, 2, 3], 8.0)
        assert (episode.rewards.len_incl_lookback(), episode.rewards.finalized) == (4, packed)

    def test_track_can_be_replaced(self):
        episode = chunk(len_lookback_buffer=1)
        episode.rewards = [3.0, 4.0, 5.0]
        episode.observations = episode.observations
        assert episode.get_return() == 9.0
        assert repr(episode.rewards) == "InfiniteLookbackBuffer([3.0] <- lookback(1) | [4.0, 5.0])"


class TestData:
    def test_data_columns_have_equal_length(self):
        episode = built(2)
        columns = episode.get_data_dict()
        assert columns == {
            "terminateds": [False, False],
            "truncateds": [False, False],
            "t": [0, 1],
            "eps_id": ["e", "e"],
            "obs": ["o0", "o1"],
            "infos": [{"i": 0}, {"i": 1}],
            "actions": [{"a": 0}, {"a": 1}],
            "rewards": [0.0, 1.0],
            "value": [0.0, 0.5],
        }
        assert {len(column) for column in built(0).get_data_dict().values()} == {0}

    def test_empty_info_can_be_written_to(self):
        episode = SingleAgentEpisode()
        episode.add_env_reset(0)
        episode.get_infos(-1)["x"] = 1
        episode.get_infos(slice(0, 1))[0]["y"] = 2
        assert episode.get_infos() == [{"x": 1, "y": 2}]


def test_forked_child_generates_its_own_ids():
    code = (
        "import os, sys\nfrom reward_kit.episodes import SingleAgentEpisode as E\n"
        "child = os.fork()\nif child: os.wait()\nprint(E().id_, flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ids = done.stdout.split()
    assert len(set(ids)) == 2 and all(len(id_) == 32 for id_ in ids)


@pytest.mark.parametrize("packed", [False, True])
def test_pickle_keeps_the_state_and_the_types(packed):
    episode = SingleAgentEpisode("e")
    episode.add_env_reset(np.zeros(2))
    episode.add_env_step(np.ones(2), {"a": 1, "b": [1]}, 1, extra_model_outputs={"v": np.float32(1)})
    episode.add_env_step(np.ones(2), {"a": 2, "b": [2, 3]}, 0.5, extra_model_outputs={"v": np.float32(2)})
    if packed:
        episode.to_numpy()
    again = pickle.loads(pickle.dumps(episode[0:2]))
    assert again == episode and again.is_numpy == packed
    if not packed:
        assert [type(reward) for reward in again.get_rewards()] == [int, float]
        assert type(again.get_extra_model_outputs("v", 0)) is np.float32
