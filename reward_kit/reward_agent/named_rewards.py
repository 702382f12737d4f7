"""The rewards of a task that has multiple rewards. Each reward runs in a separate sandbox.

The score is the weighted mean of the rewards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, NamedTuple, Self

from reward_kit.models import EvaluateResult, MetricResult
from reward_kit.reward_agent.scoring import Reward, Scored, Scorer, ScoringRequest, score_unbroken, unscored_result
from reward_kit.rewards.combinators import weighted_result
from reward_kit.rewards.judge_prompts import METRIC, sum_usages
from reward_kit.typed_interface import EvaluationMode, RewardSpec

_LEVELS = ("in_process", "warm", "isolated")


class RewardPart(NamedTuple):
    """One of multiple rewards, and its weight in the score."""

    reward: Reward
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class NamedRewards:
    """The rewards of a task, keyed by name. It has the interface of a single reward.

    See `scoring.Reward` for the fields.
    """

    parts: Mapping[str, RewardPart]
    origin: None = None
    resources: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The names of the rewards."""
        return " + ".join(self.parts)

    @property
    def mode(self) -> EvaluationMode:
        """The mode: "batch" if at least one of the rewards scores whole groups, and "pointwise" otherwise."""
        return "batch" if any(part.reward.mode == "batch" for part in self.parts.values()) else "pointwise"

    @property
    def requirements(self) -> tuple[str, ...]:
        """The packages that the rewards require."""
        return tuple(dict.fromkeys(text for part in self.parts.values() for text in part.reward.requirements))

    @property
    def parameters(self) -> frozenset[str] | None:
        """The parameters of all rewards, or None if one of them accepts any parameter."""
        taken = [part.reward.parameters for part in self.parts.values()]
        known = [names for names in taken if names is not None]
        return frozenset[str]().union(*known) if len(known) == len(taken) else None

    @property
    def required(self) -> frozenset[str]:
        """The parameters that at least one of the rewards requires."""
        return frozenset[str]().union(*(part.reward.required for part in self.parts.values()))


def each_call(reward: Reward) -> Iterator[Reward]:
    """Yield every reward that is called for a score, including the parts of combined rewards."""
    for one in each_reward(reward).values():
        parts = getattr(one.function, "made_of", {}) if isinstance(one, RewardSpec) else {}
        if not parts:
            yield one
        for part in parts.values():
            yield from each_call(part)


def each_reward(reward: Reward) -> Mapping[str, Reward]:
    """Return the rewards, keyed by name. A single reward has the name ""."""
    if isinstance(reward, NamedRewards):
        return {name: part.reward for name, part in reward.parts.items()}
    return {"": reward}


class NamedScorer:
    """A scorer that calls all rewards concurrently and combines their results.

    Args:
        scorers: the scorer and the weight of each reward. The weights are normalized so that their sum is 1.
    """

    def __init__(self, scorers: Mapping[str, tuple[Scorer, float]]) -> None:
        total = sum(weight for _, weight in scorers.values())
        self._scorers = {name: scorer for name, (scorer, _) in scorers.items()}
        self._weights = {name: weight / total for name, (_, weight) in scorers.items()}
        self._stack = AsyncExitStack()

    @property
    def mode(self) -> EvaluationMode:
        """The mode: "batch" if at least one of the rewards scores whole groups, and "pointwise" otherwise."""
        return "batch" if any(scorer.mode == "batch" for scorer in self._scorers.values()) else "pointwise"

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for scorer in self._scorers.values():
                await stack.enter_async_context(scorer)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def score(self, request: ScoringRequest) -> Scored:
        """Score one rollout."""
        (scored,) = await self.score_group([request])
        return scored

    async def score_group(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        """Score the rollouts of one group, and return the scores in order."""
        return await score_unbroken(requests, self._score_complete)

    async def _score_complete(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        began = time.perf_counter()
        columns = await asyncio.gather(*(scorer.score_group(requests) for scorer in self._scorers.values()))
        duration_s = time.perf_counter() - began
        rows = (dict(zip(self._scorers, row, strict=True)) for row in zip(*columns, strict=True))
        return [replace(self._combined(row), duration_s=duration_s) for row in rows]

    def _combined(self, scores: Mapping[str, Scored]) -> Scored:
        """Return the weighted mean of the scores, or the failure of the first reward without a score."""
        sandboxes = [scored.sandbox for scored in scores.values() if scored.sandbox]
        weakest = min(sandboxes, key=lambda one: _LEVELS.index(one.get("level", _LEVELS[0])), default=None)
        common = Scored(
            next(iter(scores.values())).rollout_id,
            sandbox=weakest,
            stdout="".join(scored.stdout for scored in scores.values()),
            stderr="".join(scored.stderr for scored in scores.values()),
            is_output_cut=any(scored.is_output_cut for scored in scores.values()),
        )
        parts = [scored.result for scored in scores.values() if scored.result is not None]
        usages = [part.metrics[METRIC].reason for part in parts if METRIC in part.metrics]
        results: dict[str, EvaluateResult] = {}
        for name, scored in scores.items():
            if scored.failure is not None:
                failure = replace(scored.failure, message=f"rewards.{name}: {scored.failure.message}")
                kept = unscored_result(failure.message, usages)
                return replace(common, result=kept, failure=failure, retry_after_s=scored.retry_after_s)
            assert scored.result is not None, "a call without a failure has a result"
            results[name] = scored.result
        result = weighted_result(results, self._weights)
        for name, part in results.items():
            for metric, value in part.metrics.items():
                if metric != METRIC:
                    result.metrics.setdefault(f"{name}.{metric}", value)
        if usages:
            result.metrics[METRIC] = MetricResult(score=0.0, is_score_valid=False, reason=sum_usages(usages))
        asked = next((part for part in results.values() if part.query is not None), None)
        if asked is not None:
            result.query, result.response = asked.query, asked.response
        return replace(common, result=result)
