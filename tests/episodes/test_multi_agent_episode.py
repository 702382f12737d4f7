"""Test `MultiAgentEpisode`: RLlib's names and meanings, hanging steps, and chunks."""

import json
import pickle
import random
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit.episodes.multi_agent_episode import MultiAgentEpisode
from reward_kit.errors import EpisodeError
from tests.episodes.multi_agent_programs import Stage, built
from tests.profiles import examples

OBSERVATIONS = [{"a": 0, "b": 10}, {"b": 11}, {"b": 12}, {"a": 1, "b": 13}, {"a": 2}]
RLLIB = Path(__file__).parents[2] / ".peers/rllib/bin/python"
SEEDS = st.integers(0, 10_000)


def chunk(**options):
    """Return a chunk: a sees steps 0, 3, 4, and b all but the last, whose action hangs."""
    actions = [{agent: seen * 2 for agent, seen in step.items()} for step in OBSERVATIONS[:-1]]
    given_ = {
        "observations": OBSERVATIONS,
        "infos": [{agent: {"seen": seen} for agent, seen in step.items()} for step in OBSERVATIONS],
        "actions": actions,
        "rewards": [{agent: seen / 4 for agent, seen in step.items()} for step in actions],
        "extra_model_outputs": [{agent: {"v": seen} for agent, seen in step.items()} for step in actions],
        "len_lookback_buffer": 0,
    }
    return MultiAgentEpisode("e", **{**given_, **options})


def begun(**observations):
    episode = MultiAgentEpisode("e")
    episode.add_env_reset(observations=observations or {"a": 0, "b": 0})
    return episode


class TestReading:
    def test_getters_index_by_environment_steps(self):
        episode = chunk()
        assert (len(episode), episode.env_t, episode.agent_steps()) == (4, 4, 5)
        assert episode.get_observations() == {"a": [0, 1, 2], "b": [10, 11, 12, 13]}
        assert episode.get_observations(1) == {"b": 11}
        assert episode.get_observations(-1) == {"a": 2}
        assert episode.get_observations([3, 0], agent_ids="a") == {"a": [1, 0]}
        assert episode.get_actions(-1) == {"a": 2, "b": 26}
        assert episode.get_infos(slice(0, 2)) == {"a": [{"seen": 0}], "b": [{"seen": 10}, {"seen": 11}]}
        assert episode.get_extra_model_outputs("v", 3) == {"a": 2, "b": 26}
        assert episode.get_extra_model_outputs(None, 3) == {"a": {"v": 2}, "b": {"v": 26}}

    def test_fill_pads_missing_values(self):
        episode = chunk()
        assert episode.get_observations(slice(3, 7), fill=-1) == {"a": [1, 2, -1, -1], "b": [13, -1, -1, -1]}
        assert episode.get_actions(1, fill=-1) == {"a": -1, "b": 22}
        assert episode.get_rewards(9, fill=0.0) == {"a": 0.0, "b": 0.0}
        with pytest.raises(IndexError, match="index 9 is out of range"):
            episode.get_rewards(9)

    def test_return_list_gives_a_list_of_dicts(self):
        assert chunk().get_observations(return_list=True) == OBSERVATIONS
        assert chunk().get_observations(slice(1, 3), return_list=True, fill=-1) == [
            {"a": -1, "b": 11},
            {"a": -1, "b": 12},
        ]
        with pytest.raises(EpisodeError, match="cannot be combined with env_steps=False; remove one of them"):
            chunk().get_observations(return_list=True, env_steps=False)

    def test_env_steps_false_indexes_by_agent_steps(self):
        episode = chunk()
        assert episode.get_observations(1, env_steps=False) == {"a": 1, "b": 11}
        assert episode.get_actions(-1, env_steps=False) == {"a": 2, "b": 26}
        assert episode.get_actions(slice(-2, None), env_steps=False) == {"a": [0, 2], "b": [24, 26]}

    def test_lookback_is_before_index_0(self):
        episode = chunk(len_lookback_buffer=3)
        assert (len(episode), episode.env_t) == (1, 1)
        assert episode.get_observations() == {"a": [1, 2], "b": [13]}
        assert episode.get_observations(-1, neg_index_as_lookback=True) == {"b": 12}
        assert episode.get_observations(slice(-3, 1), neg_index_as_lookback=True) == {
            "a": [0, 1],
            "b": [10, 11, 12, 13],
        }
        assert episode.env_t_to_agent_t["a"].data == [-1, "S", "S", 0, 1]

    def test_unknown_output_is_rejected_and_absent_agents_left_out(self):
        with pytest.raises(KeyError, match="no extra model output 'w'"):
            chunk().get_extra_model_outputs("w")
        agents = {"alice": 0, "bob": 1}
        episode = begun(**agents)
        assert episode.get_observations(0, agent_ids=["bob", "not yet here"]) == {"bob": 1}
        episode.add_env_step({"alice": 1}, {"alice": 0}, {"alice": 0.0, "carol": 1.0})
        assert episode.get_observations(-1, agent_ids=["alice", "bob", "carol"]) == {"alice": 1}
        assert MultiAgentEpisode(observation_space={"dave": None}).get_observations(0, "dave", fill=0) == {}

    def test_one_hot_discrete_uses_the_space_of_the_agent(self):
        space = {"a": SimpleNamespace(n=3, shape=(), dtype=np.int64, start=0)}
        episode = MultiAgentEpisode(action_space=space)
        episode.add_env_reset(observations={"a": 0})
        episode.add_env_step({"a": 1}, {"a": 2}, {"a": 0.0})
        episode.add_env_step({}, {"a": 1}, {})
        one, hanging = episode.get_actions(one_hot_discrete=True)["a"]
        assert (one.tolist(), hanging.tolist()) == ([0, 0, 1], [0, 1, 0])

    def test_timeline_marks_the_steps_of_each_agent(self):
        assert chunk(len_lookback_buffer=1).timeline().splitlines() == [
            "env_t  -1   0   1   2   3",
            "a       x   .   .   x   x",
            "b       x   x   x   x   …",
        ]


class TestHanging:
    def test_action_hangs_until_the_next_observation_of_its_agent(self):
        episode = begun()
        episode.add_env_step({"b": 1}, {"a": 5, "b": 6}, {"a": 1.0, "b": 2.0}, extra_model_outputs={"a": {"v": 7}})
        episode.add_env_step({"b": 2}, {"b": 8}, {"a": 0.5, "b": 0.0})
        assert episode.hanging_actions == {"a": 5}
        assert episode.hanging_rewards == {"a": 1.5}
        assert episode.hanging_extra_model_outputs == {"a": {"v": 7}}
        assert (episode.get_return(), episode.get_return(include_hanging_rewards=True)) == (2.0, 3.5)
        assert (episode.get_agents_that_stepped(), episode.get_agents_to_act()) == ({"b"}, {"b"})
        episode.add_env_step({"a": 9}, {}, {"a": 0.25})
        single = episode.agent_episodes["a"]
        assert (single.get_actions(), single.get_rewards(), single.get_observations()) == ([5], [1.75], [0, 9])
        assert single.get_extra_model_outputs("v") == [7]
        assert episode.hanging_actions == {} and episode.hanging_rewards == {}

    def test_rewards_before_the_first_observation_belong_to_no_step(self):
        episode = begun(a=0)
        episode.add_env_step({"a": 1}, {"a": 0}, {"a": 0.0, "b": 3.0})
        episode.add_env_step({"b": 1}, {"a": 0}, {"b": 1.0})
        assert episode.hanging_rewards_begin == {"b": 4.0}
        assert episode.env_t_to_agent_t["b"].data == ["S", "S", 0]
        assert episode.get_return(include_hanging_rewards=True) == 4.0

    def test_rewards_before_the_first_observation_go_with_the_first_chunk(self):
        episode = begun(a=0)
        episode.add_env_step({"a": 1}, {"a": 0}, {"a": 0.0, "b": 3.0})
        episode.add_env_step({"b": 1}, {"a": 0}, {"b": 1.0})
        parts = [episode[:0], episode[:1], episode[1:]]
        assert [part.hanging_rewards_begin for part in parts] == [{}, {"b": 4.0}, {}]
        for part in parts[1:]:
            parts[0].concat_episode(part)
        assert parts[0].hanging_rewards_begin == {"b": 4.0}
        assert parts[0].get_return(include_hanging_rewards=True) == episode.get_return(include_hanging_rewards=True)

    def test_missing_reward_is_unknown_and_not_zero(self):
        episode = begun(a=0)
        episode.add_env_step({}, {"a": 5}, {})
        episode.add_env_step({"a": 1}, {}, {})
        assert episode.agent_episodes["a"].environment_rewards() == [None]

    def test_agent_without_a_last_observation_repeats_the_one_before(self):
        episode = begun()
        episode.add_env_step({"b": 1}, {"a": 5, "b": 6}, {"a": 1.0, "b": 0.0}, terminateds={"a": True})
        assert episode.agent_episodes["a"].get_observations() == [0, 0]
        assert episode.get_terminateds() == {"a": True, "b": False, "__all__": False}
        assert episode.env_t_to_agent_t["a"].data == [0, 1]  # In RLlib the times get out of step.

    def test_waiting_agent_ends_with_the_episode(self):
        episode = begun()
        episode.add_env_step({"a": 1, "b": 1}, {"a": 5}, {"a": 1.0}, terminateds={"__all__": True})
        assert episode.get_terminateds() == {"a": True, "b": True, "__all__": True}


class TestValidation:
    @pytest.mark.parametrize(
        ("step", "problem"),
        [
            ({"observations": {"a": 1}, "actions": {"a": 1}, "rewards": {}}, "agent 'a' acted and got .* no reward"),
            ({"observations": {"a": 1}, "actions": {}, "rewards": {}}, "'a' got an observation but has not acted"),
            ({"observations": {}, "actions": {"c": 1}, "rewards": {}}, "agent 'c' acts before its first observation"),
            (
                {"observations": {}, "actions": {"a": 1}, "rewards": {}, "truncateds": {"a": True}},
                "'a' acted and was truncated without a last observation",
            ),
        ],
    )
    def test_rejected_step_changes_nothing(self, step, problem):
        episode, untouched = begun(), begun()
        with pytest.raises(EpisodeError, match=problem):
            episode.add_env_step(
                **{
                    **step,
                    "observations": {**step["observations"], "b": 1},
                    "actions": {**step["actions"], "b": 1},
                    "rewards": {"b": 1.0},
                }
            )
        assert episode.get_state()["env_t"] == 0 and episode.get_observations() == untouched.get_observations()

    def test_repeated_action_step_after_the_end_and_second_reset_are_rejected(self):
        episode = begun()
        episode.add_env_step({"b": 1}, {"a": 1, "b": 1}, {"b": 0.0}, terminateds={"b": True})
        with pytest.raises(EpisodeError, match="agent 'a' acts again before it has observed"):
            episode.add_env_step({}, {"a": 1}, {})
        with pytest.raises(EpisodeError, match="agent 'b' is done"):
            episode.add_env_step({"b": 2}, {}, {})
        with pytest.raises(
            EpisodeError,
            match="add_env_reset must be called once, before any step; the episode already has 1 steps, not over",
        ):
            episode.add_env_reset(observations={"a": 0})
        episode.add_env_step({"a": 1}, {}, {}, terminateds={"__all__": True})
        with pytest.raises(EpisodeError, match="is over \\(2 steps, terminated\\); no further step can be added"):
            episode.add_env_step({"a": 1}, {"a": 1}, {"a": 0.0})
        with pytest.raises(EpisodeError, match=r"is over .*and cannot be cut"):
            episode.cut()

    @pytest.mark.parametrize(
        ("lists", "problem"),
        [
            ({"actions": []}, "5 observations require 5 infos and 4 actions .* got actions 0"),
            ({"infos": [{}]}, "got infos 1"),
            (
                {"actions": [{}, {"b": 0}, {"b": 0}, {}]},
                "agent 'b' has observations at environment steps 0 and 1, but no action between",
            ),
            ({"actions": [{"a": 0, "b": 0}, {"a": 1, "b": 0}, {"b": 0}, {}]}, "agent 'a' acts twice"),
            ({"actions": [{"c": 0}, {}, {}, {}]}, "agent 'c' acts at step 0, before its first observation"),
            ({"len_lookback_buffer": -1}, "the lookback must not be negative"),
        ],
    )
    def test_mismatched_lists_are_rejected(self, lists, problem):
        with pytest.raises(EpisodeError, match=problem):
            chunk(**lists)

    def test_chunk_with_another_first_observation_changes_nothing(self):
        first, other = chunk()[:3], chunk(observations=[*OBSERVATIONS[:3], {"a": 1, "b": 99}, {"a": 2}])[3:]
        before = pickle.dumps(first)
        with pytest.raises(
            EpisodeError, match="agent 'b': the last observation in the first chunk differs from the first"
        ):
            first.concat_episode(other)
        assert pickle.loads(before) == first

    def test_non_adjacent_chunks_are_rejected(self):
        whole = chunk()
        for first, second in ((whole[:2], whole[3:]), (whole[:2], MultiAgentEpisode("f"))):
            before = pickle.dumps(first)
            with pytest.raises(EpisodeError, match="the next chunk must have the same id and begin there"):
                first.concat_episode(second)
            assert pickle.loads(before) == first
        with pytest.raises(EpisodeError, match="the step of an episode slice must be 1, got 2"):
            whole[::2]
        with pytest.raises(TypeError, match="for one step, call get_observations"):
            whole[1]


class TestRllibDefects:
    def test_cut_without_lookback_keeps_hanging_actions(self):
        episode = chunk()
        successor = episode.cut()
        assert (len(successor), successor.hanging_actions, successor.hanging_rewards) == (0, {"b": 26}, {"b": 6.5})
        successor.add_env_step({"b": 14}, {"a": 3}, {"b": 1.0})
        assert successor.agent_episodes["b"].get_rewards() == [7.5]
        episode.concat_episode(successor)
        assert episode.agent_episodes["b"].get_actions() == [20, 22, 24, 26]
        assert episode.hanging_actions == {"a": 3}

    def test_slice_keeps_its_infos(self):
        assert chunk()[1:3].get_infos() == {"a": [{"seen": 1}], "b": [{"seen": 11}, {"seen": 12}, {"seen": 13}]}

    def test_get_truncateds_reports_truncation(self):
        episode = begun(a=0)
        episode.add_env_step({"a": 1}, {"a": 0}, {"a": 0.0}, truncateds={"__all__": True})
        assert episode.get_truncateds() == {"a": True, "__all__": True}
        assert episode.get_terminateds() == {"a": False, "__all__": False}

    def test_truncated_agents_are_not_terminated(self):
        episode = begun(a=0)
        episode.add_env_step({"a": 1}, {"a": 0}, {"a": 0.0}, truncateds={"a": True})
        assert (episode.is_terminated, episode.is_truncated) == (False, True)
        assert not episode.agent_episodes["a"].is_terminated

    def test_empty_episode_reports_is_numpy(self):
        assert not MultiAgentEpisode().is_numpy
        assert MultiAgentEpisode().to_numpy().is_numpy

    def test_agents_without_steps_are_numpy_after_to_numpy(self):
        assert chunk().cut().to_numpy().is_numpy
        assert chunk().to_numpy()[1:3].is_numpy

    def test_chunk_returns_all_of_its_actions_by_environment_steps(self):
        # RLlib compares a time of the whole episode with the length of the chunk.
        assert chunk()[2:].get_actions(return_list=True) == [{"b": 24}, {"a": 2, "b": 26}]

    def test_agent_that_enters_in_a_later_chunk_has_the_time_of_the_chunk(self):
        successor = chunk().cut()
        successor.add_env_step({"c": 5, "a": 3}, {"a": 0}, {"a": 0.0})
        assert successor.get_observations(-1) == {"a": 3, "c": 5}

    def test_agent_may_enter_when_the_last_agent_ends(self):
        episode = begun(a=0)
        episode.add_env_step({"a": 1, "b": 0}, {"a": 0}, {"a": 0.0}, terminateds={"a": True})
        assert not episode.is_done and episode.get_agents_to_act() == {"b"}


def oracle(stage_seed, steps, *, ends_early):
    """Return each agent's data by a loop over dicts: {agent: [[seen at, info, action, reward, output], …]}."""
    stage = Stage(random.Random(stage_seed), ends_early=ends_early)
    observations, infos = stage.reset()
    rows = {agent: [[0, seen, infos[agent], None, None, None]] for agent, seen in observations.items()}
    for t in range(1, steps + 1):
        step = stage.step()
        for agent, reward in step["rewards"].items():
            if agent in rows:
                rows[agent][-1][4] = (rows[agent][-1][4] or 0.0) + reward
        for agent, action in step["actions"].items():
            rows[agent][-1][3], rows[agent][-1][5] = action, step["extra_model_outputs"][agent]["value"]
        for agent, seen in step["observations"].items():
            rows.setdefault(agent, []).append([t, seen, step["infos"].get(agent, {}), None, None, None])
    return rows


@settings(max_examples=examples(60), deadline=None)
@given(SEEDS, st.integers(1, 12), st.booleans(), st.booleans(), st.data())
def test_every_chunk_agrees_with_a_loop_over_dicts(seed, steps, ends_early, numpy, data):
    episode, rows = (
        built(MultiAgentEpisode, seed, steps, ends_early=ends_early),
        oracle(seed, steps, ends_early=ends_early),
    )
    low, high = sorted((data.draw(st.integers(0, steps)), data.draw(st.integers(0, steps))))
    part = episode.to_numpy()[low:high] if numpy else episode[low:high]
    for column, getter, end in ((1, part.get_observations, high + 1), (3, part.get_actions, high)):
        expected = [
            {a: row[column] for a, seen in rows.items() for row in seen if row[0] == t} for t in range(low, end)
        ]
        listed = [{a: value for a, value in step.items() if value is not None} for step in expected]
        over = {a for a in rows if a not in part.agent_ids}
        assert getter(return_list=True) == [{a: v for a, v in step.items() if a not in over} for step in listed]
        seen_nothing = {a for a, seen in rows.items() if not any(low <= row[0] <= high for row in seen)}
        over_before = {a for a, single in episode.agent_episodes.items() if single.is_done and rows[a][-1][0] <= low}
        assert over <= seen_nothing | over_before
    for t in range(low, high):
        got = part.get_rewards(t - low)
        assert got == {
            a: row[4] or 0.0 for a, seen in rows.items() for row in seen if row[0] == t and row[3] is not None
        }


@settings(max_examples=examples(60), deadline=None)
@given(SEEDS, st.integers(1, 12), st.booleans(), st.booleans(), st.booleans(), st.data())
def test_slices_concatenate_to_the_episode(seed, steps, ends, ends_early, numpy, data):
    episode = built(MultiAgentEpisode, seed, steps, ends=ends, ends_early=ends_early)
    cuts = sorted(data.draw(st.lists(st.integers(0, steps - 1), max_size=3)))
    parts = [episode[low:high] for low, high in zip([0, *cuts], [*cuts, steps], strict=True)]
    for part in parts[1:]:
        part.validate()
        parts[0].concat_episode(part.to_numpy() if numpy else part)
    whole = parts[0]
    assert {a: t.env_ts for a, t in whole._tracks.items()} == {a: t.env_ts for a, t in episode._tracks.items()}
    assert whole.agent_episodes == episode.agent_episodes
    assert (whole.hanging_actions, whole.hanging_rewards) == (episode.hanging_actions, episode.hanging_rewards)
    assert (whole.is_terminated, len(whole)) == (episode.is_terminated, len(episode))
    assert whole.hanging_rewards_begin == episode.hanging_rewards_begin


@settings(max_examples=examples(60), deadline=None)
@given(SEEDS, st.integers(2, 12), st.booleans())
def test_cut_loses_nothing_and_concatenation_keeps_its_argument(seed, steps, ends_early):
    first, second = built(MultiAgentEpisode, seed, steps, chunked=True, ends_early=ends_early, enters_late=True)
    whole = built(MultiAgentEpisode, seed, steps, ends_early=ends_early)
    before = json.dumps(second.get_state()["agents"])
    first.concat_episode(second)
    assert json.dumps(second.get_state()["agents"]) == before
    assert {a: e.get_state()["actions"] for a, e in first.agent_episodes.items()} == {
        a: e.get_state()["actions"] for a, e in whole.agent_episodes.items()
    }
    assert first.get_observations(return_list=True) == whole.get_observations(return_list=True)
    assert first.get_infos(return_list=True) == whole.get_infos(return_list=True)
    assert first.get_rewards(return_list=True) == whole.get_rewards(return_list=True)
    assert first.hanging_actions == whole.hanging_actions
    assert first.hanging_rewards_begin == whole.hanging_rewards_begin


@settings(max_examples=examples(40), deadline=None)
@given(SEEDS, st.integers(0, 9), st.booleans())
def test_state_survives_json_and_pickle(seed, steps, numpy):
    episode = built(MultiAgentEpisode, seed, steps)
    episode.custom_data["note"] = {"n": 1}
    part = episode.to_numpy()[: steps // 2] if numpy else episode[: steps // 2]
    for each in (episode, part):
        assert MultiAgentEpisode.from_state(json.loads(json.dumps(each.get_state()))) == each
        assert pickle.loads(pickle.dumps(each)) == each


def test_pickling_stops_the_clock():
    episode = begun(a=0)
    episode.add_env_step({"a": 1}, {"a": 0}, {"a": 0.0})
    episode._start_time += 1e6  # of another machine
    episode._last_step_time += 1e6
    again = pickle.loads(pickle.dumps(episode))
    again.add_env_step({"a": 2}, {"a": 0}, {"a": 0.0})
    assert again.get_duration_s() == episode.get_duration_s() > 0.0


def test_state_of_another_version_or_without_a_field_is_rejected():
    state = chunk().get_state()
    with pytest.raises(EpisodeError, match="version 9, but this release reads only version 1"):
        MultiAgentEpisode.from_state({**state, "schema_version": 9})
    del state["modules"]
    with pytest.raises(EpisodeError, match="the episode state is missing modules"):
        MultiAgentEpisode.from_state(state)


def test_agent_ids_may_be_any_hashable():
    episode = MultiAgentEpisode()
    episode.add_env_reset(observations={1: "x", ("team", 2): "y"})
    assert episode.get_observations(0, agent_ids=("team", 2)) == {("team", 2): "y"}
    assert MultiAgentEpisode.from_state(json.loads(json.dumps(episode.get_state()))) == episode


def test_module_mapping_is_called_once_per_agent():
    asked = []
    episode = MultiAgentEpisode(agent_to_module_mapping_fn=lambda agent, episode: asked.append(agent) or f"m_{agent}")
    assert episode.module_for("a") == "m_a"
    episode.add_env_reset(observations={"a": 0, "b": 0})
    assert asked == ["a", "b"] and episode.agent_episodes["b"].module_id == "m_b"
    assert episode.agent_episodes["a"].multi_agent_episode_id == episode.id_
    assert episode.cut().module_for("b") == "m_b" and asked == ["a", "b"]
    assert MultiAgentEpisode().module_for("a") == "default_policy"


def test_setters_change_the_agent_episodes():
    episode = chunk()
    episode.set_rewards(new_data={"a": 9.0}, at_indices=0)
    episode.set_actions(new_data={"b": [7, 8]}, at_indices=slice(0, 2))
    assert episode.get_rewards(0) == {"a": 9.0, "b": 5.0}
    assert episode.get_actions(slice(0, 2), agent_ids="b") == {"b": [7, 8]}
    with pytest.raises(KeyError, match="unknown agent 'c' in episode e"):
        episode.set_observations(new_data={"c": 1}, at_indices=0)


def test_agent_that_stops_acting_counts_as_terminated():
    episode = MultiAgentEpisode(
        observations=[{"a": 0, "b": 0}, {"a": 1, "b": 1}, {"b": 2}],
        actions=[{"a": 0, "b": 0}, {"b": 1}],
        rewards=[{"a": 1.0}, {}],
        len_lookback_buffer=0,
    )
    assert episode.get_terminateds() == {"a": True, "b": False, "__all__": False}
    assert episode.agent_episodes["b"].environment_rewards() == [None, None]


@pytest.mark.campaign
@pytest.mark.skipif(not RLLIB.exists(), reason="RLlib is not installed; benchmarks/episodes.py installs it")
def test_programs_give_the_results_of_the_rllib_class():
    script = Path(__file__).with_name("multi_agent_programs.py")
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [RLLIB, "-W", "ignore", script, "300"], env={"PYTHONPATH": root}, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "300 seeds, 0 differences {}", done.stdout + done.stderr
