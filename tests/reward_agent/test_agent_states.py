"""Test `AsyncRewardAgent` against a model, with submit, get, cancel, fail and deadlines in any order.

Every request comes back exactly once, in its own ticket, at its own place, as what it was answered, or named as failed.
"""

from __future__ import annotations

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reward_kit.errors import ConfigError
from reward_kit.providers.request_queue import RetryPolicy
from reward_kit.reward_agent import AsyncRewardAgent, Retries
from tests.profiles import examples
from tests.reward_agent import virtual_time
from tests.reward_agent.held_scorer import HeldScorer, requests

OPEN = "open"


class AgentAndModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = virtual_time.runner()
        self.tickets = []
        self.expected = {}  # (ticket, index) -> OPEN, a score, or the class of a failure
        self.deadlines = {}
        self.attempts = {}
        self.delivered = {}
        self.getting = []
        self.may_cut = set()
        self.names = 0
        self.keeper = None

    def do(self, action=None):
        """Return the result of `action` in the loop, once all its immediate consequences have happened."""

        async def act():
            result = action() if action is not None else None
            if asyncio.iscoroutine(result) or (result is not None and result is self.keeper):
                result = await result
            await virtual_time.settled()
            return result

        result = self.runner.run(act())
        now = self.runner.get_loop().time()
        for ticket, deadline in list(self.deadlines.items()):
            if deadline <= now:
                del self.deadlines[ticket]
                self.end(ticket, "timeout")
        self.take_what_came()
        return result

    def end(self, ticket, outcome):
        for key in [key for key, state in self.expected.items() if key[0] == ticket and state == OPEN]:
            self.expected[key] = outcome

    def take_what_came(self):
        for task, ticket in [pair for pair in self.getting if pair[0].done()]:
            self.getting.remove((task, ticket))
            if not task.cancelled() and not isinstance(task.exception(), ConfigError):
                self.take(task.result(), ticket)

    def take(self, chunk, asked=None):
        number = self.tickets.index(chunk.ticket)
        assert asked in (None, number)
        assert chunk.data_idxs == sorted(chunk.data_idxs)
        for index, reward, result in zip(*chunk, strict=True):
            assert (number, index) not in self.delivered
            assert result.rollout_id == chunk.ticket.requests[index].rollout_id
            assert reward == result.score
            self.delivered[number, index] = reward if reward is not None else result.failure.failure_class
        if number not in self.may_cut:
            assert all(chunk.groups.count(group) == chunk.ticket.group_size for group in set(chunk.groups))

    @initialize(width=st.integers(1, 4))
    def open_agent(self, width):
        self.width = width
        self.scorer = HeldScorer()
        retries = Retries(RetryPolicy(max_attempts=2, base_s=1.0), seed=0)
        self.agent = AsyncRewardAgent(self.scorer, max_concurrency=width, retries=retries)
        self.leave = asyncio.Event()
        self.keeper = self.runner.get_loop().create_task(self.hold_open())
        self.do()

    async def hold_open(self):
        async with self.agent:
            await self.leave.wait()

    @rule(groups=st.integers(1, 4), size=st.integers(1, 3), deadline=st.none() | st.integers(1, 5))
    def submit(self, groups, size, deadline):
        names = range(self.names, self.names + groups * size)
        self.names += groups * size
        number = len(self.tickets)
        now = self.runner.get_loop().time()
        self.tickets.append(self.do(lambda: self.agent.submit(requests(*names), size, deadline_s=deadline)))
        self.expected.update({(number, index): OPEN for index in range(groups * size)})
        if deadline is not None:
            self.deadlines[number] = now + deadline

    def key_of(self, name):
        for number, ticket in enumerate(self.tickets):
            for index, request in enumerate(ticket.requests):
                if request.rollout_id == name:
                    return number, index
        raise AssertionError(name)

    def settle(self, name, outcome):
        key = self.key_of(name)
        assert self.expected[key] == OPEN  # what is in vain is not in flight any more
        self.expected[key] = outcome

    @precondition(lambda self: self.scorer.calls)
    @rule(data=st.data(), how=st.sampled_from(["score", "crash", "raise", "cancelled inside", "provider_error"]))
    def answer(self, data, how):
        name = data.draw(st.sampled_from(sorted(self.scorer.calls)))
        if how == "score":
            self.settle(name, float(name))
            self.do(lambda: self.scorer.answer(name, score=float(name)))
        elif how == "provider_error":
            self.attempts[name] = self.attempts.get(name, 0) + 1
            if self.attempts[name] == 2:
                self.settle(name, how)
            self.do(lambda: self.scorer.fail(name, how))
        elif how == "crash":
            self.settle(name, how)
            self.do(lambda: self.scorer.fail(name, how))
        else:
            self.settle(name, "crash")
            error = ZeroDivisionError() if how == "raise" else asyncio.CancelledError()
            self.do(lambda: self.scorer.raise_in(name, error))

    @precondition(lambda self: self.tickets)
    @rule(
        data=st.data(), size=st.integers(1, 7), order=st.sampled_from(["completion", "submission"]), cut=st.booleans()
    )
    def get(self, data, size, order, cut):
        number = data.draw(st.none() | st.integers(0, len(self.tickets) - 1))
        ticket = None if number is None else self.tickets[number]
        if cut:
            self.may_cut.update(range(len(self.tickets)) if number is None else [number])
        coroutine = self.agent.get(size, ticket=ticket, order=order, cut_groups=cut)
        self.getting.append((self.runner.get_loop().create_task(coroutine), number))
        self.do()

    @rule()
    def get_group(self):
        self.getting.append((self.runner.get_loop().create_task(self.agent.get_group()), None))
        self.do()

    @precondition(lambda self: self.getting)
    @rule(data=st.data())
    def give_up_getting(self, data):
        task, _ = self.getting[data.draw(st.integers(0, len(self.getting) - 1))]
        self.do(task.cancel)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def cancel(self, data):
        number = data.draw(st.integers(0, len(self.tickets) - 1))
        self.end(number, "refused")
        self.do(self.tickets[number].cancel)

    @rule(seconds=st.sampled_from([0.3, 1.0, 3.0]))
    def time_passes(self, seconds):
        self.do(lambda: asyncio.sleep(seconds))

    @invariant()
    def what_is_in_flight_is_wanted_and_not_too_much(self):
        if hasattr(self, "scorer"):
            assert len(self.scorer.calls) <= self.width
            assert all(self.expected[self.key_of(name)] == OPEN for name in self.scorer.calls)

    @invariant()
    def what_is_delivered_is_what_was_answered(self):
        assert all(self.expected[key] == outcome for key, outcome in self.delivered.items())

    def teardown(self):
        if not hasattr(self, "agent"):
            return self.runner.close()
        self.do()
        while OPEN in self.expected.values():
            for name in list(self.scorer.calls):
                self.settle(name, float(name))
                self.do(lambda name=name: self.scorer.answer(name, score=float(name)))
            self.do(lambda: asyncio.sleep(1.0))
        for task, _ in list(self.getting):
            if not task.done():  # for a group, where all others are asked for by one who waits for more
                self.do(task.cancel)
        for ticket in self.tickets:
            while left := ticket.deliveries.outstanding:
                self.take(self.do(lambda t=ticket, n=left: self.agent.get(n, ticket=t, cut_groups=True)))
        assert self.delivered == self.expected
        assert self.agent.stats.pending == 0
        self.leave.set()
        self.do(lambda: self.keeper)
        assert not asyncio.all_tasks(self.runner.get_loop())
        return self.runner.close()


AgentAndModel.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None, derandomize=True, database=None
)
TestAgentAndModel = AgentAndModel.TestCase
