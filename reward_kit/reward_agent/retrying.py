"""Which calls of a reward are made again when they fail, and when.

Two budgets end it: one of each call, in attempts and seconds, and one of the agent, a share of all calls. The second
keeps an endpoint that is down from being asked several times as much as one that is well.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from reward_kit.errors import FAILURE_CLASSES, ConfigError, FailureClass, did_you_mean
from reward_kit.providers.request_queue import RetryPolicy
from reward_kit.reward_agent.scoring import Scored, ScoringRequest
from reward_kit.validation import check_number

SPARE = 10
"""Calls that may be made again whatever the share, so that an agent of few calls has retries too."""
_SLICES = 20


@dataclass(frozen=True, slots=True)
class Retries:
    """What the agent makes again. A rollout that broke itself is no call, and is never tried again.

    Attributes:
        policy: how often, for how long, and the waits between: exponential with full jitter on top of what the endpoint
            asks for with Retry-After, as for model endpoints. Its budget is of each call.
        classes: of failures that may pass by themselves. Of the errors of somebody's own client, those that may pass
            are a `provider_error`; see `providers/faults.py`.
        seed: of the jitter; None draws it from the system.
        max_share: retries of an agent, at most, for each call that began within the budget of the policy, and `SPARE`
            besides; None for any number. What fails beyond it is not tried again.

    Raises:
        ConfigError: a class is none, or the share is no positive number.
    """

    policy: RetryPolicy = field(default_factory=RetryPolicy)
    classes: tuple[FailureClass, ...] = ("provider_error",)
    seed: int | None = None
    max_share: float | None = 1.0

    def __post_init__(self) -> None:
        for name in self.classes:
            if name not in FAILURE_CLASSES:
                raise ConfigError(f"Retries.classes: no failure class {name!r}{did_you_mean(name, FAILURE_CLASSES)}")
        if self.max_share is not None:
            check_number("Retries.max_share", self.max_share)


class SharedBudget:
    """The retries that an agent has left: a share of the calls that began in the last while, and some to spare.

    Args:
        share: retries for each call.
        window_s: how long a call counts.
    """

    def __init__(self, share: float, window_s: float) -> None:
        self._share, self._slice_s = share, window_s / _SLICES
        self._slices: deque[list[int]] = deque()  # each its number, calls and retries
        self._calls = self._retries = 0

    def begin(self, now_s: float) -> None:
        """A call is made for the first time."""
        self._slice(now_s)[1] += 1
        self._calls += 1

    def take(self, now_s: float) -> bool:
        """Whether there is a retry left, which then is taken."""
        current = self._slice(now_s)
        if self._retries >= SPARE + self._share * self._calls:
            return False
        current[2] += 1
        self._retries += 1
        return True

    def _slice(self, now_s: float) -> list[int]:
        number = int(now_s / self._slice_s)
        # One slice more than the window has, so that a call counts for the whole of it.
        while self._slices and self._slices[0][0] < number - _SLICES:
            _, calls, retries = self._slices.popleft()
            self._calls -= calls
            self._retries -= retries
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append([number, 0, 0])
        return self._slices[-1]


class Retrier:
    """Decides for one agent whether a call that failed is made again.

    Args:
        retries: the agent's.
    """

    def __init__(self, retries: Retries) -> None:
        self._policy, self._classes = retries.policy, retries.classes
        self._jitter = random.Random(retries.seed)
        share = retries.max_share
        self._budget = None if share is None else SharedBudget(share, retries.policy.budget_s)

    def begin(self, now_s: float) -> None:
        """A call is made for the first time."""
        if self._budget is not None:
            self._budget.begin(now_s)

    def may_pass(self, requests: Sequence[ScoringRequest], scored: Sequence[Scored]) -> bool:
        """Whether a call failed in a way that another attempt may mend."""
        return any(
            result.failure is not None and request.failure is None and result.failure.failure_class in self._classes
            for request, result in zip(requests, scored, strict=True)
        )

    def wait_s(self, attempts: int, elapsed_s: float, asked_s: float | None, now_s: float) -> float | str:
        """Seconds until a call is made again; or why it is not, "" where its attempts are used up.

        Args:
            attempts: made so far.
            elapsed_s: since the first began.
            asked_s: for how long the endpoint asked to be left alone, which is never shortened; None where it did not.
            now_s: the time.
        """
        if attempts >= self._policy.max_attempts:
            return ""
        left_s = self._policy.budget_s - elapsed_s
        if asked_s is not None and asked_s > left_s:
            return f"its Retry-After of {asked_s:g} s is more than what is left of budget_s={self._policy.budget_s:g}"
        wait_s = self._policy.wait_s(attempts - 1, asked_s, self._jitter)
        if asked_s is None and wait_s > left_s:
            return f"budget_s={self._policy.budget_s:g} is used up"
        if self._budget is not None and not self._budget.take(now_s):
            return "the agent's retries are used up (max_share)"
        return min(wait_s, left_s)


def asked_s(scored: Sequence[Scored]) -> float | None:
    """For how long the endpoint asked to be left alone, by the results of one call."""
    return max((one.retry_after_s for one in scored if one.retry_after_s is not None), default=None)


def given_up(requests: Sequence[ScoringRequest], scored: Sequence[Scored], attempts: int, why: str) -> list[Scored]:
    """Results of the last attempt, whose failures tell that there were others, and why there is no further one."""
    told = f"; {attempts} attempt{'' if attempts == 1 else 's'}" + (f": {why}" if why else "")
    return [
        replace(result, failure=replace(result.failure, message=f"{result.failure.message}{told}"))
        if result.failure is not None and request.failure is None
        else result
        for request, result in zip(requests, scored, strict=True)
    ]
