"""Agents of the official SDKs in all APIs, streaming or not, before models in all APIs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reward_kit.agent.models import episode_steps
from reward_kit.agent.policies.own_agent_policy import AgentTask
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.providers.chat import DIALECTS
from tests.agent.policies.own_agents import client_of, collect
from tests.agent.recording.sdk_agents import chat_agent, messages_agent, responses_agent
from tests.agent.resources import failure, reason
from tests.chat_server import Behavior, ChatServer, answer, status

AGENTS = {
    "chat": chat_agent,
    "responses": responses_agent,
    "responses by id": lambda stream: responses_agent(stream, by_id=True),
    "messages": messages_agent,
}
USAGE = {"prompt_tokens": 100, "completion_tokens": 20, "prompt_tokens_details": {"cached_tokens": 60}}


def reasoning(api: str, number: int) -> list[dict[str, Any]]:
    text = f"Step {number}: \u00fc \U0001f600."
    if api == "responses":
        summary = [{"type": "summary_text", "text": text}]
        return [
            {"id": f"rs_{number}", "type": "reasoning", "summary": summary, "encrypted_content": f"gAAA+{number}/=="}
        ]
    thinking = {"type": "thinking", "thinking": text, "signature": f"EqoB+{number}/=="}
    return [thinking, {"type": "redacted_thinking", "data": f"opaque {number}"}]


def reply(api: str, number: int, text: str | None = None, **calls: tuple[int, int]) -> Behavior:
    """Return an answer with reasoning; `calls` are ids and summands."""
    message: dict[str, Any] = {"items": reasoning(api, number)} if api != "chat" else {"reasoning_content": f"{number}"}
    if calls:
        message["tool_calls"] = [
            {"id": id_, "type": "function", "function": {"name": "add", "arguments": f'{{"x":{x}, "y":{y}}}'}}
            for id_, (x, y) in calls.items()
        ]
    return answer(text, message=message, usage=USAGE, finish_reason="tool_calls" if calls else "stop")


async def run(api: str, agent: Any, tmp_path: Any) -> tuple[SingleAgentEpisode, ChatServer]:
    (tmp_path / "prices.yaml").write_text("m: {input: 10, cached: 1, output: 100}")
    script = [
        reply(api, 1, "Let me add.", a=(1, 2), b=(3, 4)),
        reply(api, 2, c=(3, 7)),
        reply(api, 3, "The sum is 10."),
    ]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add 1 to 4."}]
    options = {"api": api, "price_file": tmp_path / "prices.yaml"}
    return await collect(script, agent, options=options, messages=messages, initial_user_prompt=None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", DIALECTS)
async def test_record_does_not_depend_on_the_api_of_the_agent(api: str, stream: bool, tmp_path) -> None:
    records: dict[str, Any] = {}
    for name, agent in {"reference": lambda _: chat_agent(False), **AGENTS}.items():
        episode, server = await run(api, agent(stream), tmp_path)
        assert (failure(episode), reason(episode)) == (None, "answered"), name
        assert [message.role for message in episode.messages] == [
            *("system", "user", "assistant", "tool", "tool", "assistant", "tool", "assistant")
        ]
        assert [message.text for message in episode.messages if message.role == "tool"] == ["3", "7", "10"]
        assert "prompt_messages" not in episode.extra_model_outputs
        steps = [
            (step.action_taken, step.policy_logprobs, step.resulting_messages_history)
            for step in episode_steps(episode)
        ]
        messages = [message.to_chat() for message in episode.messages]
        records[name] = json.loads(json.dumps([messages, steps, episode.custom_data["usage"]], default=str))
        if api != "chat":
            # The server receives the items of its reasoning unchanged, whichever API the agent uses.
            sent = server.bodies[2]["input" if api == "responses" else "messages"]
            if api == "messages":
                sent = [block for turn in sent for block in turn["content"]]
            found = [item for item in sent if item.get("type") in ("reasoning", "thinking", "redacted_thinking")]
            assert found == [*reasoning(api, 1), *reasoning(api, 2)], name
    for name, record in records.items():
        assert record == records["reference"], name


async def test_equal_answers_keep_their_own_reasoning(tmp_path) -> None:
    """An agent in an API that cannot express the reasoning sends two equal texts back."""

    async def agent(task: AgentTask, base_url: str) -> None:
        turns: list[dict[str, Any]] = []
        async with client_of(base_url) as client:
            for _ in range(3):
                turns.append({"role": "user", "content": "Sure?"})
                said = (await client.chat.completions.create(model="any", messages=turns)).choices[0].message
                turns.append({"role": "assistant", "content": said.content})

    script = [reply("messages", number, "Yes.") for number in (1, 2, 3)]
    episode, server = await collect(script, agent, options={"api": "messages"}, tools=None)
    assert failure(episode) is None
    sent = [turn["content"] for turn in server.bodies[2]["messages"] if turn["role"] == "assistant"]
    assert [blocks[:2] for blocks in sent] == [reasoning("messages", 1), reasoning("messages", 2)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", AGENTS)
async def test_failure_of_the_model_fails_the_episode_and_ends_the_agent(name: str, stream: bool) -> None:
    ended = []

    async def agent(task: AgentTask, base_url: str) -> None:
        try:
            await AGENTS[name](stream)(task, base_url)
        finally:
            ended.append(name)

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add 1 to 4."}]
    script = [reply("chat", 1, a=(1, 2)), status(422, text="a wrong key")]
    episode, _ = await collect(script, agent, messages=messages, initial_user_prompt=None)
    assert "a wrong key" in str(failure(episode)) and len(episode) == 1 and ended == [name]
