"""Requests for scores, their results, and the protocols of rewards and scorers."""

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
from reward_kit.models import EvaluateResult, Message, TaskDefinitionModel, match_to_steps
from reward_kit.providers.faults import find_transient_failure
from reward_kit.reward_agent.requirements import check_installed
from reward_kit.reward_calls import BATCH_NAMES, OFFERED
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
    """One rollout with the data available to a reward function.

    Attributes:
        rollout_id: identifies the rollout in results.
        messages: the whole conversation.
        ground_truth: the sample's ground truth.
        assistant_turns: the position in `messages` of each step's assistant message.
        sample: the sample's row.
        environment_return: the sum of the environment's rewards; None if there were no rewards.
        stop_reason: the reason why the episode ended.
        final_state: the resource's final state as stored.
        failure: the reason why the rollout itself failed; None if it did not fail.
        episode: the episode, for rewards that take `step_data`; None for a transcript.
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
    def from_episode(
        cls, episode: SingleAgentEpisode, task: TaskDefinitionModel | TaskLike | None = None
    ) -> ScoringRequest:
        """Return the request for an episode; `task` is a `Task` or its definition."""
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

    def named_values(self, wanted: frozenset[str] | None) -> dict[str, Any]:
        """Return copies of the values that a pointwise reward takes (None: all), so that rewards may modify them."""
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
        """Return the names of the values for a reward with these parameters; None means that it accepts any."""
        known = {*_NAMED, *self.extra}
        return known if wanted is None else known & {_POINTWISE_NAMES.get(name, name) for name in wanted}

    def plain_value(self, name: str) -> Any:
        """Return a value other than messages, steps and state, without copying it."""
        if name in self.extra:
            return self.extra[name]
        return list(self.assistant_turns) if name == "assistant_turns" else getattr(self, name)


def _copied(value: Any) -> Any:
    if isinstance(value, _UNCHANGEABLE):
        return value
    kind = type(value)
    return kind() if kind in (dict, list) and not value else copy.deepcopy(value)


def _copy(message: Message) -> Message:
    """Return a copy without shared mutable data; plain text needs no deep copy."""
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
    """One rollout's score, or the reason why it is missing.

    Attributes:
        rollout_id: the rollout.
        result: the return value of the reward function; None if the function failed.
        failure: the reason for a missing score.
        duration_s: the duration of the call, including the wait for a thread or worker; a group is one call.
        sandbox: the sandbox level and strength; None without a call.
        stdout, stderr: the captured output of the call.
        is_output_cut: True if the output was truncated.
        retry_after_s: the endpoint's Retry-After, if that caused the failure.
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
        """The score; None if the rollout is unscored, which is not zero."""
        return self.result.score if self.result is not None and self.failure is None else None


class Reward(Protocol):
    """The description of a reward, known without calling it."""

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
    """Calls a reward to score rollouts or groups; use it as an async context manager."""

    @property
    def mode(self) -> EvaluationMode:
        """The reward's mode: pointwise, or batch for whole groups."""
        ...

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    async def score(self, request: ScoringRequest) -> Scored:
        """Score one rollout, for a batch reward as a group of one; failures are part of the result."""
        ...

    async def score_group(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        """Score the rollouts of one group, in order; a batch reward is called once for all of them.

        Failed rollouts are excluded from the call and keep their failure. A failed call leaves all other rollouts
        unscored; an invalid result leaves only its own rollout unscored.
        """
        ...


def check_parameters(spec: Reward) -> None:
    """Reject a reward with an unknown required parameter, or with unmet requirements."""
    check_installed(spec.requirements, f"reward {spec.id!r}")
    if taken := sorted(spec.resources.keys() & OFFERED):
        raise ConfigError(
            f"reward {spec.id!r}: a resource cannot be named {taken[0]!r}, which is the name of a rollout value"
        )
    offered = OFFERED - (BATCH_NAMES.keys() if spec.mode == "batch" else _POINTWISE_NAMES.keys())
    for name in sorted(spec.required - offered - spec.resources.keys()):
        near = f"; did you mean {BATCH_NAMES[name]!r}?" if name in BATCH_NAMES else did_you_mean(name, offered)
        if not near.endswith("?"):
            near = f"; as an option of the reward: -O {name}=…, or reward_options: {{{name}: …}} in the task file{near}"
        raise ConfigError(f"reward {spec.id!r} has an unknown parameter {name!r}{near}")


def check_truth(reward: Reward, truths: Iterable[Any], fields: Iterable[str], what: str = "sample") -> None:
    """Reject a reward that requires a ground truth if no sample has one; samples without one are unscored."""
    if reward.required & {"ground_truth", "ground_truths"} and all(truth is None for truth in truths):
        known = sorted(set(fields))
        near = difflib.get_close_matches("ground_truth", known, n=1)
        fix = f"; rename {near[0]!r} to 'ground_truth'" if near else ""
        message = f"reward {reward.id!r} needs ground_truth, but no {what} has one{fix}"
        raise ConfigError(f"{message} (their fields: {', '.join(known) or 'none'})")


def failure_from_error(error: RewardKitError) -> tuple[Failure, float | None]:
    """Return the failure of a call, and the endpoint's Retry-After."""
    failure, trouble = Failure.from_exception(error), find_transient_failure(error)
    if trouble is None:
        return failure, None
    if failure.failure_class == "crash":
        failure = replace(failure, failure_class="provider_error")
    return failure, trouble.retry_after_s


async def score_unbroken(
    requests: Sequence[ScoringRequest],
    score_complete: Callable[[Sequence[ScoringRequest]], Awaitable[Sequence[Scored]]],
) -> list[Scored]:
    """Score a group without its failed rollouts, which keep their failures."""
    whole = [request for request in requests if request.failure is None]
    scored = iter(await score_complete(whole) if whole else ())
    return [
        next(scored) if request.failure is None else Scored(request.rollout_id, None, request.failure)
        for request in requests
    ]


def result_error(id: str, result: EvaluateResult, steps: int) -> RewardKitError | None:
    """Return the reason why a result leaves its rollout unscored: invalid fields, or a step output for a missing
    step.
    """
    try:
        if result.step_outputs:
            match_to_steps(result.step_outputs, dict.fromkeys(map(str, range(steps))), f"reward {id!r}")
    except AlignmentError as error:
        return error
    if result.error is None and result.is_score_valid:
        return None
    reason = result.error or result.reason or "is_score_valid is False"
    return InvalidResultError(f"reward {id!r} returned no valid score: {reason}")
