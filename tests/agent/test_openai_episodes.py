"""Test whole tool episodes against a server with injected faults, in every API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reward_kit import RLRolloutWorker, TaskDefinitionModel, ToolRegistry
from reward_kit.agent.policies.openai_policy import OpenAIAgentPolicy
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.providers.chat import DIALECTS
from tests.chat_server import (
    Behavior,
    ChatServer,
    answer,
    cut_body,
    cut_stream,
    dropped,
    html,
    status,
    tool_calls,
)

registry = ToolRegistry("adder")


@registry.tool
async def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


TASK = TaskDefinitionModel(name="sum", initial_user_prompt="Add.", on_text="end", max_episode_steps=6)
CALL = tool_calls([("add", {"x": 1, "y": 2})])
DONE = answer("3")


async def collect(script: list[Behavior], **options: Any) -> tuple[SingleAgentEpisode, ChatServer]:
    async with ChatServer(script) as server:
        policy = OpenAIAgentPolicy("m", base_url=server.base_url, api_key="x", retry_base_s=0.001, **options)
        try:
            return await RLRolloutWorker(TASK, policy, tools=registry).collect_episode(seed=3), server
        finally:
            await policy.close()


def tool_texts(episode: SingleAgentEpisode) -> list[str]:
    return [message.text for message in episode.messages if message.role == "tool"]


FAULTS = {
    "429 with Retry-After": ([status(429, {"Retry-After": "0"})], {}),
    "500": ([status(500)], {}),
    "a dropped connection": ([dropped()], {}),
    "a body cut short": ([cut_body()], {}),
    "a stream cut short": ([cut_stream(), cut_stream(1), cut_stream(connection=True)], {"stream": True}),
    "HTML with status 200": ([html()], {}),
    "529": ([status(529)], {}),
    "all of them": ([status(503), dropped(), html(), status(429, {"Retry-After": "0.01"})], {}),
}


@pytest.mark.parametrize("api", DIALECTS)
@pytest.mark.parametrize(("faults", "options"), FAULTS.values(), ids=FAULTS)
async def test_faults_between_turns_do_not_change_the_episode(
    faults: list[Behavior], options: dict[str, Any], api: str
) -> None:
    calm, _ = await collect([CALL, CALL, DONE], api=api, **options)
    rough, server = await collect([*faults, CALL, *faults, CALL, *faults, DONE], api=api, **options)
    assert len(server.requests) == 3 + 3 * len(faults)
    for episode in (calm, rough):
        del episode.custom_data["timing"]
    assert rough == calm
    assert rough.custom_data["stop_reason"] == "answered"
    assert tool_texts(rough) == ["3", "3"]


async def test_turn_sends_the_whole_conversation_and_the_tools() -> None:
    episode, server = await collect([CALL, DONE])
    first, second = server.bodies
    assert [message["role"] for message in first["messages"]] == ["user"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]
    assert second["messages"][1]["tool_calls"][0]["id"] == second["messages"][2]["tool_call_id"]
    assert first["tools"][0]["function"]["name"] == "add"
    assert first["seed"] == second["seed"] == episode.custom_data["seeds"]["policy"] % 2**31
    assert episode.custom_data["usage"] == {"prompt_tokens": 22, "completion_tokens": 14}


async def test_malformed_tool_json_is_reported_to_the_model_and_counted() -> None:
    episode, _ = await collect([tool_calls([("add", '{"x": 1, "y"')]), CALL, DONE])
    assert "not a JSON object" in tool_texts(episode)[0] and tool_texts(episode)[1] == "3"
    assert [info["is_action_valid"] for info in episode.get_infos(slice(1, None))] == [False, True, True]
    assert episode.messages[1].tool_calls is not None
    assert episode.messages[1].tool_calls[0].function.arguments == '{"x": 1, "y"'


async def test_unknown_tool_and_invalid_arguments_are_answered() -> None:
    episode, _ = await collect([tool_calls([("ad", {"x": 1})]), tool_calls([("add", {"x": "one"})]), DONE])
    unknown, wrong = tool_texts(episode)
    assert "unknown tool 'ad'; did you mean 'add'?" in unknown
    assert "x:" in wrong and "'one'" in wrong and "y: missing" in wrong


async def test_ten_parallel_calls_are_one_step_with_ten_answers() -> None:
    calls = [("add", {"x": number, "y": 1}) for number in range(10)]
    for options in ({}, {"stream": True}):
        episode, _ = await collect([tool_calls(calls), DONE], **options)
        assert len(episode) == 2
        assert tool_texts(episode) == [str(number + 1) for number in range(10)]
        asked = [call.id for call in episode.messages[1].tool_calls or []]
        assert [message.tool_call_id for message in episode.messages[2:12]] == asked and len(set(asked)) == 10


@pytest.mark.parametrize("api", DIALECTS)
@pytest.mark.parametrize(
    ("script", "failure_class", "words"),
    [
        ([status(500)] * 3, "provider_error", ["500"]),
        ([status(401, text="bad key")], "provider_error", ["401", "bad key"]),
        ([html()] * 3, "provider_error", ["HTML"]),
    ],
)
async def test_failure_is_recorded_after_the_last_retry(
    script: list[Behavior], failure_class: str, words: list[str], api: str
) -> None:
    episode, server = await collect([CALL, *script], max_attempts=3, api=api)
    assert len(server.requests) == 1 + len(script)
    failure = episode.custom_data["failure"]
    assert failure["class"] == failure_class
    assert all(word in failure["message"] for word in words)
    assert (episode.custom_data["stop_reason"], episode.is_truncated, len(episode)) == ("error", True, 1)


async def test_token_ids_and_logprobs_of_the_server_become_token_rows() -> None:
    def reply(prompt: list[int], sampled: list[int], **rest: Any) -> Behavior:
        choice = {
            "token_ids": sampled,
            "logprobs": {"content": [{"token": f"t{t}", "logprob": -0.5, "top_logprobs": []} for t in sampled]},
        }
        return tool_calls([("add", {"x": 1, "y": 2})], choice=choice, top={"prompt_token_ids": prompt}, **rest)

    first = reply([1, 2, 3], [10, 11])
    second = reply([1, 2, 3, 10, 11, 4, 5], [12])
    episode, _ = await collect([first, second, DONE], logprobs=True, extra_body={"return_token_ids": True})
    (row,) = episode.tokens.rows()
    assert row.prompt_ids.tolist() == [1, 2, 3]
    assert row.completion_ids.tolist() == [10, 11, 4, 5, 12]
    assert row.action_mask.tolist() == [1, 1, 0, 0, 1]
    assert row.logprobs.tolist() == [-0.5, -0.5, 0.0, 0.0, -0.5]


async def test_episode_survives_json() -> None:
    from reward_kit.episodes.record import episode_from_record, episode_to_record

    episode, _ = await collect([tool_calls([("add", "{")], text="thinking \ud800"), CALL, DONE])
    assert episode_from_record(json.loads(json.dumps(episode_to_record(episode)))) == episode
