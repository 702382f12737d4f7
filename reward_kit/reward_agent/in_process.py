"""Scores in this process: a reward called in a thread, or in the loop, without walls."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio

from reward_kit.environments.snapshots import close_state
from reward_kit.errors import RewardError, RewardKitError, boundary
from reward_kit.loading import load_object
from reward_kit.models import EvaluateResult
from reward_kit.reward_agent.call_threads import MAX_THREADS, CallThreads, OverdueError
from reward_kit.reward_agent.scoring import Scored, ScoringRequest, error_of, failure_of, scored_together
from reward_kit.reward_calls import OpenReward
from reward_kit.typed_interface import Mode, RewardSpec

_Result = TypeVar("_Result")

logger = logging.getLogger("reward_kit.reward_agent")


class InProcessScorer:
    """Calls a reward in this process: a synchronous function in a thread, an async one in the loop. No walls.

    Args:
        spec: the reward. Its resources are opened, and its instance is made, before the first call.
        deadline_s: for one call, of a rollout or of a group, without its wait for a thread, and for the opening; what
            exceeds it is unscored with the class `timeout`.
        max_threads: calls of a synchronous function at a time.
    """

    def __init__(self, spec: RewardSpec, deadline_s: float | None = None, *, max_threads: int = MAX_THREADS) -> None:
        self._spec, self._deadline_s, self._max_threads = spec, deadline_s, max_threads
        folder = spec.origin.file.parent if spec.origin else None
        self._load = functools.partial(load_object, folder=folder)
        self._opened: OpenReward | None = None
        self._threads: CallThreads | None = None
        self._opening = anyio.Lock()
        self._sandbox = {"level": "in_process"}
        if spec.weakened_from is not None:
            self._sandbox["asked"] = spec.weakened_from

    @property
    def mode(self) -> Mode:
        """As `Scorer`."""
        return self._spec.mode

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened, self._opened = self._opened, None
        if opened is None:
            return
        try:
            with anyio.CancelScope(shield=True), boundary(RewardError, f"close of reward {self._spec.id!r}"):
                await opened.close()
        except RewardKitError as problem:  # every score is there; how it ends is worth a line
            logger.warning("%s", problem, exc_info=problem)
        finally:
            if self._threads is not None:
                self._threads.close()

    async def score(self, request: ScoringRequest) -> Scored:
        """As `Scorer`. A rollout that broke is not scored: its failure is the answer."""
        if self._spec.mode == "batch":
            return (await self.score_group([request]))[0]
        if request.failure is not None:
            return Scored(request.rollout_id, None, request.failure)
        began = time.perf_counter()
        result: EvaluateResult | RewardKitError
        try:
            with boundary(RewardError, f"reward {self._spec.id!r}"):
                opened = self._opened or await self._open_in_time()
                values = request.named_values(self._spec.parameters)
                result = await self._closing([values], opened.call(values))
        except RewardKitError as error:
            result = error
        return self._scored(request, result, time.perf_counter() - began)

    async def score_group(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        """As `Scorer`."""
        if self._spec.mode == "pointwise":
            return [await self.score(request) for request in requests]
        return await scored_together(requests, self._score_whole)

    async def _score_whole(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        began = time.perf_counter()
        results: Sequence[EvaluateResult | RewardKitError]
        try:
            with boundary(RewardError, f"reward {self._spec.id!r}"):
                opened = self._opened or await self._open_in_time()
                rollouts = [self._values_or_error(request) for request in requests]
                given = [values for values in rollouts if not isinstance(values, RewardKitError)]
                results = await self._closing(given, opened.call_group(rollouts))
        except RewardKitError as error:
            results = [error] * len(requests)
        duration_s = time.perf_counter() - began
        return [self._scored(*pair, duration_s) for pair in zip(requests, results, strict=True)]

    def _scored(self, request: ScoringRequest, result: EvaluateResult | RewardKitError, duration_s: float) -> Scored:
        """What came of a call for one of its rollouts."""
        found = None if isinstance(result, RewardKitError) else result
        if isinstance(result, RewardKitError):
            error: RewardKitError | None = result
        else:
            error = error_of(self._spec.id, result, len(request.assistant_turns))
        if error is None:
            return Scored(request.rollout_id, found, None, duration_s, self._sandbox)
        logger.info("episode %s cannot be scored", request.rollout_id, exc_info=error)
        failure, asked_s = failure_of(error)
        return Scored(request.rollout_id, found, failure, duration_s, self._sandbox, retry_after_s=asked_s)

    def _values_or_error(self, request: ScoringRequest) -> dict[str, Any] | RewardKitError:
        """What a rollout brings into the call of its group; where a state cannot be opened it is left out."""
        try:
            with boundary(RewardError, f"reward {self._spec.id!r}"):
                return request.named_values(self._spec.parameters)
        except RewardKitError as error:
            return error

    async def _closing(self, given: Iterable[Mapping[str, Any]], call: Coroutine[Any, Any, _Result]) -> _Result:
        """Await a call within the deadline, and close the states that it was given."""
        try:
            result = await self._in_time(call)
        except OverdueError:
            raise  # As after a cancellation it stays open: the call that was given up may still use it in its thread.
        except Exception:
            _close_states(given)
            raise
        _close_states(given)
        return result

    async def _in_time(self, call: Coroutine[Any, Any, _Result]) -> _Result:
        if self._deadline_s is None or not self._spec.is_async:
            return await call  # the threads keep the deadline themselves
        with anyio.move_on_after(self._deadline_s):
            return await call
        raise OverdueError

    async def _open_in_time(self) -> OpenReward:
        with anyio.fail_after(self._deadline_s):
            return await self._open()

    async def _open(self) -> OpenReward:
        async with self._opening:
            if self._opened is None:
                threads = CallThreads(self._deadline_s, self._max_threads)
                run = functools.partial(threads.run, is_bounded=False)
                opened = OpenReward(self._spec, self._load, run, threads.run)
                with ExitStack() as undo:
                    undo.callback(threads.close)
                    await opened.open()
                    undo.pop_all()
                self._opened, self._threads = opened, threads
            return self._opened


def _close_states(given: Iterable[Mapping[str, Any]]) -> None:
    for values in given:
        close_state(values.get("state"))


def warn_unconfined(spec: RewardSpec) -> None:
    """Say it, once, where a reward asks for walls and is handed over as a function, which cannot have any."""
    if spec.sandbox not in (None, "in_process") and spec.weakened_from is None:
        _warn_unconfined(spec.id, spec.sandbox)


@functools.lru_cache(maxsize=1000)
def _warn_unconfined(id: str, level: str) -> None:
    advice = "it is confined where it is named, as by load_reward('file.py:function')"
    logger.warning("reward %r asks for %s and runs in_process, without walls: %s", id, level, advice)


async def score_one(spec: RewardSpec, request: ScoringRequest, deadline_s: float | None = None) -> Scored:
    """Call a reward on one rollout, in this process; what it opens is closed again."""
    warn_unconfined(spec)
    async with InProcessScorer(spec, deadline_s) as scorer:
        return await scorer.score(request)
