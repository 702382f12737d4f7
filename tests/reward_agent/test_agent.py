"""`AsyncRewardAgent` returns whole groups as they complete, and each result once."""

import asyncio
import contextvars
import re
import threading
from dataclasses import replace

import pytest

from reward_kit.errors import ConfigError, RewardError
from reward_kit.models import Message
from reward_kit.reward_agent import AsyncRewardAgent, ScoringRequest, score_all, score_one
from reward_kit.typed_interface import reward_function, reward_spec


def batch(*texts):
    return [ScoringRequest(f"r{text}", [Message(role="assistant", content=str(text))]) for text in texts]


async def value(messages):
    return {"score": float(messages[-1].text)}


def agent(function=value, **kwargs):
    return AsyncRewardAgent(reward_spec(function), **kwargs)


class Gate:
    """A reward whose calls wait until the test releases them."""

    def __init__(self):
        self.open = {}

    def of(self, text):
        return self.open.setdefault(text, asyncio.Event())

    async def __call__(self, messages):
        await self.of(messages[-1].text).wait()
        return {"score": float(messages[-1].text)}

    def let(self, *texts):
        for text in texts:
            self.of(str(text)).set()


async def test_results_have_their_index_in_their_batch():
    async with agent() as scorer:
        first, second = await scorer.submit(batch(0, 1)), await scorer.submit(batch(2))
        chunks = [await scorer.get(1, ticket=second), await scorer.get(2, ticket=first)]
    assert [(chunk.data_idxs, chunk.rewards) for chunk in chunks] == [([0], [2.0]), ([0, 1], [0.0, 1.0])]
    assert [chunk.ticket for chunk in chunks] == [second, first]
    assert [scored.rollout_id for scored in chunks[1].extra_infos] == ["r0", "r1"]


async def test_score_all_returns_results_in_order_while_other_batches_wait():
    gate = Gate()
    gate.let(1, 3)
    async with agent(gate) as scorer:
        older = await scorer.submit(batch(0))
        scoring = asyncio.create_task(scorer.score_all(batch(2, 1, 4, 3), 2))
        gate.let(4, 2)
        assert [scored.score for scored in await scoring] == [2.0, 1.0, 4.0, 3.0]
        gate.let(0)
        assert (await scorer.get(1, ticket=older)).rewards == [0.0]
        assert await scorer.score_all([]) == []
        with pytest.raises(ConfigError, match="cannot be divided into groups of 2"):
            await scorer.score_all(batch(1), 2)


async def test_ticket_results_are_in_batch_order():
    async with agent() as scorer:
        ticket = await scorer.submit(batch(3, 1, 2))
        await scorer.get(3)
    assert [scored.score for scored in ticket.results] == [3.0, 1.0, 2.0]


async def test_groups_are_returned_whole_as_they_complete():
    gate = Gate()
    async with agent(gate) as scorer:
        await scorer.submit(batch(0, 1, 2, 3), group_size=2)
        gate.let(0, 3)
        getting = asyncio.create_task(scorer.get(2))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not getting.done()
        gate.let(2)
        assert (await getting).data_idxs == [2, 3]
        gate.let(1)
        assert (await scorer.get(2)).data_idxs == [0, 1]


async def test_unscored_rollout_is_none_and_its_group_is_returned():
    def picky(messages):
        if messages[-1].text == "1":
            raise ValueError("no")
        return {"score": 0.0}

    async with agent(picky) as scorer:
        await scorer.submit(batch(0, 1), group_size=2)
        chunk = await scorer.get(2)
    assert chunk.rewards == [0.0, None]
    assert [scored.failure is None for scored in chunk.extra_infos] == [True, False]


async def test_concurrent_callers_get_each_result_once():
    gate = Gate()
    async with agent(gate) as scorer:
        callers = []
        for n in range(8):
            await scorer.submit(batch(n))
            callers.append(asyncio.create_task(scorer.get(1)))
        for n in (5, 2, 7, 0, 1, 6, 4, 3):
            gate.let(n)
            await asyncio.sleep(0)
        chunks = await asyncio.gather(*callers)
    assert [chunk.rewards for chunk in chunks] == [[float(n)] for n in range(8)]  # each of the oldest batch left


async def test_timed_out_get_loses_no_result():
    gate = Gate()
    async with agent(gate) as scorer:
        await scorer.submit(batch(0, 1))
        gate.let(0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scorer.get(2), 0.02)
        gate.let(1)
        assert sorted((await scorer.get(2)).data_idxs) == [0, 1]


async def test_empty_batch_has_no_results():
    async with agent() as scorer:
        ticket = await scorer.submit([])
        assert ticket.is_done
        assert tuple(await scorer.get(0)) == tuple(await scorer.get(0, ticket=ticket)) == ([], [], [])


async def test_negative_chunk_size_is_rejected():
    async with agent() as scorer:
        await scorer.submit(batch(0))
        with pytest.raises(ConfigError, match=r"get\(-1\): chunk_size must not be negative"):
            await scorer.get(-1)


async def test_ticket_of_another_agent_is_rejected():
    async with agent() as scorer, agent() as other:
        ticket = await scorer.submit(batch(0))
        with pytest.raises(ConfigError, match="the ticket belongs to a different agent"):
            await other.get(1, ticket=ticket)


class TestRefusals:
    async def test_get_of_more_than_outstanding_results_is_rejected(self):
        async with agent() as scorer:
            await scorer.submit(batch(0, 1))
            expected = "get(3) cannot return: 2 results of batch 1 (2 requests) are outstanding"
            with pytest.raises(ConfigError, match=re.escape(expected)):
                await scorer.get(3)
            await scorer.get(2)
            with pytest.raises(ConfigError, match="no results are outstanding"):
                await scorer.get(1)

    async def test_second_caller_for_the_last_result_gets_an_error(self):
        gate = Gate()
        async with agent(gate) as scorer:
            await scorer.submit(batch(0))
            callers = [asyncio.create_task(scorer.get(1)) for _ in range(2)]
            await asyncio.sleep(0)
            gate.let(0)
            results = await asyncio.gather(*callers, return_exceptions=True)
        assert results[0].rewards == [0.0]
        assert isinstance(results[1], ConfigError)

    async def test_chunk_that_cuts_a_group_is_rejected_without_losing_results(self):
        async with agent() as scorer:
            await scorer.submit(batch(0, 1, 2), group_size=3)
            with pytest.raises(ConfigError, match=r"get\(2\) would split a group of 3; request 3, or set"):
                await scorer.get(2)
            assert (await scorer.get(3)).data_idxs == [0, 1, 2]

    async def test_get_error_without_a_ticket_names_the_batch(self):
        async with agent() as scorer:
            await scorer.submit(batch(0, 1, 2, 3), group_size=2)
            await scorer.submit(batch(4, 5, 6, 7), group_size=2)
            await scorer.get(1, cut_groups=True)
            with pytest.raises(ConfigError, match=r"3 results of batch 1 \(4 requests\) are outstanding"):
                await scorer.get(4)
            with pytest.raises(
                ConfigError, match=r"request 1 or 3, .*; 3 results of batch 1 \(4 requests\) are outstanding"
            ):
                await scorer.get(2)
            await scorer.get(3)
            with pytest.raises(ConfigError, match=r"4 results of batch 2 \(4 requests\) are outstanding"):
                await scorer.get(6)

    @pytest.mark.parametrize("group_size", [0, 2])
    async def test_batch_must_be_divisible_by_group_size(self, group_size):
        async with agent() as scorer:
            with pytest.raises(ConfigError, match=f"3 requests cannot be divided into groups of {group_size}"):
                await scorer.submit(batch(0, 1, 2), group_size)

    async def test_arguments_of_wrong_type_are_rejected_without_losing_results(self):
        async with agent() as scorer:
            with pytest.raises(ConfigError, match="item 1 is a str; pass a ScoringRequest or an episode"):
                await scorer.submit([*batch(0), "text"])
            with pytest.raises(
                ConfigError, match="a batch must be a list of requests or episodes, got an object; for a"
            ):
                await scorer.submit(object())
            with pytest.raises(ConfigError, match="group_size must be an integer, got '1'"):
                await scorer.submit(batch(0), "1")
            await scorer.submit(batch(0))
            with pytest.raises(ConfigError, match=r"chunk_size must be an integer, got 1\.5"):
                await scorer.get(1.5)
            with pytest.raises(ConfigError, match="ticket must be the result of submit, got a str"):
                await scorer.get(1, ticket="the first")
            assert (await scorer.get(1)).data_idxs == [0]

    def test_max_concurrency_must_be_positive(self):
        with pytest.raises(ConfigError, match="max_concurrency must be at least 1, got 0"):
            agent(max_concurrency=0)

    async def test_error_in_the_agent_block_releases_waiting_callers(self):
        with pytest.raises(ZeroDivisionError):
            async with agent(Gate()) as scorer:
                await scorer.submit(batch(0, 1))
                callers = [asyncio.create_task(scorer.get(1)) for _ in range(2)]
                await asyncio.sleep(0)
                raise ZeroDivisionError
        results = await asyncio.wait_for(asyncio.gather(*callers, return_exceptions=True), 30)
        assert [type(result) for result in results] == [RewardError] * 2

    async def test_calls_on_a_closed_agent_raise(self):
        scorer = agent()
        with pytest.raises(RewardError, match="not open"):
            await scorer.submit(batch(0))
        async with scorer:
            await scorer.submit(batch(0))
        for late in (scorer.submit(batch(1)), scorer.get(1), scorer.get_group(), anext(scorer.mini_batches(1))):
            with pytest.raises(RewardError, match="not open"):
                await late
        assert scorer.stats.submitted == 1
        async with scorer:
            await scorer.submit(batch(2))
            assert (await scorer.get(1)).rewards == [2.0]


async def test_calls_in_flight_are_limited_to_max_concurrency():
    running = most = 0

    async def watch(messages):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return {"score": 0.0}

    async with agent(watch, max_concurrency=3) as scorer:
        await scorer.submit(batch(*range(12)))
        await scorer.get(12)
    assert most == 3


async def test_blocking_calls_run_up_to_max_concurrency():
    barrier = threading.Barrier(50, timeout=30)

    def wait(messages):
        return {"score": float(barrier.wait() >= 0)}

    async with agent(wait, max_concurrency=50) as scorer:
        await scorer.submit(batch(*range(100)))
        assert (await scorer.get(100)).rewards == [1.0] * 100


async def test_batches_alternate_and_are_scored_in_order():
    order = []

    async def note(messages):
        order.append(int(messages[-1].text))
        return {"score": 0.0}

    async with agent(note, max_concurrency=1) as scorer:
        await scorer.submit(batch(0, 1, 2, 3, 4))
        await scorer.submit(batch(5, 6))
    assert order == [0, 1, 5, 2, 6, 3, 4]  # the first one began before the second batch was there


async def test_rewards_that_never_await_do_not_block_the_event_loop():
    turns, done = 0, False

    async def other():
        nonlocal turns
        while not done:
            turns += 1
            await asyncio.sleep(0)

    async with agent(max_concurrency=1) as scorer:
        watching = asyncio.create_task(other())
        await scorer.submit(batch(*range(20)))
        await scorer.get(20)
        done = True
        await watching
    assert turns >= 20


VARIABLE = contextvars.ContextVar("VARIABLE", default=-1.0)


class TestContextVariables:
    """Each request has a copy of the submitter's context variables."""

    @staticmethod
    def plain(messages):
        seen = VARIABLE.get()
        VARIABLE.set(float(messages[-1].text))
        return {"score": seen}

    @staticmethod
    async def waiting(messages):
        first = VARIABLE.get()
        VARIABLE.set(float(messages[-1].text))
        await asyncio.sleep(0)
        assert VARIABLE.get() == float(messages[-1].text)
        return {"score": first}

    @pytest.mark.parametrize("name", ["plain", "waiting"])
    async def test_request_sees_context_of_its_submitter_but_not_of_its_siblings(self, name):
        async with agent(getattr(self, name), max_concurrency=1) as scorer:
            VARIABLE.set(100.0)
            first = await scorer.submit(batch(0, 1))
            VARIABLE.set(200.0)
            second = await scorer.submit(batch(2, 3))
        assert [scored.score for ticket in (first, second) for scored in ticket.results] == [100.0] * 2 + [200.0] * 2
        assert VARIABLE.get() == 200.0


async def test_deadline_applies_to_each_call():
    async def sleepy(messages):
        await asyncio.sleep(30 if messages[-1].text == "0" else 0)
        return {"score": 1.0}

    async with agent(sleepy, deadline_s=0.05, max_concurrency=1) as scorer:
        ticket = await scorer.submit(batch(0, 1))
        await scorer.get(2)
    assert [scored.score for scored in ticket.results] == [None, 1.0]
    assert ticket.results[0].failure.failure_class == "timeout"


async def test_leaving_the_agent_waits_for_calls_in_flight():
    async with agent() as scorer:
        ticket = await scorer.submit(batch(4))
    assert ticket.results[0].score == 4.0


async def test_leaving_with_an_error_cancels_calls_in_flight():
    with pytest.raises(ZeroDivisionError):
        async with agent(Gate()) as scorer:
            ticket = await scorer.submit(batch(0))
            await asyncio.sleep(0)
            raise ZeroDivisionError
    assert ticket.results == [None]


class TestSandboxWarnings:
    async def test_function_requesting_a_sandbox_is_warned_about_once(self, caplog):
        walled = reward_function(id="asks for walls", sandbox="isolated")(lambda messages: {"score": 1.0})
        for _ in range(2):
            async with agent(walled) as scorer:
                await scorer.submit(batch(0))
                (scored,) = (await scorer.get(1)).extra_infos
            assert scored.sandbox == {"level": "in_process"}
        await score_one(reward_spec(walled), batch(0)[0])
        (told,) = caplog.messages
        assert told.startswith("reward 'asks for walls' requests isolated but runs in_process, without a sandbox")

    @pytest.mark.parametrize("level", [None, "in_process"])
    async def test_function_without_a_sandbox_level_is_scored_without_a_warning(self, level, caplog):
        async with agent(reward_function(sandbox=level)(lambda messages: {"score": 1.0})) as scorer:
            await scorer.submit(batch(0))
        assert caplog.messages == []

    async def test_sandbox_warning_from_loading_is_not_repeated(self, caplog):
        spec = reward_spec(reward_function(id="weakened", sandbox="warm")(lambda messages: {"score": 1.0}))
        await score_one(replace(spec, weakened_from="warm"), batch(0)[0])
        assert caplog.messages == []


async def test_reopened_agent_has_its_full_concurrency():
    scorer = agent(max_concurrency=2)
    with pytest.raises(ZeroDivisionError):
        async with scorer:
            lost = await scorer.submit(batch(0, 1, 2))
            raise ZeroDivisionError
    async with scorer:
        ticket = await scorer.submit(batch(3, 4, 5))
    assert lost.results == [None] * 3
    assert [scored.score for scored in ticket.results] == [3.0, 4.0, 5.0]


async def test_closed_agent_leaves_no_threads():
    before = threading.enumerate()
    async with agent(lambda messages: {"score": 1.0}) as scorer:
        await scorer.submit(batch(*range(100)))
        await scorer.get(100)
        assert len(threading.enumerate()) > len(before)
    assert threading.enumerate() == before


@reward_function
class Doubling:
    def score(self, messages):
        return {"score": 2 * float(messages[-1].text)}


@pytest.mark.parametrize(
    ("reward", "scores"), [(value, [0.0, 3.0]), (reward_function(value), [0.0, 3.0]), (Doubling, [0.0, 6.0])]
)
def test_score_all_takes_functions_and_classes(reward, scores):
    assert [scored.score for scored in score_all(reward, batch(0, 3))] == scores
    assert [scored.score for scored in score_all(reward, batch(0, 3), 2, max_concurrency=1)] == scores


def test_score_all_needs_whole_groups():
    with pytest.raises(ConfigError, match="groups of 2"):
        score_all(value, batch(1, 2, 3), 2)
