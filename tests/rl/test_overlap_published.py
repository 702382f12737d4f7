"""Test that the published time savings are recomputed and simulated.

Qwen2-7B on Megatron, GSM8K, delays of 1 to 40 s for each sample (verl's pull request 2854).
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from reward_kit.rl.overlap import (
    Overlap,
    PipelineSettings,
    Schedule,
    draw_latencies,
    parse_latency,
    simulate_overlap,
)

SYNC, MINIBATCH, ONE_STEP_OFF, BOTH = Schedule
HOURS = {SYNC: (17, 53), ONE_STEP_OFF: (13, 23), MINIBATCH: (15, 41), BOTH: (12, 22)}
STATED = {ONE_STEP_OFF: 25.16, MINIBATCH: 12.30, BOTH: 30.85}
LOGGED_STEPS = 15 * (7473 // 1024) - 1  # from the first to the last: 15 epochs of whole batches
FITTED = PipelineSettings(
    rollout_s=64,
    log_probs_s=30,
    update_s=15.4,
    handling_s=29,
    batch_size=1024,
    group_size=5,
    minibatch_size=256,
    max_concurrency=256,
    steps=15,
    one_batch_at_a_time=True,
)


def simulated(setup: PipelineSettings) -> Overlap:
    return simulate_overlap(setup, draw_latencies(setup, parse_latency("uniform:1:40")))


def minutes(hours_and_minutes: tuple[int, int]) -> int:
    return hours_and_minutes[0] * 60 + hours_and_minutes[1]


def step_s(overlap: Overlap, schedule: Schedule) -> float:
    """Return seconds per step between the ends of the first and the last step, as in a log of steps."""
    ends = overlap.results[schedule].step_ends_s
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def test_published_savings_follow_from_published_hours_except_one() -> None:
    for schedule, stated in STATED.items():
        assert round(100 * (1 - minutes(HOURS[schedule]) / minutes(HOURS[SYNC])), 2) == stated
    others = {(18, 24): ((13, 10), 28.44), (17, 7): ((13, 10), 23.08), (17, 53): ((12, 21), 30.94)}
    for before, (after, stated) in others.items():
        assert round(100 * (1 - minutes(after) / minutes(before)), 2) == stated
    # FSDP with the 3B model is stated as 23.08 too, which is the row below it.
    assert round(100 * (1 - minutes((13, 15)) / minutes((17, 23))), 2) == 23.78


def test_fitted_stage_times_reproduce_the_published_hours() -> None:
    overlap = simulated(FITTED)
    measured = {schedule: minutes(time) * 60 / LOGGED_STEPS for schedule, time in HOURS.items()}
    for schedule in (SYNC, MINIBATCH, ONE_STEP_OFF):  # each gave one of the fitted numbers
        assert step_s(overlap, schedule) == pytest.approx(measured[schedule], rel=0.01)
    assert step_s(overlap, BOTH) == pytest.approx(measured[BOTH], rel=0.02)  # none was fitted to this one
    cuts = [100 * (1 - step_s(overlap, schedule) / step_s(overlap, SYNC)) for schedule in (MINIBATCH, ONE_STEP_OFF)]
    assert cuts == pytest.approx([STATED[MINIBATCH], STATED[ONE_STEP_OFF]], abs=0.1)
    assert 100 * (1 - step_s(overlap, BOTH) / step_s(overlap, SYNC)) == pytest.approx(STATED[BOTH], abs=1.2)


def test_call_times_alone_predict_the_published_runs() -> None:
    """Nothing is fitted: 5,120 calls on 256 threads, one batch after the other, whatever the model or the back end."""
    predicted = step_s(simulated(FITTED), BOTH) * LOGGED_STEPS / 60
    assert round(predicted) in range(minutes((12, 30)), minutes((12, 36)))
    for taken in ((12, 21), (12, 22), (13, 10), (13, 10), (13, 15)):
        assert predicted == pytest.approx(minutes(taken), rel=0.06)


def test_one_step_off_and_both_are_equal_without_handling_time() -> None:
    """Where calls keep the agent busy, time per step is that of the calls, whatever the machine does meanwhile."""
    for rollout_s, update_s in itertools.product((20, 93), (10, 30)):
        setup = dataclasses.replace(FITTED, handling_s=0, rollout_s=rollout_s, update_s=update_s, steps=6)
        overlap = simulated(setup)
        assert step_s(overlap, ONE_STEP_OFF) == pytest.approx(step_s(overlap, BOTH), rel=0.005)


def test_agent_filling_every_slot_saves_a_third() -> None:
    overlap = simulated(dataclasses.replace(FITTED, one_batch_at_a_time=False))
    assert step_s(overlap, BOTH) == pytest.approx(5120 * 20.5 / 256, rel=0.02)
    assert 1 - step_s(overlap, BOTH) / step_s(overlap, SYNC) == pytest.approx(0.335, abs=0.01)
