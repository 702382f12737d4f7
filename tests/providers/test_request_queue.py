"""The request queue of an endpoint, in fake time: pace, order, concurrency and outages."""

from __future__ import annotations

import asyncio
import time
from collections import deque

import pytest

from reward_kit.errors import ProviderError
from reward_kit.providers import Rates
from reward_kit.providers.faults import AccessError, DeadlineError, TransientError, UnknownHostError, UnreachableError
from reward_kit.providers.request_queue import Permit, RequestQueue
from tests.providers.fake_clock import FakeClock, settle

REFUSED = TransientError("slow down", status=429)
BROKEN = TransientError("HTTP 500", status=500)
NOBODY = UnreachableError("refused the connection")


class RecordingListener:
    """A listener that records its notifications."""

    def __init__(self, patience_s: float | None = None) -> None:
        self.outage_time_s = patience_s
        self.lines: list[str] = []
        self.reasons: list[str] = []

    def tell(self, line: str) -> None:
        self.lines.append(line)

    def give_up(self, reason: str) -> None:
        self.reasons.append(reason)


class Scene:
    """A queue in fake time, and requests on it."""

    def __init__(self, rates: Rates | None = None, patience_s: float | None = None) -> None:
        self.clock, self.watcher = FakeClock(), RecordingListener(patience_s)
        self.queue = RequestQueue("http://there", rates or Rates(), self.watcher, self.clock)
        self.entered: deque[tuple[float, int]] = deque()
        self.tasks: list[asyncio.Task] = []
        self.down_until = 0.0

    def request(self, name: int, *outcomes: object, seconds: float = 1.0, **permit: float) -> asyncio.Task:
        """Run a request whose attempts take `seconds` each: errors, then an answer."""
        task = asyncio.create_task(self._request(name, list(outcomes), seconds, permit))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # looked at, or not wanted
        self.tasks.append(task)
        return task

    async def _request(self, name: int, outcomes: list, seconds: float, options: dict) -> int:
        """Return the number of attempts that counted."""
        permit, counted = self.queue.permit(**{"size": 400, **options}), 0
        try:
            while True:
                await permit.enter()
                self.entered.append((self.clock.time, name))
                await self.clock.sleep(seconds)
                outcome = outcomes.pop(0) if outcomes else BROKEN if self.clock.time < self.down_until else None
                if outcome is None:
                    permit.answered(100, 50)
                    return counted
                counted += not permit.failed(outcome, is_last=counted >= 4)
                if counted >= 5 or not isinstance(outcome, TransientError):
                    raise outcome
        finally:
            permit.leave()

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    @property
    def starts(self) -> list[float]:
        return [round(when - 1_000.0, 6) for when, _ in self.entered]


async def answered_once(scene: Scene) -> None:
    scene.request(0, seconds=0.0)
    await scene.clock.advance(0.1)
    scene.entered.clear()


async def test_requests_do_not_wait_without_rates():
    scene = Scene()
    for name in range(200):
        scene.request(name)
    await scene.clock.advance(1.0)
    assert scene.starts == [0.0] * 200
    assert scene.queue.in_flight == 0


async def test_requests_start_in_order_of_arrival_and_evenly_spaced():
    scene = Scene(Rates(requests_per_minute=30))
    for name in range(10):
        scene.request(name)
    await scene.clock.advance(60.0)
    assert [name for _, name in scene.entered] == list(range(10))
    assert scene.starts == pytest.approx([2.0 * n for n in range(10)])


async def test_token_rate_uses_actual_usage():
    scene = Scene(Rates(tokens_per_minute=6_000))  # 100 a second; a request really uses 150
    for name in range(60):
        scene.request(name, seconds=0.01, max_completion=1_000)
    await scene.clock.advance(60.0)
    in_a_minute = sum(start < 60 for start in scene.starts)
    assert 36 <= in_a_minute <= 41


async def test_requests_in_flight_are_limited_to_max_connections():
    scene = Scene(Rates(max_connections=3))
    for name in range(9):
        scene.request(name)
    await scene.clock.advance(0.5)
    assert scene.queue.in_flight == 3
    await scene.clock.advance(10.0)
    assert scene.starts == [0.0] * 3 + [1.0] * 3 + [2.0] * 3


async def test_longest_wait_is_that_of_an_answer_or_of_the_queue():
    scene = Scene(Rates(max_connections=1))
    assert scene.queue.longest_wait() is None
    scene.request(0, seconds=20.0)
    await scene.clock.advance(5.0)
    scene.request(1, seconds=1.0)
    await scene.clock.advance(10.0)
    assert scene.queue.longest_wait() == (pytest.approx(15.0), False)
    scene.request(2, seconds=30.0)
    await scene.clock.advance(7.0)  # the second has been answered, the third is sent
    assert scene.queue.longest_wait() == (pytest.approx(1.0), False)
    scene.request(3)
    await scene.clock.advance(3.0)
    scene.tasks[2].cancel()
    await scene.clock.advance(5.0)
    assert scene.queue.longest_wait() is None


async def test_thousands_of_waiting_requests_cost_little_cpu_time():
    scene = Scene(Rates(max_connections=1))
    for name in range(2_000):
        scene.request(name, seconds=0.0)
    began = time.process_time()
    await scene.clock.advance(10.0)
    assert len(scene.entered) == 2_000
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize("moment", ["waiting", "let in", "in flight"])
async def test_cancelled_request_frees_its_slot(moment):
    scene = Scene(Rates(max_connections=1))
    first, second = scene.request(1), scene.request(2)
    await settle()
    if moment == "waiting":
        second.cancel()
    elif moment == "in flight":
        first.cancel()
    else:
        first.cancel()
        for _ in range(4):  # until the first has let the second in, which has not yet run
            await asyncio.sleep(0)
            if scene.queue.in_flight:
                break
        second.cancel()
    await settle()
    third = scene.request(3)
    await scene.clock.advance(5.0)
    assert third.done() and third.result() == 0
    assert scene.queue.in_flight == 0
    await scene.end()


async def test_cancelled_waiter_does_not_delay_the_next_requests():
    scene = Scene(Rates(requests_per_minute=6))
    tasks = [scene.request(name) for name in range(4)]
    await scene.clock.advance(1.0)
    tasks[1].cancel()
    await scene.clock.advance(30.0)
    assert [name for _, name in scene.entered] == [0, 2, 3]
    assert scene.starts == pytest.approx([0.0, 10.0, 20.0])


async def test_burst_of_refusals_costs_no_attempts_and_finds_endpoint_capacity():
    """An endpoint with ten slots refuses all others at once."""
    scene, places, refusals = Scene(), 10, 0

    async def request(name: int) -> int:
        nonlocal places, refusals
        permit, counted = scene.queue.permit(400), 0
        while True:
            await permit.enter()
            await scene.clock.sleep(0.05)
            if places == 0:
                refusals += 1
                counted += not permit.failed(REFUSED, is_last=counted >= 4)
                if counted:
                    await scene.clock.sleep(0.5)
                continue
            places -= 1
            await scene.clock.sleep(2.0)
            places += 1
            permit.answered(100, 50)
            return counted

    tasks = [asyncio.create_task(request(name)) for name in range(300)]
    await scene.clock.advance(2.0 * 300 / 10 * 1.5)
    assert all(task.done() for task in tasks)
    assert max(task.result() for task in tasks) <= 2
    assert sum(task.result() for task in tasks) < 30, "a burst costs hardly one in ten an attempt, and not all of them"
    assert refusals < 350
    assert [line for line in scene.watcher.lines if "limits the rate; at most 10 requests" in line]


async def test_retry_after_pauses_the_whole_queue():
    scene = Scene()
    await answered_once(scene)
    scene.request(1, TransientError("later", 20.0, 429), seconds=0.0)
    await scene.clock.advance(0.0)
    scene.request(2)
    await scene.clock.advance(19.9)
    assert [name for _, name in scene.entered] == [1]
    await scene.clock.advance(5.0)
    assert {name for _, name in scene.entered} == {1, 2}


async def test_endpoint_that_never_answers_stops_the_run_at_its_first_timeout_after_a_minute():
    scene = Scene()
    scene.request(1, DeadlineError("sent nothing"), seconds=40.0)
    await scene.clock.advance(45.0)
    assert scene.watcher.reasons == []
    scene.request(2, DeadlineError("sent nothing"), seconds=40.0)
    await scene.clock.advance(45.0)
    assert len(scene.watcher.reasons) == 1 and "has not responded for 8" in scene.watcher.reasons[0]


async def test_timeout_of_an_endpoint_that_has_answered_is_retried():
    scene = Scene()
    await answered_once(scene)
    scene.request(1, DeadlineError("sent nothing"), seconds=90.0)
    await scene.clock.advance(200.0)
    assert scene.watcher.reasons == []


async def test_retry_after_of_a_rare_rejection_delays_only_its_request():
    scene = Scene()
    for name in range(40):
        scene.request(name, seconds=0.1)
    await scene.clock.advance(0.2)
    scene.request(40, TransientError("later", 20.0, 429), seconds=0.0)
    for name in range(41, 60):
        scene.request(name, seconds=0.1)
    await scene.clock.advance(0.2)
    scene.entered.clear()
    scene.request(60)
    await scene.clock.advance(0.1)
    assert [name for _, name in scene.entered] == [60]
    assert scene.queue._concurrency.limit == float("inf")


async def test_retry_after_of_a_single_rejection_pauses_the_queue_only_if_another_follows():
    scene = Scene()
    later = TransientError("later", 20.0, 429)
    scene.request(0, later, seconds=0.0)
    for name in range(1, 4):
        scene.request(name, later if name == 3 else None, seconds=float(name))
    await scene.clock.advance(0.5)
    scene.request(4)
    await scene.clock.advance(2.0)
    assert 4 in [name for _, name in scene.entered]
    await scene.clock.advance(1.0)
    scene.request(5)
    await scene.clock.advance(10.0)
    assert 5 not in [name for _, name in scene.entered], "the second rejection of the burst pauses the queue"


async def test_retry_after_beyond_outage_time_stops_the_run():
    scene = Scene(patience_s=60.0)
    await answered_once(scene)
    scene.request(1, TransientError("tomorrow", 86_400.0, 429), seconds=0.0)
    await scene.clock.advance(1.0)
    assert scene.watcher.reasons == ["http://there requests a pause of 86400 s"]
    await scene.end()


async def test_request_refused_alone_fails_when_its_budget_is_used_up():
    scene = Scene()
    await answered_once(scene)
    task = scene.request(1, *[REFUSED] * 99, seconds=0.1, budget_s=100.0)
    await scene.clock.advance(400.0)
    with pytest.raises(TransientError):
        task.result()
    assert not scene.watcher.reasons


async def test_outage_costs_no_attempts_and_is_probed_by_single_requests():
    scene = Scene()
    await answered_once(scene)
    scene.down_until = scene.clock.time + 100.0
    tasks = [scene.request(name) for name in range(50)]
    await scene.clock.advance(90.0)
    assert len(scene.entered) == 50 + 4 + 6  # everyone, the four that were tried again, and the probes
    assert len(scene.watcher.lines) == 1
    assert "http://there has failed 5 times in a row since" in scene.watcher.lines[0]
    assert "the run pauses and retries, first after 1 s and later every 30 s: HTTP" in scene.watcher.lines[0]
    await scene.clock.advance(60.0)
    assert sorted(task.result() for task in tasks) == [0] * 46 + [1] * 4
    assert "http://there is responding again after" in scene.watcher.lines[1]
    assert not scene.watcher.reasons


async def test_probe_intervals_grow_up_to_thirty_seconds():
    scene = Scene(patience_s=1_000.0)
    await answered_once(scene)
    for name in range(5):
        scene.request(name, *[BROKEN] * 99, seconds=0.0)
    await scene.clock.advance(130.0)
    probes = [start - 0.1 for start in scene.starts if start > 0.5]
    assert probes == pytest.approx([1, 3, 7, 15, 31, 61, 91, 121])
    await scene.end()


async def test_cancelled_probe_is_repeated():
    scene = Scene()
    await answered_once(scene)
    tasks = [scene.request(name, *[BROKEN] * 2, seconds=0.5) for name in range(6)]
    await scene.clock.advance(1.6)  # the first probe is under way
    assert scene.queue.in_flight == 1
    prober = scene.entered[-1][1]
    tasks[prober].cancel()
    await scene.clock.advance(60.0)
    assert all(task.done() for task in tasks)
    assert scene.queue.in_flight == 0


async def test_waiting_requests_fail_after_outage_patience_with_a_single_stop_reason():
    scene = Scene(patience_s=100.0)
    await answered_once(scene)
    tasks = [scene.request(name, *[NOBODY] * 99, seconds=0.1) for name in range(8)]
    await scene.clock.advance(99.0)
    assert not any(task.done() for task in tasks) and not scene.watcher.reasons
    await scene.clock.advance(120.0)
    assert len(scene.watcher.reasons) == 1
    assert "http://there has not responded for 100 s: refused the connection" in scene.watcher.reasons[0]
    for task in tasks:
        with pytest.raises(ProviderError, match="not responded for 100 s"):
            task.result()


async def test_give_up_callback_can_cancel_waiting_requests_before_they_fail():
    scene = Scene(patience_s=10.0)
    await answered_once(scene)
    tasks = [scene.request(name, *[NOBODY] * 99, seconds=0.1) for name in range(8)]
    scene.watcher.give_up = lambda reason: [task.cancel() for task in tasks]
    await scene.clock.advance(60.0)
    assert all(task.cancelled() for task in tasks)


async def test_abandoned_endpoint_is_still_probed():
    scene = Scene(patience_s=10.0)
    await answered_once(scene)
    for name in range(5):
        scene.request(name, *[NOBODY] * 99, seconds=0.1)
    await scene.clock.advance(120.0)
    probe, hopeless = scene.request(10, seconds=0.1), scene.request(11)
    await scene.clock.advance(1.0)
    assert probe.result() == 0
    with pytest.raises(ProviderError, match="not responded"):
        hopeless.result()
    after = scene.request(12)
    await scene.clock.advance(2.0)
    assert after.result() == 0


@pytest.mark.parametrize(("error", "patience_s", "until"), [(BROKEN, None, 60), (NOBODY, None, 3), (NOBODY, 20.0, 20)])
async def test_endpoint_that_never_answered_is_given_up_early(error, patience_s, until):
    scene = Scene(patience_s=patience_s)
    scene.request(1, *[error] * 99, seconds=0.1)
    scene.request(2, *[error] * 99, seconds=0.1)
    await scene.clock.advance(until - 1.0)
    assert not scene.watcher.reasons
    await scene.clock.advance(until + 2.0)
    assert len(scene.watcher.reasons) == 1
    assert bool(scene.watcher.lines) == (until > 3)  # a wrong address is reported in one line
    with pytest.raises(ProviderError):
        scene.tasks[0].result()


async def test_run_stops_when_the_first_five_requests_are_rejected():
    scene = Scene()
    for name in range(20):
        scene.request(name, ProviderError("unknown parameter"), seconds=1.0 + name)
    await scene.clock.advance(4.5)
    assert not scene.watcher.reasons
    await scene.clock.advance(0.6)
    assert scene.watcher.reasons == ["the first 5 requests all failed; the latest error: unknown parameter"]


async def test_rejected_requests_after_a_completion_do_not_stop_the_run():
    scene = Scene()
    await answered_once(scene)
    for name in range(20):
        scene.request(name, ProviderError("content policy"), seconds=1.0)
    await scene.clock.advance(10.0)
    assert not scene.watcher.reasons


async def test_failing_request_among_successful_requests_fails_alone():
    scene = Scene()
    poison = scene.request(0, *[BROKEN] * 99, seconds=0.2)
    others = [scene.request(name, seconds=0.3 * name) for name in range(1, 20)]
    await scene.clock.advance(20.0)
    with pytest.raises(TransientError):
        poison.result()
    assert [task.result() for task in others] == [0] * 19
    assert not scene.watcher.lines


async def test_single_failing_request_is_not_an_outage_but_a_second_failure_is():
    scene = Scene()
    await answered_once(scene)
    poison = scene.request(0, *[BROKEN] * 99)
    await scene.clock.advance(10.0)
    with pytest.raises(TransientError):
        poison.result()
    assert not scene.watcher.lines
    following = scene.request(1, BROKEN, BROKEN)
    await scene.clock.advance(60.0)
    assert following.result() == 0
    assert len(scene.watcher.lines) == 2


async def test_refused_connection_is_always_an_outage():
    scene = Scene()
    await answered_once(scene)
    task = scene.request(0, *[NOBODY] * 8)
    await scene.clock.advance(300.0)
    assert task.result() == 4
    assert len(scene.watcher.lines) == 2


async def test_unknown_host_is_an_outage_only_after_a_first_answer():
    scene = Scene()
    wrong = scene.request(0, UnknownHostError("no such host"))
    await scene.clock.advance(2.0)
    assert scene.watcher.reasons == ["no such host"]
    with pytest.raises(UnknownHostError):
        wrong.result()
    await answered_once(scene)
    permit = scene.queue.permit(400)
    await permit.enter()
    assert permit.failed(UnknownHostError("no such host"), is_last=True)


@pytest.mark.parametrize("status, stops", [(401, True), (402, True), (403, False)])
async def test_rejected_api_key_stops_the_run(status, stops):
    scene = Scene()
    await answered_once(scene)
    scene.request(1, AccessError("no", status))
    await scene.clock.advance(2.0)
    assert bool(scene.watcher.reasons) is stops


async def test_status_403_before_any_answer_stops_the_run():
    scene = Scene()
    scene.request(1, AccessError("no", 403))
    await scene.clock.advance(2.0)
    assert scene.watcher.reasons == ["no"]


async def test_permit_reports_time_waited_in_the_queue():
    scene = Scene(Rates(requests_per_minute=6))
    permits: list[Permit] = [scene.queue.permit(1) for _ in range(3)]
    tasks = [asyncio.create_task(permit.enter()) for permit in permits]
    await scene.clock.advance(30.0)
    assert [permit.waited_s for permit in permits] == pytest.approx([0.0, 10.0, 20.0])
    await asyncio.gather(*tasks)


def test_queue_works_across_event_loops():
    scene = Scene(Rates(max_connections=1))

    async def interrupted() -> None:
        await scene.queue.permit(1).enter()  # never left

    async def again() -> None:
        async with asyncio.timeout(1):
            await scene.queue.permit(1).enter()

    asyncio.run(interrupted())
    asyncio.run(again())
