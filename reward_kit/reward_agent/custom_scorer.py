"""The in-process scorer for a user's `compute_score`. It scores single rollouts and post-processes each group."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from reward_kit.errors import ConfigError, Failure, RewardError, RewardKitError, boundary, did_you_mean, type_name
from reward_kit.providers.request_queue import Rates, RetryPolicy
from reward_kit.reward_agent.call_scheduler import Retries
from reward_kit.reward_agent.custom_rewards import NO_SCORE, Calls, failed, finished
from reward_kit.reward_agent.in_process import InProcessScorer
from reward_kit.reward_agent.scoring import Scored, ScoringRequest
from reward_kit.typed_interface import RewardSpec
from reward_kit.validation import check_positive

MAX_THREADS = 256
"""The maximum number of concurrent calls of a synchronous `compute_score`. Most of them wait for an endpoint."""


class CustomScorer(InProcessScorer):
    """An `InProcessScorer` for a user's `compute_score`."""

    def __init__(self, spec: RewardSpec, deadline_s: float | None = None, *, max_threads: int = MAX_THREADS) -> None:
        super().__init__(spec, deadline_s, max_threads=max_threads)
        kind: type | None = getattr(spec.function, "user_class", None)
        self.rates: Rates | None = None  # `requests_per_minute` and `max_connections` of the class
        self.retries: Retries | None = None  # `call_retries` of the class
        if kind is None:
            return
        asked = {name: getattr(kind, name, None) for name in ("requests_per_minute", "max_connections")}
        if set(asked.values()) != {None}:
            try:
                self.rates = Rates(**asked)
            except ConfigError as error:
                raise ConfigError(f"{kind.__name__}: {error}") from None
        if (policy := getattr(kind, "call_retries", None)) is not None:
            what, known = f"{kind.__name__}.call_retries", [each.name for each in fields(RetryPolicy)]
            if not isinstance(policy, Mapping):
                raise ConfigError(
                    f"{what} must be a mapping with some of the keys {', '.join(known)}, got {type_name(policy)}"
                )
            for name, value in policy.items():
                if name not in known:
                    raise ConfigError(f"{what}: unknown key {name!r}{did_you_mean(str(name), known)}")
                check_positive(f"{what}[{name!r}]", value, is_integer=name == "max_attempts")
            self.retries = Retries(RetryPolicy(**policy))


class GroupScorer(CustomScorer):
    """A scorer that calls `compute_score` for each rollout, and `post_process_scores` when a group is complete."""

    def __init__(self, spec: RewardSpec, deadline_s: float | None = None, *, max_threads: int = MAX_THREADS) -> None:
        each: RewardSpec = spec.function.each  # type: ignore[attr-defined]
        required = each.required - spec.options.keys()
        each = replace(each, options=spec.options, required=required, weakened_from=spec.weakened_from)
        super().__init__(each, deadline_s, max_threads=max_threads)

    async def score_group(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        return await self.finish_group(requests, await super().score_group(requests))

    async def finish_group(self, requests: Sequence[ScoringRequest], scored: Sequence[Scored]) -> list[Scored]:
        """Post-process the scores of a group, and return the results in order.

        On failure, the whole group is unscored.
        """
        indexes = [index for index, request in enumerate(requests) if request.failure is None]
        if self._opened is None or not indexes:  # Opening failed, and each call reports the reason.
            return list(scored)
        before = [scored[index] for index in indexes]
        try:
            after = await self._post_processed(before)
        except RewardKitError as error:
            failure = Failure.from_exception(error)
            after = [replace(each, failure=each.failure or failure) for each in before]
        changed = dict(zip(indexes, after, strict=True))
        return [changed.get(index, each) for index, each in enumerate(scored)]

    async def _post_processed(self, before: Sequence[Scored]) -> list[Scored]:
        assert self._opened is not None
        assert self._threads is not None
        calls: Calls = self._opened.instance.calls
        assert calls.post is not None, "only a class with post_process_scores is scored in groups"
        post = functools.partial(calls.post, [math.nan if each.score is None else each.score for each in before])

        async def awaited() -> Any:
            result = post()
            return await result if inspect.isawaitable(result) else result

        with boundary(RewardError, f"post_process_scores of {self._spec.id!r}"):
            processed = await (self._in_time(awaited()) if self._spec.is_async else self._threads.run(post))
        results = []
        for each in before:
            if each.result is not None and each.failure is None:
                results.append(each.result)
            else:  # a result with the reason for the missing score
                kept = {} if each.result is None else {"query": each.result.query, "response": each.result.response}
                results.append(failed(each.failure.message if each.failure is not None else NO_SCORE, **kept))
        scored = []
        for each, result in zip(before, finished(results, processed, self._spec.id), strict=True):
            if result.is_score_valid and result.error is None:
                scored.append(replace(each, result=result, failure=None))
            elif each.failure is not None:  # still without a score
                scored.append(each)
            else:
                failure = Failure("invalid_result", "InvalidResultError", result.error or "no valid score")
                scored.append(replace(each, result=result, failure=failure))
        return scored


def in_process_scorer(spec: RewardSpec, deadline_s: float | None = None, **options: int) -> InProcessScorer:
    """Create a scorer that calls the reward in this process. See `InProcessScorer` for the options."""
    if hasattr(spec.function, "each"):
        return GroupScorer(spec, deadline_s, **options)
    return (CustomScorer if hasattr(spec.function, "custom_form") else InProcessScorer)(spec, deadline_s, **options)
