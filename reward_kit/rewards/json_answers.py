"""Rewards for JSON answers: equality to an expected value, and conformance to a schema."""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from reward_kit.display_text import pluralize
from reward_kit.errors import ConfigError, RewardError, install_hint
from reward_kit.models import EvaluateResult, Message, MetricResult
from reward_kit.reward_calls import checks_options
from reward_kit.rewards.option_types import Closeness, check_closeness, check_extra, is_close
from reward_kit.rewards.replies import excerpt, fenced_blocks, last_answer, passed, quoted, require_truth
from reward_kit.safe_input import Pairs, strict_decoder
from reward_kit.typed_interface import reward_function

if TYPE_CHECKING:
    import jsonschema  # type: ignore[import-untyped, unused-ignore]

LONGEST: Final = 1_000_000
"""The maximum number of characters in a reply."""
_MOST_FAILURES: Final = 1_000
_BRACKET: Final = re.compile(r"[{\[]")
_TAGS = frozenset({"json", "jsonc", "json5", ""})
Where = Literal["any", "whole", "fenced"]


def _check_arrays(options: Mapping[str, Any]) -> None:
    if options["tolerance"] and options["arrays"] == "any_order":
        raise ConfigError("option 'tolerance' cannot be combined with arrays=\"any_order\"; remove one of them")


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
    """Score 1 if the JSON in the answer equals the expected value, and 0 otherwise.

    If `partial` is set, the score is the share of correct fields. Object fields have no order, 1 equals 1.0, true does
    not equal 1, and null is different from a missing field. Syntax that is valid only in Python or JavaScript, such as
    NaN, comments, single quotes and trailing commas, is not JSON. An object with duplicate field names is also
    rejected.

    Args:
        messages: the conversation. Only the last assistant message is read, and its reasoning is ignored.
        ground_truth: the expected value. A string is parsed as JSON, so the string Paris must be written as '"Paris"'.
        answer: "whole" to require that the whole reply is JSON; "fenced" to read the last block that is untagged or
            tagged as json; or "any" to try the whole reply, that block, and the last object or array in the text, in
            this order.
        partial: "fields" to score the share of correct leaves, which are fields and items without children. A leaf must
            be at the correct position. The share is relative to all expected or found leaves.
        arrays: "ordered" to compare arrays in order, or "any_order" to compare them as multisets. In the latter case,
            an item counts only if the whole item is correct.
        tolerance: the maximum difference between two numbers, relative or absolute.

    Raises:
        RewardError: If the ground truth is missing or is not JSON. The rollout is then unscored.
        ConfigError: If the tolerance is not in [0, 1), or if it is combined with "any_order".

    Example:
        ```python
        json_answer(messages, {"city": "Oslo", "degrees": 4})
        ```
    """
    check_closeness(tolerance)
    _check_arrays({"tolerance": tolerance, "arrays": arrays})
    expected = _truth(require_truth(ground_truth, "json_answer"), "json_answer")
    try:
        value = find_json(last_answer(messages), answer)
    except ValueError as error:
        return passed(False, f"no answer: {error}")
    how = ComparisonRules(tolerance, arrays == "any_order")
    differs = difference(expected, value, how)
    common = common_leaves(expected, value, how) if differs else leaves(expected)
    share = common / (leaves(expected) + leaves(value) - common) if differs else 1.0
    reason = f"the answer is not the expected value{differs}" if differs else "the answer is the expected value"
    metrics = {"fields": MetricResult(score=share, reason=f"{common} of {leaves(expected)} fields are correct")}
    return EvaluateResult(score=share if partial == "fields" else float(not differs), reason=reason, metrics=metrics)


def _check_schema(options: Mapping[str, Any]) -> None:
    check_extra("json", "jsonschema")
    if options["schema"] is None:
        return
    try:
        _validator(json.dumps(as_json(options["schema"]), sort_keys=True), formats=False)
    except ValueError as error:
        raise ConfigError(f"option 'schema' is not a JSON schema: {error}") from None


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
    """Score 1 if the JSON in the answer conforms to a schema, and 0 otherwise.

    The content is not judged. This reward runs in the sandbox, because patterns in the schema are matched against text
    from the model. References to other documents are not followed, so `$ref` must refer to a part of the schema itself.

    Args:
        messages: the conversation. Only the last assistant message is read, and its reasoning is ignored.
        ground_truth: the schema of this sample, as an object or a JSON string. It is used if `schema` is `None`.
        schema: the schema for all samples.
        answer: where the JSON is in the reply; see `json_answer`.
        formats: True to check the keyword `format` as well, as far as the library supports it. In the standard, this
            keyword is only an annotation.

    Raises:
        RewardError: If the schema is missing or invalid, or if jsonschema is not installed. The rollout is then
            unscored.
        ConfigError: If the option `schema` is not a valid schema or, when a task is loaded, if the `json` extra is not
            installed.

    Example:
        ```python
        with_options(json_schema_answer, schema={"type": "object", "required": ["city"]})
        ```
    """
    wanted = schema
    if wanted is None:
        wanted = _truth(require_truth(ground_truth, "json_schema_answer"), "json_schema_answer")
    if not isinstance(wanted, dict):
        raise RewardError("json_schema_answer: ground_truth is not a JSON schema; write an object")
    try:
        value, why = find_json(last_answer(messages), answer), ""
    except ValueError as error:
        value, why = None, str(error)
    try:  # Check the schema even if there is no answer, so that the first rollout reports an invalid schema.
        problem = schema_violation(value, wanted, formats)
    except ValueError as error:
        kind = ConfigError if schema is not None else RewardError
        raise kind(f"json_schema_answer: the schema is not a JSON schema: {error}") from None
    if why:
        return passed(False, f"no answer: {why}")
    return passed(not problem, f"the answer does not conform: {problem}" if problem else "the answer conforms")


def find_json(text: str, where: Where = "any") -> Any:
    """Return the JSON value in a reply. Raise a ValueError if the value is missing or invalid."""
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
        raise ValueError("the reply has no JSON block")
    # Find the last object or array in the text. Skip an invalid value up to its error, so that no part of it is
    # mistaken for the answer. Limit the failures, because for each one Python scans the whole text to count its lines.
    value, position, failures = None, 0, 0
    while start := _BRACKET.search(text, position):
        try:
            value, position = decoder.raw_decode(text, start.start())
        except json.JSONDecodeError as error:
            position, failures = max(error.pos, start.end()), failures + 1
            if failures > _MOST_FAILURES:
                raise ValueError("the reply contains too many brackets that are not JSON") from None
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
    if value is None:
        raise ValueError(f"{quoted(text)} contains no JSON; {why}")
    return as_json(value)


def _truth(ground_truth: Any, reward: str) -> Any:
    try:
        return read_json(ground_truth) if isinstance(ground_truth, str) else as_json(ground_truth)
    except ValueError as error:
        raise RewardError(f"{reward}: ground_truth cannot be read: {error}") from None


DEEPEST: Final = 50
"""The maximum nesting depth of a value. Comparing a deeper value would exceed the recursion limit of Python."""


class ComparisonRules(NamedTuple):
    """The rules for comparing two values.

    Attributes:
        tolerance: the maximum difference between two numbers, relative or absolute.
        any_order: True to ignore the order of array items.
        subset: True to allow additional fields in objects.
    """

    tolerance: float = 0.0
    any_order: bool = False
    subset: bool = False


def read_json(text: str) -> Any:
    """Parse a JSON string (RFC 8259).

    Raises:
        ValueError: If the string is not JSON, is too long or too deeply nested, or contains a duplicate field name or a
            number that is out of range for a float.
    """
    if len(text) > LONGEST:
        raise ValueError(f"it is longer than {LONGEST:,} characters")
    try:
        value = decoder.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} in line {error.lineno}") from None
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels") from None
    return as_json(value)


def as_json(value: Any) -> Any:
    """Return the value unchanged. Raise a ValueError if the value is not JSON or is too deeply nested."""
    level = [value]
    for _ in range(DEEPEST):
        level = [item for outer in level for item in _inside(outer)]
        if not level:
            return value
    raise ValueError(f"it is nested deeper than {DEEPEST} levels")


def difference(expected: Any, given: Any, how: ComparisonRules, path: str = "") -> str:
    """Describe the first difference between two values, or return "" if they are equal.

    An example result is " at .a[0]: expected 3, found 4". The number 1 equals 1.0, but true is not a number. Object
    fields have no order.
    """
    if isinstance(expected, Mapping) and isinstance(given, Mapping):
        for name, item in expected.items():
            if name not in given:
                return _located(_field(path, name), f"expected {abbreviate(item)}, but it is missing")
            if differs := difference(item, given[name], how, _field(path, name)):
                return differs
        extra = next((name for name in given if name not in expected), None)
        if extra is None or how.subset:
            return ""
        return _located(_field(path, extra), f"{abbreviate(given[extra])} is not expected")
    if isinstance(expected, list | tuple) and isinstance(given, list | tuple) and len(expected) == len(given):
        if not how.any_order:
            pairs = enumerate(zip(expected, given, strict=True))
            differences = (difference(one, other, how, f"{path}[{index}]") for index, (one, other) in pairs)
            return next(filter(None, differences), "")
        left = Counter(comparison_key(item, True) for item in given)
        for item in expected:
            key = comparison_key(item, True)
            if not left[key]:
                return _located(path, f"the item {abbreviate(item)} is missing")
            left[key] -= 1
        return ""
    if is_number(expected) and is_number(given):
        is_same = is_close(expected, given, how.tolerance)
    else:
        is_same = type(expected) is type(given) and bool(expected == given)
    return "" if is_same else _located(path, f"expected {abbreviate(expected)}, found {abbreviate(given)}")


def _field(path: str, name: str) -> str:
    return f"{path}.{name}" if name.isidentifier() and len(name) <= 60 else f"{path}[{quoted(name)}]"


def _located(path: str, problem: str) -> str:
    return f" at {path}: {problem}" if path else f": {problem}"


def comparison_key(value: Any, any_order: bool = False) -> Hashable:
    """Return a key that is the same for two values if they have no `difference` at tolerance 0."""
    if isinstance(value, Mapping):
        return "object", frozenset((name, comparison_key(item, any_order)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return array_key([comparison_key(item, any_order) for item in value], any_order)
    if is_number(value):
        return "number", value
    return type(value).__name__, value


def array_key(items: Sequence[Hashable], any_order: bool) -> Hashable:
    """Return the key of an array, computed from the keys of its items."""
    return "array", frozenset(Counter(items).items()) if any_order else tuple(items)


def leaves(value: Any) -> int:
    """Count the leaves of a value.

    Leaves are fields and items without children, including empty objects and arrays.
    """
    inner = list(_inside(value))
    return sum(map(leaves, inner)) if inner else 1


def common_leaves(expected: Any, given: Any, how: ComparisonRules) -> int:
    """Count the leaves that are equal and at the same position in two values."""
    if isinstance(expected, Mapping) and isinstance(given, Mapping) and (expected or given):
        return sum(common_leaves(item, given[name], how) for name, item in expected.items() if name in given)
    if isinstance(expected, list | tuple) and isinstance(given, list | tuple) and (expected or given):
        if how.any_order:
            shared = Counter(comparison_key(item, True) for item in expected) & Counter(
                comparison_key(item, True) for item in given
            )
            sizes = {comparison_key(item, True): leaves(item) for item in expected}
            return sum(sizes[key] * count for key, count in shared.items())
        return sum(common_leaves(one, other, how) for one, other in zip(expected, given, strict=False))
    return int(not difference(expected, given, how))


def is_number(value: Any) -> bool:
    """Return True if the value is a JSON number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def abbreviate(value: Any) -> str:
    """Return a shortened form of a value for use in a reason."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, Mapping):
        return f"an object of {pluralize(len(value), 'field')}"
    if isinstance(value, list | tuple):
        return f"an array of {pluralize(len(value), 'item')}"
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    return json.dumps(value)


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise ValueError("the field names of an object must be strings")
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not JSON")
    elif value is not None and not isinstance(value, str | int):
        raise ValueError(f"{type(value).__name__} is not JSON")


def _reject_duplicate_keys(pairs: Pairs) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twin = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"it has the field {quoted(twin)} twice")
    return fields


decoder: Final = strict_decoder(_reject_duplicate_keys)
"""A strict decoder that raises a ValueError if an object has a duplicate field."""
LONGEST_MATCHED: Final = 10_000
"""The maximum length of a string or name that is matched against the regular expressions of a schema."""


def schema_violation(value: Any, schema: Any, formats: bool) -> str:
    """Describe the first violation of a schema, or return "" if the value conforms.

    Args:
        value: the JSON value to check.
        schema: a schema of the draft named in its `$schema`. The default is draft 2020-12.
        formats: True to check the keyword `format` as well, as far as the library supports it.

    Raises:
        RewardError: If jsonschema is not installed, or if the schema refers to a different document or endlessly to
            itself.
        ValueError: If the schema is invalid.
    """
    text = json.dumps(as_json(schema), sort_keys=True)
    validator = _validator(text, formats)
    if '"pattern' in text and _longest(value) > LONGEST_MATCHED:
        return f"a string is longer than {LONGEST_MATCHED:,} characters, which is the limit for matching patterns"
    import referencing.exceptions

    try:
        error = next(validator.iter_errors(value), None)
    except referencing.exceptions.Unresolvable as unknown:
        raise RewardError(
            f"the schema's reference {unknown.ref!r:.100} does not resolve; other documents are not fetched"
        ) from None
    except RecursionError:
        if _depth(value) > DEEPEST // 2:
            return "it is nested too deeply"
        raise RewardError("the schema refers to itself endlessly") from None
    if error is None:
        return ""
    return f"{quoted(error.json_path)}: {excerpt(error.message, 120)}"


@functools.lru_cache(maxsize=64)
def _validator(text: str, formats: bool) -> jsonschema.protocols.Validator:
    """Return a validator for a schema, passed as a JSON string.

    The validator's registry contains only the draft schemas and never fetches a document.
    """
    try:
        import jsonschema.validators  # type: ignore[import-untyped, unused-ignore]
        import jsonschema_specifications  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise RewardError(f"json_schema_answer needs jsonschema; {install_hint('json')}") from None
    schema = json.loads(text)
    draft = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        draft.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"{quoted(error.json_path)}: {excerpt(error.message, 120)}") from None
    bounded = jsonschema.validators.extend(draft, {"uniqueItems": _unique_items})
    checker = draft.FORMAT_CHECKER if formats else None
    return bounded(schema, registry=jsonschema_specifications.REGISTRY, format_checker=checker)


def _unique_items(_validator: Any, is_asked: Any, items: Any, _schema: Any) -> Iterator[jsonschema.ValidationError]:
    """Check `uniqueItems` in linear time. The library's check takes quadratic time."""
    import jsonschema

    if is_asked is True and isinstance(items, list) and len(set(map(comparison_key, items))) < len(items):
        yield jsonschema.ValidationError("two items are the same")


def _longest(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return max((max(len(name), _longest(item)) for name, item in value.items()), default=0)
    return max(map(_longest, value), default=0) if isinstance(value, list) else 0


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)
