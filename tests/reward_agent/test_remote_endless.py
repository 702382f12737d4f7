"""Endless answers of reward servers and of endpoints asked by `reward-kit doctor`."""

from __future__ import annotations

import pytest

from tests.endless_server import endless, peak

REWARD = """
import aiohttp
from reward_kit.reward_agent.remote import RequestOptions, RewardEndpoint
from reward_kit.providers.request_queue import RetryPolicy
"""
ASK_REWARD = """
request_options = RequestOptions(policy=RetryPolicy(max_attempts=2, base_s=0.01))
async with RewardEndpoint("http://127.0.0.1:{port}/v1/rewards/exact", "key", request_options) as endpoint:
    await endpoint.request("score", b"{{}}")
"""


@pytest.mark.parametrize("kind", ["json", "error", "gzip", "headers"])
def test_endless_answer_of_a_reward_server_is_cut(kind: str) -> None:
    with endless(kind) as port:
        cost = peak(REWARD, ASK_REWARD.format(port=port))
    assert (cost.kind, cost.mb < 200) == ("ProviderError", True), cost
    assert f"http://127.0.0.1:{port}/" in cost.message and "\n" not in cost.message and len(cost.message) < 2_000


@pytest.mark.parametrize("kind", ["json", "gzip", "error", "headers"])
def test_doctor_cuts_an_endless_model_list(kind: str) -> None:
    with endless(kind) as port:
        ask = f"""
        (answer,) = await ask_endpoints(["http://127.0.0.1:{port}/v1"])
        assert answer.outcome in ("foreign", "failing", "broken"), answer
        """
        cost = peak("import aiohttp\nfrom reward_kit.cli.doctor import ask_endpoints", ask)
    assert (cost.kind, cost.message, cost.mb < 50) == ("", "", True), cost
