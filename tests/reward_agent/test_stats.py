"""Statistics and metrics of `AsyncRewardAgent`."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest

from reward_kit.errors import Failure, RewardError
from reward_kit.models import EvaluateResult
from reward_kit.providers.request_queue import RetryPolicy
from reward_kit.reward_agent import AsyncRewardAgent, Retries, ScoreCache, Scored, SyncRewardAgent
from reward_kit.reward_agent.stats import Latencies, Tally
from reward_kit.rewards.judge_client import Answer, JudgeUsage
from reward_kit.rewards.judge_prompts import METRIC
from reward_kit.typed_interface import reward_spec
from tests.reward_agent import virtual_time
from tests.reward_agent.held_scorer import HeldScorer, requests, scored
from tests.reward_agent.test_agent_scheduling import virtual
from tests.reward_agent.virtual_time import settled


def costing(name, cost, *, calls=1):
    usage = JudgeUsage()
    for _ in range(calls):
        usage.add_call(Answer("", 10, 1, cost))
    return Scored(name, EvaluateResult(score=1.0, metrics={METRIC: usage.as_metric()}))


class DelayedScorer(HeldScorer):
    """A scorer that answers after the seconds in a request's name."""

    async def score(self, request):
        if request.failure is not None:
            return Scored(request.rollout_id, None, request.failure)
        await asyncio.sleep(float(request.rollout_id))
        return scored(request.rollout_id, 1.0)


class TestCounts:
    @virtual
    async def test_counts_follow_a_queue_from_full_to_empty(self=None):
        held = HeldScorer()
        async with AsyncRewardAgent(held, max_concurrency=3) as agent:
            await agent.submit(requests(*"abcdefgh"), group_size=2)
            await settled()
            full = agent.stats
            assert (full.submitted, full.pending, full.waiting, full.in_flight, full.done) == (8, 8, 5, 3, 0)
            assert (full.groups_complete, full.groups_outstanding) == (0, 4)
            held.fail("a", "timeout")
            await settled()
            half = agent.stats
            assert (half.pending, half.waiting, half.in_flight) == (7, 4, 3)
            assert (half.done, dict(half.failed)) == (0, {}), "its group is not complete"
            held.answer("b")
            held.fail("c")
            await settled()
            assert (agent.stats.done, dict(agent.stats.failed)) == (2, {"timeout": 1})
            while agent.stats.pending:
                held.answer(*held.calls)
                await settled()
        empty = agent.stats
        assert (empty.pending, empty.waiting, empty.in_flight, empty.done) == (0, 0, 0, 8)
        assert (empty.groups_complete, empty.groups_outstanding) == (4, 0)
        assert dict(empty.failed) == {"timeout": 1, "crash": 1}

    @virtual
    async def test_group_call_counts_as_a_single_call_in_flight(self=None):
        held = HeldScorer("batch")
        async with AsyncRewardAgent(held, max_concurrency=1) as agent:
            await agent.submit(requests(*"abcdef"), group_size=3)
            await settled()
            assert (agent.stats.pending, agent.stats.waiting, agent.stats.in_flight) == (6, 3, 1)
            while agent.stats.pending:
                held.answer(*held.calls)
                await settled()

    @virtual
    async def test_retries_and_cached_results_are_counted(self=None):
        held = HeldScorer()
        retries = Retries(RetryPolicy(max_attempts=2), seed=1)
        async with AsyncRewardAgent(held, retries=retries, cache=ScoreCache()) as agent:
            await agent.submit([replace(one, rollout_id=name) for one in requests("a") for name in "ab"])
            await settled()
            held.fail("a", "provider_error")
            await asyncio.sleep(60.0)
            held.answer("a")
        assert (agent.stats.retries, agent.stats.cached, agent.stats.done) == (1, 1, 2)

    @virtual
    async def test_failed_finish_group_is_counted_as_failures(self=None):
        class Unfinished(DelayedScorer):
            async def finish_group(self, requests, found):
                raise ValueError("no mean")

        async with AsyncRewardAgent(Unfinished()) as agent:
            await agent.submit(requests(1, 2), group_size=2)
        assert (agent.stats.done, sum(agent.stats.failed.values())) == (2, 2)

    def test_agent_left_with_an_error_has_nothing_outstanding(self):
        async def leave(agent):
            async with agent:
                await agent.submit(requests("a", "b"))
                await settled()
                raise KeyError

        agent = AsyncRewardAgent(HeldScorer())
        with pytest.raises(KeyError):
            virtual_time.run(leave(agent))
        stats = agent.stats
        assert (stats.pending, stats.in_flight, stats.groups_outstanding) == (0, 0, 0)
        assert (stats.done, stats.latency_p50_s) == (0, None)


class TestLatency:
    @virtual
    async def test_latency_excludes_time_in_the_queue(self=None):
        async with AsyncRewardAgent(DelayedScorer(), max_concurrency=1) as agent:
            await agent.submit(requests(*range(1, 12)))
        stats = agent.stats
        assert (stats.latency_p50_s, stats.latency_p90_s) == (pytest.approx(6.0), pytest.approx(10.0))
        assert stats.latency_p99_s == pytest.approx(10.9)

    @virtual
    async def test_latency_includes_timeouts_but_not_cancelled_or_failed_rollouts(self=None):
        async with AsyncRewardAgent(DelayedScorer(), deadline_s=5.0) as agent:
            await agent.submit(requests(100))
            (await agent.submit(requests(1))).cancel()
            await agent.submit(requests(0, failure=Failure("crash", "Test", "the rollout broke")))
        assert agent.stats.latency_p50_s == agent.stats.latency_p99_s == pytest.approx(5.0)

    def test_percentiles_are_exact_for_few_values_and_sampled_for_many(self):
        latencies, draw = Latencies(size=1000, seed=3), random.Random(4)
        assert latencies.percentiles((50,)) == [None]
        given = [draw.expovariate(1.0) for _ in range(50_000)]
        for seconds in given[:1000]:
            latencies.add(seconds)
        assert latencies.percentiles((50, 99)) == pytest.approx(np.percentile(given[:1000], (50, 99)))
        for seconds in given[1000:]:
            latencies.add(seconds)
        assert len(latencies._kept) == 1000
        # Within four standard errors of the share below: sqrt(0.25 / 1000) of the median.
        (median,) = latencies.percentiles((50,))
        assert abs(np.mean(np.array(given) < median) - 0.5) < 4 * 0.0158

    def test_latency_sample_is_determined_by_the_seed(self):
        def drawn(seed):
            latencies = Latencies(size=10, seed=seed)
            for value in range(1000):
                latencies.add(float(value))
            return latencies.percentiles((10, 50, 90))

        assert drawn(1) == drawn(1) != drawn(2)


class TestCost:
    def test_cost_is_unknown_without_reported_costs(self):
        tally = Tally()
        tally.spend([scored("a", 1.0), Scored("b", None)])
        stats = tally.stats(0)
        assert (stats.cost_usd, stats.unpriced) == (None, 0)
        assert "reward_agent/cost_usd" not in stats.metrics()

    def test_cost_adds_up_and_unpriced_calls_are_counted(self):
        tally = Tally()
        for cost in (0.25, None, 0.5):
            tally.spend([costing("a", cost)])
        assert (tally.stats(0).cost_usd, tally.stats(0).unpriced) == (0.75, 1)

    def test_cost_shared_by_a_group_is_counted_once(self):
        tally = Tally()
        tally.spend([costing(name, 0.25, calls=2) for name in "abcd"])
        assert tally.stats(0).cost_usd == 0.5

    @pytest.mark.parametrize(
        "text", ["cost_usd=inf", "cost_usd=-1", "cost_usd=1e9", "cost_usd=" + "9" * 400, "", "cost"]
    )
    def test_invalid_cost_is_unpriced(self, text):
        one = costing("a", 1.0)
        one.result.metrics[METRIC].reason = text
        tally = Tally()
        tally.spend([one])
        assert (tally.cost_usd, tally.unpriced) == (None, 1)

    @virtual
    async def test_retried_attempts_cost_and_cached_results_do_not(self=None):
        class Judge(DelayedScorer):
            async def score(self, request):
                self.asked.append(request.rollout_id)
                one = costing(request.rollout_id, 0.25)
                return replace(one, failure=Failure("provider_error", "T", "down")) if len(self.asked) == 1 else one

        async with AsyncRewardAgent(Judge(), retries=Retries(seed=1), cache=ScoreCache()) as agent:
            for _ in range(3):
                await agent.submit(requests("a"))
                await agent.get(1)
        assert (agent.stats.cost_usd, agent.stats.cached) == (0.5, 2)


class TestMetrics:
    def test_metrics_have_flat_names_and_omit_unknown_values(self):
        async def value(messages):
            if messages[-1].text == "x":
                raise RewardError("no number")
            return {"score": float(messages[-1].text)}

        with SyncRewardAgent(reward_spec(value)) as agent:
            before = agent.stats.metrics()
            agent.compute_reward_pipeline(requests("1", "2", "x"))
            agent.get(3)
            (failure_class,) = agent.stats.failed
            after = agent.stats.metrics()
        assert all(type(value) is float for value in after.values())
        percentiles = {f"reward_agent/latency_p{p}_s" for p in (50, 90, 99)}
        assert after.keys() - before.keys() == percentiles | {f"reward_agent/failed/{failure_class}"}
        assert before["reward_agent/submitted"] == before["reward_agent/failed"] == 0.0
        assert (after["reward_agent/done"], after["reward_agent/failed"]) == (3.0, 1.0)
        assert after["reward_agent/latency_p50_s"] <= after["reward_agent/latency_p99_s"]

    def test_every_metric_is_documented_in_the_guide(self, request):
        guide = (request.config.rootpath / "docs" / "guides" / "reward_agent.md").read_text()
        explained = guide.split("| `reward_agent/…` | Meaning |")[1].split("\n\n")[0]
        for name in Tally().stats(0).__slots__:
            assert f"`{name}`" in explained, name
