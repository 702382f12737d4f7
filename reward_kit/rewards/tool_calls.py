"""The reward `tool_calls_match`, which compares a rollout's tool calls with the expected calls.

Calls are compared by tool name and by the meaning of their arguments under the tool's schema, not as strings. A ground
truth that lists allowed values has the format of the Berkeley Function-Calling Leaderboard (Patil et al. 2025,
gorilla.cs.berkeley.edu). Unlike the leaderboard, this reward pairs unordered calls optimally instead of greedily, and
it compares strings exactly unless the option `strings` is set to a less strict comparison.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from reward_kit.errors import ConfigError, RewardError, boundary, type_name
from reward_kit.models import EvaluateResult, Message, MetricResult
from reward_kit.reward_calls import checks_options
from reward_kit.rewards.json_answers import abbreviate, array_key, as_json, is_number, read_json
from reward_kit.rewards.replies import agent_messages, fenced_blocks, last_answer, passed, quoted, require_truth
from reward_kit.typed_interface import reward_function

MOST_CALLS: Final = 256
"""The maximum number of calls; a rollout with more calls is wrong."""
LONGEST: Final = 1_000_000
"""The maximum number of characters in all arguments together, and in a message that is searched for calls."""
_OPENS, _CLOSES = "<tool_call>", "</tool_call>"
_TOOL_FIELDS = ("tools", "functions", "function")
Extra = Literal["wrong", "ignore"]
Partial = Literal["none", "calls", "arguments"]


class _ParsedCall(NamedTuple):
    """A call found in a message. Its arguments are a JSON string."""

    name: str
    arguments: str
    problem: str = ""


Strings = Literal["exact", "casefold", "bfcl"]
"""The comparison of strings: exact, without case, or as on the Berkeley Function-Calling Leaderboard.

The leaderboard ignores case, removes spaces and the characters ,./-_*^, and treats single and double quotes as equal.
"""


class ArgumentRules(NamedTuple):
    """The rules for comparing arguments.

    Attributes:
        strings: how strings are compared.
        coerce: True to convert a string to the number or boolean that it represents if the schema requires one.
        any_order: True to ignore the order of items in every array. If False, only arrays with `uniqueItems` have no
            order.
    """

    strings: Strings = "exact"
    coerce: bool = False
    any_order: bool = False


def _check_tools(options: Mapping[str, Any]) -> None:
    if options["tools"] is not None:
        _by_name(options["tools"], ArgumentRules("exact", False, False), ConfigError, "option 'tools': tools")


@reward_function
@checks_options(_check_tools)
def tool_calls_match(
    messages: list[Message],
    ground_truth: Any = None,
    sample: Any = None,
    assistant_turns: Any = None,
    *,
    turns: Literal["last", "all"] = "last",
    ordered: bool = False,
    extra: Extra = "wrong",
    partial: Partial = "none",
    tools: list[dict[str, Any]] | None = None,
    validate: Literal["full", "names"] = "full",
    strings: Strings = "exact",
    coerce: bool = False,
    any_order: bool = False,
    text_calls: bool = False,
) -> EvaluateResult:
    """Score 1 if the agent's calls match the expected calls, and 0 otherwise.

    If `partial` is set, the score is a share. If tool specifications are known, an invalid call scores 0 even if the
    same call is expected. A call is invalid if the tool is unknown, if the arguments are not a JSON object, or if they
    do not conform to the schema. Omitting an argument is the same as passing its default, 5 equals 5.0 if the schema
    requires a number or an integer, and arrays with `uniqueItems` have no order. The metrics are the shares of correct
    `calls`, `names` and `arguments`.

    Args:
        messages: the conversation.
        ground_truth: the expected calls. A call has the form `{"name": …, "arguments": {…}}` or `{"type": "function",
            "function": {…}}`, where the arguments are an object or a JSON string. Multiple calls are written as a list
            or as `{"tool_calls": […]}`. Allowed values are written as `[{"function": {"argument": [allowed
            values…]}}]`, where "" allows the argument to be omitted. Each of these forms can also be passed as a JSON
            string. With `[]`, the score is 1 only if no call is made, even with `extra="ignore"`.
        sample: the row of the dataset. If `tools` is `None`, the tool specifications are read from the row's field
            `tools`, `functions` or `function`.
        assistant_turns: the positions of the messages that the agent wrote. Example calls in the prompt are ignored. If
            None, all assistant messages are used.
        turns: "last" to compare the calls in the last message that contains calls, or "all" to compare the calls in all
            messages.
        ordered: True to require the calls in the expected order.
        extra: "wrong" to reject additional calls, or "ignore" to accept them.
        partial: "calls" to score the share of correct calls, or "arguments" to give each call partial credit: the share
            of correct arguments among all expected or passed arguments. Additional calls lower the share unless they
            are ignored.
        tools: the tool specifications, either as in a request, `{"type": "function", "function": {"name",
            "parameters"}}`, or only the inner objects.
        validate: "full" to check arguments against the schema, or "names" to check only their names. Some of the
            leaderboard's ground truths require "names", because they expect a variable name where the schema requires a
            number.
        strings: "exact" to compare strings exactly; "casefold" to ignore case, even in enums; or "bfcl" to compare
            strings as the leaderboard does, which also removes spaces and the characters ,./-_*^ and therefore treats
            "1.5" and "15" as equal.
        coerce: True to accept "5" for 5 and "true" for true if the schema requires that type. This option requires tool
            specifications.
        any_order: True to ignore the order of every array.
        text_calls: True to also count calls written as `<tool_call>{…}</tool_call>` or in ```json blocks if the message
            has no other calls.

    Raises:
        RewardError: If the ground truth is missing or invalid, or if the sample's tools are invalid. The rollout is
            then unscored.
        ConfigError: If `tools` is invalid.

    Example:
        ```python
        tool_calls_match(messages, {"name": "get_weather", "arguments": {"city": "Oslo"}})
        ```
    """
    expected = read_expected(require_truth(ground_truth, "tool_calls_match"))
    same = ArgumentRules(strings, coerce, any_order)
    schemas = _schemas(tools, sample, same)
    if coerce and schemas is None:
        raise RewardError(
            "tool_calls_match: `coerce` needs tool specifications; set `tools` in the options or the sample"
        )
    turns_seen = [message for message in agent_messages(messages, assistant_turns) if message.role == "assistant"]
    if not turns_seen:
        return passed(False, "the agent wrote no message and made no call")
    by_turn = [calls for message in turns_seen if (calls := _message_calls(message, text_calls))]
    written = [call for calls in (by_turn if turns == "all" else by_turn[-1:]) for call in calls]
    if len(written) > MOST_CALLS or sum(len(call.arguments) for call in written) > LONGEST:
        return passed(False, f"the agent made {len(written)} calls, which are too many or too long")
    with boundary(RewardError, "tool_calls_match: the schema of a tool is malformed"):
        made = [_made(call, schemas, validate) for call in written]
        if not expected:
            called = ", ".join(quoted(call.name) for call in made[:3])
            return passed(
                not made, f"no call was expected, {f'but {called} was called' if made else 'and none was made'}"
            )
        known, unknown = schemas or {}, ArgumentsSchema(True, same)
        shares = [[_share(one, call, known.get(one.name, unknown)) for call in made] for one in expected]
        pair = best_in_order if ordered else best_pairs
        exact = pair([[float(share == 1.0) for share in row] for row in shares])
        right = sum(column is not None and row[column] == 1.0 for row, column in zip(shares, exact, strict=True))
        fractions = zip(shares, pair(shares), strict=True)
        fractional = sum(row[column] for row, column in fractions if column is not None)
        names = sum((Counter(call.name for call in expected) & Counter(call.name for call in made)).values())
        count = len(expected) if extra == "ignore" else max(len(expected), len(made))
        parts = {"calls": right / count, "names": names / count, "arguments": min(fractional / count, 1.0)}
        problem = ""
        wrong = (
            (one, row)
            for one, row, column in zip(expected, shares, exact, strict=True)
            if column is None or row[column] < 1.0
        )
        if (first := next(wrong, None)) is not None:
            problem = _problem(*first, made, known.get(first[0].name, unknown))
        elif extra == "wrong" and (others := [call for index, call in enumerate(made) if index not in set(exact)]):
            problem = f"; a call to {quoted(others[0].name)} was not expected"
    reason = f"{right} of {len(expected)} expected calls were made{problem}"
    metrics = {name: MetricResult(score=share, reason=reason) for name, share in parts.items()}
    is_right = right == len(expected) and (extra == "ignore" or len(made) == len(expected))
    return EvaluateResult(score=1.0 if is_right else parts.get(partial, 0.0), reason=reason, metrics=metrics)


def _problem(expected: ExpectedCall, shares: Sequence[float], made: Sequence[MadeCall], schema: ArgumentsSchema) -> str:
    """Return the reason why an expected call was not counted."""
    near = [index for index, call in enumerate(made) if call.name == expected.name and shares[index] < 1.0]
    if not near:
        return f"; {quoted(expected.name)} was not called" + (f", but {quoted(made[0].name)} was" if made else "")
    nearest = made[max(near, key=shares.__getitem__)]
    if nearest.problem:
        return f"; {quoted(expected.name)}: {nearest.problem}"
    same = _same_arguments(expected, nearest, schema)
    name = next((name for name in (*expected.arguments, *nearest.arguments) if name not in same), None)
    if name is None:
        return f"; {quoted(expected.name)}: the call is correct"
    wanted = f"{abbreviate(expected.arguments[name])} was" if name in expected.arguments else "it was not"
    given = f"is {abbreviate(nearest.arguments[name])}" if name in nearest.arguments else "is missing"
    return f"; {quoted(expected.name)}: argument {quoted(name)} {given}, but {wanted} expected"


def _made(call: _ParsedCall, schemas: Mapping[str, ArgumentsSchema] | None, validate: str) -> MadeCall:
    if call.problem:
        return MadeCall(call.name, {}, call.problem)
    try:
        # Some models send an empty string for a tool without parameters.
        arguments = read_json(call.arguments) if call.arguments.strip() else {}
    except ValueError as error:
        return MadeCall(call.name, {}, f"its arguments cannot be read: {error}")
    if not isinstance(arguments, dict):
        return MadeCall(call.name, {}, "its arguments are not a JSON object")
    if schemas is None:
        return MadeCall(call.name, arguments)
    if call.name not in schemas:
        return MadeCall(call.name, arguments, "the tool is unknown")
    schema = schemas[call.name]
    problem = schema.problem(arguments) if validate == "full" else schema.missing_or_unknown(arguments)
    return MadeCall(call.name, arguments, problem)


def _message_calls(message: Message, text_calls: bool) -> list[_ParsedCall]:
    calls = [_ParsedCall(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    if not calls and message.function_call is not None:
        calls = [_ParsedCall(message.function_call.name, message.function_call.arguments)]
    text = last_answer([message]) if text_calls and not calls else ""
    if len(text) > LONGEST:
        return []
    if _OPENS in text:  # A call that cannot be parsed counts as a wrong call.
        return [call for part in text.split(_OPENS)[1:] for call in _read(part.partition(_CLOSES)[0], True)]
    blocks = [block.text for block in fenced_blocks(text) if block.tag in ("json", "")]
    return calls or [call for block in blocks for call in _read(block, False)]


def _read(text: str, is_call: bool) -> Iterator[_ParsedCall]:
    try:
        value = read_json(text.strip())
    except ValueError as error:
        if is_call:
            yield _ParsedCall("", "", f"a call cannot be parsed: {error}")
        return
    for item in value if isinstance(value, list) else [value]:
        inner = item.get("function", item) if isinstance(item, dict) else None
        if isinstance(inner, dict) and isinstance(inner.get("name"), str) and "arguments" in inner:
            arguments = inner["arguments"]
            yield _ParsedCall(inner["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))
        elif is_call:
            yield _ParsedCall("", "", "a call has no name or no arguments")


def _schemas(tools: Any, sample: Any, same: ArgumentRules) -> dict[str, ArgumentsSchema] | None:
    """Return the schemas, keyed by tool name, or None if no tools are known."""
    if tools is not None:
        return _by_name(tools, same, ConfigError, "option 'tools': tools")
    for field in _TOOL_FIELDS if isinstance(sample, Mapping) else ():
        given, where = sample.get(field), f"tool_calls_match: the sample's field {field!r}"
        try:
            given = read_json(given) if isinstance(given, str) and given.strip().startswith("[") else given
        except ValueError as error:
            raise RewardError(f"{where} cannot be read: {error}") from None
        if not isinstance(given, list) or not given:
            continue
        # The other field names may have a different meaning in a dataset.
        if field == "tools" or all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in given):
            return _by_name(given, same, RewardError, where)
    return None


def _by_name(tools: Any, same: ArgumentRules, error: type[Exception], where: str) -> dict[str, ArgumentsSchema]:
    by_name: dict[str, ArgumentsSchema] = {}
    for index, item in enumerate(tools):
        inner = item.get("function", item) if isinstance(item, Mapping) else None
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(name, str):
            raise error(f'{where}[{index}] is not a tool; write {{"name": …, "parameters": {{…}}}}')
        try:
            schema = as_json(inner.get("parameters", True))
        except ValueError as problem:
            raise error(f"{where}[{index}].parameters: {problem}") from None
        by_name[name] = ArgumentsSchema(True if schema is None else schema, same, name)
    return by_name


def best_pairs(weights: Sequence[Sequence[float]]) -> list[int | None]:
    """Pair rows with columns so that the total weight is maximized.

    This is the Hungarian method with potentials (Kuhn 1955, Munkres 1957), which takes O(rows² · columns) time.

    Args:
        weights: a rectangular matrix of non-negative numbers.

    Returns:
        The column assigned to each row. No column is used twice. If there are fewer columns than rows, None is assigned
        to some rows.
    """
    height, width = len(weights), len(weights[0]) if weights else 0
    if height > width:
        placed: list[int | None] = [None] * height
        for column, row in enumerate(best_pairs(list(zip(*weights, strict=True)))):
            if row is not None:
                placed[row] = column
        return placed
    row_price, column_price = [0.0] * (height + 1), [0.0] * (width + 1)
    row_of = [0] * (width + 1)  # by column; row and column 0 mean "unassigned"
    for new_row in range(1, height + 1):
        row_of[0], column = new_row, 0
        slack, before, is_used = [float("inf")] * (width + 1), [0] * (width + 1), [False] * (width + 1)
        while row_of[column]:  # Dijkstra's search for the cheapest path to a free column; reduced costs stay >= 0
            is_used[column] = True
            row = row_of[column]
            free = [other for other in range(1, width + 1) if not is_used[other]]
            for other in free:
                cost = -weights[row - 1][other - 1] - row_price[row] - column_price[other]
                if cost < slack[other]:
                    slack[other], before[other] = cost, column
            nearest = min(free, key=slack.__getitem__)
            step = slack[nearest]
            for other in range(width + 1):
                if is_used[other]:
                    row_price[row_of[other]] += step
                    column_price[other] -= step
                else:
                    slack[other] -= step
            column = nearest
        while column:
            row_of[column], column = row_of[before[column]], before[column]
    columns: list[int | None] = [None] * height
    for column in range(1, width + 1):
        if row_of[column]:
            columns[row_of[column] - 1] = column - 1
    return columns


def best_in_order(weights: Sequence[Sequence[float]]) -> list[int | None]:
    """Pair rows with columns as in `best_pairs`, but preserve their order.

    The column assigned to a row comes after the columns assigned to all earlier rows.
    """
    width = len(weights[0]) if weights else 0
    best = [[0.0] * (width + 1)]
    for row in weights:
        above, line = best[-1], [0.0]
        for column, weight in enumerate(row):
            line.append(max(above[column] + weight, above[column + 1], line[column]))
        best.append(line)
    placed: list[int | None] = [None] * len(weights)
    row_index, column = len(weights), width
    while row_index and column:
        if best[row_index][column] == best[row_index - 1][column]:
            row_index -= 1
        elif best[row_index][column] == best[row_index][column - 1]:
            column -= 1
        else:
            row_index, column = row_index - 1, column - 1
            placed[row_index] = column
    return placed


_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "dict": (dict,),  # "dict" and "tuple" are type names in the leaderboard's schemas
    "tuple": (list,),
}
_NUMBERS: Final = frozenset({"number", "integer", "float"})
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,30}")
_DECIMAL: Final = re.compile(r"[+-]?[0-9]{1,30}(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,2})?")
_BFCL_DROPS: Final = str.maketrans("'", '"', " ,./-_*^")


class ArgumentsSchema:
    """The schema for a tool's arguments.

    The following JSON Schema keywords are supported: type, required, properties, additionalProperties, items, enum,
    const, default, uniqueItems, `$ref` within the schema, allOf, anyOf and oneOf. Patterns, formats and bounds are not
    checked.
    """

    def __init__(self, schema: Any, same: ArgumentRules, tool: str = "") -> None:
        self.root, self._same, self._tool = schema, same, tool
        # Keyed by the ids of value and schema, which outlive the comparison.
        self._known: dict[tuple[int, int], str] = {}
        self._keys: dict[tuple[int, int], dict[str, Hashable]] = {}

    def problem(self, value: Any) -> str:
        """Describe briefly why a value does not conform to the schema, or return "" if it does."""
        self._known.clear()
        return self._problem(value, self.root, "")

    def missing_or_unknown(self, arguments: Mapping[str, Any]) -> str:
        """Describe the first missing or unknown argument, or return "" if all names are correct.

        The values are not checked.
        """
        for schema in self._facets(self.root, arguments):
            if problem := self._names_problem(arguments, schema, ""):
                return problem
        return ""

    def key(self, value: Any, schema: Any) -> Hashable:
        """Return a key that is the same for all values that are equal under the schema."""
        types = self._types(schema)
        if isinstance(value, str):
            value = self._coerced(value, types)
        if is_number(value):
            is_free = not types.isdisjoint(_NUMBERS)
            return ("number" if is_free else type(value).__name__), value
        if isinstance(value, str):
            if self._same.strings == "casefold":
                return "str", value.casefold()
            return "str", value.translate(_BFCL_DROPS).lower() if self._same.strings == "bfcl" else value
        if isinstance(value, Mapping):
            return "object", frozenset(self.field_keys(value, schema).items())
        if isinstance(value, list | tuple):
            items = self.items(value, schema)
            is_set = any(facet.get("uniqueItems") is True for facet in self._facets(schema, value))
            return array_key([self.key(item, items) for item in value], self._same.any_order or is_set)
        return type(value).__name__, value

    def field_keys(self, fields: Mapping[str, Any], schema: Any) -> dict[str, Hashable]:
        """Return the keys of an object's fields. A missing field has the key of its default value."""
        pair = (id(fields), id(schema))
        if pair in self._keys:
            return self._keys[pair]
        properties = self.properties(fields, schema)
        keys = {name: self.key(item, properties.get(name, True)) for name, item in fields.items()}
        for name, field_schema in properties.items():
            if name not in keys and isinstance(field_schema, Mapping) and "default" in field_schema:
                keys[name] = self.key(field_schema["default"], field_schema)
        self._keys[pair] = keys
        return keys

    def properties(self, fields: Mapping[str, Any], schema: Any) -> dict[str, Any]:
        """Return the schemas for an object's fields, keyed by field name."""
        inner = [facet.get("properties") for facet in self._facets(schema, fields)]
        return {name: part for one in inner if isinstance(one, Mapping) for name, part in one.items()}

    def items(self, value: Sequence[Any], schema: Any) -> Any:
        """Return the schema for the items in an array."""
        return next((facet["items"] for facet in self._facets(schema, value) if "items" in facet), True)

    def _problem(self, value: Any, schema: Any, path: str) -> str:
        """Describe why a value does not conform to a schema.

        Each value is checked against each schema only once, so nested unions do not take exponential time.
        """
        if not isinstance(schema, Mapping):
            return f"{path or 'it'} is not allowed" if schema is False else ""
        pair = (id(value), id(schema))
        if pair not in self._known:
            self._known[pair] = ""  # Ends the recursion for schemas that refer to themselves.
            self._known[pair] = self._first_problem(value, schema, path)
        return self._known[pair]

    def _first_problem(self, value: Any, schema: Mapping[str, Any], path: str) -> str:
        wanted = schema.get("type")
        names = [wanted] if isinstance(wanted, str) else wanted
        if isinstance(names, list | tuple) and names:
            plain = self._coerced(value, frozenset(filter(_is_text, names))) if isinstance(value, str) else value
            if not any(_is_of(plain, name) for name in names):
                return f"{_named(path)} is {abbreviate(value)}, not {' or '.join(map(str, names))}"
        choice_schema = {"type": schema.get("type", ["number", "string"])}
        if "enum" in schema or "const" in schema:
            key = self.key(value, choice_schema)
            if "enum" in schema and not any(key == self.key(choice, choice_schema) for choice in schema["enum"]):
                return f"{_named(path)} is {abbreviate(value)}, which is not one of the allowed values"
            if "const" in schema and key != self.key(schema["const"], choice_schema):
                return f"{_named(path)} is {abbreviate(value)}, not {abbreviate(schema['const'])}"
        for part in self._parts(schema):
            if problem := self._problem(value, part, path):
                return problem
        for union in (schema[word] for word in ("anyOf", "oneOf") if schema.get(word)):
            if all(problems := [self._problem(value, branch, path) for branch in union]):
                return problems[0]
        inner: Iterator[str] = iter(())
        if isinstance(value, Mapping):
            if problem := self._names_problem(value, schema, path):
                return problem
            properties, others = schema.get("properties") or {}, schema.get("additionalProperties", True)
            inner = (
                self._problem(item, properties.get(name, others), f"{path}.{name}" if path else name)
                for name, item in value.items()
            )
        elif isinstance(value, list | tuple):
            items = schema.get("items", True)
            inner = (self._problem(item, items, f"{path}[{index}]") for index, item in enumerate(value))
        return next(filter(None, inner), "")

    def _names_problem(self, fields: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> str:
        """Describe the first missing or unknown field, or return "" if all names are correct."""
        prefix = f"{path}." if path else ""
        for name in schema.get("required") or []:
            if name not in fields:
                return f"{_named(f'{prefix}{name}')} is missing"
        if schema.get("additionalProperties") is False and "patternProperties" not in schema:
            for name in fields:
                if name not in (schema.get("properties") or {}):
                    return f"{_named(f'{prefix}{name}')} is unknown"
        return ""

    def _parts(self, schema: Mapping[str, Any]) -> list[Any]:
        return [*([self._at(schema["$ref"])] if "$ref" in schema else []), *(schema.get("allOf") or [])]

    def _facets(self, schema: Any, value: Any, seen: tuple[int, ...] = ()) -> Iterator[Mapping[str, Any]]:
        """Yield the schemas that apply to a value.

        These are the schema itself, the schemas that it references, and the branch of each union to which the value
        conforms.
        """
        if not isinstance(schema, Mapping) or id(schema) in seen:
            return
        yield schema
        parts = self._parts(schema)
        for word in ("anyOf", "oneOf"):
            parts += [branch for branch in schema.get(word) or [] if not self._problem(value, branch, "")][:1]
        for part in parts:
            yield from self._facets(part, value, (*seen, id(schema)))

    def _types(self, schema: Any, seen: tuple[int, ...] = ()) -> frozenset[str]:
        """Return the names of all types allowed by any part of the schema."""
        if not isinstance(schema, Mapping) or id(schema) in seen:
            return frozenset()
        wanted = schema.get("type")
        names = {wanted} if isinstance(wanted, str) else set(filter(_is_text, wanted or []))
        parts = [*self._parts(schema), *(schema.get("anyOf") or []), *(schema.get("oneOf") or [])]
        return frozenset(names).union(*(self._types(part, (*seen, id(schema))) for part in parts))

    def _at(self, reference: Any) -> Any:
        """Return the part of the schema to which a reference, such as `#/a/b`, points."""
        part = self.root
        path = str(reference)
        try:
            if path != "#" and not path.startswith("#/"):
                raise KeyError(path)
            for name in path.split("/")[1:]:
                name = name.replace("~1", "/").replace("~0", "~")
                part = part[int(name)] if isinstance(part, list) else part[name]
        except (KeyError, IndexError, ValueError, TypeError):
            raise RewardError(
                f"the reference {path!r} in the schema of tool {self._tool!r} does not resolve to a part of the "
                "schema; add that part, because other documents are not fetched"
            ) from None
        return part

    def _coerced(self, text: str, types: frozenset[str]) -> Any:
        """Convert a string to the number or boolean that it represents if the rules and the types allow it."""
        if not self._same.coerce or "string" in types:
            return text
        plain = text.strip()
        if "boolean" in types and plain.lower() in ("true", "false"):
            return plain.lower() == "true"
        if not types.isdisjoint(_NUMBERS) and _INTEGER.fullmatch(plain):
            return int(plain)
        is_number_wanted = not types.isdisjoint(_NUMBERS - {"integer"})
        return float(plain) if is_number_wanted and _DECIMAL.fullmatch(plain) else text


def _is_of(value: Any, name: Any) -> bool:
    if name in ("number", "float"):
        return is_number(value)
    if name == "integer":
        return is_number(value) and (isinstance(value, int) or value.is_integer())
    return not isinstance(name, str) or name not in _TYPES or isinstance(value, _TYPES[name])


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _named(path: str) -> str:
    return f"argument {quoted(path)}" if path else "the call"


MOST_EXPECTED: Final = 64
_KEYS: Final = {"function", "name", "arguments", "id", "type", "index"}
_FORMS: Final = (
    'write {"name": …, "arguments": {…}}, {"type": "function", "function": {…}}, {"tool_calls": […]}, a list of these, '
    'or [{"name of the function": {"argument": [allowed values…]}}]'
)


class ExpectedCall(NamedTuple):
    """An expected call.

    Attributes:
        name: the name of the tool.
        arguments: a mapping from each argument name to its value or its list of allowed values.
        has_choices: True if `arguments` contains lists of allowed values. The value "" in a list makes the argument
            optional.
    """

    name: str
    arguments: Mapping[str, Any]
    has_choices: bool = False


class MadeCall(NamedTuple):
    """A call made by the agent. `problem` describes why the call is invalid, or is "" if the call is valid."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""


def read_expected(ground_truth: Any) -> list[ExpectedCall]:
    """Parse the calls in a ground truth of any supported form.

    Raises:
        RewardError: If the form is unknown. The message contains the position.
    """
    value = ground_truth
    try:
        value = read_json(value) if isinstance(value, str) else as_json(value)
    except ValueError as error:
        raise RewardError(f"tool_calls_match: ground_truth cannot be read: {error}") from None
    if isinstance(value, Mapping):
        value = value["tool_calls"] or [] if "tool_calls" in value else [value]
    if not isinstance(value, list | tuple):
        raise RewardError(f"tool_calls_match: ground_truth is {type_name(value)}; {_FORMS}")
    if len(value) > MOST_EXPECTED:
        raise RewardError(f"tool_calls_match: ground_truth has {len(value)} calls; at most {MOST_EXPECTED} are allowed")
    calls = []
    for index, item in enumerate(value):
        where = f"tool_calls_match: ground_truth[{index}]"
        if not isinstance(item, Mapping):
            raise RewardError(f"{where} is {type_name(item)}; {_FORMS}")
        if len(item) == 1:
            ((name, choices),) = item.items()
            if isinstance(choices, Mapping) and _are_choices(choices) and (choices or name not in _KEYS):
                calls.append(ExpectedCall(name, choices, has_choices=True))
                continue
        call = item.get("function", item)
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise RewardError(f"{where} does not name a function; {_FORMS}")
        if unknown := sorted((call.keys() | item.keys()) - _KEYS):
            raise RewardError(f"{where} has the unknown key {unknown[0]!r}; {_FORMS}")
        written = call.get("arguments") or {}
        try:
            arguments = (read_json(written) if written.strip() else {}) if isinstance(written, str) else written
        except ValueError as error:
            raise RewardError(f"{where}: its arguments cannot be read: {error}") from None
        if not isinstance(arguments, Mapping):
            raise RewardError(f"{where}: its arguments must be an object, got {type_name(arguments)}")
        calls.append(ExpectedCall(call["name"], arguments))
    return calls


def _share(expected: ExpectedCall, made: MadeCall, schema: ArgumentsSchema) -> float:
    """Return the share of correct arguments among all expected or passed arguments.

    The share is 0 for an invalid call and for a call to a different tool.
    """
    if made.problem or made.name != expected.name:
        return 0.0
    count = len(expected.arguments.keys() | made.arguments.keys())
    return len(_same_arguments(expected, made, schema)) / count if count else 1.0


def _same_arguments(expected: ExpectedCall, made: MadeCall, schema: ArgumentsSchema) -> set[str]:
    """Return the names of the correct arguments among all expected or passed arguments."""
    written = expected.arguments.keys() | made.arguments.keys()
    if not expected.has_choices:
        wanted = schema.field_keys(expected.arguments, schema.root)
        given = schema.field_keys(made.arguments, schema.root)
        return {name for name, key in given.items() if name in written and name in wanted and wanted[name] == key}
    properties = schema.properties(made.arguments, schema.root)
    return {
        name
        for name in written
        if _is_allowed(name, expected.arguments, made.arguments, properties.get(name, True), schema)
    }


def _is_allowed(
    name: str, expected: Mapping[str, Any], made: Mapping[str, Any], argument_schema: Any, schema: ArgumentsSchema
) -> bool:
    """Return True if an argument has an allowed value. A missing argument has its default value."""
    default = (
        [argument_schema["default"]] if isinstance(argument_schema, Mapping) and "default" in argument_schema else []
    )
    if name not in expected:
        return any(schema.key(made[name], argument_schema) == schema.key(value, argument_schema) for value in default)
    values = [made[name]] if name in made else default
    is_left_out = name not in made and "" in expected[name]
    return is_left_out or any(
        _fits_choice(choice, value, argument_schema, schema) for value in values for choice in expected[name]
    )


def _fits_choice(choice: Any, value: Any, value_schema: Any, schema: ArgumentsSchema) -> bool:
    """Return True if a value equals an allowed value.

    In an allowed object, each field contains a list of allowed values.
    """
    if isinstance(choice, Mapping) and isinstance(value, Mapping) and _are_choices(choice):
        properties = schema.properties(value, value_schema)
        names = dict.fromkeys((*choice, *value))
        return all(_is_allowed(name, choice, value, properties.get(name, True), schema) for name in names)
    if isinstance(choice, list | tuple) and isinstance(value, list) and any(isinstance(one, Mapping) for one in choice):
        inner = schema.items(value, value_schema)
        return len(choice) == len(value) and all(
            _fits_choice(one, other, inner, schema) for one, other in zip(choice, value, strict=True)
        )
    return schema.key(choice, value_schema) == schema.key(value, value_schema)


def _are_choices(value: Mapping[str, Any]) -> bool:
    return all(isinstance(choices, list | tuple) for choices in value.values())
