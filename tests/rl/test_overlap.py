"""Test the overlap simulator: call times, the four schedules, lower bounds and timelines."""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import math
import selectors
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit.errors import ConfigError
from reward_kit.models import EvaluateResult, Message
from reward_kit.reward_agent import AsyncRewardAgent, ScoringRequest
from reward_kit.rl.overlap import (
    Latency,
    Overlap,
    PipelineSettings,
    Schedule,
    draw_latencies,
    draw_timeline,
    list_schedule,
    parse_latency,
    rank_correlation,
    simulate_overlap,
)
from reward_kit.typed_interface import reward_spec
from tests.profiles import examples

SYNC, MINIBATCH, ONE_STEP_OFF, BOTH = Schedule
BASE = PipelineSettings(rollout_s=8, update_s=2, batch_size=8, group_size=2, minibatch_size=2, steps=4)

# Halves and quarters add up exactly, so that "no later" needs no tolerance.
seconds = st.integers(0, 160).map(lambda quarters: quarters / 4)


def change(**changes: Any) -> PipelineSettings:
    return dataclasses.replace(BASE, **changes)


def constant(setup: PipelineSettings, latency: float) -> Overlap:
    return simulate_overlap(setup, draw_latencies(setup, Latency("constant", (latency,))))


def uniform(setup: PipelineSettings, seed: int = 0) -> Overlap:
    return simulate_overlap(setup, draw_latencies(setup, parse_latency("uniform:1:40"), seed))


def makespans(overlap: Overlap) -> list[float]:
    return [overlap.results[schedule].makespan_s for schedule in Schedule]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[PipelineSettings, np.ndarray]:
    minibatch, minibatches, group = (draw(st.integers(1, 3)) for _ in range(3))
    setup = PipelineSettings(
        rollout_s=draw(seconds),
        update_s=draw(seconds) + 0.25,
        log_probs_s=draw(seconds),
        publish_s=draw(seconds),
        handling_s=draw(seconds),
        batch_size=minibatch * minibatches,
        group_size=group,
        minibatch_size=minibatch,
        max_concurrency=draw(st.sampled_from([1, 2, 3, 4, 8, 16, 32])),
        steps=draw(st.integers(1, 5)),
        separate_rollouts=draw(st.booleans()),
        log_probs_while_scoring=draw(st.booleans()),
        one_batch_at_a_time=draw(st.booleans()),
    )
    count = setup.steps * setup.calls_per_step
    drawn = draw(st.lists(seconds, min_size=count, max_size=count))
    return setup, np.array(drawn).reshape(setup.steps, -1)


# The calls


def brute_force(latencies: list[float], concurrency: int, not_before: float) -> list[float]:
    """Return the start time of each call, by stepping from event to event."""
    waiting, running, begins, now = list(enumerate(latencies)), [], [0.0] * len(latencies), not_before
    while waiting or running:
        while waiting and len(running) < concurrency:
            index, latency = waiting.pop(0)
            begins[index] = now
            heapq.heappush(running, now + latency)
        now = heapq.heappop(running)
    return begins


@given(st.lists(seconds, max_size=30), st.integers(1, 8), seconds)
def test_calls_start_in_order_when_a_slot_is_free(latencies: list[float], concurrency: int, not_before: float) -> None:
    begins, ends = list_schedule(latencies, [0.0] * concurrency, not_before)
    assert begins.tolist() == brute_force(latencies, concurrency, not_before)
    assert (ends - begins).tolist() == latencies


class JumpingSelector(selectors.DefaultSelector):
    """A selector that advances the clock instead of waiting for a timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


def test_simulated_call_starts_match_the_reward_agent() -> None:
    latencies = np.random.default_rng(3).integers(1, 160, 60) / 4
    begins: dict[int, float] = {}

    async def slow(messages: list[Message], **kwargs: Any) -> EvaluateResult:
        index = int(messages[0].text)
        begins[index] = asyncio.get_running_loop().time()
        await asyncio.sleep(float(latencies[index]))
        return EvaluateResult(score=1.0)

    async def score() -> None:
        requests = [ScoringRequest(str(n), [Message(role="user", content=str(n))]) for n in range(60)]
        async with AsyncRewardAgent(reward_spec(slow), max_concurrency=7) as agent:
            await agent.submit(requests, 5)
            await agent.get(60)

    selector = JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        loop.run_until_complete(score())
    finally:
        loop.close()
    expected, _ = list_schedule(latencies.tolist(), [0.0] * 7)
    assert [begins[n] for n in range(60)] == pytest.approx(expected.tolist(), abs=1e-6)


# The schedules


@settings(deadline=None, max_examples=examples(150))
@given(pipelines())
def test_more_overlap_is_never_slower_and_respects_the_lower_bound(case: tuple[PipelineSettings, np.ndarray]) -> None:
    overlap = simulate_overlap(*case)
    sync, minibatch, one_step_off, both = makespans(overlap)
    assert both <= minibatch <= sync
    assert both <= one_step_off <= sync
    assert overlap.lower_bound_s <= both + 1e-9


@settings(deadline=None, max_examples=examples(50))
@given(pipelines())
def test_machine_activities_are_sequential_and_cover_every_second(
    case: tuple[PipelineSettings, np.ndarray],
) -> None:
    setup, latencies = case
    for result in simulate_overlap(setup, latencies).results.values():
        ends = [0.0, *(item.end_s for item in result.intervals)]
        assert [item.begin_s for item in result.intervals] == ends[:-1] and ends[-1] == result.makespan_s
        assert result.seconds("update") == setup.steps * setup.minibatches * setup.update_s
        assert result.seconds("log_probs", "publish") == setup.steps * (setup.log_probs_s + setup.publish_s)
        rollouts = result.rollouts if setup.separate_rollouts else [i for i in result.intervals if i.doing == "rollout"]
        assert [item.step for item in rollouts] == list(range(setup.steps))
        assert result.utilization == pytest.approx(1 - result.idle_s / result.makespan_s)
        if not setup.separate_rollouts:
            assert result.seconds("waits_for_rollouts") == 0


@settings(deadline=None, max_examples=examples(50))
@given(pipelines())
def test_no_batch_is_used_before_it_is_scored(case: tuple[PipelineSettings, np.ndarray]) -> None:
    setup, latencies = case
    for result in simulate_overlap(setup, latencies).results.values():
        for step, batch in enumerate(result.batches):
            updates = [item for item in result.intervals if item.doing == "update" and item.step == step]
            ends_G = batch.ends_C.reshape(setup.batch_size, setup.group_size).max(axis=1)
            assert sorted(batch.groups_MG.ravel().tolist()) == list(range(setup.batch_size))
            for update, groups in zip(updates, batch.groups_MG, strict=True):
                assert update.begin_s >= ends_G[groups].max()
                if not result.schedule.updates_early:
                    assert update.begin_s >= batch.ends_C.max()


@settings(deadline=None, max_examples=examples(50))
@given(pipelines())
def test_calls_in_flight_are_limited(case: tuple[PipelineSettings, np.ndarray]) -> None:
    setup, latencies = case
    for result in simulate_overlap(setup, latencies).results.values():
        begins = np.concatenate([batch.begins_C for batch in result.batches])
        ends = np.concatenate([batch.ends_C for batch in result.batches])
        for moment in begins:
            assert ((begins <= moment) & (moment < ends)).sum() <= setup.max_concurrency


@given(st.booleans(), st.booleans())
def test_instant_rewards_gain_nothing_from_minibatches(separate: bool, serial: bool) -> None:
    setup = change(log_probs_s=3, publish_s=1, separate_rollouts=separate, one_batch_at_a_time=serial)
    sync, minibatch, one_step_off, both = makespans(constant(setup, 0))
    assert sync == minibatch == 4 * (8 + 3 + 4 * 2 + 1)
    assert one_step_off == both and (both < sync if separate else both == sync)


def test_simulation_matches_values_by_hand() -> None:
    """16 calls of 3 s, 4 concurrent: a batch is scored in 12 s, 2 groups every 3 s."""
    overlap = constant(change(max_concurrency=4), 3)
    sync, minibatch, one_step_off, both = makespans(overlap)
    assert sync == 4 * (8 + 12 + 8)
    assert minibatch == 4 * (8 + 12 + 2)
    # What hides the 12 s of calls: 8 s of rollout at first, then 8 s of updates as well, at the end updates alone.
    assert one_step_off == 8 + (12 + 8) + 2 * (8 + 8) + (4 + 8)
    assert both == 4 * (8 + 8) == overlap.lower_bound_s
    idle = [overlap.results[schedule].idle_s for schedule in Schedule]
    assert idle == [48, 24, 8, 0]
    assert [overlap.cut(schedule) for schedule in Schedule] == [0, 1 - 88 / 112, 1 - 72 / 112, 1 - 64 / 112]


def test_call_bound_simulation_reaches_the_lower_bound() -> None:
    """64 sequential calls of 3 s, after the first rollout and before the last update."""
    overlap = constant(change(max_concurrency=1), 3)
    assert overlap.results[BOTH].makespan_s == overlap.lower_bound_s == 8 + 64 * 3 + 2


def test_unlimited_concurrency_takes_as_long_as_the_longest_call() -> None:
    setup = change(max_concurrency=10**9)
    overlap = uniform(setup)
    longest = overlap.latencies_SC.max(axis=1)
    assert overlap.results[SYNC].makespan_s == pytest.approx(4 * (8 + 8) + longest.sum())
    assert overlap.results[ONE_STEP_OFF].makespan_s < overlap.results[SYNC].makespan_s


def test_log_probs_while_scoring_hides_part_of_the_wait() -> None:
    waits, hides = (
        makespans(constant(change(log_probs_s=5, max_concurrency=4, log_probs_while_scoring=flag), 3))
        for flag in (False, True)
    )
    assert waits[0] - hides[0] == 4 * 5
    assert waits[1:] == hides[1:]


def test_separate_rollout_machine_makes_the_trainer_wait() -> None:
    result = constant(change(separate_rollouts=True, max_concurrency=16), 3).results[ONE_STEP_OFF]
    # Before the first batch 8 s; later a rollout takes as long as the four updates beside it.
    assert result.seconds("waits_for_rollouts") == 8
    assert [item.begin_s for item in result.rollouts] == [0, 8, 19, 27]


def test_staleness_is_1_for_schedules_with_rollouts_ahead() -> None:
    ages = {schedule.value: result.staleness for schedule, result in uniform(BASE).results.items()}
    assert ages == {"sync": 0, "minibatch": 0, "one_step_off": 1, "both": 1}


def test_one_batch_at_a_time_leaves_slots_empty() -> None:
    """The published agent starts a batch when the last is scored; here, a free slot suffices."""
    setup = change(rollout_s=1, max_concurrency=4, steps=10)
    eager, serial = uniform(setup), uniform(dataclasses.replace(setup, one_batch_at_a_time=True))
    for schedule in (ONE_STEP_OFF, BOTH):
        assert eager.results[schedule].makespan_s < serial.results[schedule].makespan_s
    for schedule in (SYNC, MINIBATCH):
        assert eager.results[schedule].makespan_s == serial.results[schedule].makespan_s


def test_equal_seeds_draw_equal_latencies() -> None:
    first, again, other = (uniform(BASE, seed).latencies_SC.tolist() for seed in (1, 1, 2))
    assert first == again != other


# What completion order does to mini-batches


def test_slow_groups_come_last_with_full_concurrency() -> None:
    overlap = uniform(change(max_concurrency=16, batch_size=32, minibatch_size=8, group_size=1, steps=20))
    crowded = uniform(change(max_concurrency=2, batch_size=32, minibatch_size=8, group_size=1, steps=20))
    all_at_once = uniform(change(max_concurrency=32, batch_size=32, minibatch_size=8, group_size=1, steps=20))
    biases = [case.results[BOTH].latency_bias or 0.0 for case in (crowded, overlap, all_at_once)]
    assert biases == sorted(biases) and biases[2] > 0.9 and biases[0] < 0.2
    assert abs(overlap.results[SYNC].latency_bias or 0.0) < 0.15
    assert overlap.results[SYNC].order_kept == pytest.approx(1.0)
    assert (crowded.results[BOTH].order_kept or 0.0) > (all_at_once.results[BOTH].order_kept or 0.0)


def test_latency_bias_is_undefined_for_equal_latencies() -> None:
    assert constant(BASE, 3).results[MINIBATCH].latency_bias is None
    assert uniform(change(minibatch_size=8)).results[MINIBATCH].order_kept is None


def test_rank_correlation_by_hand() -> None:
    def of(first: list[float], second: list[float]) -> float | None:
        return rank_correlation(np.array(first), np.array(second))

    assert of([1, 2, 3], [10, 100, 1000]) == pytest.approx(1)
    assert of([1, 2, 3], [5, 4, 1]) == pytest.approx(-1)
    # Ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4: covariance 4.5 of deviations 4.5 and 5.
    assert of([1, 7, 7, 9], [1, 3, 2, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert of([1, 1, 1], [1, 2, 3]) is None


# Settings


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rollout_s": -1}, "rollout_s must be a non-negative number of seconds, got -1"),
        ({"publish_s": math.nan}, "publish_s must be a non-negative number of seconds, got nan"),
        ({"update_s": math.inf}, "update_s must be a non-negative number of seconds, got inf"),
        ({"rollout_s": 1e300}, "rollout_s must be at most 1e+08 seconds, got 1e+300"),
        ({"max_concurrency": 0}, "max_concurrency must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"minibatch_size": 3}, "minibatch_size must divide batch_size, for example 2"),
        ({"minibatch_size": 16}, "minibatch_size must divide batch_size, for example 8"),
        ({"rollout_s": 0, "update_s": 0}, "rollout_s and update_s are both 0"),
        ({"steps": 10**9}, "1000000000 steps of 16 calls exceed the limit of 5,000,000 calls"),
    ],
)
def test_invalid_settings_are_rejected(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        change(**changes)
    assert told in str(refused.value)


def test_latencies_of_wrong_shape_or_nan_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"must have the shape \(4, 16\)"):
        simulate_overlap(BASE, np.ones((4, 15)))
    with pytest.raises(ConfigError, match="finite, non-negative number of seconds"):
        simulate_overlap(BASE, np.full((4, 16), np.nan))


# The drawing


def test_timeline_shows_activities_over_time() -> None:
    drawn = str(draw_timeline(constant(change(log_probs_s=2, publish_s=2, max_concurrency=4, steps=1), 3), 11 + 32))
    assert drawn.splitlines()[:5] == [
        "step 1, 1 s per character",
        "",
        "sync",
        "  machine  RRRRRRRR············LLUUUUUUUUPP",
        "  step     " + "1" * 32,
    ]
    assert "  machine  RRRRRRRRLL·UU·UU·UU·UUPP" in drawn.splitlines()
    assert "  calls            ████████████" in drawn.splitlines()


@pytest.mark.parametrize(("steps", "shown"), [(1, (1, 1)), (3, (1, 2)), (4, (2, 3)), (9, (2, 3))])
def test_timeline_draws_two_steps_on_a_common_scale(steps: int, shown: tuple[int, int]) -> None:
    overlap = uniform(change(steps=steps, separate_rollouts=True))
    timeline = draw_timeline(overlap, 60)
    assert (timeline.first_step, timeline.last_step) == shown
    for row in timeline.rows:
        ends = [0.0, *overlap.results[row.schedule].step_ends_s]
        assert len(row.cells) == pytest.approx((ends[shown[1]] - ends[shown[0] - 1]) / timeline.cell_s, abs=0.51)
    assert max(map(len, str(timeline).splitlines())) <= 60
    assert [row.shows for row in timeline.rows][:4] == ["machine", "rollouts", "step", "calls"]


def test_too_narrow_timeline_is_rejected() -> None:
    with pytest.raises(ConfigError, match="must be at least 21 characters, got 20"):
        draw_timeline(uniform(BASE), 20)
    assert draw_timeline(uniform(BASE), 21)
