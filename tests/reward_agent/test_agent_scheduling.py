"""Test the schedule of `AsyncRewardAgent` in virtual time: order, rates, deadlines, retries, cache, back-pressure."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from reward_kit.errors import ConfigError, Failure, RewardError
from reward_kit.providers.request_queue import Rates, RetryPolicy
from reward_kit.reward_agent import AsyncRewardAgent, Retries, ScoreCache, SyncRewardAgent
from reward_kit.reward_agent.call_scheduler import SPARE
from reward_kit.reward_agent.score_cache import content_hash
from reward_kit.typed_interface import reward_function, reward_spec
from tests.reward_agent import virtual_time
from tests.reward_agent.held_scorer import HeldScorer, failed, requests, scored
from tests.reward_agent.virtual_time import settled


def now():
    return asyncio.get_running_loop().time()


def virtual(test):
    """Turn a coroutine function into a test in virtual time."""

    def run(*fixtures):
        virtual_time.run(test(*fixtures))

    run.__name__ = test.__name__
    return run


@virtual
async def test_started_groups_are_finished_first_and_tickets_alternate():
    held = HeldScorer()
    async with AsyncRewardAgent(held, max_concurrency=2) as agent:
        await agent.submit(requests(*"abcdefghi"), group_size=3)
        await agent.submit(requests(*"uvw"), group_size=3)
        while held.calls or not held.asked:
            await settled()
            for name in list(held.calls)[:1]:
                held.answer(name)
    assert (
        "".join(held.asked) == "abcdefuvwghi"
    )  # the first batch began, and stood in line again, before the second came
    assert held.most == 2


class TestRates:
    @staticmethod
    async def beginnings(agent, held, count):
        async with agent:
            await agent.submit(requests(*range(count)))
            began = []
            while len(began) < count:
                await asyncio.sleep(0.01)
                began += [now()] * len(held.calls)
                held.answer(*held.calls)
        return began

    def test_calls_start_at_the_allowed_rate(self):
        held = HeldScorer()
        agent = AsyncRewardAgent(held, rates=Rates(requests_per_minute=60))
        began = virtual_time.run(self.beginnings(agent, held, 5))
        assert began == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0], abs=0.03)

    def test_scorer_can_define_rates(self):
        held = HeldScorer()
        held.rates = Rates(requests_per_minute=120, max_connections=1)
        assert virtual_time.run(self.beginnings(AsyncRewardAgent(held), held, 4))[-1] == pytest.approx(1.0, abs=0.03)
        assert held.most == 1

    def test_token_rates_are_rejected(self):
        with pytest.raises(ConfigError, match="tokens_per_minute applies only to model endpoints"):
            AsyncRewardAgent(HeldScorer(), rates=Rates(tokens_per_minute=100))


class TestTicketsThatEndEarly:
    @virtual
    async def test_requests_missing_at_the_ticket_deadline_are_unscored(self=None):
        held = HeldScorer()
        async with AsyncRewardAgent(held, max_concurrency=3) as agent:
            ticket = await agent.submit(requests(*"abcdef"), group_size=2, deadline_s=10.0)
            other = await agent.submit(requests("x"))
            await settled()
            held.answer("a", "b", "c")
            chunk = await agent.get(6)
            assert now() == pytest.approx(10.0)
            assert chunk.rewards == [1.0, 1.0, 1.0, None, None, None]
            assert chunk.incomplete_groups == [1, 2]
            assert {one.failure.failure_class for one in chunk.extra_infos[3:]} == {"timeout"}
            await settled()
            assert set(held.calls) == {"x"}
            assert "d" in held.cancelled
            assert ticket.is_done
            held.answer("x")
            assert (await agent.get(1, ticket=other)).rewards == [1.0]

    @virtual
    async def test_cancelled_ticket_frees_its_calls_and_leaves_other_tickets_alone(self=None):
        held = HeldScorer()
        async with AsyncRewardAgent(held, max_concurrency=2) as agent:
            ticket, other = await agent.submit(requests(*"abc")), await agent.submit(requests("x"))
            await settled()
            ticket.cancel()
            await settled()
            assert (sorted(held.cancelled), list(held.calls)) == (["a", "b"], ["x"])
            assert [one.failure.failure_class for one in ticket.results] == ["refused"] * 3
            held.answer("x")
            assert (await agent.get(1, ticket=other)).rewards == [1.0]
            assert (await agent.get(3)).rewards == [None] * 3

    @virtual
    async def test_cancelled_score_all_leaves_no_calls_or_results(self=None):
        held = HeldScorer()
        async with AsyncRewardAgent(held, max_concurrency=3) as agent:
            asking = asyncio.create_task(agent.score_all(requests(*"abcd")))
            await settled()
            other = await agent.submit(requests("x"))
            held.answer("a")
            await settled()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await settled()
            assert (sorted(held.cancelled), list(held.calls)) == (["b", "c", "d"], ["x"])
            held.answer("x")
            assert (await agent.get_group()).ticket is other, "earlier results have no reader"
            with pytest.raises(ConfigError, match="no results are outstanding"):
                await agent.get_group()


class TestRetries:
    @staticmethod
    async def failing(agent, held, failure_class="provider_error", **values):
        """Return the attempts for a request that always fails, and its failure."""
        async with agent:
            await agent.submit(requests("a", **values))
            getting = asyncio.create_task(agent.get(1))
            while not getting.done():
                await settled()
                if held.calls:
                    held.fail("a", failure_class)
                await asyncio.sleep(0.01)
        return len(held.asked), getting.result().extra_infos[0].failure

    def test_retries_stop_after_max_attempts(self):
        held = HeldScorer()
        agent = AsyncRewardAgent(held, retries=Retries(RetryPolicy(max_attempts=4), seed=1))
        attempts, failure = virtual_time.run(self.failing(agent, held))
        assert (attempts, failure.message) == (4, "a failed; 4 attempts")

    def test_retries_stop_when_the_budget_is_used_up(self):
        held = HeldScorer()
        policy = RetryPolicy(max_attempts=1000, budget_s=5.0, base_s=1.0, cap_s=1.0)
        retries = Retries(policy, seed=1, max_share=None)
        attempts, failure = virtual_time.run(self.failing(AsyncRewardAgent(held, retries=retries), held))
        assert 5 < attempts < 20
        assert failure.message == f"a failed; {attempts} attempts: budget_s=5 is used up"

    @virtual
    async def test_calls_share_the_retry_allowance_of_the_agent(self=None):
        class Down:
            mode, calls = "pointwise", 0

            async def __aenter__(self):
                return self

            async def __aexit__(self, *_):
                return None

            async def score(self, request):
                self.calls += 1
                return failed(request.rollout_id, "provider_error")

        # Whatever is done at one time, an endpoint that is down gets one call for each request, the half, and ten.
        retries = Retries(RetryPolicy(max_attempts=8, budget_s=60.0, base_s=0.1), seed=1, max_share=0.5)
        async with AsyncRewardAgent(down := Down(), max_concurrency=16, retries=retries) as agent:
            await agent.submit(requests(*range(100)))
            chunk = await agent.get(100)
            assert (down.calls, agent.stats.retries) == (100 + 50 + SPARE, 50 + SPARE)
            assert all(
                "the agent's retry budget is used up (max_share)" in one.failure.message for one in chunk.extra_infos
            )
            await asyncio.sleep(70.0)  # the budget is of the calls of the last minute
            await agent.submit(requests("later"))
            assert "8 attempts" in (await agent.get(1)).extra_infos[0].failure.message

    @virtual
    async def test_retry_after_pauses_calls_or_fails_beyond_the_budget(self=None):
        held = HeldScorer()
        async with AsyncRewardAgent(held, retries=Retries(RetryPolicy(budget_s=60.0), seed=1)) as agent:
            await agent.submit(requests("a", "b"))
            await settled()
            held.calls["a"].set_result(replace(failed("a", "provider_error"), retry_after_s=20.0))
            held.calls["b"].set_result(replace(failed("b", "provider_error"), retry_after_s=61.0))
            await asyncio.sleep(19.9)
            assert held.asked == ["a", "b"]
            await asyncio.sleep(0.7)  # 20 s and up to half a second
            assert held.asked == ["a", "b", "a"]
            held.answer("a")
            chunk = await agent.get(2)
        assert chunk.rewards == [1.0, None]
        expected = "b failed; 1 attempt: its Retry-After of 61 s exceeds the time left in budget_s=60"
        assert chunk.extra_infos[1].failure.message == expected

    def test_permanent_failures_are_not_retried(self):
        held = HeldScorer()
        agent = AsyncRewardAgent(held, retries=Retries(seed=1))
        assert virtual_time.run(self.failing(agent, held, "invalid_result"))[0] == 1

    def test_failed_rollout_is_not_retried(self):
        broken = Failure("provider_error", "PolicyError", "the policy's endpoint")
        held = HeldScorer()
        agent = AsyncRewardAgent(held, retries=Retries(seed=1))
        assert virtual_time.run(self.failing(agent, held, failure=broken))[0] == 1

    def test_unknown_failure_class_and_invalid_share_are_rejected(self):
        with pytest.raises(ConfigError, match=r"unknown failure class 'time_out'; did you mean 'timeout'\?"):
            Retries(classes=("time_out",))
        with pytest.raises(ConfigError, match=r"Retries\.max_share: expected a number above 0, got 0"):
            Retries(max_share=0)


class TestCache:
    @staticmethod
    def alike(*names):
        return [type(one)(f"r{i}", one.messages) for i, one in enumerate(requests(*names))]

    @virtual
    async def test_equal_requests_share_a_call_and_get_separate_copies(self=None):
        calls = []

        async def judge(messages):
            calls.append(messages[-1].text)
            await asyncio.sleep(1.0)
            return {"score": float(len(calls))}

        cache = ScoreCache()
        async with AsyncRewardAgent(reward_spec(judge), cache=cache) as agent:
            ticket = await agent.submit(TestCache.alike("a", "a", "b", "a"))
            chunk = await agent.get(4)
            assert calls == ["a", "b"]
            assert chunk.rewards[0] == chunk.rewards[1] == chunk.rewards[3]
            assert [one.rollout_id for one in chunk.extra_infos] == ["r0", "r1", "r2", "r3"]
            assert len({id(one.result) for one in ticket.results}) == 4
            again = await agent.submit(TestCache.alike("b"))
            await agent.get(1)
        assert (again.results[0].score, len(calls), len(cache)) == (chunk.rewards[2], 2, 2)

    @virtual
    async def test_cancelling_a_ticket_keeps_calls_shared_with_other_tickets(self=None):
        held = HeldScorer()
        async with AsyncRewardAgent(held, cache=ScoreCache()) as agent:
            first = await agent.submit(requests("a"))
            second = await agent.submit(requests("a"))
            await settled()
            first.cancel()
            await settled()
            held.answer("a")
            assert (await agent.get(1, ticket=second)).rewards == [1.0]
        assert (held.asked, held.cancelled, first.results[0].score) == (["a"], [], None)

    @virtual
    async def test_failures_are_not_cached(self=None):
        held = HeldScorer()
        async with AsyncRewardAgent(held, cache=ScoreCache()) as agent:
            for answer in (held.fail, held.answer):
                await agent.submit(requests("a"))
                await settled()
                answer("a")
                chunk = await agent.get(1)
        assert (chunk.rewards, held.asked) == ([1.0], ["a", "a"])

    @pytest.mark.parametrize("values", [{"ground_truth": {1: 2}}, {"extra": {"x": object()}}, {"sample": {"x": (1,)}}])
    def test_requests_without_a_json_form_have_no_cache_key(self, values):
        assert content_hash(requests("a", **values)) is None

    def test_cache_key_covers_every_field_that_a_reward_sees(self):
        kinds = [{}, {"ground_truth": 1}, {"ground_truth": "1"}, {"sample": {"a": 1}}, {"environment_return": 1.0}]
        kinds += [{"stop_reason": "x"}, {"extra": {"a": 1}}, {"assistant_turns": [1]}]
        assert len({content_hash(requests("a", **values)) for values in kinds}) == len(kinds)

    def test_cache_rejects_rewards_that_use_step_data(self):
        spec = reward_spec(reward_function(id="steps")(lambda messages, step_data: 1.0))
        with pytest.raises(ConfigError, match="reward 'steps' uses 'step_data'"):
            AsyncRewardAgent(spec, cache=ScoreCache())


@virtual
async def test_submit_waits_for_pending_requests_in_fifo_order():
    held = HeldScorer()
    async with AsyncRewardAgent(held, max_pending=3) as agent:
        await agent.submit(requests("a", "b"))
        waiting = [asyncio.create_task(agent.submit(requests(*names))) for names in ("cd", "e")]
        await settled()
        assert [task.done() for task in waiting] == [False, False]
        held.answer("a")
        await settled()
        assert [task.done() for task in waiting] == [True, False]
        held.answer("b", "c")
        await settled()
        assert waiting[1].done()
        held.answer("d", "e")
        much = asyncio.create_task(agent.submit(requests(*"uvwxyz")))  # alone it may be more
        await settled()
        assert much.done()
        held.answer(*held.calls)


class CenteredScorer(HeldScorer):
    """A scorer that finishes groups by subtracting their mean."""

    error = None

    async def finish_group(self, requests, found):
        await asyncio.sleep(1.0)
        if self.error is not None:
            raise self.error
        mean = sum(one.score or 0.0 for one in found) / len(found)
        return [scored(one.rollout_id, (one.score or 0.0) - mean) for one in found]


class TestFinishGroup:
    @virtual
    async def test_group_is_returned_after_finish_group(self=None):
        held = CenteredScorer()
        async with AsyncRewardAgent(held) as agent:
            await agent.submit(requests("a", "b"), group_size=2)
            await settled()
            held.answer("a", score=3.0)
            held.answer("b", score=1.0)
            assert (await agent.get(2)).rewards == [1.0, -1.0]
            assert now() == pytest.approx(1.0)

    @virtual
    async def test_failed_finish_group_leaves_the_group_unscored(self=None):
        held = CenteredScorer()
        held.error = ValueError("no mean")
        async with AsyncRewardAgent(held) as agent:
            await agent.submit(requests("a", "b"), group_size=2)
            await settled()
            held.answer("a", "b")
            chunk = await agent.get(2)
        assert chunk.rewards == [None, None]
        assert "no mean" in chunk.extra_infos[0].failure.message

    @virtual
    async def test_unfinished_group_is_unscored_at_the_deadline(self=None):
        held = CenteredScorer()
        async with AsyncRewardAgent(held) as agent:
            await agent.submit(requests("a", "b"), group_size=2, deadline_s=0.5)
            await settled()
            held.answer("a", "b")
            chunk = await agent.get(2)
        assert [one.failure.failure_class for one in chunk.extra_infos] == ["timeout"] * 2


class TestHooks:
    @virtual
    async def test_hook_transforms_a_chunk(self=None):
        async def later(idxs, rewards, infos, scale):
            return [scale * reward for reward in rewards]

        async with AsyncRewardAgent(CenteredScorer(), max_concurrency=1) as agent:
            agent.scorer.score = lambda request: asyncio.sleep(0, scored(request.rollout_id, 1.0))
            await agent.submit(requests("a", "b"))
            assert await agent.get(1, lambda idxs, rewards, infos: (idxs, len(infos))) == ([0], 1)
            assert await agent.get(1, later, scale=3.0) == [0.0]

    @virtual
    async def test_hook_receives_three_columns_and_its_errors_propagate(self=None):
        seen = []

        def hook(idxs, rewards, infos, *, sign):
            seen.append((idxs, rewards, [one.rollout_id for one in infos]))
            return [sign * reward for reward in rewards]

        async with AsyncRewardAgent(held := HeldScorer()) as agent:
            await agent.submit(requests("a", "b", "c"), 3)
            await settled()
            for name, score in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
                held.answer(name, score=score)
            assert await agent.get(3, hook, sign=-1) == [-1.0, -2.0, -3.0]
            assert seen == [([0, 1, 2], [1.0, 2.0, 3.0], ["a", "b", "c"])]
            await agent.submit(requests("d"))
            await settled()
            held.answer("d")
            with pytest.raises(TypeError, match="missing 1 required keyword-only argument"):
                await agent.get(1, hook)
            assert (await agent.get(1)).rewards == [1.0]

    @virtual
    async def test_hook_that_raises_loses_no_results(self=None):
        def broken(*_):
            raise ValueError("broken")

        async with AsyncRewardAgent(held := HeldScorer()) as agent:
            for name in ("x", "y"):
                await agent.submit(requests(*(f"{name}{n}" for n in range(6))), 2)
                await settled()
                for n in (4, 5, 2, 3, 0, 1):
                    held.answer(f"{name}{n}", score=float(n))
                await settled()
            for size in (2, 3, 6):  # a group, a part of one, and the whole batch
                with pytest.raises(ValueError, match="broken"):
                    await agent.get(size, broken, cut_groups=True)
            # The results of the first batch still come first, also as whole groups.
            group = (await agent.get_group()).data_idxs
            rest = [index for _ in range(2) for index in (await agent.get(2, cut_groups=True)).data_idxs]
            assert sorted([*group, *rest]) == [0, 1, 2, 3, 4, 5]
            assert (await agent.get(6)).rewards == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]

    @virtual
    async def test_hook_arguments_without_a_hook_are_rejected(self=None):
        async with AsyncRewardAgent(HeldScorer()) as agent:
            with pytest.raises(ConfigError, match="get: scale can be passed only with hook_func"):
                await agent.get(1, scale=3.0)


class TestSyncRewardAgent:
    @staticmethod
    def agent():
        async def value(messages):
            return {"score": float(messages[-1].text)}

        return SyncRewardAgent(reward_spec(value), max_concurrency=4)

    def test_submit_get_and_mini_batches(self):
        with self.agent() as agent:
            ticket = agent.submit(requests(0, 1, 2, 3), 2)
            agent.compute_reward_pipeline(requests(7, 8), 2)
            chunks = [chunk.data_idxs for chunk in agent.mini_batches(2, ticket=ticket, order="submission")]
            assert chunks == [[0, 1], [2, 3]]
            assert agent.get(2, lambda idxs, rewards, infos, add: [add + one for one in rewards], add=1) == [8.0, 9.0]
            with pytest.raises(ConfigError, match="no results are outstanding"):
                agent.get_group()
            assert agent.stats.done == 6
        with pytest.raises(RewardError, match="with SyncRewardAgent"):
            agent.get(1)

    def test_ticket_can_be_cancelled_from_the_calling_thread(self):
        held = HeldScorer()
        with SyncRewardAgent(held) as agent:
            ticket = agent.submit(requests("a"))
            ticket.cancel()
            assert agent.get(1).rewards == [None]
