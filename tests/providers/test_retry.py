"""Retry policy and parsing of the Retry-After header."""

from __future__ import annotations

import random
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.errors import ConfigError, DeadlineError, ProviderError
from reward_kit.providers.faults import IdleTimeoutError, TransientError, parse_retry_after
from reward_kit.providers.request_queue import RetryPolicy, with_retries

NOW = 1_790_000_000.0
SECONDS = st.integers(0, 10_000_000)


@given(SECONDS)
def test_retry_after_in_whole_seconds(seconds):
    assert parse_retry_after({"Retry-After": str(seconds)}) == seconds


@given(st.floats(0, 1e9))
def test_retry_after_in_decimal_seconds(seconds):
    assert parse_retry_after({"Retry-After": f" {seconds!r} "}) == seconds


@given(st.floats(0, 1e9), SECONDS)
def test_retry_after_ms_takes_precedence(milliseconds, seconds):
    headers = {"Retry-After-Ms": repr(milliseconds), "Retry-After": str(seconds)}
    assert parse_retry_after(headers) == milliseconds / 1000


@given(SECONDS)
def test_retry_after_date_is_relative_to_now(seconds):
    assert parse_retry_after({"Retry-After": formatdate(NOW + seconds, usegmt=True)}, NOW) == seconds


@given(SECONDS, st.integers(-1_000_000, 1_000_000))
def test_retry_after_date_is_relative_to_the_server_date(seconds, skew):
    until, sent = formatdate(NOW + skew + seconds, usegmt=True), formatdate(NOW + skew, usegmt=True)
    assert parse_retry_after({"Retry-After": until, "Date": sent}, NOW) == seconds


@pytest.mark.parametrize(
    "date",
    ["Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"],
    ids=["IMF-fixdate", "RFC 850", "asctime"],
)
def test_retry_after_accepts_all_rfc_9110_date_formats(date):
    assert parse_retry_after({"Retry-After": date}, 784_111_777.0 - 60) == 60.0


@given(SECONDS)
def test_retry_after_in_the_past_means_no_wait(seconds):
    assert parse_retry_after({"Retry-After": formatdate(NOW - seconds, usegmt=True)}, NOW) == 0.0
    assert parse_retry_after({"Retry-After": f"-{seconds}"}) == 0.0


@given(st.text())
def test_arbitrary_headers_do_not_break_the_parser(text):
    wait = parse_retry_after({"Retry-After": text, "Retry-After-Ms": text, "Date": text}, NOW)
    assert wait is None or wait >= 0.0


def test_exhausted_limits_of_anthropic_count_without_retry_after():
    headers = {"Date": "Mon, 05 Jan 2026 10:00:00 GMT"}
    for kind, left, reset in (
        ("requests", "0", "10:00:07Z"),
        ("input-tokens", "0", "10:00:30Z"),
        ("tokens", "9", "11:00:00Z"),
    ):
        headers[f"anthropic-ratelimit-{kind}-remaining"] = left
        headers[f"anthropic-ratelimit-{kind}-reset"] = f"2026-01-05T{reset}"
    assert parse_retry_after(headers) == 30.0
    assert parse_retry_after({**headers, "Retry-After": "2"}) == 2.0
    assert parse_retry_after({**headers, "anthropic-ratelimit-input-tokens-reset": "soon"}) == 7.0


@pytest.mark.parametrize("text", ["soon", "nan", "inf", "", "1e999"])
def test_meaningless_retry_after_is_none(text):
    assert parse_retry_after({"Retry-After": text}) is None


@given(st.integers(0, 10_000), st.floats(0, 100), st.integers())
def test_wait_is_at_least_retry_after_with_jitter_up_to_the_cap(retry, asked, seed):
    policy = RetryPolicy(base_s=0.5, cap_s=30.0)
    extra = policy.wait_s(retry, asked, random.Random(seed)) - asked
    assert -1e-9 <= extra <= min(30.0, 0.5 * 2.0 ** min(retry, 64)) + 1e-9


def test_waits_are_determined_by_the_seed():
    policy = RetryPolicy()
    waits = [[policy.wait_s(n, None, random.Random(seed)) for n in range(5)] for seed in (1, 1, 2)]
    assert waits[0] == waits[1] != waits[2]


class ScriptedCall:
    """A call that fails with the given errors in turn, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.count = 0

    async def __call__(self) -> str:
        self.count += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


FAST = RetryPolicy(base_s=0.0)


async def test_transient_errors_are_retried():
    attempts = ScriptedCall(TransientError("a"), IdleTimeoutError("b"))
    assert await with_retries(attempts, FAST, random.Random(0)) == ("answer", 2)


@pytest.mark.parametrize("error", [ProviderError("no"), DeadlineError("no"), ConfigError("no"), KeyError("no")])
async def test_other_errors_are_raised_without_retry(error):
    attempts = ScriptedCall(error)
    with pytest.raises(type(error)) as caught:
        await with_retries(attempts, FAST, random.Random(0))
    assert caught.value is error
    assert attempts.count == 1


@pytest.mark.parametrize("kind, flat", [(TransientError, ProviderError), (IdleTimeoutError, DeadlineError)])
async def test_last_failure_is_raised_as_public_error_with_its_cause(kind, flat):
    errors = [kind(f"failure {n}") for n in range(9)]
    attempts = ScriptedCall(*errors)
    with pytest.raises(flat, match=r"failure 2; gave up after 3 attempts \(max_attempts\)") as caught:
        await with_retries(attempts, RetryPolicy(max_attempts=3, base_s=0.0), random.Random(0))
    assert type(caught.value) is flat
    assert caught.value.__cause__ is errors[2]
    assert attempts.count == 3


async def test_exhausted_budget_stops_retries():
    attempts = ScriptedCall(*[TransientError("busy")] * 9)
    with pytest.raises(ProviderError, match=r"gave up after 1 attempt: retry_budget_s=1e-09 is used up"):
        await with_retries(attempts, RetryPolicy(budget_s=1e-9), random.Random(0))


async def test_single_attempt_keeps_the_original_message():
    with pytest.raises(ProviderError, match=r"^busy$"):
        await with_retries(ScriptedCall(TransientError("busy")), RetryPolicy(max_attempts=1), random.Random(0))
