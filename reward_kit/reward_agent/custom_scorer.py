"""Where a user's `compute_score` is called in this process: its calls apart, the scores of a group then together."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from reward_kit.errors import ConfigError, Failure, RewardError, RewardKitError, boundary, did_you_mean, kind_of
from reward_kit.models import EvaluateResult
from reward_kit.providers.request_queue import Rates, RetryPolicy
from reward_kit.reward_agent.calling import Retries
from reward_kit.reward_agent.custom_rewards import Calls, failed, finished
from reward_kit.reward_agent.in_process import InProcessScorer
from reward_kit.reward_agent.scoring import Scored, ScoringRequest
from reward_kit.typed_interface import RewardSpec
from reward_kit.validation import check_number

MAX_THREADS = 256

"""Calls of a synchronous `compute_score` at a time: most of them wait for an endpoint."""


class CustomScorer(InProcessScorer):
    """As `InProcessScorer`, for a user's class or function that has `compute_score`'s form.

    Attributes:
        rates: what the class says with `requests_per_minute` and `max_connections`; the reward agent keeps to it.
        retries: what the reward agent makes again as the class says with `call_retries`; None where it does not.
    """

    def __init__(self, spec: RewardSpec, deadline_s: float | None = None, *, max_threads: int = MAX_THREADS) -> None:
        super().__init__(spec, deadline_s, max_threads=max_threads)
        kind: type | None = getattr(spec.function, "user_class", None)
        self.rates, self.retries = _rates_of(kind), _retries_of(kind)


def _rates_of(kind: type | None) -> Rates | None:
    asked = {name: getattr(kind, name, None) for name in ("requests_per_minute", "max_connections")}
    if kind is None or set(asked.values()) == {None}:
        return None
    try:
        return Rates(**asked)
    except ConfigError as error:
        raise ConfigError(f"{kind.__name__}: {error}") from None


def _retries_of(kind: type | None) -> Retries | None:
    asked = getattr(kind, "call_retries", None)
    if kind is None or asked is None:
        return None
    what, known = f"{kind.__name__}.call_retries", [each.name for each in fields(RetryPolicy)]
    if not isinstance(asked, Mapping):
        raise ConfigError(f"{what} is a mapping with some of {', '.join(known)}, not {kind_of(asked)}")
    for name, value in asked.items():
        if name not in known:
            raise ConfigError(f"{what}: unknown key {name!r}{did_you_mean(str(name), known)}")
        check_number(f"{what}[{name!r}]", value, whole=name == "max_attempts")
    return Retries(RetryPolicy(**asked))


class GroupScorer(CustomScorer):
    """Calls `compute_score` of each rollout by itself, and `post_process_scores` once all of a group are in.

    Args:
        spec: of the class, which scores groups.
        deadline_s: for one call of either.
        max_threads: calls of a synchronous class at a time.
    """

    def __init__(self, spec: RewardSpec, deadline_s: float | None = None, *, max_threads: int = MAX_THREADS) -> None:
        each: RewardSpec = spec.function.each  # type: ignore[attr-defined]
        required = each.required - spec.options.keys()
        each = replace(each, options=spec.options, required=required, weakened_from=spec.weakened_from)
        super().__init__(each, deadline_s, max_threads=max_threads)

    async def score_group(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        """As `Scorer`; for callers that have no further use for `finish_group`."""
        return await self.finish_group(requests, await super().score_group(requests))

    async def finish_group(self, requests: Sequence[ScoringRequest], scored: Sequence[Scored]) -> list[Scored]:
        """The scores of a group after its post-processing, in their order.

        Each rollout that did not break has its place in what is processed, with NaN where its call gave no score. A
        post-processing that fails leaves all of them unscored.
        """
        places = [place for place, request in enumerate(requests) if request.failure is None]
        if self._opened is None or not places:  # it could not be opened, and every call says why
            return list(scored)
        before = [scored[place] for place in places]
        try:
            after = await self._post_processed(before)
        except RewardKitError as error:
            failure = Failure.from_exception(error)
            after = [replace(each, failure=each.failure or failure) for each in before]
        found = dict(zip(places, after, strict=True))
        return [found.get(place, each) for place, each in enumerate(scored)]

    async def _post_processed(self, before: Sequence[Scored]) -> list[Scored]:
        assert self._opened is not None
        calls: Calls = self._opened.instance.calls
        post = calls.post
        assert post is not None, "only a class that has one is scored so"
        scores = [math.nan if each.score is None else each.score for each in before]
        results = [_result_of(each) for each in before]
        with boundary(RewardError, f"post_process_scores of {self._spec.id!r}"):
            processed = await self._run_post(functools.partial(post, scores))
        done = finished(results, processed, self._spec.id)
        return [_after(*each) for each in zip(before, done, strict=True)]

    async def _run_post(self, post: functools.partial[Any]) -> Any:
        if self._spec.is_async:
            return await self._in_time(_awaited(post))
        assert self._threads is not None
        return await self._threads.run(post)


async def _awaited(function: functools.partial[Any]) -> Any:
    result = function()
    return await result if hasattr(result, "__await__") else result


def _result_of(scored: Scored) -> EvaluateResult:
    """What the call gave, or a result in its place that says why it gave none."""
    if scored.result is not None and scored.failure is None:
        return scored.result
    kept = {} if scored.result is None else {"query": scored.result.query, "response": scored.result.response}
    return failed(scored.failure.message if scored.failure is not None else "it gave no score", **kept)


def _after(before: Scored, result: EvaluateResult) -> Scored:
    if result.is_score_valid and result.error is None:
        return replace(before, result=result, failure=None)
    if before.failure is not None:  # it had no score and got none
        return before
    failure = Failure("invalid_result", "InvalidResultError", result.error or "it has no valid score")
    return replace(before, result=result, failure=failure)


def custom_scorer(
    spec: RewardSpec, deadline_s: float | None = None, *, max_threads: int = MAX_THREADS
) -> CustomScorer | None:
    """Where a reward is called that was made of a `compute_score`; None for any other."""
    if hasattr(spec.function, "each"):
        return GroupScorer(spec, deadline_s, max_threads=max_threads)
    is_custom = hasattr(spec.function, "custom_form")
    return CustomScorer(spec, deadline_s, max_threads=max_threads) if is_custom else None
