"""Rewards that combine other rewards: a weighted mean, a gate, clipping, and the first reward that returns a score.

Each part is a pointwise reward together with its options and resources. If a part that was called leaves the rollout
unscored, the combined result is unscored too, except in `first_of`. A missing score is never treated as zero.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from reward_kit.display_text import truncate
from reward_kit.errors import ConfigError, InvalidResultError, RewardKitError
from reward_kit.models import EvaluateResult, MetricResult, StepOutput
from reward_kit.reward_calls import Caller, OpenReward, fix_options
from reward_kit.rewards.judge_prompts import METRIC, sum_usages
from reward_kit.task_parts import SandboxLevel
from reward_kit.typed_interface import RewardSpec, as_function, reward_spec

Reward = Callable[..., Any]
Call = Callable[[str], Awaitable[EvaluateResult]]
"""A function that calls the part with the given name on the rollout.

It raises an error if the part returns no score.
"""
_PART_REASON = 300  # maximum length of a part's reason that is quoted in the reason of `weighted`
_LEVELS: tuple[SandboxLevel | None, ...] = (None, "in_process", "warm", "isolated")


def weighted(id: str = "weighted", /, **parts: Reward | tuple[Reward, float]) -> Reward:
    """Return a reward that is the weighted mean of multiple rewards.

    Each part's score is recorded as a metric under the part's name. For each step, the step outputs of the parts are
    added up with the same weights.

    Args:
        id: the name under which the reward is recorded.
        parts: the parts, keyed by name. Each part is a reward, which has weight 1, or a pair of a reward and its
            weight. The weights are normalized so that they sum to 1.

    Raises:
        ConfigError: If there are no parts, if a weight is negative, or if all weights are 0.

    Example:
        ```python
        evaluate = weighted(answer=(math_answer, 0.9), format=(tag_format, 0.1))
        ```
    """
    pairs = {name: part if isinstance(part, tuple) else (part, 1.0) for name, part in parts.items()}
    if not pairs:
        raise ConfigError("weighted() needs at least one part: weighted(answer=math_answer, …)")
    for name, (_, weight) in pairs.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
            raise ConfigError(f"weighted(): the weight of {name!r} must be a non-negative number, got {weight!r}")
    total = sum(weight for _, weight in pairs.values())
    if not total:
        raise ConfigError("weighted(): all weights are 0")
    weights = {name: weight / total for name, (_, weight) in pairs.items()}

    async def combine(call: Call) -> EvaluateResult:
        return weighted_result({name: await call(name) for name in weights}, weights)

    return combined(id, {name: reward for name, (reward, _) in pairs.items()}, combine)


def weighted_result(results: Mapping[str, EvaluateResult], weights: Mapping[str, float]) -> EvaluateResult:
    """Return the weighted sum of multiple results, including a metric for each of them.

    Step outputs are added up for each step, and their reasons are joined. The reason quotes the parts' reasons in
    ascending order of score; parts with weight 0 come last.
    """
    steps: dict[str, float] = {}
    reasons: dict[str, list[str]] = {}
    for name, result in results.items():
        for output in result.step_outputs or ():
            index = str(output.step_index)
            steps[index] = steps.get(index, 0.0) + weights[name] * output.base_reward
            if output.reason:
                reasons.setdefault(index, []).append(f"{name}: {output.reason}")
    by_score = sorted(results, key=lambda name: (weights[name] == 0, results[name].score))
    return EvaluateResult(
        score=sum(weights[name] * result.score for name, result in results.items()),
        reason="; ".join(_part_reason(name, results[name], weights[name]) for name in by_score),
        metrics={name: _metric(result) for name, result in results.items()},
        step_outputs=[
            StepOutput(step_index=index, base_reward=reward, reason="; ".join(reasons.get(index, ())) or None)
            for index, reward in steps.items()
        ]
        or None,
    )


def _part_reason(name: str, result: EvaluateResult, weight: float) -> str:
    """Return a part's score, weight and shortened reason on one line.

    The part's metric contains the full reason.
    """
    reason = truncate(" ".join((result.reason or "").split()), _PART_REASON)
    return f"{name} {result.score:.3g} (weight {weight:.3g})" + (f": {reason}" if reason else "")


def gate(condition: Reward, reward: Reward, *, at_least: float = 1.0, id: str = "gate") -> Reward:
    """Return a reward that calls `reward` only if `condition` scores at least `at_least`.

    If `condition` scores less, the result is 0 and `reward` is not called.

    Example:
        ```python
        evaluate = gate(tag_format, math_answer)
        ```
    """

    async def combine(call: Call) -> EvaluateResult:
        first = await call("condition")
        if first.score < at_least:
            reason = f"the condition scored {first.score:g}, which is less than {at_least:g}: {first.reason}"
            return EvaluateResult(score=0.0, reason=reason, metrics={"condition": _metric(first)})
        result = await call("reward")
        return result.model_copy(update={"metrics": {**result.metrics, "condition": _metric(first)}})

    return combined(id, {"condition": condition, "reward": reward}, combine)


def clip(reward: Reward, low: float = 0.0, high: float = 1.0, *, id: str = "clip") -> Reward:
    """Return a reward whose score is clipped to the interval from `low` to `high`.

    Raises:
        ConfigError: If `low` is not less than `high`.
    """
    if not low < high:
        raise ConfigError(f"clip(): low must be less than high, got {low!r} and {high!r}")

    async def combine(call: Call) -> EvaluateResult:
        result = await call("reward")
        return result.model_copy(update={"score": min(max(result.score, low), high)})

    return combined(id, {"reward": reward}, combine)


def first_of(*rewards: Reward, id: str = "first_of") -> Reward:
    """Return a reward that tries multiple rewards in order and uses the first result that has a score.

    For example, the reward can compare the answer exactly if there is a ground truth, and call a judge otherwise.
    """
    if not rewards:
        raise ConfigError("first_of() needs at least one reward")
    names = [str(number) for number in range(len(rewards))]

    async def combine(call: Call) -> EvaluateResult:
        problems = []
        for name in names:
            try:
                return await call(name)
            except RewardKitError as error:
                problems.append(str(error))
        raise InvalidResultError(f"{id}: none of the {len(names)} rewards returned a score: {'; '.join(problems)}")

    return combined(id, dict(zip(names, rewards, strict=True)), combine)


class CombinedReward:
    """A reward that combines other rewards and opens them in its process."""

    made_of: Mapping[str, RewardSpec]
    combine: Callable[[Call], Awaitable[EvaluateResult]]

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._opened: dict[str, OpenReward] = {}

    async def open_parts(self, load: Callable[[str], Any], run: Caller) -> None:
        """Open all parts. If a part cannot be opened, close those that are already open."""
        async with AsyncExitStack() as stack:
            for name, spec in self.made_of.items():
                opened = OpenReward(spec, _loader_beside(spec, load), run)
                await opened.open()
                stack.push_async_callback(opened.close)
                self._opened[name] = opened
            self._stack = stack.pop_all()

    async def call_part(self, name: str, values: Mapping[str, Any]) -> EvaluateResult:
        """Call a part with a copy of the rollout, so that parts cannot affect each other.

        The final state is opened only once and is shared by all parts.
        """
        copies = {key: value if key == "state" else copy.deepcopy(value) for key, value in values.items()}
        return await self._opened[name].call(copies)

    async def score(self, **values: Any) -> EvaluateResult:
        """Return the result for one rollout, including the total usage of all judges that were called."""
        usages: list[str] = []

        async def call(name: str) -> EvaluateResult:
            result = await self.call_part(name, values)
            if METRIC in result.metrics:
                usages.append(result.metrics[METRIC].reason)
            if result.error is not None or not result.is_score_valid:
                problem = result.error or result.reason
                raise InvalidResultError(f"{self.made_of[name].id} returned no valid score: {problem}")
            return result

        result = await self.combine(call)
        if usages:
            usage = MetricResult(score=0.0, is_score_valid=False, reason=sum_usages(usages))
            result = result.model_copy(update={"metrics": {**result.metrics, METRIC: usage}})
        return result

    async def close(self) -> None:
        """Close the parts in reverse order."""
        await self._stack.aclose()


def combined(id: str, parts: Mapping[str, Reward], combine: Callable[[Call], Awaitable[EvaluateResult]]) -> Reward:
    """Return a pointwise reward that combines other rewards.

    Args:
        id: the name under which the reward is recorded.
        parts: the rewards, keyed by name.
        combine: a function that returns the result for one rollout. Its argument is a function that calls the part with
            a given name on that rollout.

    Raises:
        ConfigError: If a part is not a pointwise reward.
    """
    specs = {name: fix_options(reward_spec(reward), {}) for name, reward in parts.items()}
    for name, spec in specs.items():
        if spec.mode == "batch":
            raise ConfigError(f"{id}: {name!r} is a batch reward; only pointwise rewards can be combined")
    takes_any = any(spec.parameters is None for spec in specs.values())
    spec = RewardSpec(
        function=type(id, (CombinedReward,), {"made_of": specs, "combine": staticmethod(combine)}),
        mode="pointwise",
        id=id,
        requirements=tuple(dict.fromkeys(text for spec in specs.values() for text in spec.requirements)),
        resources={},
        parameters=None if takes_any else frozenset[str]().union(*map(rollout_values, specs.values())),
        required=frozenset[str]().union(*(spec.required - spec.resources.keys() for spec in specs.values())),
        is_async=True,
        _converters={},
        sandbox=max((spec.sandbox for spec in specs.values()), key=_LEVELS.index),
    )
    return as_function(spec)


def _loader_beside(spec: RewardSpec, load: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a loader that resolves a part's references relative to the part's file."""
    if spec.origin is None:
        return load
    folder = spec.origin.file.parent
    return lambda reference: load(str(folder / reference) if ".py:" in reference else reference)


def rollout_values(spec: RewardSpec) -> frozenset[str]:
    """Return the names of the rollout values that a reward takes, excluding its options and resources."""
    return (spec.parameters or frozenset()) - spec.resources.keys() - spec.options.keys()


def _metric(result: EvaluateResult) -> MetricResult:
    return MetricResult(score=result.score, reason=result.reason or "")
