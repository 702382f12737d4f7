"""Threads for blocking calls: results, concurrency, deadlines, cancellation and shutdown."""

import asyncio
import contextvars
import gc
import random
import threading
import time
import weakref

import anyio
import pytest

from reward_kit.reward_agent.in_process import CallThreads, OverdueError

WAIT_S = 30.0  # for what must happen; a test that waits this long has failed


@pytest.fixture
def made():
    """A factory of `CallThreads` that are closed at the end, with a check that no thread is left."""
    before = set(threading.enumerate())
    everything = []

    def make(*arguments, **named):
        everything.append(CallThreads(*arguments, **named))
        return everything[-1]

    yield make
    for threads in everything:
        threads.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def ours():
    """Return the threads of this test; a reward kept open by another test has its own."""
    return [thread for thread in threading.enumerate() if thread.name == "reward-kit calls" and thread not in _EARLIER]


_EARLIER = set()


@pytest.fixture(autouse=True)
def _threads_of_others():
    _EARLIER.clear()
    _EARLIER.update(threading.enumerate())


class HeldCall:
    """A call that signals its start and waits until the test releases it."""

    def __init__(self):
        self.begun, self.ended, self._let = threading.Event(), threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        assert self._let.wait(WAIT_S)
        self.ended.set()
        return "late"

    def let(self):
        self._let.set()

    async def has(self, event):
        assert await asyncio.to_thread(event.wait, WAIT_S)


class TestResults:
    async def test_each_call_gets_its_own_result(self, made):
        threads, numbers = made(), random.Random(5)
        order = [numbers.randrange(1000) for _ in range(500)]
        assert await asyncio.gather(*(threads.run(lambda n=n: n) for n in order)) == order

    async def test_calls_run_in_submission_order(self, made):
        seen = []
        threads = made(most=1)
        await asyncio.gather(*(threads.run(lambda n=n: seen.append(n)) for n in range(3)))
        assert seen == [0, 1, 2]

    @pytest.mark.parametrize("error", [ValueError("v"), SystemExit(3), TimeoutError("own")])
    async def test_exception_is_raised_to_the_awaiting_caller(self, made, error):
        def raising():
            raise error

        with pytest.raises(type(error)) as caught:
            await made().run(raising)
        assert caught.value is error
        assert [frame.name for frame in caught.traceback][-1] == "raising"

    async def test_keyboard_interrupt_in_a_call_does_not_end_the_event_loop(self, made):
        def raising():
            raise KeyboardInterrupt

        with pytest.raises(RuntimeError, match="the function raised KeyboardInterrupt") as caught:
            await made().run(raising)
        assert isinstance(caught.value.__cause__, KeyboardInterrupt)

    async def test_stop_iteration_becomes_a_runtime_error(self, made):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await made().run(lambda: next(iter(())))

    async def test_raising_call_does_not_end_its_thread(self, made):
        threads = made(most=1)
        with pytest.raises(SystemExit):
            await threads.run(lambda: (_ for _ in ()).throw(SystemExit))
        thread = ours()
        await threads.run(int)
        assert ours() == thread

    async def test_call_sees_a_copy_of_the_context_of_its_caller(self, made):
        variable, threads = contextvars.ContextVar("variable", default="none"), made()

        async def caller(name):
            variable.set(name)
            seen = await threads.run(lambda: (variable.get(), variable.set("changed"))[0])
            return seen, variable.get()

        assert await asyncio.gather(caller("a"), caller("b")) == [("a", "a"), ("b", "b")]
        assert await threads.run(variable.get) == "none"

    def test_call_can_run_its_own_event_loop(self):
        async def main():
            threads = CallThreads()
            result = await threads.run(lambda: anyio.run(anyio.sleep, 0))
            threads.close()
            return result

        assert anyio.run(main) is None

    async def test_finished_call_is_released(self, made):
        class Big:
            pass

        threads, big = made(), Big()
        gone = weakref.ref(big)
        await threads.run(lambda big=big: big)
        del big
        gc.collect()
        assert gone() is None

    async def test_handled_error_is_released(self, made):
        class OwnError(Exception):
            pass

        def raising():
            raise OwnError

        gc.disable()  # what is in no cycle needs none
        try:
            await made().run(raising)
        except OwnError as error:
            gone = weakref.ref(error)
        finally:
            gc.enable()
        assert gone() is None


class TestConcurrency:
    async def test_interdependent_calls_run_concurrently(self, made):
        threads, barrier = made(), threading.Barrier(16, timeout=WAIT_S)
        places = await asyncio.gather(*(threads.run(barrier.wait) for _ in range(16)))
        assert sorted(places) == list(range(16))

    async def test_long_call_does_not_block_the_next_call(self, made):
        threads, held = made(), HeldCall()
        lasting = asyncio.create_task(threads.run(held))
        await held.has(held.begun)
        assert await threads.run(lambda: "quick") == "quick"
        held.let()
        assert await lasting == "late"

    async def test_result_does_not_wait_for_a_later_call(self, made):
        threads, held = made(), HeldCall()
        quick = asyncio.create_task(threads.run(lambda: "quick"))
        lasting = asyncio.create_task(threads.run(held))
        assert await quick == "quick"
        assert not lasting.done()
        held.let()
        assert await lasting == "late"

    async def test_threads_are_limited_to_the_maximum(self, made):
        threads, calls = made(most=2), [HeldCall() for _ in range(3)]
        running = [asyncio.create_task(threads.run(call)) for call in calls]
        for call in calls[:2]:
            await call.has(call.begun)
        await asyncio.sleep(0.01)
        assert len(ours()) == 2
        assert not calls[2].begun.is_set()
        for call in calls:
            call.let()
        assert await asyncio.gather(*running) == ["late"] * 3
        assert len(ours()) == 2

    async def test_threads_are_reused(self, made):
        threads = made(most=1)
        for _ in range(50):
            await threads.run(int)
        assert len(ours()) == 1


class TestDeadline:
    async def test_overdue_call_is_abandoned_and_its_result_dropped(self, made):
        threads, held = made(0.02), HeldCall()
        with pytest.raises(OverdueError):
            await threads.run(held)
        held.let()
        await held.has(held.ended)
        assert await threads.run(lambda: "next", is_bounded=False) == "next"

    async def test_waiting_for_a_thread_does_not_count_against_the_deadline(self, made):
        threads, calls = made(0.2, most=1), [HeldCall(), HeldCall()]
        results = await asyncio.gather(
            *(threads.run(call) for call in calls), threads.run(lambda: "made"), return_exceptions=True
        )
        assert [type(result) for result in results[:2]] == [OverdueError] * 2
        assert results[2] == "made"  # having waited for twice its deadline
        for call in calls:
            call.let()

    async def test_queued_call_has_its_full_deadline(self, made):
        threads, calls = made(0.2, most=1), [HeldCall() for _ in range(3)]
        first, second, third = (
            asyncio.create_task(threads.run(call, is_bounded=call is not calls[1])) for call in calls
        )
        with pytest.raises(OverdueError):
            await first
        await asyncio.sleep(0.15)
        calls[1].let()
        await second
        await calls[2].has(calls[2].begun)
        began = time.monotonic()
        with pytest.raises(OverdueError):
            await third
        assert time.monotonic() - began > 0.1
        calls[0].let(), calls[2].let()

    async def test_abandoned_thread_does_not_count_against_the_maximum(self, made):
        threads, calls = made(0.02, most=1), [HeldCall() for _ in range(3)]
        results = await asyncio.gather(*(threads.run(call) for call in calls), return_exceptions=True)
        assert [type(result) for result in results] == [OverdueError] * 3
        assert all(call.begun.is_set() for call in calls)
        for call in calls:
            call.let()

    async def test_overlapping_calls_each_meet_their_deadline(self, made):
        threads, calls = made(0.04), [HeldCall(), HeldCall()]
        first = asyncio.create_task(threads.run(calls[0]))
        await asyncio.sleep(0.02)
        second = asyncio.create_task(threads.run(calls[1]))
        for running in (first, second):
            with pytest.raises(OverdueError):
                await running
        for call in calls:
            call.let()

    async def test_unbounded_call_has_no_deadline(self, made):
        threads, held = made(0.01), HeldCall()
        lasting = asyncio.create_task(threads.run(held, is_bounded=False))
        other = HeldCall()
        with pytest.raises(OverdueError):
            await threads.run(other)
        assert not lasting.done()
        held.let(), other.let()
        assert await lasting == "late"


class TestCancellation:
    async def test_cancelled_queued_call_never_runs(self, made):
        threads, held, seen = made(most=1), HeldCall(), []
        lasting = asyncio.create_task(threads.run(held))
        await held.has(held.begun)
        waiting = asyncio.create_task(threads.run(lambda: seen.append("made")))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        held.let()
        await lasting
        await threads.run(int)
        assert seen == []

    async def test_cancelled_scope_starts_no_call(self, made):
        threads, begun = made(), threading.Event()
        with anyio.CancelScope() as scope:
            scope.cancel()
            asyncio.get_running_loop().call_soon(begun.wait, 0.05)  # it would have had the time
            await threads.run(begun.set)
        assert not begun.is_set()

    async def test_cancelled_running_call_is_abandoned_and_its_thread_ends(self, made):
        threads, held = made(most=1), HeldCall()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(threads.run, held)
                await held.has(held.begun)
                lost = ours()
                scope.cancel()
        assert await threads.run(lambda: "next") == "next"
        assert len(ours()) == 2
        held.let()
        lost[0].join(WAIT_S)
        assert lost[0] not in ours()

    async def test_cancelled_and_overdue_calls_do_not_affect_other_results(self, made):
        numbers, threads = random.Random(11), made(0.2, most=3)
        calls = {n: HeldCall() for n in numbers.sample(range(60), 6)}

        async def one(n):
            return await threads.run(calls.get(n, lambda: n))

        tasks = [asyncio.create_task(one(n)) for n in range(60)]
        cancelled = set(numbers.sample(range(60), 15))
        await asyncio.sleep(0)
        for n in cancelled:
            tasks[n].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for n, result in enumerate(results):
            wanted = asyncio.CancelledError if n in cancelled else OverdueError if n in calls else int
            assert type(result) is wanted
            assert wanted is not int or result == n
        for call in calls.values():
            call.let()


class TestClose:
    async def test_close_ends_idle_threads(self):
        threads = CallThreads()
        barrier = threading.Barrier(3, timeout=WAIT_S)
        await asyncio.gather(*(threads.run(barrier.wait) for _ in range(3)))
        assert len(ours()) >= 3
        threads.close()
        assert ours() == []

    async def test_close_does_not_wait_for_running_calls(self):
        threads, held = CallThreads(most=1), HeldCall()
        lasting = asyncio.create_task(threads.run(held))
        await held.has(held.begun)
        threads.close()
        (thread,) = ours()
        held.let()
        assert await lasting == "late"
        thread.join(WAIT_S)
        assert ours() == []

    async def test_calls_after_close_run_and_leave_no_thread(self):
        threads, barrier = CallThreads(), threading.Barrier(2, timeout=WAIT_S)
        await threads.run(int)
        threads.close()
        assert sorted(await asyncio.gather(*(threads.run(barrier.wait) for _ in range(2)))) == [0, 1]
        for thread in ours():
            thread.join(WAIT_S)
        assert ours() == []

    def test_thread_that_outlives_its_event_loop_ends_silently(self, made):
        held = HeldCall()

        async def main():
            task = asyncio.create_task(made(most=1).run(held))
            await held.has(held.begun)
            task.cancel()

        asyncio.run(main())
        (thread,) = ours()
        held.let()
        thread.join(WAIT_S)
        assert ours() == []
