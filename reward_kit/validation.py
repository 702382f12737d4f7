"""Messages for data that a pydantic model or an option check rejects. Each problem is described on one line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import pydantic
from pydantic import BaseModel
from pydantic_core import ErrorDetails

from reward_kit.display_text import SECRET_NAME, hide_secrets, truncate
from reward_kit.errors import ConfigError, did_you_mean


def describe_validation_error(error: pydantic.ValidationError, known: type[BaseModel] | None = None) -> list[str]:
    """Return one line per problem: the field, the problem, the value, and the nearest known key."""
    lines = []
    for problem in error.errors(include_url=False):
        field = ".".join(str(part) for part in problem["loc"]) or "(top level)"
        if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):  # dataclasses report the latter
            names = _field_names_at(known, problem["loc"][:-1]) if known else []
            lines.append(f"{field}: unknown key{did_you_mean(str(problem['loc'][-1]), names)}")
        elif problem["type"] == "missing":
            lines.append(f"{field}: missing")
        else:
            is_secret = any(SECRET_NAME.search(str(part)) for part in problem["loc"])
            given = "…" if is_secret else repr(hide_secrets(problem["input"]))
            lines.append(f"{field}: {describe_problem(problem)} (got {truncate(given, 80)})")
    return lines


_WORDS = {
    "int_parsing": "expected a whole number",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "finite_number": "expected a finite number",
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "string_type": "expected a string",
    "list_type": "expected a list",
    "tuple_type": "expected a list",
    "dict_type": "expected a mapping of keys",
    "model_type": "expected a mapping of keys",
    "model_attributes_type": "expected a mapping of keys",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be {le} or less",
    "literal_error": "expected {expected}",
}
"""Our wording of common problems, keyed by the error type of pydantic."""


def describe_problem(problem: ErrorDetails) -> str:
    """Describe a problem without naming the field and the value."""
    words = _WORDS.get(problem["type"])
    if words is None:
        return problem["msg"].removeprefix("Value error, ")
    # Show a bound as it was written: 16, not 16.0.
    bounds = problem.get("ctx", {}).items()
    return words.format(**{name: f"{value:g}" if isinstance(value, float) else value for name, value in bounds})


def _field_names_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Return the field names of the model at `path`, or [] if that path has no model."""
    for part in path:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        if field is None:  # a key in a dict of models, or the name of a union's branch
            continue
        inner = model_types(field.annotation)
        if not inner:
            return []
        model = inner[0]
    return [field.alias or name for name, field in model.model_fields.items()] + list(model.model_fields)


def model_types(annotation: Any) -> list[type[BaseModel]]:
    """Return the pydantic models that occur in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in model_types(part)]


def check_choice(name: str, choice: object, known: Sequence[str]) -> None:
    """Raise a ConfigError if `choice` is not in `known`."""
    if choice not in known:
        raise ConfigError(f"unknown {name} {choice!r}{did_you_mean(str(choice), known)}")


def check_number(name: str, number: object, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise a ConfigError if `number` is not a finite number in [low, high]."""
    if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number):
        raise ConfigError(f"{name} must be a finite number, got {number!r}")
    if number < low or not number <= high:
        limits = f"in [{low:g}, {high:g}]" if high < math.inf else f"at least {low:g}"
        raise ConfigError(f"{name} must be {limits}, got {number!r}")


def check_integer(name: str, number: object, low: int) -> None:
    """Raise a ConfigError if `number` is not an integer of at least `low`."""
    if not isinstance(number, int) or isinstance(number, bool) or number < low:
        raise ConfigError(f"{name} must be an integer of at least {low}, got {number!r}")


def check_positive(name: str, value: Any, *, is_integer: bool = False, allow_zero: bool = False) -> None:
    """Check that an option is a positive number, or zero if that is allowed."""
    kinds = int if is_integer else int | float
    number = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not allow_zero):
        kind = "whole number" if is_integer else "number"
        raise ConfigError(f"{name}: expected a {kind} {'of at least' if allow_zero else 'above'} 0, got {value!r}")
