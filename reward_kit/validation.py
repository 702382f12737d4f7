"""What is wrong with data that a pydantic model refused, a line for each problem, as a user can mend it."""

from __future__ import annotations

from typing import Any

import pydantic
from pydantic import BaseModel

from reward_kit.errors import did_you_mean


def describe_validation_error(error: pydantic.ValidationError, known: type[BaseModel] | None = None) -> list[str]:
    """One line per problem: the field, the offending value, what is wrong, and the nearest known key.

    Args:
        error: what pydantic raised.
        known: the model whose field names are offered for an unknown key.
    """
    lines = []
    for problem in error.errors(include_url=False):
        field = ".".join(str(part) for part in problem["loc"]) or "(top level)"
        if problem["type"] == "extra_forbidden":
            names = _field_names_at(known, problem["loc"][:-1]) if known else []
            lines.append(f"{field}: unknown key{did_you_mean(str(problem['loc'][-1]), names)}")
        elif problem["type"] == "missing":
            lines.append(f"{field}: missing")
        else:
            shown = repr(problem["input"])
            shown = shown if len(shown) <= 80 else f"{shown[:79]}…"
            lines.append(f"{field}: {problem['msg'].removeprefix('Value error, ')} (got {shown})")
    return lines


def _field_names_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """The field names of the model that `path` leads to, [] where it leads to none."""
    for part in path:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        if field is None:  # a key of a dict of models, or the name of a union's branch
            continue
        inner = _model_types(field.annotation)
        if not inner:
            return []
        model = inner[0]
    return [field.alias or name for name, field in model.model_fields.items()] + list(model.model_fields)


def _model_types(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models that an annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in getattr(annotation, "__args__", ()) for found in _model_types(part)]
