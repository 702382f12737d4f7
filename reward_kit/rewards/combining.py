"""Rewards made of rewards: a weighted mean, a gate, bounds, and the first that has an answer.

Each part is a reward of any kind, with options and resources of its own, and sees the rollout as if it were alone. A
part that is unscored leaves the whole unscored, except in `first_of`; a missing number is never taken for a zero.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from reward_kit.errors import ConfigError, InvalidResultError, RewardKitError
from reward_kit.models import EvaluateResult, MetricResult, StepOutput
from reward_kit.reward_calls import Caller, OpenReward, fixed
from reward_kit.task_parts import SandboxLevel
from reward_kit.typed_interface import RewardSpec, as_function, reward_spec

Reward = Callable[..., Any]
_THICKNESS: tuple[SandboxLevel | None, ...] = (None, "in_process", "warm", "isolated")


def weighted(id: str = "weighted", /, **parts: Reward | tuple[Reward, float]) -> Reward:
    """The weighted mean of several rewards; each part's score is a metric of that name.

    Step outputs of the parts are added up by step, with the same weights.

    Args:
        id: names the reward in files.
        parts: by name a reward, of weight 1, or a pair of reward and weight; weights are made to add up to 1.

    Raises:
        ConfigError: there are no parts, or a weight is negative, or all are 0.

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
            raise ConfigError(f"weighted(): the weight of {name!r} is a number of at least 0, not {weight!r}")
    total = sum(weight for _, weight in pairs.values())
    if not total:
        raise ConfigError("weighted(): all weights are 0")
    weights = {name: weight / total for name, (_, weight) in pairs.items()}

    async def combine(call: Call) -> EvaluateResult:
        results = {name: await call(name) for name in weights}
        return EvaluateResult(
            score=sum(weights[name] * result.score for name, result in results.items()),
            reason="; ".join(f"{name} {result.score:g} × {weights[name]:g}" for name, result in results.items()),
            metrics=_metrics(results),
            step_outputs=_summed(results, weights),
        )

    return combined(id, {name: reward for name, (reward, _) in pairs.items()}, combine)


def gate(condition: Reward, reward: Reward, *, at_least: float = 1.0, id: str = "gate") -> Reward:
    """`reward` where `condition` scores at least so much, else 0; `reward` is then not called at all.

    Example:
        ```python
        evaluate = gate(tag_format, math_answer)
        ```
    """

    async def combine(call: Call) -> EvaluateResult:
        first = await call("condition")
        if first.score < at_least:
            reason = f"the condition scores {first.score:g}, below {at_least:g}: {first.reason}"
            return EvaluateResult(score=0.0, reason=reason, metrics=_metrics({"condition": first}))
        result = await call("reward")
        metrics = {**result.metrics, **_metrics({"condition": first})}
        return result.model_copy(update={"metrics": metrics})

    return combined(id, {"condition": condition, "reward": reward}, combine)


def clip(reward: Reward, low: float = 0.0, high: float = 1.0, *, id: str = "clip") -> Reward:
    """A reward whose score is moved to the nearer bound where it lies outside of them.

    Raises:
        ConfigError: `low` is not below `high`.
    """
    if not low < high:
        raise ConfigError(f"clip(): low {low!r} is not below high {high!r}")

    async def combine(call: Call) -> EvaluateResult:
        result = await call("reward")
        return result.model_copy(update={"score": min(max(result.score, low), high)})

    return combined(id, {"reward": reward}, combine)


def first_of(*rewards: Reward, id: str = "first_of") -> Reward:
    """The first reward that gives a score; one that is unscored hands on to the next.

    Such as an exact comparison where there is a ground truth, and a judge where there is none.
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
        raise InvalidResultError(f"{id}: none of {len(names)} rewards gave a score: {'; '.join(problems)}")

    return combined(id, dict(zip(names, rewards, strict=True)), combine)


Call = Callable[[str], Awaitable[EvaluateResult]]
"""Calls the part of this name on the rollout; what it leaves unscored is raised."""
_Combine = Callable[[Call], Awaitable[EvaluateResult]]


class _Parts(NamedTuple):
    specs: Mapping[str, RewardSpec]
    combine: _Combine


class CombinedReward:
    """The instance behind a combination: its parts, opened where the combination runs."""

    made_of: _Parts

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._opened: dict[str, OpenReward] = {}

    async def open_parts(self, load: Callable[[str], Any], run: Caller) -> None:
        """Open each part; what was opened is closed where one fails."""
        async with AsyncExitStack() as stack:
            for name, spec in self.made_of.specs.items():
                opened = OpenReward(spec, loads_beside(spec, load), run)
                await opened.open()
                stack.push_async_callback(opened.close)
                self._opened[name] = opened
            self._stack = stack.pop_all()

    async def score(self, **values: Any) -> EvaluateResult:
        """The score of one rollout."""

        async def call(name: str) -> EvaluateResult:
            opened = self._opened[name]
            result = await opened.call(copies(values))
            if result.error is not None or not result.is_score_valid:
                raise InvalidResultError(f"{opened.spec.id} gave no valid score: {result.error or result.reason}")
            return result

        return await self.made_of.combine(call)

    async def close(self) -> None:
        """Close the parts, last opened first."""
        await self._stack.aclose()


def combined(id: str, parts: Mapping[str, Reward], combine: _Combine) -> Reward:
    """A pointwise reward made of others.

    Args:
        id: names the reward in files.
        parts: by name; each sees the rollout as if it were alone.
        combine: the result of one rollout, from what the parts give when it calls them.

    Raises:
        ConfigError: a part is not a pointwise reward.
    """
    specs = {name: fixed(reward_spec(reward), {}) for name, reward in parts.items()}
    for name, spec in specs.items():
        if spec.mode == "batch":
            raise ConfigError(f"{id}: {name!r} is a batch reward; only pointwise rewards can be combined")
    any_parameters = any(spec.parameters is None for spec in specs.values())
    names = frozenset[str]().union(*(asked(spec) for spec in specs.values()))
    kind = type(id, (CombinedReward,), {"made_of": _Parts(specs, combine)})
    spec = RewardSpec(
        function=kind,
        mode="pointwise",
        id=id,
        requirements=tuple(dict.fromkeys(text for spec in specs.values() for text in spec.requirements)),
        resources={},
        parameters=None if any_parameters else names,
        required=frozenset[str]().union(*(spec.required - spec.resources.keys() for spec in specs.values())),
        is_async=True,
        _converters={},
        sandbox=max((spec.sandbox for spec in specs.values()), key=_THICKNESS.index),
    )
    return as_function(spec)


def loads_beside(spec: RewardSpec, load: Callable[[str], Any]) -> Callable[[str], Any]:
    """A part's references are relative to its own file, wherever the combination was written."""
    if spec.origin is None:
        return load
    folder = spec.origin.file.parent
    return lambda reference: load(str(folder / reference) if ".py:" in reference else reference)


def asked(spec: RewardSpec) -> frozenset[str]:
    """The rollout's values that a reward wants; its options and resources are its own."""
    return (spec.parameters or frozenset()) - spec.resources.keys() - spec.options.keys()


def copies(values: Mapping[str, Any]) -> dict[str, Any]:
    """What one part may change without the others seeing it; a state is open once, and shared."""
    return {name: value if name == "state" else copy.deepcopy(value) for name, value in values.items()}


def _metrics(results: Mapping[str, EvaluateResult]) -> dict[str, MetricResult]:
    """Each part's score as a metric, which lies in [0, 1]; what lies outside is in the reason."""
    return {
        name: MetricResult(
            score=min(max(result.score, 0.0), 1.0),
            reason=result.reason or "" if 0 <= result.score <= 1 else f"scores {result.score:g}: {result.reason or ''}",
        )
        for name, result in results.items()
    }


def _summed(results: Mapping[str, EvaluateResult], weights: Mapping[str, float]) -> list[StepOutput] | None:
    """The parts' step outputs added up by step, in the order of first mention; None where no part has any."""
    total: dict[str, float] = {}
    for name, result in results.items():
        for output in result.step_outputs or ():
            index = str(output.step_index)
            total[index] = total.get(index, 0.0) + weights[name] * output.base_reward
    return [StepOutput(step_index=index, base_reward=reward) for index, reward in total.items()] or None
