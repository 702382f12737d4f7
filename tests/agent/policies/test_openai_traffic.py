"""Test `OpenAIAgentPolicy` with the recordings, limits and prices that a run shares."""

from __future__ import annotations

import pytest

from reward_kit.agent.policies import make_policy
from reward_kit.agent.policies.openai_policy import OpenAIAgentPolicy
from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.episodes.record import episode_to_record
from reward_kit.errors import ConfigError
from reward_kit.models import TaskDefinitionModel
from reward_kit.providers import Cassette, ProviderSession
from tests.chat_server import ChatServer, answer, status, tool_calls

TASK = TaskDefinitionModel(
    name="count",
    resource_type="python_state",
    base_resource_config={"initial_state": {"x": 0}},
    initial_user_prompt="Count.",
    max_episode_steps=4,
    on_text="end",
)


def counting(body):
    """Answer with two calls, then text; reject some second turns."""
    turns = sum(message["role"] == "assistant" for message in body["messages"])
    counting.asked += 1
    if turns == 1 and counting.asked % 7 == 0:
        return status(400, text="I do not like this one")
    if turns == 2:
        return answer(f"done {counting.asked}")
    return tool_calls([("set_value", {"path": "x", "value": turns})])


counting.asked = 0


async def episodes(policy, count=6):
    worker = RLRolloutWorker(TASK, policy)
    collected = [await worker.collect_episode(seed=seed) for seed in range(count)]
    await policy.close()
    return collected


def without_times(episode):
    record = episode_to_record(episode)
    record.pop("timing", None)
    return record


@pytest.mark.parametrize("stream", [False, True])
async def test_replayed_episodes_need_no_server_and_no_key(tmp_path, monkeypatch, stream):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    options = {"model": "m", "stream": stream}
    async with ChatServer(counting) as server:
        recording = ProviderSession(cassette=Cassette.record(tmp_path / "c.jsonl"))
        policy = make_policy("openai", {**options, "base_url": server.base_url}, traffic=recording)
        recorded = [without_times(episode) for episode in await episodes(policy)]
        recording.close()
    assert len({record["stop_reason"] for record in recorded}) == 2  # broken ones among them
    replaying = ProviderSession(cassette=Cassette.replay(tmp_path / "c.jsonl"))
    replayed = [without_times(episode) for episode in await episodes(make_policy("openai", options, traffic=replaying))]
    replaying.close()
    assert replayed == recorded


def test_provider_session_is_passed_only_to_policies_that_accept_it():
    shared = ProviderSession()
    assert make_policy("openai", {"model": "m", "base_url": "http://a/v1"}, traffic=shared)._endpoint._traffic is shared
    assert isinstance(make_policy("scripted", {"actions": []}, traffic=shared), ScriptedPolicy)


def test_traffic_is_not_a_task_file_key():
    with pytest.raises(ConfigError, match=r"policy\.traffic: unknown key for policy 'openai'"):
        make_policy("openai", {"model": "m", "base_url": "http://a/v1", "traffic": None})


def test_policies_with_conflicting_rates_for_a_model_are_rejected():
    shared, options = ProviderSession(), {"model": "m", "base_url": "http://a/v1"}
    make_policy("openai", {**options, "requests_per_minute": 60}, traffic=shared)
    make_policy("openai", {**options, "model": "other"}, traffic=shared)
    make_policy("openai", options, traffic=shared)  # who gives none keeps to those that are there
    with pytest.raises(ConfigError, match="two policies use 'm' at http://a/v1"):
        make_policy("openai", {**options, "requests_per_minute": 90}, traffic=shared)


def test_cost_is_known_if_the_price_file_lists_the_model(tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("m: {input: 1, output: 1}\n")
    policies = {
        (model, file): OpenAIAgentPolicy(model, base_url="http://a/v1", price_file=file)
        for model in ("m", "other")
        for file in (prices, None)
    }
    assert [key for key, policy in policies.items() if policy.knows_cost] == [("m", prices)]
