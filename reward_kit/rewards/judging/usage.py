"""What a verdict took: calls, tokens, dollars; as a metric that is never averaged, since it is no score."""

from __future__ import annotations

from dataclasses import dataclass

from reward_kit.models import MetricResult

METRIC = "judge_usage"


@dataclass(slots=True)
class JudgeUsage:
    """Adds up over the requests of one score.

    Attributes:
        calls: requests that were answered over the network, or from a recording.
        cached: answers that were known already; they take nothing.
        prompt_tokens: None once an endpoint has not said how many.
        completion_tokens: likewise.
        cost: US dollars; None once a price is not known.
    """

    calls: int = 0
    cached: int = 0
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    cost: float | None = 0.0

    def add_call(self, prompt_tokens: int | None, completion_tokens: int | None, cost: float | None) -> None:
        """One more answered request."""
        self.calls += 1
        self.prompt_tokens = _sum(self.prompt_tokens, prompt_tokens)
        self.completion_tokens = _sum(self.completion_tokens, completion_tokens)
        self.cost = None if self.cost is None or cost is None else self.cost + cost

    def as_metric(self) -> MetricResult:
        """The figures as `name=value` texts."""
        figures = {
            "calls": self.calls,
            "cached": self.cached,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cost_usd": None if self.cost is None else f"{self.cost:.6f}",
        }
        told = (f"{name}={'unknown' if value is None else value}" for name, value in figures.items())
        return MetricResult(score=0.0, is_score_valid=False, reason=" ".join(told))


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
