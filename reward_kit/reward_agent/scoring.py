"""One score: what a reward function is given of an episode, the call, and what is kept of its answer."""

from __future__ import annotations

import copy
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import anyio
import anyio.to_thread
import pydantic

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
from reward_kit.models import (
    EvaluateResult,
    Message,
    MetricResult,
    StepOutput,
    TaskDefinitionModel,
    describe_validation_error,
)
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
_BATCH_NAMES = {"messages": "rollouts_messages", "ground_truth": "ground_truths"}

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
        values = {
            "messages": [_copy(message) for message in self.messages],
            "ground_truth": copy.deepcopy(self.ground_truth),
            "assistant_turns": list(self.assistant_turns),
            "sample": copy.deepcopy(dict(self.sample)),
            "environment_return": self.environment_return,
            "stop_reason": self.stop_reason,
            "rollout_id": self.rollout_id,
            **copy.deepcopy(dict(self.extra)),
        }
        if wanted is None or "step_data" in wanted:
            values["step_data"] = copy.deepcopy(self._steps())
        if wanted is None or "state" in wanted:
            values["state"] = open_snapshot(self.final_state) if self.final_state else None
        return values

    def _steps(self) -> list[StepData]:
        return steps_of(self.episode) if self.episode is not None else []


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
    """

    rollout_id: str
    result: EvaluateResult | None = None
    failure: Failure | None = None
    duration_s: float = 0.0

    @property
    def score(self) -> float | None:
        """The score; None where the rollout is unscored. Unscored is not zero."""
        return self.result.score if self.result is not None and self.failure is None else None


def check_parameters(spec: RewardSpec) -> None:
    """Refuse a reward that requires what is never given, or a package that is not installed.

    Raises:
        ConfigError: the name is told, with the nearest one.
    """
    for requirement in spec.requirements:
        package = re.split(r"[\s<>=!~\[;@]", requirement.strip(), maxsplit=1)[0]
        if not any(metadata.distributions(name=package)):
            raise ConfigError(f"reward {spec.id!r} requires {requirement!r}, and it is not installed")
    for name in sorted(spec.required - OFFERED - spec.resources.keys()):
        raise ConfigError(f"reward {spec.id!r} asks for {name!r}, which nobody gives{did_you_mean(name, OFFERED)}")


async def score_one(spec: RewardSpec, request: ScoringRequest, deadline_s: float | None = None) -> Scored:
    """Call a reward on one rollout, in this process. A synchronous function runs in a thread.

    A batch reward is called with a batch of one. A rollout that broke is not scored: its failure is the answer.
    """
    began = time.perf_counter()
    result, failure = None, None
    if request.failure is not None:
        return Scored(request.rollout_id, None, request.failure)
    try:
        with boundary(RewardError, f"reward {spec.id!r}"), anyio.fail_after(deadline_s):
            result = await _call(spec, request)
        _check_steps(spec, result, len(request.assistant_turns))
        failure = _declared_failure(spec, result)
    except RewardKitError as error:
        logger.info("episode %s cannot be scored", request.rollout_id, exc_info=error)
        failure = Failure.from_exception(error)
    return Scored(request.rollout_id, result, failure, time.perf_counter() - began)


async def _call(spec: RewardSpec, request: ScoringRequest) -> EvaluateResult:
    given = {**spec.resources, **request.named_values(spec.parameters)}
    state = given.get("state")
    if spec.mode == "batch":
        # One list per named value, with an entry for each rollout.
        given = {_BATCH_NAMES.get(name, name): [value] for name, value in given.items()}
    try:
        returned = await _run(spec, spec.arguments(given))
    except Exception:
        close_state(state)
        raise
    # After a cancellation it stays open: a call that was given up may still be using it in its thread.
    close_state(state)
    checked = spec.check(returned, 1)
    result: EvaluateResult = checked[0] if spec.mode == "batch" else checked
    return result


async def _run(spec: RewardSpec, arguments: Mapping[str, Any]) -> Any:
    """What the function returns; an invalid result that it tries to make is named as one, not as a crash."""
    try:
        if spec.is_async:
            return await spec.function(**arguments)
        return await anyio.to_thread.run_sync(lambda: spec.function(**arguments), abandon_on_cancel=True)
    except pydantic.ValidationError as error:
        kinds = {kind.__name__: kind for kind in (EvaluateResult, StepOutput, MetricResult)}
        if error.title not in kinds:
            raise
        problems = "; ".join(describe_validation_error(error, kinds[error.title]))
        raise InvalidResultError(f"reward {spec.id!r} made an invalid {error.title}: {problems}") from error


def _check_steps(spec: RewardSpec, result: EvaluateResult, steps: int) -> None:
    """A step output that names no step, or a second one for a step, is found when it is made, not when credit is."""
    seen: set[str] = set()
    for output in result.step_outputs or ():
        index = str(output.step_index)
        if index in seen or index not in map(str, range(steps)):
            problem = "is given twice" if index in seen else f"names no step; there are {steps}, counted from 0"
            raise AlignmentError(f"reward {spec.id!r}: step_index {index!r} {problem}")
        seen.add(index)


def _declared_failure(spec: RewardSpec, result: EvaluateResult) -> Failure | None:
    """The failure that a result declares itself: an error, or a score that is not valid."""
    if result.error is None and result.is_score_valid:
        return None
    reason = result.error or result.reason or "is_score_valid is false"
    return Failure.from_exception(InvalidResultError(f"reward {spec.id!r} declared no valid score: {reason}"))
