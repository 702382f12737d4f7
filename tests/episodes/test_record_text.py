"""The line that an episode becomes at once is that of its record, byte for byte."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.episodes.json_text import compact_json
from reward_kit.episodes.record import episode_to_record
from reward_kit.episodes.record_text import episode_to_text
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.models import FunctionCall, Message, ToolCall
from tests.agent.worlds import WORLD, call, collected
from tests.episodes.test_json_text import TEXTS, VALUES

MORE = st.sampled_from([{}, {}, {"vendor": [1]}, {"__type__": "message"}])
FUNCTIONS = st.builds(lambda name, text, more: FunctionCall(name=name, arguments=text, **more), TEXTS, TEXTS, MORE)
CALLS = st.builds(lambda name, function, more: ToolCall(id=name, function=function, **more), TEXTS, FUNCTIONS, MORE)
CONTENTS = st.none() | TEXTS | st.lists(st.dictionaries(TEXTS, VALUES, max_size=2), max_size=2)
MESSAGES = st.builds(
    lambda fields, more: Message(**{**more, **fields}),
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]), "content": CONTENTS},
        optional={
            "name": TEXTS,
            "tool_call_id": TEXTS,
            "tool_calls": st.lists(CALLS, max_size=2),
            "function_call": FUNCTIONS,
            "reasoning_content": TEXTS,
        },
    ),
    MORE,
)
FACTS = st.sampled_from(["sample_id", "policy", "failure", "seeds", "usage", "sample", "timing", "user_usage", "more"])
STATES = st.fixed_dictionaries({}, optional={"state_key": TEXTS | st.tuples(st.integers(0, 3))})
INFOS = st.none() | st.builds(dict.__or__, st.dictionaries(TEXTS, VALUES, max_size=3), STATES)


@st.composite
def episodes(draw: st.DrawFn) -> SingleAgentEpisode:
    episode = SingleAgentEpisode("r-1")
    episode.custom_data = draw(st.dictionaries(FACTS, VALUES, max_size=4))
    for step in range(draw(st.integers(0, 3))):
        episode.add_messages(draw(st.lists(MESSAGES, max_size=2)))
        texts = [message.content for message in episode.messages if isinstance(message.content, str)]
        shown = draw(VALUES | st.sampled_from(["", *texts]))
        if step == 0:
            episode.add_env_reset(shown, draw(INFOS))
            continue
        if draw(st.booleans()):
            episode.add_assistant_message(draw(MESSAGES))
        reward = draw(st.none() | st.integers(-3, 3) | st.floats(-1e9, 1e9))
        outputs = draw(st.dictionaries(TEXTS, VALUES, max_size=2))
        episode.add_env_step(shown, draw(VALUES), reward, draw(INFOS), extra_model_outputs=outputs)
    episode.is_terminated = draw(st.booleans())
    return episode


def expected(episode: SingleAgentEpisode, **given: Any) -> str:
    return compact_json(episode_to_record(episode, **given))


@given(episodes())
def test_every_episode_has_the_line_of_its_record(episode: SingleAgentEpisode) -> None:
    assert episode_to_text(episode) == expected(episode)


async def test_so_has_one_of_a_worker_with_its_state_elsewhere() -> None:
    episode = await collected([call(), call("cut"), {"type": "terminate"}], resource_type=WORLD)
    kept = {"kind": "json", "sha256": "0" * 64}
    assert episode_to_text(episode, final_state=kept) == expected(episode, final_state=kept)
    assert episode_to_text(episode) == expected(episode)


def test_so_has_a_chunk_with_a_lookback_that_is_stored_compactly() -> None:
    episode = SingleAgentEpisode("r-1")
    episode.add_env_reset(np.zeros(2, np.float32))
    for step in range(5):
        episode.add_env_step(np.ones(2, np.float32), step, step / 2, extra_model_outputs={"logp": -0.5})
    chunk = episode.slice(slice(2, 5), len_lookback_buffer=1)
    assert episode_to_text(chunk) == expected(chunk)
    assert episode_to_text(chunk.to_numpy()) == expected(chunk)


def test_tokens_are_those_of_the_record() -> None:
    episode = SingleAgentEpisode("r-1")
    episode.tokens.add_turn(0, [1, 2], [3, 4], [-0.5, math.nan])
    assert episode.tokens and episode_to_text(episode) == expected(episode)


def test_rewards_that_add_up_to_no_number_are_refused_as_no_json_holds_them() -> None:
    episode = SingleAgentEpisode("r-1")
    episode.add_env_reset("")
    for _ in range(2):
        episode.add_env_step("", 0, 1.7e308)
    with pytest.raises(ValueError, match="not JSON compliant"):
        episode_to_text(episode)
