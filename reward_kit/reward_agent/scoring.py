"""One score: what a reward function is given of an episode, the call, and what is kept of its answer."""

from __future__ import annotations

import copy
import functools
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from types import TracebackType
from typing import Any, Protocol, Self

import anyio
import anyio.to_thread

from reward_kit.agent.models import StepData, steps_of
from reward_kit.environments.base import StateSnapshot
from reward_kit.environments.snapshots import close_state, open_snapshot
from reward_kit.episodes.record import environment_return
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import (
    AlignmentError,
    ConfigError,
    Failure,
    InvalidResultError,
    RewardError,
    RewardKitError,
    boundary,
    did_you_mean,
)
from reward_kit.loading import load_object
from reward_kit.models import EvaluateResult, Message, TaskDefinitionModel
from reward_kit.reward_agent.calling import OpenReward
from reward_kit.typed_interface import RewardSpec

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
        facts = episode.custom_data
        stored = facts.get("final_state")
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
            failure=Failure.from_json(facts["failure"]) if facts.get("failure") else None,
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
                values[name] = copy.deepcopy(self._steps())
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
    return value if isinstance(value, str | int | float | None) else copy.deepcopy(value)


def _copy(message: Message) -> Message:
    """A copy that shares nothing that can be changed; plain text needs no deep one."""
    is_plain = isinstance(message.content, str | None) and not message.tool_calls and not message.function_call
    return message.model_copy(deep=not is_plain or bool(message.model_extra))


@dataclass(frozen=True, slots=True)
class Scored:
    """One rollout's score, or why it has none.

    Attributes:
        rollout_id: the rollout.
        result: what the reward function returned; None where it failed.
        failure: why there is no score.
        duration_s: how long the call took.
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
    def requirements(self) -> tuple[str, ...]: ...
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
    """Refuse a reward that requires what is never given, or a package that is not installed.

    Raises:
        ConfigError: the name is told, with the nearest one.
    """
    for requirement in spec.requirements:
        package = re.split(r"[\s<>=!~\[;@]", requirement.strip(), maxsplit=1)[0]
        if not any(metadata.distributions(name=package)):
            raise ConfigError(f"reward {spec.id!r} requires {requirement!r}, and it is not installed")
    if taken := sorted(spec.resources.keys() & OFFERED):
        raise ConfigError(f"reward {spec.id!r}: a resource cannot be called {taken[0]!r}, which is the rollout's")
    for name in sorted(spec.required - OFFERED - spec.resources.keys()):
        raise ConfigError(f"reward {spec.id!r} asks for {name!r}, which nobody gives{did_you_mean(name, OFFERED)}")


class InProcessScorer:
    """Calls a reward in this process: a synchronous function in a thread, an async one in the loop. No walls.

    Args:
        spec: the reward. Its resources are opened, and its instance is made, before the first call.
        deadline_s: for one call; what exceeds it is unscored with the class `timeout`.
    """

    def __init__(self, spec: RewardSpec, deadline_s: float | None = None) -> None:
        self._spec, self._deadline_s = spec, deadline_s
        folder = spec.origin.file.parent if spec.origin else None
        self._load = functools.partial(load_object, folder=folder)
        self._opened: OpenReward | None = None
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

    async def score(self, request: ScoringRequest) -> Scored:
        """As `Scorer`. A rollout that broke is not scored: its failure is the answer."""
        if request.failure is not None:
            return Scored(request.rollout_id, None, request.failure)
        began = time.perf_counter()
        result, failure = None, None
        try:
            with boundary(RewardError, f"reward {self._spec.id!r}"), anyio.fail_after(self._deadline_s):
                result = await self._call(request)
            failure = failure_of(self._spec.id, result, len(request.assistant_turns))
        except RewardKitError as error:
            logger.info("episode %s cannot be scored", request.rollout_id, exc_info=error)
            failure = Failure.from_exception(error)
        return Scored(request.rollout_id, result, failure, time.perf_counter() - began, self._sandbox)

    async def _call(self, request: ScoringRequest) -> EvaluateResult:
        opened = self._opened or await self._open()
        values = request.named_values(self._spec.parameters)
        try:
            result = await opened.call(values)
        except Exception:
            close_state(values.get("state"))
            raise
        # After a cancellation it stays open: a call that was given up may still be using it in its thread.
        close_state(values.get("state"))
        return result

    async def _open(self) -> OpenReward:
        async with self._opening:
            if self._opened is None:
                opened = OpenReward(self._spec, self._load, _in_thread)
                await opened.open()
                self._opened = opened
            return self._opened


async def _in_thread(function: Any) -> Any:
    return await anyio.to_thread.run_sync(function, abandon_on_cancel=True)


async def score_one(spec: RewardSpec, request: ScoringRequest, deadline_s: float | None = None) -> Scored:
    """Call a reward on one rollout, in this process; what it opens is closed again."""
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
    seen: set[str] = set()
    for output in result.step_outputs or ():
        index = str(output.step_index)
        if index in seen or index not in map(str, range(steps)):
            problem = "is given twice" if index in seen else f"names no step; there are {steps}, counted from 0"
            raise AlignmentError(f"reward {id!r}: step_index {index!r} {problem}")
        seen.add(index)
    if result.error is None and result.is_score_valid:
        return None
    reason = result.error or result.reason or "is_score_valid is false"
    return Failure.from_exception(InvalidResultError(f"reward {id!r} declared no valid score: {reason}"))
