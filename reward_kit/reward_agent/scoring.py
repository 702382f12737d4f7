"""Scoring requests, their results, and the protocols for rewards and scorers."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from reward_kit.agent.models import episode_steps
from reward_kit.environments.base import StateSnapshot
from reward_kit.environments.snapshots import open_snapshot
from reward_kit.episodes.record import environment_return, get_facts
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import AlignmentError, ConfigError, Failure, InvalidResultError, RewardKitError, did_you_mean
from reward_kit.models import EvaluateResult, Message, MetricResult, TaskDefinitionModel, match_to_steps
from reward_kit.providers.faults import find_transient_failure
from reward_kit.reward_agent.requirements import check_installed
from reward_kit.reward_calls import BATCH_NAMES, OFFERED
from reward_kit.rewards.judge_prompts import METRIC, sum_usages
from reward_kit.typed_interface import EvaluationMode, Origin

if TYPE_CHECKING:
    from reward_kit.agent.rl_rollout_worker import TaskLike

_NAMED = (
    *("messages", "ground_truth", "assistant_turns", "sample", "environment_return", "stop_reason", "rollout_id"),
    *("step_data", "state"),
)
_POINTWISE_NAMES = {many: one for one, many in BATCH_NAMES.items()}
_UNCHANGEABLE = (str, int, float, NoneType)


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """A rollout to score, and the data that a reward function can use.

    Attributes:
        rollout_id: the id of the rollout. The result contains the same id.
        messages: the whole conversation.
        ground_truth: the ground truth of the sample.
        assistant_turns: for each step, the index of its assistant message in `messages`.
        sample: the row of the sample in the dataset.
        environment_return: the sum of the environment's rewards, or None if it returned none.
        stop_reason: the reason why the episode ended.
        final_state: the resource's stored final state.
        failure: the reason why the rollout itself failed, or None if it did not fail.
        episode: the episode, for rewards with a parameter `step_data`. None for a transcript.
        extra: additional values, keyed by name, such as the task's `goal_description`.
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
    def from_episode(
        cls, episode: SingleAgentEpisode, task: TaskDefinitionModel | TaskLike | None = None
    ) -> ScoringRequest:
        """Return the request to score an episode. `task` is a `Task` or its definition."""
        if task is not None and not isinstance(task, TaskDefinitionModel):
            task = task.definition
        facts = get_facts(episode)
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

    @property
    def timing(self) -> Mapping[str, Any] | None:
        """The times of the episode, or None without a episode."""
        return get_facts(self.episode).get("timing") if self.episode is not None else None

    def named_values(self, wanted: frozenset[str] | None) -> dict[str, Any]:
        """Return the values that a pointwise reward takes, or all values if `wanted` is `None`.

        The values are copies, so the reward can modify them.
        """
        values: dict[str, Any] = {}
        for name in self.names(wanted):
            if name == "messages":
                values[name] = [_copy(message) for message in self.messages]
            elif name == "step_data":
                values[name] = copy.deepcopy(episode_steps(self.episode)) if self.episode is not None else []
            elif name == "state":
                values[name] = open_snapshot(self.final_state) if self.final_state else None
            else:
                values[name] = _copied(self.plain_value(name))
        return values

    def names(self, wanted: frozenset[str] | None) -> set[str]:
        """Return the names of the values that a reward with these parameters takes. None means any parameters."""
        known = {*_NAMED, *self.extra}
        return known if wanted is None else known & {_POINTWISE_NAMES.get(name, name) for name in wanted}

    def plain_value(self, name: str) -> Any:
        """Return a value without copying it. Messages, steps and the state are not plain values."""
        if name in self.extra:
            return self.extra[name]
        return list(self.assistant_turns) if name == "assistant_turns" else getattr(self, name)


def _copied(value: Any) -> Any:
    if isinstance(value, _UNCHANGEABLE):
        return value
    kind = type(value)
    return kind() if kind in (dict, list) and not value else copy.deepcopy(value)


def _copy(message: Message) -> Message:
    """Return a copy that shares no mutable data with the message. Strings do not need a deep copy."""
    calls = message.tool_calls or ()
    is_plain = isinstance(message.content, _UNCHANGEABLE) and not message.function_call and not message.model_extra
    if not is_plain or any(call.model_extra or call.function.model_extra for call in calls):
        return message.model_copy(deep=True)
    copied = message.model_copy()
    if calls:
        copied.tool_calls = [call.model_copy(update={"function": call.function.model_copy()}) for call in calls]
    return copied


@dataclass(frozen=True, slots=True)
class Scored:
    """The score of a rollout, or the reason why it is missing.

    Attributes:
        rollout_id: the id of the rollout.
        result: the return value of the reward function, or None if the function failed.
        failure: the reason why the score is missing, or None if there is a score.
        duration_s: the duration of the call in seconds, including the wait for a thread or worker. A group is scored in
            one call.
        sandbox: the level and the strength of the sandbox, or None if there was no call.
        stdout, stderr: the captured output of the call.
        is_output_cut: whether the output was truncated.
        retry_after_s: the endpoint's Retry-After in seconds, if the endpoint caused the failure.
    """

    rollout_id: str
    result: EvaluateResult | None = None
    failure: Failure | None = None
    duration_s: float = 0.0
    sandbox: Mapping[str, str] | None = None
    stdout: str = ""
    stderr: str = ""
    is_output_cut: bool = False
    retry_after_s: float | None = None

    @property
    def score(self) -> float | None:
        """The score, or None if the rollout is unscored. None is not zero."""
        return self.result.score if self.result is not None and self.failure is None else None


class Reward(Protocol):
    """The description of a reward. It is known without calling the reward."""

    @property
    def id(self) -> str: ...
    @property
    def mode(self) -> EvaluationMode: ...
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
    @property
    def options(self) -> Mapping[str, Any]: ...


class Scorer(Protocol):
    """An object that calls a reward to score rollouts or groups. Use it as an async context manager."""

    @property
    def mode(self) -> EvaluationMode:
        """The mode of the reward: "pointwise", or "batch" if it scores whole groups."""
        ...

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    async def score(self, request: ScoringRequest) -> Scored:
        """Score one rollout. A batch reward scores it as a group of one. Failures are part of the result."""
        ...

    async def score_group(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        """Score the rollouts of a group, in order. A batch reward is called once for the whole group.

        Failed rollouts are not passed to the reward, and they keep their failure. If a call fails, all of its rollouts
        are unscored. If a result is invalid, only the rollout of that result is unscored.
        """
        ...


def check_parameters(spec: Reward) -> None:
    """Raise an error if a reward requires an unknown parameter or a package that is not installed."""
    check_installed(spec.requirements, f"reward {spec.id!r}")
    if taken := sorted(spec.resources.keys() & OFFERED):
        raise ConfigError(
            f"reward {spec.id!r}: a resource cannot be named {taken[0]!r}, because a value of the rollout has this name"
        )
    offered = OFFERED - (BATCH_NAMES.keys() if spec.mode == "batch" else _POINTWISE_NAMES.keys())
    for name in sorted(spec.required - offered - spec.resources.keys()):
        near = f"; did you mean {BATCH_NAMES[name]!r}?" if name in BATCH_NAMES else did_you_mean(name, offered)
        if not near.endswith("?"):
            near = f"; to set it, use -O {name}=…, or reward_options: {{{name}: …}} in the task file{near}"
        raise ConfigError(f"reward {spec.id!r} has an unknown parameter {name!r}{near}")


def check_truth(reward: Reward, truths: Iterable[Any], fields: Iterable[str], what: str = "sample") -> None:
    """Raise an error if a reward requires a ground truth but no sample has one.

    If only some samples have no ground truth, these samples are unscored.
    """
    if reward.required & {"ground_truth", "ground_truths"} and all(truth is None for truth in truths):
        known = sorted(set(fields))
        message = f"reward {reward.id!r} needs ground_truth, but no {what} has one{rename_to_truth(known)}"
        raise ConfigError(f"{message} (their fields: {', '.join(known) or 'none'})")


def rename_to_truth(fields: Iterable[str]) -> str:
    """Return the advice to rename a misspelled field, or ""."""
    near = difflib.get_close_matches("ground_truth", [name for name in fields if name != "ground_truth"], n=1)
    return f"; rename {near[0]!r} to 'ground_truth'" if near else ""


def failure_from_error(error: RewardKitError) -> tuple[Failure, float | None]:
    """Return a call's failure, and the endpoint's Retry-After in seconds (None if absent)."""
    failure, trouble = Failure.from_exception(error), find_transient_failure(error)
    if trouble is None:
        return failure, None
    if failure.failure_class == "crash":
        failure = replace(failure, failure_class="provider_error")
    return failure, trouble.retry_after_s


def unscored_result(error: str, usages: Sequence[str]) -> EvaluateResult | None:
    """Return a result that has no score but contains the judges' usage, which costs money.

    Return None if nothing was used.
    """
    if not usages:
        return None
    usage = MetricResult(score=0.0, is_score_valid=False, reason=sum_usages(usages))
    return EvaluateResult(score=0.0, is_score_valid=False, error=error, metrics={METRIC: usage})


async def score_unbroken(
    requests: Sequence[ScoringRequest],
    score_complete: Callable[[Sequence[ScoringRequest]], Awaitable[Sequence[Scored]]],
) -> list[Scored]:
    """Score the rollouts of a group that did not fail. Failed rollouts keep their failures."""
    whole = [request for request in requests if request.failure is None]
    scored = iter(await score_complete(whole) if whole else ())
    return [
        next(scored) if request.failure is None else Scored(request.rollout_id, None, request.failure)
        for request in requests
    ]


def result_error(id: str, result: EvaluateResult, steps: int) -> RewardKitError | None:
    """Return the error if a result is not a valid score, or if it has an output for a nonexistent step."""
    try:
        if result.step_outputs:
            match_to_steps(result.step_outputs, dict.fromkeys(map(str, range(steps))), f"reward {id!r}")
    except AlignmentError as error:
        return error
    if result.error is None and result.is_score_valid:
        return None
    reason = result.error or result.reason or "is_score_valid is False"
    return InvalidResultError(f"reward {id!r} returned no valid score: {reason}")
