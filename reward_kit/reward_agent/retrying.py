"""Which calls of a reward are made again when they fail, and when."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from reward_kit.errors import FAILURE_CLASSES, ConfigError, FailureClass, did_you_mean
from reward_kit.providers.retry import RetryPolicy
from reward_kit.reward_agent.scoring import Scored, ScoringRequest


@dataclass(frozen=True, slots=True)
class Retries:
    """What the agent makes again. A rollout that broke itself is no call, and is never tried again.

    Attributes:
        policy: how often, for how long, and the waits between: exponential with full jitter, as for model endpoints.
            Its budget is of each call.
        classes: of failures that may pass by themselves.
        seed: of the jitter; None draws it from the system.

    Raises:
        ConfigError: a class is none.
    """

    policy: RetryPolicy = field(default_factory=RetryPolicy)
    classes: tuple[FailureClass, ...] = ("provider_error",)
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in self.classes:
            if name not in FAILURE_CLASSES:
                raise ConfigError(f"Retries.classes: no failure class {name!r}{did_you_mean(name, FAILURE_CLASSES)}")

    def wait_s(self, attempts: int, elapsed_s: float, jitter: random.Random) -> float | None:
        """Seconds until a call is made again; None where it has failed for good.

        Args:
            attempts: made so far.
            elapsed_s: since the first began.
            jitter: draws the wait.
        """
        if attempts >= self.policy.max_attempts:
            return None
        wait_s = self.policy.wait_s(attempts - 1, None, jitter)
        return wait_s if elapsed_s + wait_s <= self.policy.budget_s else None

    def may_pass(self, requests: Sequence[ScoringRequest], scored: Sequence[Scored]) -> bool:
        """Whether a call failed in a way that another attempt may mend."""
        return any(
            result.failure is not None and request.failure is None and result.failure.failure_class in self.classes
            for request, result in zip(requests, scored, strict=True)
        )


def given_up(requests: Sequence[ScoringRequest], scored: Sequence[Scored], attempts: int) -> list[Scored]:
    """Results of the last attempt, whose failures tell that there were others."""
    return [
        replace(result, failure=replace(result.failure, message=f"{result.failure.message}; {attempts} attempts"))
        if result.failure is not None and request.failure is None
        else result
        for request, result in zip(requests, scored, strict=True)
    ]
