"""Rewards for answers that are JSON: the same value as expected, or one that conforms to a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from reward_kit.errors import ConfigError, RewardError
from reward_kit.models import EvaluateResult, Message, MetricResult
from reward_kit.reward_calls import checks_options
from reward_kit.rewards.comparing.json_schemas import check_schema, why_not_conforming
from reward_kit.rewards.comparing.json_values import (
    Comparing,
    as_json,
    common_leaves,
    decoder,
    difference,
    leaves,
    read_json,
)
from reward_kit.rewards.option_types import Closeness, check_closeness, check_extra
from reward_kit.rewards.reading.fenced import fenced_blocks
from reward_kit.rewards.reading.texts import last_answer, needed, passed, shown
from reward_kit.typed_interface import reward_function

LONGEST: Final = 1_000_000
"""Characters of a reply that is read."""

_MOST_FAILURES: Final = 1_000
_BRACKET: Final = re.compile(r"[{\[]")
_TAGS = frozenset({"json", "jsonc", "json5", ""})

Where = Literal["any", "whole", "fenced"]


def _check_arrays(options: Mapping[str, Any]) -> None:
    if options["tolerance"] and options["arrays"] == "any_order":
        raise ConfigError("option 'tolerance': it goes with arrays in order; leave out arrays=\"any_order\"")


@reward_function
@checks_options(_check_arrays)
def json_answer(
    messages: list[Message],
    ground_truth: Any = None,
    *,
    answer: Where = "any",
    partial: Literal["none", "fields"] = "none",
    arrays: Literal["ordered", "any_order"] = "ordered",
    tolerance: Closeness = 0.0,
) -> EvaluateResult:
    """1 where the JSON in the answer is the expected value, else 0, or the share of its fields.

    Fields have no order, 1 and 1.0 are the same number, true is not 1, and null is not a field that is missing. What
    only Python or JavaScript reads (NaN, comments, single quotes, a comma at the end) is no JSON, and neither is an
    object that names a field twice.

    Args:
        messages: the conversation; its last assistant message is read, without what the model thought.
        ground_truth: the value; a text is read as JSON text, so that the text Paris is written '"Paris"'.
        answer: "whole": the reply is JSON and nothing else; "fenced": its last block that is tagged json or not at all;
            "any": the whole, else that block where there is one, else the last object or array in the text.
        partial: "fields": fields and items that hold no others count, each in its place: those that are right, as a
            share of those that were expected or given. More fields than were expected lower it.
        arrays: "any_order" compares arrays as multisets; an item then counts where it is right as a whole.
        tolerance: how far numbers may lie apart, relative or absolute.

    Raises:
        RewardError: there is no ground truth, or it is no JSON, so that the rollout is unscored.
        ConfigError: the tolerance is below 0, or asked for together with "any_order".

    Example:
        ```python
        json_answer(messages, {"city": "Oslo", "degrees": 4})
        ```
    """
    check_closeness(tolerance)
    _check_arrays({"tolerance": tolerance, "arrays": arrays})
    expected = _truth(needed(ground_truth, "json_answer"), "json_answer")
    try:
        found = find_json(last_answer(messages), answer)
    except ValueError as error:
        return passed(False, f"no answer: {error}")
    how = Comparing(tolerance, arrays == "any_order")
    differs = difference(expected, found, how)
    common = common_leaves(expected, found, how) if differs else leaves(expected)
    share = common / (leaves(expected) + leaves(found) - common) if differs else 1.0
    reason = f"the answer is not the expected value{differs}" if differs else "the answer is the expected value"
    metrics = {"fields": MetricResult(score=share, reason=f"{common} of {leaves(expected)} fields are right")}
    return EvaluateResult(score=share if partial == "fields" else float(not differs), reason=reason, metrics=metrics)


def _check_schema(options: Mapping[str, Any]) -> None:
    check_extra("json", "jsonschema")
    if options["schema"] is None:
        return
    try:
        check_schema(options["schema"])
    except ValueError as error:
        raise ConfigError(f"option 'schema': it is no JSON schema: {error}") from None


@reward_function(sandbox="warm")
@checks_options(_check_schema)
def json_schema_answer(
    messages: list[Message],
    ground_truth: Any = None,
    *,
    schema: dict[str, Any] | None = None,
    answer: Where = "any",
    formats: bool = False,
) -> EvaluateResult:
    """1 where the JSON in the answer conforms to a schema, else 0. It says nothing of whether what it holds is right.

    It runs behind walls, since a schema's patterns are run on the model's text. References to other documents are not
    followed: `$ref` leads to a part of the schema itself.

    Args:
        messages: the conversation; its last assistant message is read, without what the model thought.
        ground_truth: the schema, as object or JSON text, where the option does not give it.
        schema: the schema for all samples.
        answer: where the JSON stands, as for `json_answer`.
        formats: `format` counts as well, as far as the library checks it; else it is a remark, as the standard has it.

    Raises:
        RewardError: there is no schema, or it is none, or jsonschema is not installed: the rollout is unscored.
        ConfigError: the option `schema` is no schema; when it is loaded, also where the extra `json` is not installed.

    Example:
        ```python
        with_options(json_schema_answer, schema={"type": "object", "required": ["city"]})
        ```
    """
    wanted = schema
    if wanted is None:
        wanted = _truth(needed(ground_truth, "json_schema_answer"), "json_schema_answer")
    if not isinstance(wanted, dict):
        raise RewardError("json_schema_answer: the ground_truth is no JSON schema; write an object")
    try:
        found, why = find_json(last_answer(messages), answer), ""
    except ValueError as error:
        found, why = None, str(error)
    try:  # also where there is no answer: a schema that is none is told by the first rollout
        problem = why_not_conforming(found, wanted, formats)
    except ValueError as error:
        kind = ConfigError if schema is not None else RewardError
        raise kind(f"json_schema_answer: the schema is no JSON schema: {error}") from None
    if why:
        return passed(False, f"no answer: {why}")
    return passed(not problem, f"the answer does not conform: {problem}" if problem else "the answer conforms")


def find_json(text: str, where: Where = "any") -> Any:
    """The JSON value that a reply gives.

    Raises:
        ValueError: there is none, or it cannot be read; the message says why.
    """
    if not text.strip():
        raise ValueError("the reply is empty")
    if len(text) > LONGEST:
        raise ValueError(f"the reply is longer than {LONGEST:,} characters")
    if where == "whole":
        return read_json(text.strip())
    why = ""
    if where == "any":
        try:
            return read_json(text.strip())
        except ValueError as error:
            why = str(error)
    blocks = [block.text for block in fenced_blocks(text) if block.tag in _TAGS]
    if blocks:
        return read_json(blocks[-1].strip())
    if where == "fenced":
        raise ValueError("the reply has no block of JSON")
    found = _last_in(text)
    if found is None:
        raise ValueError(f"{shown(text)} holds no JSON; {why}")
    return as_json(found)


def _last_in(text: str) -> Any:
    """The last object or array in a text, None where there is none.

    What fails is left behind up to where it fails, so that no part of a broken value is taken for the answer. Each
    failure costs Python a look at the whole text, to count its lines.
    """
    found, position, failures = None, 0, 0
    while start := _BRACKET.search(text, position):
        try:
            found, position = decoder.raw_decode(text, start.start())
        except json.JSONDecodeError as error:
            position, failures = max(error.pos, start.end()), failures + 1
            if failures > _MOST_FAILURES:
                raise ValueError("the reply has too many brackets that are no JSON") from None
        except RecursionError:
            raise ValueError("it nests too deeply") from None
    return found


def _truth(ground_truth: Any, reward: str) -> Any:
    try:
        return read_json(ground_truth) if isinstance(ground_truth, str) else as_json(ground_truth)
    except ValueError as error:
        raise RewardError(f"{reward}: the ground_truth cannot be read: {error}") from None
