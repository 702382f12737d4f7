"""One score: what a reward function is given of an episode, the call, and what is kept of its answer."""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType, TracebackType
from typing import Any, Protocol, Self

import anyio

from reward_kit.agent.models import StepData, steps_of
from reward_kit.environments.base import StateSnapshot
from reward_kit.environments.snapshots import close_state, open_snapshot
from reward_kit.episodes.record import environment_return, facts_of
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import (
    ConfigError,
    Failure,
    InvalidResultError,
    RewardError,
    RewardKitError,
    boundary,
    did_you_mean,
)
from reward_kit.loading import load_object
from reward_kit.models import EvaluateResult, Message, TaskDefinitionModel, match_to_steps
from reward_kit.reward_agent.call_threads import MAX_THREADS, CallThreads, OverdueError
from reward_kit.reward_agent.requirements import check_installed
from reward_kit.reward_calls import OpenReward
from reward_kit.typed_interface import Origin, RewardSpec

OFFERED = frozenset(
    {
        "messages",
        "ground_truth",
        "assistant_turns",
        "sample",
        "state",
        "step_data",
        "environment_return",
        "stop_reason",
        "rollout_id",
        "task_name",
        "goal_description",
        "evaluation_criteria",
        "rollouts_messages",
        "ground_truths",
    }
)
"""Every name that a reward function may ask for."""
_NAMED = (
    *("messages", "ground_truth", "assistant_turns", "sample", "environment_return", "stop_reason", "rollout_id"),
    *("step_data", "state"),
)
_POINTWISE_NAMES = {"rollouts_messages": "messages", "ground_truths": "ground_truth"}
_UNCHANGEABLE = (str, int, float, NoneType)

logger = logging.getLogger("reward_kit.reward_agent")


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """One rollout as a reward function may see it.

    Attributes:
        rollout_id: names the rollout in results.
        messages: the whole conversation.
        ground_truth: the sample's.
        assistant_turns: the position in `messages` of each step's assistant message.
        sample: the sample's row.
        environment_return: the sum of the environment's rewards, None where it gave none.
        stop_reason: why the episode ended.
        final_state: the resource's final state as stored.
        failure: why the rollout itself broke, where it did.
        episode: for rewards that name `step_data`; None for a transcript.
        extra: further named values, such as the task's `goal_description`.
    """

    rollout_id: str
    messages: Sequence[Message]
    ground_truth: Any = None
    assistant_turns: Sequence[int] = ()
    sample: Mapping[str, Any] = field(default_factory=dict)
    environment_return: float | None = None
    stop_reason: str | None = None
    final_state: StateSnapshot | None = None
    failure: Failure | None = None
    episode: SingleAgentEpisode | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, episode: SingleAgentEpisode, task: TaskDefinitionModel | None = None) -> ScoringRequest:
        """The request for an episode that the rollout worker collected."""
        facts = facts_of(episode)
        stored, broke = facts.get("final_state"), facts.get("failure")
        extra = {}
        if task is not None:
            criteria = task.evaluation_criteria
            extra = {
                "task_name": task.name,
                "goal_description": task.goal_description,
                "evaluation_criteria": criteria.model_dump() if criteria else None,
            }
        return cls(
            rollout_id=episode.id_,
            messages=episode.messages,
            ground_truth=facts.get("ground_truth"),
            assistant_turns=episode.assistant_turns.tolist(),
            sample=facts.get("sample") or {},
            environment_return=environment_return(episode),
            stop_reason=facts.get("stop_reason"),
            final_state=StateSnapshot(stored["kind"], stored["payload"]) if stored else None,
            failure=Failure.from_json(broke) if broke else None,
            episode=episode,
            extra=extra,
        )

    def named_values(self, wanted: frozenset[str] | None) -> dict[str, Any]:
        """Everything a pointwise reward may name; what is costly only where it is in `wanted` (None: all).

        All are copies: a reward that changes them changes nothing, neither here nor for the siblings of the rollout.
        """
        values: dict[str, Any] = {}
        for name in self.names(wanted):
            if name == "messages":
                values[name] = [_copy(message) for message in self.messages]
            elif name == "step_data":
                values[name] = _copied(self._steps())
            elif name == "state":
                values[name] = open_snapshot(self.final_state) if self.final_state else None
            else:
                values[name] = _copied(self.plain_value(name))
        return values

    def names(self, wanted: frozenset[str] | None) -> set[str]:
        """The values that a reward gets which takes these parameters (None: any)."""
        known = {*_NAMED, *self.extra}
        return known if wanted is None else known & {_POINTWISE_NAMES.get(name, name) for name in wanted}

    def plain_value(self, name: str) -> Any:
        """A value that is no message, step or state; not a copy."""
        if name in self.extra:
            return self.extra[name]
        return list(self.assistant_turns) if name == "assistant_turns" else getattr(self, name)

    def _steps(self) -> list[StepData]:
        return steps_of(self.episode) if self.episode is not None else []


def _copied(value: Any) -> Any:
    if isinstance(value, _UNCHANGEABLE):
        return value
    kind = type(value)
    return kind() if kind in (dict, list) and not value else copy.deepcopy(value)


def _copy(message: Message) -> Message:
    """A copy that shares nothing that can be changed; plain text needs no deep one."""
    is_plain = isinstance(message.content, _UNCHANGEABLE) and not message.tool_calls and not message.function_call
    return message.model_copy(deep=not is_plain or bool(message.model_extra))


@dataclass(frozen=True, slots=True)
class Scored:
    """One rollout's score, or why it has none.

    Attributes:
        rollout_id: the rollout.
        result: what the reward function returned; None where it failed.
        failure: why there is no score.
        duration_s: how long the call took, with its wait for a thread or a worker.
        sandbox: the level it ran at and, behind walls, their strength; None where nothing was called.
        stdout, stderr: what the reward wrote, where it was kept apart.
        is_output_cut: it wrote more than was kept.
    """

    rollout_id: str
    result: EvaluateResult | None = None
    failure: Failure | None = None
    duration_s: float = 0.0
    sandbox: Mapping[str, str] | None = None
    stdout: str = ""
    stderr: str = ""
    is_output_cut: bool = False

    @property
    def score(self) -> float | None:
        """The score; None where the rollout is unscored. Unscored is not zero."""
        return self.result.score if self.result is not None and self.failure is None else None


class Reward(Protocol):
    """What is known of a reward without calling it, whether it is loaded here or behind walls."""

    @property
    def id(self) -> str: ...
    @property
    def origin(self) -> Origin | None: ...
    @property
    def requirements(self) -> tuple[str, ...]: ...
    @property
    def parameters(self) -> frozenset[str] | None: ...
    @property
    def required(self) -> frozenset[str]: ...
    @property
    def resources(self) -> Mapping[str, Any]: ...


class Scorer(Protocol):
    """Where rewards are called: opened, asked for one score after the other or for several at once, and closed."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    async def score(self, request: ScoringRequest) -> Scored:
        """The score of one rollout; what goes wrong with it is in the result."""
        ...


def check_parameters(spec: Reward) -> None:
    """Refuse a reward that requires what is never given, or a package that is not installed as it asks.

    Raises:
        ConfigError: the name is told, with the nearest one.
    """
    check_installed(spec.requirements, f"reward {spec.id!r}")
    if taken := sorted(spec.resources.keys() & OFFERED):
        raise ConfigError(f"reward {spec.id!r}: a resource cannot be called {taken[0]!r}, which is the rollout's")
    for name in sorted(spec.required - OFFERED - spec.resources.keys()):
        raise ConfigError(f"reward {spec.id!r} asks for {name!r}, which nobody gives{did_you_mean(name, OFFERED)}")


class InProcessScorer:
    """Calls a reward in this process: a synchronous function in a thread, an async one in the loop. No walls.

    Args:
        spec: the reward. Its resources are opened, and its instance is made, before the first call.
        deadline_s: for one call, without its wait for a thread, and for the opening; what exceeds it is unscored with
            the class `timeout`.
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
        if request.failure is not None:
            return Scored(request.rollout_id, None, request.failure)
        began = time.perf_counter()
        result, failure = None, None
        try:
            with boundary(RewardError, f"reward {self._spec.id!r}"):
                result = await self._call(request)
            failure = failure_of(self._spec.id, result, len(request.assistant_turns))
        except RewardKitError as error:
            logger.info("episode %s cannot be scored", request.rollout_id, exc_info=error)
            failure = Failure.from_exception(error)
        return Scored(request.rollout_id, result, failure, time.perf_counter() - began, self._sandbox)

    async def _call(self, request: ScoringRequest) -> EvaluateResult:
        if (opened := self._opened) is None:
            with anyio.fail_after(self._deadline_s):
                opened = await self._open()
        values = request.named_values(self._spec.parameters)
        try:
            result = await self._result_in_time(opened, values)
        except OverdueError:
            raise  # As after a cancellation it stays open: the call that was given up may still use it in its thread.
        except Exception:
            close_state(values.get("state"))
            raise
        close_state(values.get("state"))
        return result

    async def _result_in_time(self, opened: OpenReward, values: Mapping[str, Any]) -> EvaluateResult:
        if self._deadline_s is None or not self._spec.is_async:
            return await opened.call(values)  # the threads keep the deadline themselves
        with anyio.move_on_after(self._deadline_s):
            return await opened.call(values)
        raise OverdueError

    async def _open(self) -> OpenReward:
        async with self._opening:
            if self._opened is None:
                threads = CallThreads(self._deadline_s, self._max_threads)
                run = functools.partial(threads.run, is_bounded=False)
                opened = OpenReward(self._spec, self._load, run, threads.run)
                try:
                    await opened.open()
                except BaseException:
                    threads.close()
                    raise
                self._opened, self._threads = opened, threads
            return self._opened


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


def failure_of(id: str, result: EvaluateResult, steps: int) -> Failure | None:
    """The failure that a result declares itself: an error, or a score that is not valid.

    Args:
        id: the reward's.
        result: what it returned.
        steps: how many there are.

    Raises:
        AlignmentError: a step output names no step, or one that another names too. It is found when it is made, not
            when credit is.
    """
    if result.step_outputs:
        match_to_steps(result.step_outputs, dict.fromkeys(map(str, range(steps))), f"reward {id!r}")
    if result.error is None and result.is_score_valid:
        return None
    reason = result.error or result.reason or "is_score_valid is false"
    return Failure.from_exception(InvalidResultError(f"reward {id!r} declared no valid score: {reason}"))
