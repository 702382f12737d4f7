"""Bounded validation against a JSON schema from an untrusted server.

A regular expression, references that double at each level, or a check for unique items can make jsonschema run for
years. Here, each keyword costs one step, plus one step for each item that it may visit. Patterns are not matched, and a
check ends after a fixed number of steps.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

from reward_kit.environments.base import canonical_json
from reward_kit.safe_input import TooLargeError, format_size

_MAX_SCHEMA_CHARS = 256 * 1024
_MAX_STEPS = 100_000
_SHOWN_CHARS = 200
_PATTERN_KEYWORDS = ("pattern", "patternProperties", "unevaluatedProperties")


class _Steps:
    """The number of steps that the current check has left. Checks run one at a time, because they never await."""

    left = 0

    @classmethod
    def take(cls, count: int) -> None:
        cls.left -= count
        if cls.left < 0:
            raise TooLargeError(f"{_MAX_STEPS:,} steps of validation")


def schema_violation(value: Any, schema: Any) -> str:
    """Describe the first violation of a schema, or return "" if the value conforms.

    Raises:
        ValueError: the schema is invalid.
        TooLargeError: the schema is too large, or the check takes too many steps.
    """
    from referencing.exceptions import Unresolvable

    text = json.dumps(schema)
    if len(text) > _MAX_SCHEMA_CHARS:
        raise TooLargeError(format_size(_MAX_SCHEMA_CHARS))
    validator = _validator(text)
    _Steps.left = _MAX_STEPS
    try:
        error = next(validator.iter_errors(value), None)
    except Unresolvable as unknown:
        raise ValueError(f"the reference {unknown.ref!r:.100} does not resolve to anything in the schema") from None
    except RecursionError:
        raise TooLargeError("Python's recursion limit") from None
    return "" if error is None else f"{error.json_path:.100}: {error.message:.{_SHOWN_CHARS}}"


@functools.lru_cache(maxsize=64)
def _validator(text: str) -> Any:
    import jsonschema.validators  # type: ignore[import-untyped, unused-ignore]
    import referencing

    schema = json.loads(text)
    draft = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        draft.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"{error.json_path:.100}: {error.message:.{_SHOWN_CHARS}}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    checks = {name: _counted(check) for name, check in draft.VALIDATORS.items()}
    checks |= dict.fromkeys(_PATTERN_KEYWORDS, _unchecked) | {"uniqueItems": _unique_items}
    checks["additionalProperties"] = _without_patterns(checks["additionalProperties"])
    return jsonschema.validators.extend(draft, checks)(schema, registry=referencing.Registry())


def _counted(check: Any) -> Any:
    def run(validator: Any, keyword: Any, value: Any, schema: Any) -> Iterator[Any]:
        size = len(keyword) if isinstance(keyword, list) else 0
        _Steps.take(1 + size + (len(value) if isinstance(value, list | dict) else 0))
        yield from check(validator, keyword, value, schema) or ()

    return run


def _without_patterns(check: Any) -> Any:
    def run(validator: Any, keyword: Any, value: Any, schema: Any) -> Iterator[Any]:
        if "patternProperties" not in schema:
            yield from check(validator, keyword, value, schema)

    return run


def _unchecked(*_: Any) -> tuple[()]:
    return ()


def _unique_items(_validator: Any, is_asked: Any, items: Any, _schema: Any) -> Iterator[Any]:
    import jsonschema

    if is_asked is True and isinstance(items, list):
        _Steps.take(len(items))
        if len(set(map(canonical_json, items))) < len(items):
            yield jsonschema.ValidationError("two items are the same")
