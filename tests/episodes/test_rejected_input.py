"""Test that both episode classes reject invalid input and keep nothing of a rejected step."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from reward_kit.episodes.multi_agent_episode import MultiAgentEpisode
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import EpisodeError
from reward_kit.models import Message

NO_NUMBERS: list[Any] = ["x", "1.0", [1.0], {"value": 1.0}, 1j, np.complex128(1j), np.array([1.0]), b"1"]
NUMBERS: list[Any] = [1, True, np.float32(1), np.int8(1), np.bool_(True), np.array(1.0), Fraction(1)]


def single() -> SingleAgentEpisode:
    episode = SingleAgentEpisode("e")
    episode.add_env_reset("o")
    episode.add_env_step("o", "a", 1.0, extra_model_outputs={"v": 1})
    return episode


def several() -> MultiAgentEpisode:
    episode = MultiAgentEpisode("m")
    episode.add_env_reset(observations={"alice": 0, "bob": 0})
    episode.add_env_step({"alice": 1, "bob": 1}, {"alice": 0, "bob": 0}, {"alice": 1.0, "bob": 2.0})
    return episode


def refused(episode: Any, add: Callable[[Any], None], match: str) -> None:
    before = copy.deepcopy(episode)
    with pytest.raises(EpisodeError, match=match):
        add(episode)
    assert episode == before
    episode.validate()


@pytest.mark.parametrize("reward", NO_NUMBERS, ids=repr)
def test_non_numeric_reward_is_rejected(reward: Any) -> None:
    refused(single(), lambda e: e.add_env_step("o", "a", reward), "episode e, step 1: the reward must be a number, got")
    data = {"observations": {"bob": 2}, "actions": {"bob": 1}}
    match = "episode m, step 1: the reward of agent 'bob' must be a number, got"
    refused(several(), lambda e: e.add_env_step(rewards={"bob": reward}, **data), match)
    with pytest.raises(EpisodeError, match="episode e, step 1: the reward must be a number, got"):
        SingleAgentEpisode("e", observations=[0, 1, 2], actions=[0, 0], rewards=[0.5, reward])
    with pytest.raises(EpisodeError, match="step 0: the reward of agent 'a' must be a number, got"):
        MultiAgentEpisode(observations=[{"a": 0}, {"a": 1}], actions=[{"a": 0}], rewards=[{"a": reward}])


@pytest.mark.parametrize("reward", NUMBERS, ids=repr)
def test_reward_may_be_any_numeric_type(reward: Any) -> None:
    one, many = single(), several()
    one.add_env_step("o", "a", reward)
    many.add_env_step({"bob": 2}, {"bob": 1}, {"bob": reward})
    given = SingleAgentEpisode(observations=[0, 1], actions=[0], rewards=[reward], len_lookback_buffer=0)
    assert (one.get_return(), many.get_return(), given.get_return()) == (2.0, 4.0, 1.0)


def test_reset_infos_that_are_not_a_dict_are_rejected() -> None:
    # RLlib's documentation begins an episode so; its class keeps whatever it is given.
    episode = SingleAgentEpisode("e")
    with pytest.raises(EpisodeError, match="episode e, step 0: infos must be a dict, got 'info_0'"):
        episode.add_env_reset("obs_0", "info_0")  # type: ignore[arg-type]
    assert not episode.is_reset
    with pytest.raises(EpisodeError, match="step 1: infos must be a dict, got 'info_1'"):
        SingleAgentEpisode("e", observations=[0, 1], actions=[0], rewards=[0.0], infos=[{}, "info_1"])  # type: ignore[list-item]


@pytest.mark.parametrize("infos", [{"bob": "info_1"}, "info_1"])
def test_multi_agent_infos_that_are_not_dicts_are_rejected(infos: Any) -> None:
    match = "episode m, step 1: .*infos.* must be a dict.* got 'info_1'"
    refused(several(), lambda e: e.add_env_step({"bob": 2}, {"bob": 1}, {"bob": 0.0}, infos), match)
    episode = MultiAgentEpisode("m")
    with pytest.raises(EpisodeError, match=r"episode m, step 0: .*infos.* must be a dict"):
        episode.add_env_reset(observations={"bob": 0}, infos=infos)
    assert not episode.is_reset


@pytest.mark.parametrize(
    ("part", "match"),
    [
        ({"infos": "x"}, "episode e, step 1: infos must be a dict, got 'x'"),
        ({"infos": 3}, "infos must be a dict, got 3"),
        ({"extra_model_outputs": "x"}, "episode e, step 1: extra_model_outputs must be a dict, got 'x'"),
        ({"extra_model_outputs": [1]}, "extra_model_outputs must be a dict"),
    ],
)
def test_infos_and_outputs_that_are_not_a_dict_are_rejected(part: dict[str, Any], match: str) -> None:
    refused(single(), lambda episode: episode.add_env_step("o", "a", 1.0, **part), match)


def test_step_before_the_reset_is_rejected() -> None:
    with pytest.raises(EpisodeError, match="episode m: call add_env_reset before add_env_step"):
        MultiAgentEpisode("m").add_env_step({}, {}, {})
    # An environment may show nothing to anybody at first.
    episode = MultiAgentEpisode("m")
    episode.add_env_reset(observations={})
    episode.add_env_step({"alice": 0}, {}, {})
    assert episode.get_observations(-1) == {"alice": 0}


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (
            {"terminateds": {"__al__": True}},
            "terminateds contains the unknown agent '__al__'; did you mean '__all__'",
        ),
        ({"truncateds": {"bbo": True}}, "truncateds contains the unknown agent 'bbo'; did you mean 'bob'"),
    ],
)
def test_flag_of_an_unknown_agent_is_rejected(flags: dict[str, Any], match: str) -> None:
    refused(several(), lambda e: e.add_env_step({"bob": 2}, {"bob": 1}, {"bob": 0.0}, **flags), f"step 1: {match}")


def test_flags_of_agents_that_never_entered_are_accepted() -> None:
    episode = several()
    part: Any = ({"bob": 2}, {"bob": 1}, {"bob": 0.0})
    episode.add_env_step(*part, terminateds={"carol": False, "__all__": False})
    episode.add_env_step(*part, terminateds={"carol": True, "__all__": True})
    assert episode.is_terminated


def test_unknown_acting_agent_is_named_first() -> None:
    # Alice got an observation and has not acted, which is another mistake.
    match = "agent 'bbo' acts before its first observation.*did you mean 'bob'"
    refused(several(), lambda e: e.add_env_step({"alice": 2}, {"bbo": 1}, {}), match)


def state() -> dict[str, Any]:
    episode = single()
    episode.messages.append(Message(role="user", content="hi"))
    return json.loads(json.dumps(episode.get_state()))


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("t", "x", "t must be an int, got 'x'"),
        ("t_started", None, "t_started must be an int, got None"),
        ("lookback", "x", "lookback must be an int"),
        ("is_terminated", "x", "is_terminated must be a bool"),
        ("actions", "a", "actions must be a list, got 'a'"),
        ("messages", {}, "messages must be a list"),
        ("messages", [{"role": "user", "content": "hi", "name": 3}], r"messages\[0\]: name"),
        ("tokens", "x", "tokens must be a dict"),
        ("rewards", ["x"], "step 0: the reward must be a number, got 'x'"),
        ("assistant_turns", ["x"], "cannot be read: TypeError"),
    ],
)
def test_state_with_a_wrong_field_type_is_rejected(field: str, value: Any, match: str) -> None:
    with pytest.raises(EpisodeError, match=match) as caught:
        SingleAgentEpisode.from_state({**state(), field: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("field", "value"), [("env_t", "x"), ("agents", {}), ("agents", [["a", {}]])])
def test_multi_agent_state_with_a_wrong_field_type_is_rejected(field: str, value: Any) -> None:
    with pytest.raises(EpisodeError, match="episode state"):
        MultiAgentEpisode.from_state({**several().get_state(), field: value})


@pytest.mark.parametrize("kind", [SingleAgentEpisode, MultiAgentEpisode])
def test_state_that_is_not_a_dict_is_rejected(kind: Any) -> None:
    with pytest.raises(EpisodeError, match="an episode state must be a dict as returned by get_state, got 'x'"):
        kind.from_state("x")
