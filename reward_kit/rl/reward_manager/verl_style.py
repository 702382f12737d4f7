"""Score functions written for verl, called as rewards: the same deadlines, the same failures, never a silent zero."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from reward_kit.errors import ConfigError, InvalidResultError, kind_of
from reward_kit.models import EvaluateResult
from reward_kit.reward_agent.custom_answers import failed, read_answer
from reward_kit.typed_interface import Mode, RewardSpec, reward_function, reward_spec

ComputeScore = Callable[..., Any]

_NAMES: dict[Mode, tuple[str, ...]] = {
    "pointwise": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "batch": ("data_sources", "solution_strs", "ground_truths", "extra_infos"),
}


def is_verl_style(function: Any, mode: Mode) -> bool:
    """It takes a solution by verl's name for it.

    Raises:
        ConfigError: by that of the other form.
    """
    if not callable(function) or isinstance(function, type):
        return False
    parameters = inspect.signature(function).parameters
    for form, names in _NAMES.items():
        if names[1] in parameters:
            if form != mode:
                manager = "BatchRewardManager" if form == "batch" else "NaiveRewardManager"
                raise ConfigError(f"a score function that takes {names[1]!r} is for the {manager}")
            return True
    return False


class VerlReward:
    """A score function of verl's form as a reward, for one batch.

    It gives a number, `(score, query, response)`, or a mapping with `score` and whatever else it has to tell.

    Attributes:
        spec: the reward.
        extras: for each rollout id what its answer held besides the score.
    """

    def __init__(self, function: ComputeScore, mode: Mode) -> None:
        self._function, self._mode = function, mode
        self._parameters = inspect.signature(function).parameters
        self.extras: dict[str, dict[str, Any]] = {}
        spec, truth = self._spec(), self._parameters.get(_NAMES[mode][2])
        if truth is None or truth.default is not truth.empty:
            spec = replace(spec, required=spec.required - {_NAMES[mode][2]})
        self.spec = spec

    def _spec(self) -> RewardSpec:
        function, is_async = self._function, inspect.iscoroutinefunction(self._function)
        name = getattr(function, "__name__", type(function).__name__)
        if self._mode == "pointwise":

            def one(
                messages: Any, rollout_id: str, data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any
            ) -> EvaluateResult:
                return self._one(
                    rollout_id, function(**self._named(data_source, solution_str, ground_truth, extra_info))
                )

            async def one_awaited(
                messages: Any, rollout_id: str, data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any
            ) -> EvaluateResult:
                named = self._named(data_source, solution_str, ground_truth, extra_info)
                return self._one(rollout_id, await function(**named))

            return reward_spec(reward_function(id=name)(one_awaited if is_async else one))

        def all_of(
            rollouts_messages: Any,
            rollout_id: list[str],
            data_source: Any,
            solution_str: Any,
            ground_truths: Any,
            extra_info: Any,
        ) -> Any:
            return self._all(rollout_id, function(**self._named(data_source, solution_str, ground_truths, extra_info)))

        async def all_awaited(
            rollouts_messages: Any,
            rollout_id: list[str],
            data_source: Any,
            solution_str: Any,
            ground_truths: Any,
            extra_info: Any,
        ) -> Any:
            named = self._named(data_source, solution_str, ground_truths, extra_info)
            return self._all(rollout_id, await function(**named))

        return reward_spec(reward_function(mode="batch", id=name)(all_awaited if is_async else all_of))

    def _named(self, *values: Any) -> dict[str, Any]:
        """What the function names; everything where it takes any."""
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
        named = zip(_NAMES[self._mode], values, strict=True)
        return {name: value for name, value in named if takes_any or name in self._parameters}

    def _one(self, rollout_id: str, answer: Any) -> EvaluateResult:
        if isinstance(answer, Mapping):
            self.extras[rollout_id] = {key: value for key, value in answer.items() if key != "score"}
        try:
            return read_answer(answer, "it")
        except InvalidResultError as error:
            # Such an answer is told of in the place of its row; an error here would be that of a whole batch.
            return failed(str(error))

    def _all(self, rollout_ids: list[str], answers: Any) -> Any:
        answers = answers.tolist() if hasattr(answers, "tolist") else answers
        if not isinstance(answers, list | tuple):
            raise InvalidResultError(f"a score function for batches returns a list, not {kind_of(answers)}")
        if len(answers) != len(rollout_ids):
            raise InvalidResultError(f"{len(answers)} scores for {len(rollout_ids)} rows")
        return [self._one(rollout_id, answer) for rollout_id, answer in zip(rollout_ids, answers, strict=True)]
