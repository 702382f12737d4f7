"""Test `StepData` and `History`, the serializable views of an episode."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.agent.models import History, StepData, episode_steps
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.models import Message
from tests.agent.resources import COUNTER, call, collected

MESSAGES = [Message(role="user", content=str(n)) for n in range(6)]


@given(
    st.integers(0, 6),
    st.none() | st.integers(-8, 8),
    st.none() | st.integers(-8, 8),
    st.sampled_from([None, 1, -1, 2, -3]),
)
def test_history_equals_the_list_of_its_messages(stop, first, last, step):
    history, expected = History(MESSAGES, stop), MESSAGES[:stop]
    assert len(history) == stop
    assert list(history) == history[:] == expected
    assert history == expected
    assert history[first:last:step] == expected[first:last:step]
    for index in range(-8, 8):
        if -stop <= index < stop:
            assert history[index] is expected[index]
        else:
            with pytest.raises(IndexError):
                history[index]


def test_history_excludes_later_messages():
    conversation = MESSAGES[:2]
    history = History(conversation, 2)
    conversation.append(MESSAGES[2])
    assert list(history) == MESSAGES[:2]
    assert history != conversation
    assert pickle.loads(pickle.dumps(history)) == history


def test_step_has_three_required_fields_and_keeps_unknown_ones():
    step = StepData(system_step_index=0, observation_data="o", action_taken={"type": "text"}, mine=1)
    assert (step.base_reward, step.advantage, step.return_to_go, step.policy_logprobs) == (None, None, None, None)
    assert (step.is_done, step.step_info, step.resulting_messages_history) == (False, {}, [])
    assert step.mine == 1


async def test_step_serializes_with_its_history_and_tokens():
    episode = await collected([call(), {"type": "terminate"}], resource_type=COUNTER)
    step = episode_steps(episode)[0].model_copy(
        update={"policy_logprobs": {"token_ids": np.array([1, 2]), "usage": {"prompt_tokens": 1}}}
    )
    read = json.loads(step.model_dump_json())
    assert [message["role"] for message in read["resulting_messages_history"]] == ["user", "assistant", "tool"]
    assert read["policy_logprobs"] == {"token_ids": [1, 2], "usage": {"prompt_tokens": 1}}
    again = StepData.model_validate(read)
    assert again.resulting_messages_history == list(step.resulting_messages_history)


def test_episode_without_a_conversation_has_steps():
    episode = SingleAgentEpisode("e")
    episode.add_env_reset([0.0], {"state_key": "a"})
    episode.add_env_step([1.0], {"type": "move"}, 2.0, {"state_key": "b"}, terminated=True)
    (step,) = episode_steps(episode)
    assert (step.observation_data, step.is_done, step.resulting_messages_history) == ([0.0], True, [])
    assert step.step_info.items() >= {"environment_reward": 2.0, "assistant_turn_index": 0, "state_key": "a"}.items()
    assert episode_steps(episode.to_numpy())[0].step_info["environment_reward"] == 2.0
