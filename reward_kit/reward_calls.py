"""Calls to a reward that has fixed options and open resources, in this process or in the sandbox.

A built-in reward takes options as keyword parameters with defaults. `with_options` fixes some of these parameters, like
`reward_options:` in a task file, and immediately checks the values against the annotations. `OpenReward` then makes the
calls. The sandboxed worker imports this file, so the file has few imports.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, TypeVar

import pydantic

from reward_kit.errors import ConfigError, InvalidResultError, RewardError, RewardKitError, did_you_mean
from reward_kit.models import EvaluateResult, MetricResult, StepOutput
from reward_kit.typed_interface import (
    RewardSpec,
    as_function,
    as_result,
    as_results,
    reward_spec,
    scoring_function,
    type_adapter,
)
from reward_kit.validation import describe_validation_error, model_types

_Function = TypeVar("_Function", bound=Callable[..., Any])
_CHECK = "check_options"
BATCH_NAMES = {"messages": "rollouts_messages", "ground_truth": "ground_truths"}
"""The batch parameter that corresponds to each pointwise parameter."""
OFFERED = frozenset(
    {
        *("messages", "ground_truth", "assistant_turns", "sample", "state", "step_data", "environment_return"),
        *("stop_reason", "rollout_id", "task_name", "goal_description", "evaluation_criteria"),
        *BATCH_NAMES.values(),
    }
)
"""All values of a rollout that a reward function may take as parameters."""
REFERENCE = re.compile(r"[^\s:]+\.py:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")
"""The syntax of a string that names a resource factory."""
Caller = Callable[[Callable[[], Any]], Awaitable[Any]]


def with_options(reward: Callable[..., Any], /, **options: Any) -> Callable[..., Any]:
    """Return a copy of a reward for which some keyword parameters are fixed.

    Args:
        reward: a reward function or class, which is not modified.
        options: the options, keyed by parameter name. Values are converted to the parameters' annotations.

    Raises:
        ConfigError: a parameter does not exist or is filled from the rollout, or the value of an option is invalid.

    Example:
        ```python
        strict = with_options(math_answer, tolerance=0.0)
        ```
    """
    return as_function(fix_options(reward_spec(reward), options))


def fix_options(spec: RewardSpec, options: Mapping[str, Any]) -> RewardSpec:
    """Return the spec with these options fixed, in the same way as `with_options`.

    The reward's own check (`checks_options`) runs even if there are no options.
    """
    code = scoring_function(spec.function)
    hints = typing.get_type_hints(code, include_extras=True)
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name in OFFERED:
            raise ConfigError(f"reward {spec.id!r}: {name!r} is filled from the rollout and cannot be an option")
        if spec.parameters is not None and name not in spec.parameters:
            known = option_names(spec)
            if not known:
                raise ConfigError(f"reward {spec.id!r} takes no options; remove {name!r}")
            raise ConfigError(f"reward {spec.id!r} has no option {name!r}{did_you_mean(name, known)}")
        try:
            adapter = type_adapter(hints.get(name, Any))
            values[name] = value if adapter is None else adapter.validate_python(value)
        except pydantic.ValidationError as error:
            models = model_types(hints.get(name))  # for the nearest known key in a nested option
            lines = describe_validation_error(error, models[0] if models else None)
            problem = "; ".join(line.removeprefix("(top level): ") for line in lines)
            raise ConfigError(f"reward {spec.id!r}, option {name!r}: {problem}") from None
    options = {**spec.options, **values}
    if (check := getattr(code, _CHECK, None)) is not None:
        parameters = inspect.signature(code).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        try:
            check({name: value for name, value in {**defaults, **options}.items() if name not in OFFERED})
        except ConfigError as error:
            raise ConfigError(f"reward {spec.id!r}, {error}") from None
    return replace(spec, options=options, required=spec.required - values.keys()) if values else spec


def checks_options(check: Callable[[Mapping[str, Any]], None]) -> Callable[[_Function], _Function]:
    """Decorate a reward with a check of the combination of its options. The check runs when the reward is loaded.

    Place the decorator below `@reward_function`.

    Args:
        check: a function that takes all options by name, including defaults, converted to their annotations. It raises
            a ConfigError such as "option 'at_least': 5 is above at_most, 3", to which the reward's name is prefixed.
    """

    def mark(function: _Function) -> _Function:
        setattr(function, _CHECK, check)
        return function

    return mark


def option_names(spec: RewardSpec) -> list[str]:
    """Return the sorted names of the parameters that may be fixed."""
    return sorted((spec.parameters or frozenset()) - OFFERED - spec.resources.keys())


class OpenReward:
    """A reward with its open resources and, for a class, its instance; `close` closes them.

    Args:
        spec: the reward.
        load: a function that returns the object to which a resource reference refers.
        run: a function that calls a synchronous function, either in a thread or directly.
        run_score: a function that calls the reward if it is synchronous; by default `run`.
    """

    def __init__(
        self, spec: RewardSpec, load: Callable[[str], Any], run: Caller, run_score: Caller | None = None
    ) -> None:
        self.spec = spec
        self._load, self._run, self._run_score = load, run, run_score or run
        self._stack = AsyncExitStack()
        self._resources: dict[str, Any] = {}
        self._score = spec.function
        self.instance: Any = None  # the instance of a reward class, once opened
        self._needs_truth = _needs_truth(spec)

    async def open(self) -> None:
        """Open the resources, create the instance and call its `setup`. Everything is rolled back on error."""
        async with AsyncExitStack() as stack:
            for name, value in self.spec.resources.items():
                self._resources[name] = await self._opened(value, stack)
            if isinstance(self.spec.function, type):
                self.instance = instance = await self._run(self.spec.function)
                self._score = instance.score
                if (open_parts := getattr(instance, "open_parts", None)) is not None:
                    await open_parts(self._load, self._run)
                if (setup := getattr(instance, "setup", None)) is not None:
                    await self._run_function(setup)
                if (close := getattr(instance, "close", None)) is not None:
                    stack.push_async_callback(self._run_function, close)
            self._stack = stack.pop_all()

    async def _opened(self, value: Any, stack: AsyncExitStack) -> Any:
        """Return a plain value unchanged. For a factory, open its product and return the opened object."""
        if isinstance(value, str) and REFERENCE.match(value):
            value = self._load(value)
        if not callable(value):
            return value
        made = await self._run_function(value)
        if callable(close := getattr(made, "close", None)):
            stack.push_async_callback(self._run_function, close)
        elif hasattr(made, "__aenter__"):
            made = await stack.enter_async_context(made)
        elif hasattr(made, "__enter__"):
            made = stack.enter_context(made)
        return made

    async def call(self, values: Mapping[str, Any]) -> EvaluateResult:
        """Call the reward on one rollout. A batch reward gets a group of one.

        Args:
            values: the values of the rollout, keyed by the parameter names of a pointwise reward.

        Raises:
            InvalidResultError: the reward returned, or tried to create, an invalid result.
            RewardError: the reward requires a ground truth, but the rollout has none.
        """
        if self.spec.mode == "batch":
            (result,) = await self.call_group([values])
            if isinstance(result, RewardKitError):
                raise result
            return result
        self._check_truth(values)
        return as_result(await self._call({**self._resources, **values}), f"reward {self.spec.id!r}")

    async def call_group(
        self, rollouts: Sequence[Mapping[str, Any] | RewardKitError]
    ) -> list[EvaluateResult | RewardKitError]:
        """Call a batch reward on a group, and return the result or the error of each rollout.

        Args:
            rollouts: the values of each rollout, keyed by the parameter names of a pointwise reward. If an item is an
                error, its rollout is excluded from the call, and the error is returned as its result.

        Raises:
            InvalidResultError: the reward did not return a list of the right length.
        """
        whole: list[Mapping[str, Any]] = []
        failed: dict[int, RewardKitError] = {}
        for index, values in enumerate(rollouts):
            try:
                if isinstance(values, RewardKitError):
                    failed[index] = values
                else:
                    self._check_truth(values)
                    # Check each value separately, so that an invalid value excludes only its own rollout.
                    self.spec.arguments({BATCH_NAMES.get(name, name): [value] for name, value in values.items()})
                    whole.append(values)
            except (RewardError, InvalidResultError) as error:
                failed[index] = error
        if not whole:
            return list(failed.values())
        names = dict.fromkeys(name for values in whole for name in values)
        lists = {BATCH_NAMES.get(name, name): [values.get(name) for values in whole] for name in names}
        # The rollouts' values become lists; all rollouts share the resources.
        returned = await self._call({**self._resources, **lists})
        results = iter(as_results(returned, len(whole), f"reward {self.spec.id!r}"))
        return [failed[index] if index in failed else next(results) for index in range(len(rollouts))]

    def _check_truth(self, values: Mapping[str, Any]) -> None:
        """Raise a RewardError if a required ground truth is missing.

        Otherwise, the reward would receive None and probably return a score of 0.
        """
        if self._needs_truth and values.get("ground_truth") is None:
            raise RewardError(
                f"reward {self.spec.id!r} requires a ground_truth, but the sample has none; add one, or write `| "
                "None` in the annotation if the reward works without it"
            )

    async def _call(self, values: Mapping[str, Any]) -> Any:
        arguments = self.spec.arguments(values)
        try:
            if self.spec.is_async:
                return await self._score(**arguments)
            return await self._run_score(lambda: self._score(**arguments))
        except pydantic.ValidationError as error:
            # An invalid result that the reward constructs does not count as a crash.
            kinds = {kind.__name__: kind for kind in (EvaluateResult, StepOutput, MetricResult)}
            if error.title not in kinds:
                raise
            problems = "; ".join(describe_validation_error(error, kinds[error.title]))
            raise InvalidResultError(f"reward {self.spec.id!r} created an invalid {error.title}: {problems}") from error
        except (AttributeError, TypeError) as error:
            # The cause may be message["content"] or message.get("content").
            if not str(error).startswith(("'Message' object", "'ToolCall' object")):
                raise
            raise RewardError(
                f"reward {self.spec.id!r}: {type(error).__name__}: {error}; messages are Message objects: use "
                "messages[-1].content, or annotate the parameter as messages: list[dict]"
            ) from error

    async def close(self) -> None:
        """Close the instance and the resources in the reverse order of opening."""
        stack, self._stack = self._stack, AsyncExitStack()
        await stack.aclose()

    async def _run_function(self, function: Callable[[], Any]) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function()
        result = await self._run(function)
        return await result if inspect.isawaitable(result) else result


def needs_host(spec: RewardSpec) -> bool:
    """Return True if the reward, or a part of it, cannot run in the sandbox.

    This is the case if it calls a model or starts a sandbox of its own.
    """
    if any(hasattr(resource, "check_options") for resource in spec.resources.values()):
        return True
    return any(needs_host(part) for part in getattr(spec.function, "made_of", {}).values())


def _needs_truth(spec: RewardSpec) -> bool:
    """Return True if the ground truth is required and its annotation excludes None."""
    name = BATCH_NAMES["ground_truth"] if spec.mode == "batch" else "ground_truth"
    if name not in spec.required:
        return False
    hint = typing.get_type_hints(scoring_function(spec.function)).get(name, Any)
    return _excludes_none(next(iter(typing.get_args(hint)), Any) if spec.mode == "batch" else hint)


def _excludes_none(hint: Any) -> bool:
    """Return True if an annotation certainly excludes None."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return all(map(_excludes_none, typing.get_args(hint)))
    kind = origin or hint
    return isinstance(kind, type) and kind not in (object, types.NoneType)
