"""A reward made ready and called, the same way in this process and behind walls: resources, instances, arguments.

The confined worker imports this file, so it imports next to nothing.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pydantic

from reward_kit.errors import InvalidResultError, RewardError, RewardKitError
from reward_kit.models import EvaluateResult, MetricResult, StepOutput
from reward_kit.returned import as_result, as_results
from reward_kit.typed_interface import RewardSpec, code_of
from reward_kit.validation import describe_validation_error

BATCH_NAMES = {"messages": "rollouts_messages", "ground_truth": "ground_truths"}
"""What a pointwise name is called where there is a list of it."""

REFERENCE = re.compile(r"[^\s:]+\.py:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")
"""A text that names a factory of a resource."""

Caller = Callable[[Callable[[], Any]], Awaitable[Any]]


class OpenReward:
    """A reward with its resources opened and its instance made, until `close`.

    Args:
        spec: the reward.
        load: finds what a resource's reference names.
        run: calls what is synchronous, where that is to happen.
        run_score: calls a synchronous reward itself; by default as `run`.
    """

    def __init__(
        self, spec: RewardSpec, load: Callable[[str], Any], run: Caller, run_score: Caller | None = None
    ) -> None:
        self.spec = spec
        self._load, self._run, self._run_score = load, run, run_score or run
        self._stack = AsyncExitStack()
        self._resources: dict[str, Any] = {}
        self._score = spec.function
        self.instance: Any = None  # of a class, once it is open
        self._needs_truth = _needs_truth(spec)

    async def open(self) -> None:
        """Open the resources, then make the instance and set it up. What was opened is closed where this fails."""
        async with AsyncExitStack() as stack:
            for name, value in self.spec.resources.items():
                self._resources[name] = await self._opened(value, stack)
            if isinstance(self.spec.function, type):
                self.instance = instance = await self._run(self.spec.function)
                self._score = instance.score
                if (open_parts := getattr(instance, "open_parts", None)) is not None:
                    await open_parts(self._load, self._run)
                if (setup := getattr(instance, "setup", None)) is not None:
                    await self._result_of(setup)
                if (close := getattr(instance, "close", None)) is not None:
                    stack.push_async_callback(self._result_of, close)
            self._stack = stack.pop_all()

    async def _opened(self, value: Any, stack: AsyncExitStack) -> Any:
        """What stands for a resource in calls: a plain value itself, else what its factory makes, opened."""
        if isinstance(value, str) and REFERENCE.match(value):
            value = self._load(value)
            if not callable(value):
                return value
        if not callable(value):
            return value
        made = await self._result_of(value)
        if callable(close := getattr(made, "close", None)):
            stack.push_async_callback(self._result_of, close)
        elif hasattr(made, "__aenter__"):
            made = await stack.enter_async_context(made)
        elif hasattr(made, "__enter__"):
            made = stack.enter_context(made)
        return made

    async def call(self, values: Mapping[str, Any]) -> EvaluateResult:
        """Call the reward on one rollout; a batch reward with a group of one.

        Args:
            values: the rollout's, by the names of a pointwise reward.

        Raises:
            InvalidResultError: it returned no result, or tried to make one that is none.
            RewardError: it requires a ground truth, and the rollout has none.
        """
        if self.spec.mode == "batch":
            (result,) = await self.call_group([values])
            if isinstance(result, RewardKitError):
                raise result
            return result
        self._check_truth(values)
        return as_result(await self._returned({**self._resources, **values}), f"reward {self.spec.id!r}")

    async def call_group(
        self, rollouts: Sequence[Mapping[str, Any] | RewardKitError]
    ) -> list[EvaluateResult | RewardKitError]:
        """Call a batch reward on a group; in the place of each rollout its result, or why it alone has none.

        Args:
            rollouts: the values of each, by the names of a pointwise reward, or why they cannot be had: such a rollout
                is left out of the call, and its error is its result.

        Raises:
            InvalidResultError: it returned no list, or one of another length.
        """
        rollouts = [self._or_why_not(values) for values in rollouts]
        whole = [values for values in rollouts if not isinstance(values, RewardKitError)]
        if not whole:
            return [values for values in rollouts if isinstance(values, RewardKitError)]
        names = dict.fromkeys(name for values in whole for name in values)
        lists = {BATCH_NAMES.get(name, name): [values.get(name) for values in whole] for name in names}
        # One list per value of the rollouts; a resource is one for all of them.
        returned = await self._returned({**self._resources, **lists})
        results = iter(as_results(returned, len(whole), f"reward {self.spec.id!r}"))
        return [values if isinstance(values, RewardKitError) else next(results) for values in rollouts]

    def _check_truth(self, values: Mapping[str, Any]) -> None:
        """None where a ground truth is required would be compared, and score 0: so it is not handed over at all."""
        if self._needs_truth and values.get("ground_truth") is None:
            raise RewardError(
                f"reward {self.spec.id!r} requires a ground_truth, and the sample has none; give it one, or write "
                "`| None` in the annotation of a reward that can do without"
            )

    def _or_why_not(self, values: Mapping[str, Any] | RewardKitError) -> Mapping[str, Any] | RewardKitError:
        if isinstance(values, RewardKitError):
            return values
        try:
            self._check_truth(values)
        except RewardError as error:
            return error
        return values

    async def _returned(self, given: Mapping[str, Any]) -> Any:
        arguments = self.spec.arguments(given)
        try:
            if self.spec.is_async:
                return await self._score(**arguments)
            return await self._run_score(lambda: self._score(**arguments))
        except pydantic.ValidationError as error:
            if (invalid := _invalid(error, self.spec.id)) is None:
                raise
            raise invalid from error

    async def close(self) -> None:
        """Close the instance and the resources, last opened first."""
        stack, self._stack = self._stack, AsyncExitStack()
        await stack.aclose()

    async def _result_of(self, function: Callable[[], Any]) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function()
        result = await self._run(function)
        return await result if inspect.isawaitable(result) else result


def calls_out(spec: RewardSpec) -> bool:
    """It, or a part of it, asks a model or has a sandbox of its own, neither of which can be done behind walls."""
    if any(hasattr(resource, "check_options") for resource in spec.resources.values()):
        return True
    parts = getattr(spec.function, "made_of", None)
    return any(calls_out(part) for part in parts.specs.values()) if parts is not None else False


def _needs_truth(spec: RewardSpec) -> bool:
    """It has no default for the ground truth, and an annotation that does not allow None."""
    name = BATCH_NAMES["ground_truth"] if spec.mode == "batch" else "ground_truth"
    if name not in spec.required:
        return False
    hint = typing.get_type_hints(code_of(spec.function)).get(name, Any)
    if spec.mode == "batch":
        hint = next(iter(typing.get_args(hint)), Any)
    return _refuses_none(hint)


def _refuses_none(hint: Any) -> bool:
    """Whether None is surely no value of an annotation; what cannot be told allows it."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return all(map(_refuses_none, typing.get_args(hint)))
    kind = origin or hint
    return isinstance(kind, type) and kind not in (object, types.NoneType)


def _invalid(error: pydantic.ValidationError, id: str) -> InvalidResultError | None:
    """An invalid result that a reward tried to make is named as one, not as a crash."""
    kinds = {kind.__name__: kind for kind in (EvaluateResult, StepOutput, MetricResult)}
    if error.title not in kinds:
        return None
    problems = "; ".join(describe_validation_error(error, kinds[error.title]))
    return InvalidResultError(f"reward {id!r} made an invalid {error.title}: {problems}")
