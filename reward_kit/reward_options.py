"""Options of a reward function: its keyword parameters, fixed before it is called.

A built-in reward takes what it may be told as keyword parameters with defaults. `with_options` gives a reward with some
of them fixed, as a task file does with `reward_options:`. What is fixed is checked against the annotations when it is
fixed, and not by the thousandth rollout.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import pydantic

from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.typed_interface import RewardSpec, as_function, code_of, reward_spec
from reward_kit.validation import describe_validation_error

_Function = TypeVar("_Function", bound=Callable[..., Any])
_CHECK = "check_options"

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
"""Every name of a rollout's value that a reward function may ask for."""


def with_options(reward: Callable[..., Any], /, **options: Any) -> Callable[..., Any]:
    """A reward like this one, with some of its keyword parameters fixed.

    Args:
        reward: a reward function or class; it stays as it is.
        options: by the names of its parameters; values are shaped to their annotations.

    Raises:
        ConfigError: it has no such parameter, the parameter is one of the rollout's values, or the value does not fit.

    Example:
        ```python
        strict = with_options(math_answer, tolerance=0.0)
        ```
    """
    return as_function(fixed(reward_spec(reward), options))


def fixed(spec: RewardSpec, options: Mapping[str, Any]) -> RewardSpec:
    """The spec with these options; as `with_options`, for one that is loaded already.

    Also without any, the reward's own check is made, as it asked for with `checks_options`.
    """
    hints = typing.get_type_hints(code_of(spec.function), include_extras=True)
    values = {name: _shaped(spec, name, value, hints.get(name, Any)) for name, value in options.items()}
    _check_together(spec, {**spec.options, **values})
    return replace(spec, options={**spec.options, **values}, required=spec.required - values.keys()) if values else spec


def checks_options(check: Callable[[Mapping[str, Any]], None]) -> Callable[[_Function], _Function]:
    """Have a reward's options checked together when it is loaded; below `@reward_function`.

    Args:
        check: gets all options by name, defaults included, each of its annotation's type. It raises a ConfigError such
            as "option 'at_least': 5 is above at_most, 3"; the reward's name is put before it.
    """

    def mark(function: _Function) -> _Function:
        setattr(function, _CHECK, check)
        return function

    return mark


def option_names(spec: RewardSpec) -> list[str]:
    """The parameters that may be fixed, sorted."""
    return sorted((spec.parameters or frozenset()) - OFFERED - spec.resources.keys())


def _check_together(spec: RewardSpec, options: Mapping[str, Any]) -> None:
    code = code_of(spec.function)
    check = getattr(code, _CHECK, None)
    if check is None:
        return
    parameters = inspect.signature(code).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    try:
        check({name: value for name, value in {**defaults, **options}.items() if name not in OFFERED})
    except ConfigError as error:
        raise ConfigError(f"reward {spec.id!r}, {error}") from None


def _shaped(spec: RewardSpec, name: str, value: Any, annotation: Any) -> Any:
    if name in OFFERED:
        raise ConfigError(f"reward {spec.id!r}: {name!r} is the rollout's, and cannot be an option")
    if spec.parameters is not None and name not in spec.parameters:
        known = option_names(spec)
        if not known:
            raise ConfigError(f"reward {spec.id!r} takes no options; remove {name!r}")
        raise ConfigError(f"reward {spec.id!r} has no option {name!r}{did_you_mean(name, known)}")
    try:
        return pydantic.TypeAdapter(annotation).validate_python(value)
    except pydantic.ValidationError as error:
        problem = "; ".join(line.removeprefix("(top level): ") for line in describe_validation_error(error))
        raise ConfigError(f"reward {spec.id!r}, option {name!r}: {problem}") from None
