"""Attempts that stop: full jitter between them, the endpoint's own Retry-After honoured, and two ends.

The ends are a number of attempts and a budget of seconds, counted from the first attempt on. A wait that the budget
cannot pay for is not begun. A Retry-After is never shortened: asking sooner than told only earns another refusal.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from reward_kit.errors import DeadlineError, ProviderError
from reward_kit.providers.faults import ENDPOINT_ERRORS, EndpointError, IdleTimeoutError, TransientError
from reward_kit.providers.lane import Passage

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long to try.

    Attributes:
        max_attempts: in all, the first included.
        budget_s: seconds from the first attempt after which no further one begins.
        base_s: upper bound in seconds of the first random wait; it doubles with each retry.
        cap_s: upper bound in seconds of any random wait.
    """

    max_attempts: int = 5
    budget_s: float = 300.0
    base_s: float = 0.5
    cap_s: float = 30.0

    def wait_s(self, retry: int, retry_after_s: float | None, jitter: random.Random) -> float:
        """Seconds before retry number `retry` (from 0): the endpoint's wish, and full jitter on top of it.

        The jitter is uniform in [0, min(cap_s, base_s * 2**retry)], so that callers refused together come back apart.
        """
        # Past 2**64 the cap has long won; the bound keeps the power a float.
        return (retry_after_s or 0.0) + jitter.uniform(0.0, min(self.cap_s, self.base_s * 2.0 ** min(retry, 64)))


async def with_retries(
    attempt: Callable[[], Awaitable[T]], policy: RetryPolicy, jitter: random.Random, passage: Passage | None = None
) -> tuple[T, int]:
    """What `attempt` returns, and how many retries that took.

    Only `TransientError` and `IdleTimeoutError` are tried again; every other error passes at once. With a passage, each
    attempt waits for its turn, and one that failed because the endpoint is down or wants less counts neither as an
    attempt nor as time. The caller tells the passage of an answer.

    Raises:
        ProviderError, DeadlineError: the last failure, when attempts or budget are used up; the message says which.
        LimitError: as the attempt raised it.
    """
    started = time.monotonic()
    retries = counted = 0
    while True:
        if passage is not None:
            await passage.enter()
        try:
            return await attempt(), retries
        except ENDPOINT_ERRORS as error:
            retries += 1
            if passage is not None and passage.failed(error, is_last=_is_last(error, counted, policy)):
                continue
            if not isinstance(error, TransientError | IdleTimeoutError):
                raise
            waited_s = passage.waited_s if passage is not None else 0.0
            left = policy.budget_s - (time.monotonic() - started - waited_s)
            wait = _next_wait(error, counted, policy, jitter, left)
            _log.debug("attempt %d failed, the next in %.2f s: %s", retries, wait, error)
        counted += 1
        await asyncio.sleep(wait)


def _is_last(error: EndpointError, counted: int, policy: RetryPolicy) -> bool:
    """Whether no attempt would follow on `error`."""
    return not isinstance(error, TransientError | IdleTimeoutError) or counted + 1 >= policy.max_attempts


def _next_wait(
    error: TransientError | IdleTimeoutError, retries: int, policy: RetryPolicy, jitter: random.Random, left: float
) -> float:
    """Seconds before the next attempt.

    Raises:
        ProviderError, DeadlineError: there is no next attempt.
    """
    if policy.max_attempts == 1:
        raise _final(error) from error
    if retries + 1 >= policy.max_attempts:
        raise _final(error, f"gave up after {policy.max_attempts} attempts (max_attempts)") from error
    asked = error.retry_after_s if isinstance(error, TransientError) else None
    if asked is not None and asked > left:
        why = f"its Retry-After of {asked:g} s is more than what is left of retry_budget_s={policy.budget_s:g}"
        raise _final(error, f"{why}; raise retry_budget_s to wait for it") from error
    wait = policy.wait_s(retries, asked, jitter)
    if left <= 0 or (asked is None and wait > left):
        tried = "1 attempt" if retries == 0 else f"{retries + 1} attempts"
        why = f"gave up after {tried}: retry_budget_s={policy.budget_s:g} is used up"
        raise _final(error, why) from error
    return min(wait, left)


def _final(error: ProviderError | DeadlineError, why: str = "") -> ProviderError | DeadlineError:
    flat = DeadlineError if isinstance(error, DeadlineError) else ProviderError
    return flat(f"{error}; {why}" if why else str(error))
