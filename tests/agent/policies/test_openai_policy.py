"""Test the requests of `OpenAIAgentPolicy` to a local server and the actions it parses from each answer."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from reward_kit.agent.policies.openai_policy import OpenAIAgentPolicy
from reward_kit.agent.policy_interface import EpisodeContext, check_output
from reward_kit.environments.base import tool_spec
from reward_kit.errors import ConfigError, ProviderError
from reward_kit.models import Message
from tests.chat_server import ChatServer, answer, dropped, html, status, tool_calls

TOOLS = [tool_spec("move", "Go there.", {"type": "object", "properties": {"to": {"type": "string"}}})]
HELLO = [Message(role="system", content="Be brief."), Message(role="user", content="hi")]


@asynccontextmanager
async def session_at(server: ChatServer, seed: int = 7, **options):
    policy = OpenAIAgentPolicy("m", base_url=server.base_url, **{"api_key": "k", "retry_base_s": 0.001, **options})
    session = await policy.open(EpisodeContext("r", seed))
    yield session
    await session.close()
    await policy.close()


async def act(behaviour, observation=HELLO, tools=TOOLS, **options):
    async with ChatServer([behaviour]) as server, session_at(server, **options) as session:
        return check_output(await session.get_action(observation, tools))


@pytest.mark.parametrize("stream", [False, True])
async def test_text_answer_becomes_a_text_action(stream):
    output = await act(answer("hello"), stream=stream)
    assert output.action_structured == {"type": "text", "content": "hello"}
    assert output.raw_policy_output == "hello"
    assert output.log_probs == {
        "usage": {"prompt_tokens": 11, "completion_tokens": 7},
        "finish_reason": "stop",
    }
    assert output.value_estimate is None


@pytest.mark.parametrize("text", [None, ""])
async def test_empty_answer_is_an_empty_text(text):
    output = await act(answer(text))
    assert output.action_structured == {"type": "text", "content": ""}
    assert output.raw_policy_output == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_single_call_becomes_a_tool_call(stream):
    output = await act(tool_calls([("move", {"to": "north"})]), stream=stream)
    expected = {"type": "tool_call", "name": "move", "arguments": {"to": "north"}, "id": "call_move_0"}
    assert output.action_structured == expected
    assert output.raw_policy_output is None


async def test_single_call_with_text_keeps_the_text():
    output = await act(tool_calls([("move", {"to": "north"})], "Going."))
    assert output.action_structured == {
        "type": "tool_calls",
        "calls": [{"name": "move", "arguments": {"to": "north"}, "id": "call_move_0"}],
        "content": "Going.",
    }
    assert output.raw_policy_output == "Going."


@pytest.mark.parametrize("stream", [False, True])
async def test_ten_parallel_calls_keep_their_order(stream):
    output = await act(tool_calls([("move", {"to": str(n)}) for n in range(10)]), stream=stream)
    calls = output.action_structured["calls"]
    assert [call["arguments"]["to"] for call in calls] == [str(n) for n in range(10)]
    assert len({call["id"] for call in calls}) == 10


@pytest.mark.parametrize("text", ['{"to": ', "[1]", '"north"', "null", '{"x": NaN}', "move north", "[" * 100_000])
async def test_arguments_that_are_not_an_object_are_kept_verbatim(text):
    output = await act(tool_calls([("move", text)]))
    assert output.action_structured == {
        "type": "tool_call",
        "name": "move",
        "arguments_text": text,
        "id": "call_move_0",
    }


async def test_missing_arguments_are_an_empty_object():
    assert (await act(tool_calls([("move", "")]))).action_structured["arguments"] == {}


async def test_reasoning_is_part_of_the_action():
    output = await act(answer("42", message={"reasoning_content": "hm"}))
    assert output.action_structured == {"type": "text", "content": "42", "reasoning_content": "hm"}


async def test_token_ids_logprobs_and_cost_are_recorded(tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("m: {input: 1000000, output: 10}\n")
    tokens = {"logprobs": {"content": [{"token": "a", "logprob": -0.5}]}, "token_ids": [9]}
    behaviour = answer("a", choice=tokens, top={"prompt_token_ids": [1, 2]}, finish_reason="length")
    output = await act(behaviour, logprobs=True, price_file=prices)
    assert output.log_probs == {
        "prompt_ids": [1, 2],
        "token_ids": [9],
        "logprobs": [-0.5],
        "usage": {"prompt_tokens": 11, "completion_tokens": 7, "cost": 11.00007},
        "finish_reason": "length",
    }


async def test_request_contains_every_configured_option():
    options = {
        "temperature": 0,
        "top_p": 0.9,
        "max_tokens": 64,
        "logprobs": True,
        "parallel_tool_calls": False,
        "extra_body": {"return_token_ids": True},
    }
    async with ChatServer(lambda _: answer()) as server, session_at(server, seed=2**31 + 5, **options) as session:
        await session.get_action(HELLO, TOOLS)
        await session.get_action(HELLO, None)
        with_tools, without_tools = server.bodies
    assert with_tools == {
        "model": "m",
        "messages": [message.to_chat() for message in HELLO],
        "tools": TOOLS,
        "seed": 5,
        "temperature": 0,
        "top_p": 0.9,
        "max_tokens": 64,
        "logprobs": True,
        "parallel_tool_calls": False,
        "return_token_ids": True,
    }
    assert not {"tools", "parallel_tool_calls"} & without_tools.keys()


async def test_unset_options_are_not_sent():
    async with ChatServer([answer()]) as server, session_at(server, send_seed=False) as session:
        await session.get_action(HELLO)
        assert server.bodies[0].keys() == {"model", "messages"}


async def test_each_episode_sends_its_own_seed():
    async with ChatServer(lambda _: answer()) as server:
        policy = OpenAIAgentPolicy("m", base_url=server.base_url, api_key="k")
        sessions = [await policy.open(EpisodeContext(f"r{seed}", seed)) for seed in range(20)]
        await asyncio.gather(*(session.get_action(HELLO) for session in sessions))
        await policy.get_action(HELLO)
        await policy.close()
        assert sorted(body.get("seed", -1) for body in server.bodies) == [-1, *range(20)]


async def test_every_turn_sends_the_whole_conversation():
    conversation = list(HELLO)
    async with ChatServer(lambda _: answer()) as server, session_at(server) as session:
        for turn in range(5):
            output = await session.get_action(conversation, TOOLS)
            conversation.append(Message(role="assistant", content=output.action_structured["content"]))
            conversation.append(Message(role="user", content=f"turn {turn}"))
            assert server.bodies[-1]["messages"] == [message.to_chat() for message in conversation[:-2]]


@pytest.mark.parametrize("send", [False, True])
async def test_earlier_reasoning_is_sent_only_if_enabled(send):
    conversation = [*HELLO, Message(role="assistant", content="a", reasoning_content="hm"), HELLO[1]]
    async with ChatServer([answer()]) as server, session_at(server, send_reasoning=send) as session:
        await session.get_action(conversation)
        assert ("reasoning_content" in server.bodies[0]["messages"][2]) is send


async def test_faults_are_retried_within_an_action():
    script = [status(429, {"Retry-After": "0"}), status(500), dropped(), html(), answer("there")]
    async with ChatServer(script) as server, session_at(server) as session:
        assert (await session.get_action(HELLO)).raw_policy_output == "there"


async def test_exhausted_retries_raise_provider_error_and_next_action_works():
    script = [status(503), status(503), answer("back")]
    async with ChatServer(script) as server, session_at(server, max_attempts=2) as session:
        with pytest.raises(ProviderError, match="gave up after 2 attempts"):
            await session.get_action(HELLO)
        assert (await session.get_action(HELLO)).raw_policy_output == "back"


@pytest.mark.parametrize(
    "options, said",
    [
        ({"temperature": "hot"}, "temperature: expected a number of at least 0, got 'hot'"),
        ({"temperature": -1}, "temperature: expected a number of at least 0, got -1"),
        ({"top_p": 0}, "top_p: expected a number above 0, got 0"),
        ({"max_tokens": 1.5}, "max_tokens: expected a whole number above 0, got 1.5"),
        ({"max_attempts": 0}, "max_attempts: expected a whole number above 0, got 0"),
        ({"max_attempts": True}, "max_attempts: expected a whole number above 0, got True"),
        ({"idle_timeout_s": 0}, "idle_timeout_s: expected a number above 0, got 0"),
        ({"total_timeout_s": float("inf")}, "total_timeout_s: expected a number above 0, got inf"),
        ({"retry_budget_s": None}, "retry_budget_s: expected a number above 0, got None"),
        ({"requests_per_minute": 0}, "requests_per_minute: expected a number above 0, got 0"),
        ({"tokens_per_minute": True}, "tokens_per_minute: expected a number above 0, got True"),
        ({"max_connections": 0.5}, "max_connections: expected a whole number above 0, got 0.5"),
        ({"extra_body": {"messages": []}}, "extra_body.messages: this key is set by the policy"),
        (
            {"extra_body": {"x": object()}},
            "extra_body: the request cannot be sent, because it cannot be converted to JSON",
        ),
        ({"extra_body": [1]}, "extra_body: expected a mapping"),
        ({"base_url": "localhost"}, "base_url 'localhost' is not a URL"),
        ({"model": ""}, "model: expected the model's name, got ''"),
        ({"price_file": "/no/such/file.yaml"}, "price file /no/such/file.yaml cannot be read"),
    ],
)
def test_invalid_option_is_named_in_the_config_error(options, said):
    with pytest.raises(ConfigError) as caught:
        OpenAIAgentPolicy(**{"model": "m", "base_url": "http://127.0.0.1:1/v1", **options})
    assert said in str(caught.value)


def test_api_key_is_read_from_its_variable_and_never_shown(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(ConfigError, match="no API key"):
        OpenAIAgentPolicy("m")
    monkeypatch.setenv("MY_KEY", "hush")
    policy = OpenAIAgentPolicy("m", api_key_env="MY_KEY")
    assert "api.openai.com" in repr(policy)
    assert "hush" not in repr(policy)
    assert "hush" not in repr(vars(policy))
