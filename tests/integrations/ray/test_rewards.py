"""Test rewards in worker processes of a cluster, and the reward agent as an actor."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from reward_kit.errors import ConfigError
from reward_kit.integrations.ray.reward_agent import RayAsyncRewardAgent
from reward_kit.integrations.ray.rewards import RayScorer
from reward_kit.models import Message
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.loading import SandboxChoice, load_reward, make_scorer
from reward_kit.reward_agent.scoring import ScoringRequest
from tests.integrations.ray.fault_injection import killed

pytestmark = pytest.mark.campaign

REWARDS = """
import os, time
from pathlib import Path
from reward_kit import reward_function

def digits(messages):
    return {"score": len([c for c in messages[-1].content if c.isdigit()]) / 10, "reason": messages[-1].content}

def picky(messages, ground_truth):
    "Breaks on seven, exits on eight, gives nonsense on nine."
    number = int(messages[-1].content)
    if number == 7:
        raise ValueError("seven")
    if number == 8:
        os._exit(3)
    if number == 9:
        return "nonsense"
    return {"score": number / 10}

async def slow(messages):
    import anyio
    await anyio.sleep(float(messages[-1].content))
    return {"score": 1.0}

def once(messages, marker):
    "Takes its process along, the first time."
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return {"score": 1.0}
    os._exit(1)

@reward_function(mode="batch")
def shares(rollouts_messages):
    numbers = [float(messages[-1].content) for messages in rollouts_messages]
    return [{"score": number / sum(numbers)} for number in numbers]
"""
HERE = SandboxChoice(level="in_process")


@pytest.fixture
def rewards(folder: Path) -> Path:
    (folder / "r.py").write_text(REWARDS)
    return folder


def requests(*contents: Any, **extra: Any) -> list[ScoringRequest]:
    return [
        ScoringRequest(f"e{place}", [Message(role="user", content=str(content))], ground_truth=1, extra=extra)
        for place, content in enumerate(contents)
    ]


def scorer(rewards: Path, name: str, choice: SandboxChoice | None = None, **options: Any) -> RayScorer:
    reward = load_reward(f"r.py:{name}", rewards, choice, options.pop("fixed", None)).reward
    return RayScorer(reward, f"r.py:{name}", rewards, **{"workers": 2, **options})


def comparable(scored: Any) -> Any:
    failure = scored.failure and (scored.failure.failure_class, scored.failure.message)
    return (scored.rollout_id, scored.score, failure, scored.sandbox, scored.stdout)


@pytest.mark.usefixtures("cluster")
class TestScorer:
    @pytest.mark.parametrize("choice", [HERE, None], ids=["in_process", "behind walls"])
    async def test_scores_and_failures_equal_in_process_scoring(self, rewards: Path, choice: Any) -> None:
        batch = requests(*([1, 2, 7, 9] if choice else [1, 2, 7, 8, 9]))
        here = make_scorer(load_reward("r.py:picky", rewards, choice).reward)
        async with AsyncRewardAgent(here) as agent:
            await agent.submit(batch)
            expected = await agent.get(len(batch))
        async with AsyncRewardAgent(scorer(rewards, "picky", choice)) as agent:
            await agent.submit(batch)
            found = await agent.get(len(batch))
        assert [comparable(one) for one in found.extra_infos] == [comparable(one) for one in expected.extra_infos]
        assert found.rewards[:3] == [0.1, 0.2, None]

    async def test_batch_reward_receives_its_group(self, rewards: Path) -> None:
        async with AsyncRewardAgent(scorer(rewards, "shares")) as agent:
            await agent.submit(requests(1, 3, 2, 2), 2)
            assert (await agent.get(4)).rewards == [0.25, 0.75, 0.5, 0.5]

    async def test_call_in_a_lost_process_is_retried(self, rewards: Path) -> None:
        marker = str(rewards / "marker")
        losing = scorer(rewards, "once", HERE, fixed={"marker": marker})
        async with AsyncRewardAgent(losing) as agent:
            await agent.submit(requests(1, 2, 3))
            assert (await agent.get(3)).rewards == [1.0, 1.0, 1.0]

    async def test_call_that_kills_every_process_is_unscored(self, rewards: Path) -> None:
        async with AsyncRewardAgent(scorer(rewards, "picky", HERE, workers=1)) as agent:
            await agent.submit(requests(8))
            (scored,) = (await agent.get(1)).extra_infos
        assert scored.score is None
        assert scored.failure is not None and scored.failure.failure_class == "crash"
        assert "its process was lost 3 times" in scored.failure.message

    async def test_agent_deadline_ends_the_call(self, rewards: Path) -> None:
        async with AsyncRewardAgent(scorer(rewards, "slow", HERE), deadline_s=20.0) as agent:
            await agent.submit(requests(0.0, 600.0))
            chunk = await agent.get(2)
        assert chunk.rewards == [1.0, None]
        assert chunk.extra_infos[1].failure is not None and chunk.extra_infos[1].failure.failure_class == "timeout"


def test_rates_that_cannot_be_divided_are_rejected(rewards: Path) -> None:
    (rewards / "r.py").write_text("def limited(messages, requests_per_minute=None):\n    return {'score': 1.0}\n")
    with pytest.raises(ConfigError, match="requests_per_minute cannot be shared by 2 processes"):
        scorer(rewards, "limited", HERE, fixed={"requests_per_minute": 60})


@pytest.mark.usefixtures("cluster")
class TestAgent:
    @pytest.fixture
    def started(self) -> Iterator[list[Any]]:
        agents: list[Any] = []
        yield agents
        for agent in agents:
            ray.kill(agent)

    def start(self, started: list[Any], rewards: Path, name: str, **options: Any) -> Any:
        options = {"choice": HERE, **options}
        started.append(RayAsyncRewardAgent.options(num_cpus=0.5).remote(f"r.py:{name}", str(rewards), **options))
        return started[-1]

    def test_compute_reward_pipeline_and_get(self, started: list[Any], rewards: Path) -> None:
        agent = self.start(started, rewards, "digits")
        batch = requests("1", "22", "333", "4444", length=3)
        assert ray.get(agent.compute_reward_pipeline.remote(batch, group_size=2)) == 4
        data_idxs, rewards_, extra_infos = ray.get(agent.get.remote(4))
        assert (data_idxs, rewards_) == ([0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4])
        assert [info.result.reason for info in extra_infos] == ["1", "22", "333", "4444"]
        assert ray.get(agent.stats.remote()).done == 4

    def test_columns_are_aligned_if_groups_finish_out_of_order(self, started: list[Any], rewards: Path) -> None:
        agent = self.start(started, rewards, "slow")
        batch = [
            ScoringRequest(f"e{n}", [Message(role="user", content=wait)], extra={"response_length": length})
            for n, (wait, length) in enumerate([("0.4", 1), ("0.4", 1), ("0.0", 4), ("0.0", 4)])
        ]
        ray.get(agent.compute_reward_pipeline.remote(batch, group_size=2))
        chunk = ray.get(agent.get.remote(4))
        assert (chunk.data_idxs, chunk.lengths, chunk.batch) == ([0, 1, 2, 3], [1, 1, 4, 4], 1)
        assert chunk.placed(4).nonzero()[1].tolist() == [0, 0, 3, 3]
        with pytest.raises(ConfigError, match="item 2: the response must have 1 to 3 tokens, got 4"):
            chunk.placed(3)

    def test_an_exception_affects_only_its_own_rollout(self, started: list[Any], rewards: Path) -> None:
        agent = self.start(started, rewards, "picky")
        ray.get(agent.compute_reward_pipeline.remote(requests(1, 7, 9, 2), group_size=2))
        chunk = ray.get(agent.get.remote(4), timeout=60)
        assert chunk.rewards == [0.1, None, None, 0.2]
        assert [info.failure and info.failure.failure_class for info in chunk.extra_infos][1:3] == [
            "crash",
            "invalid_result",
        ]
        assert chunk.incomplete_groups == [0, 1]

    def test_concurrent_batches_are_not_mixed(self, started: list[Any], rewards: Path) -> None:
        agent = self.start(started, rewards, "slow")
        ray.get(agent.compute_reward_pipeline.remote(requests(600.0, 0.0, 0.0, 0.0), group_size=2))
        ray.get(agent.compute_reward_pipeline.remote(requests(0.0, 0.0), group_size=2))
        first = ray.get(agent.get.remote(2))
        assert (first.batch, first.data_idxs) == (1, [2, 3])
        stats = ray.get(agent.stats.remote())
        assert (stats.in_flight, stats.pending) == (1, 1), "the second batch did not wait for the first"

    def test_impossible_requests_are_rejected_at_once(self, started: list[Any], rewards: Path) -> None:
        agent = self.start(started, rewards, "digits")
        ray.get(agent.compute_reward_pipeline.remote(requests(1, 2, 3, 4), group_size=2))
        with pytest.raises(ConfigError, match="would split a group of 2; request 2 or 4"):
            ray.get(agent.get.remote(3))
        with pytest.raises(ConfigError, match=r"get\(6\) cannot return: 4 results of batch 1 .* are outstanding"):
            ray.get(agent.get.remote(6))
        assert ray.get(agent.get.remote(4)).rewards == [0.1] * 4
        with pytest.raises(ConfigError, match="a batch must be a list of requests or episodes, got a dict"):
            ray.get(agent.compute_reward_pipeline.remote({"prompts": []}))

    def test_instant_rewards_are_returned_immediately(self, started: list[Any], rewards: Path) -> None:
        agent = self.start(started, rewards, "digits")
        ray.get(agent.compute_reward_pipeline.remote(requests(1)))
        ray.get(agent.get.remote(1))
        began = time.perf_counter()
        for _ in range(20):
            ray.get(agent.compute_reward_pipeline.remote(requests(1)))
            ray.get(agent.get.remote(1))
        print(f"\nround trip of an instant reward: {(time.perf_counter() - began) / 20 * 1e3:.1f} ms")

    def test_hook_receives_columns_and_loses_nothing_by_an_error(self, started: list[Any], rewards: Path) -> None:
        agent = self.start(started, rewards, "digits")
        texts = [ScoringRequest(f"e{n}", [Message(role="user", content=text)]) for n, text in enumerate(["1", "23"])]
        assert ray.get(agent.compute_reward_pipeline.remote(texts)) == 2
        with pytest.raises(ZeroDivisionError):
            ray.get(agent.get.remote(2, lambda idxs, scores, infos: 1 / 0))
        hooked = ray.get(agent.get.remote(2, lambda idxs, scores, infos, scale: [scale * s for s in scores], scale=10))
        assert hooked == [1.0, 2.0]

    def test_reward_workers_are_replaced_when_killed(self, started: list[Any], rewards: Path, home: Path) -> None:
        agent = self.start(started, rewards, "slow", reward_workers=2, max_concurrency=8)
        ray.get(agent.compute_reward_pipeline.remote(requests(*[0.0] * 4)))
        assert ray.get(agent.get.remote(4)).rewards == [1.0] * 4
        ray.get(agent.compute_reward_pipeline.remote(requests(*[1.0] * 8)))
        assert killed("ray::RewardActor", home) == 2
        assert ray.get(agent.get.remote(8), timeout=60).rewards == [1.0] * 8

    def test_unknown_options_are_rejected_at_start(self, started: list[Any], rewards: Path) -> None:
        agent = self.start(started, rewards, "digits", max_concurency=3)
        with pytest.raises(ray.exceptions.RayActorError, match="no option 'max_concurency'"):
            ray.get(agent.stats.remote())
