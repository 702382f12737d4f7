"""Rate limits hold in every window, and token estimates adapt to actual usage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.errors import ConfigError
from reward_kit.providers import Rates
from reward_kit.providers.request_queue import Bucket, TokenEstimate


def taken(per_minute: float, wishes: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (time, amount) taken for requests of (pause before it, amount), each as early as possible."""
    bucket, now, log = Bucket(per_minute, 0.0), 0.0, []
    for pause, amount in wishes:
        now += pause
        now += bucket.wait_s(amount, now)
        assert bucket.wait_s(amount, now) == 0.0
        bucket.take(amount)
        log.append((now, amount))
    return log


WISHES = st.lists(st.tuples(st.sampled_from([0.0, 0.0, 0.01, 1.0, 40.0]), st.floats(0.1, 500.0)), max_size=80)


@given(st.floats(1.0, 6_000.0), WISHES)
def test_usage_in_any_window_is_bounded_by_rate_bucket_and_largest_amount(per_minute, wishes):
    log = taken(per_minute, wishes)
    bucket, largest = max(1.0, per_minute / 60), max((amount for _, amount in log), default=0.0)
    for first in range(len(log)):
        total = 0.0
        for when, amount in log[first:]:
            total += amount
            assert total <= per_minute * (when - log[first][0]) / 60 + bucket + largest + 1e-6


@pytest.mark.parametrize("per_minute", [6, 60, 600])
def test_requests_are_spread_evenly_and_use_the_full_rate(per_minute):
    log = taken(per_minute, [(0.0, 1.0)] * (3 * per_minute))
    burst = max(1, per_minute // 60)
    for second in range(60):
        assert sum(second <= when < second + 1 for when, _ in log) <= burst + max(1, per_minute / 60)
    assert log[-1][0] == pytest.approx((len(log) - burst) * 60 / per_minute)


def test_unused_rate_does_not_accumulate():
    bucket = Bucket(60, 0.0)
    bucket.take(1.0)
    assert bucket.wait_s(1.0, 600.0) == 0.0
    bucket.take(1.0)
    assert bucket.wait_s(1.0, 600.0) == pytest.approx(1.0)


def test_overestimated_tokens_are_returned_to_the_bucket():
    bucket = Bucket(600, 0.0)
    bucket.take(10.0)
    bucket.take(-6.0)
    assert bucket.wait_s(6.0, 0.0) == 0.0


def test_token_estimate_starts_from_bytes_and_adapts_to_usage():
    estimate = TokenEstimate()
    assert estimate.tokens(400, 50) == 150.0
    for _ in range(100):
        estimate.learn(400, 200, 10)
    assert estimate.tokens(800, 50) == pytest.approx(410, rel=1e-3)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"requests_per_minute": 0}, "requests_per_minute: expected a number above 0, got 0"),
        ({"tokens_per_minute": "many"}, "tokens_per_minute: expected a number above 0, got 'many'"),
        ({"max_connections": 1.5}, "max_connections: expected a whole number above 0, got 1.5"),
    ],
)
def test_invalid_rate_is_a_config_error_naming_the_option(options, said):
    with pytest.raises(ConfigError, match=said):
        Rates(**options)
