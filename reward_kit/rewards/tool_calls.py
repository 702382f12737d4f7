"""`tool_calls_match`: are the tool calls of a rollout the expected ones?

Each call is compared by name and by what its arguments mean under the tool's schema, not by its text. The form with
allowed values is that of the Berkeley Function-Calling Leaderboard (Patil et al. 2025, gorilla.cs.berkeley.edu); unlike
there, calls in any order are paired for the best total and not greedily, and texts are compared as they are unless
`strings` says otherwise.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from reward_kit.errors import ConfigError, RewardError, boundary
from reward_kit.models import EvaluateResult, Message, MetricResult
from reward_kit.reward_calls import checks_options
from reward_kit.rewards.comparing.assignment import best_in_order, best_pairs
from reward_kit.rewards.comparing.json_values import as_json, read_json
from reward_kit.rewards.comparing.tool_schemas import Same, Strings, ToolSchema
from reward_kit.rewards.comparing.tool_truths import (
    Agreement,
    ExpectedCall,
    MadeCall,
    agreement,
    first_wrong,
    read_expected,
)
from reward_kit.rewards.reading.fenced import fenced_blocks
from reward_kit.rewards.reading.texts import last_answer, needed, passed, shown
from reward_kit.typed_interface import reward_function

MOST_CALLS: Final = 256
"""Calls that are compared. A rollout with more of them is wrong."""

LONGEST: Final = 1_000_000
"""Characters of all arguments together, and of a message that is searched for calls."""

_OPENS, _CLOSES = "<tool_call>", "</tool_call>"
_TOOL_FIELDS = ("tools", "functions", "function")

Extra = Literal["wrong", "ignore"]
Partial = Literal["none", "calls", "arguments"]


class _Written(NamedTuple):
    """A call as it stands in a message, its arguments as JSON text."""

    name: str
    arguments: str
    problem: str = ""


def _check_tools(options: Mapping[str, Any]) -> None:
    if options["tools"] is not None:
        _by_name(options["tools"], Same("exact", False, False), ConfigError, "option 'tools': tools")


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
    """1 where the calls that were made are the expected ones, else 0, or a share where `partial` asks for one.

    Where tool specifications are known, a call that no tool would carry out earns nothing, even if the same call is
    expected: unknown tool, arguments that are no JSON object or do not fit the schema. An argument left out is the same
    as its default, 5 is 5.0 where the schema wants a number or an integer, and arrays with `uniqueItems` have no order.
    Metrics: `calls`, `names` and `arguments`, each the share that is right.

    Args:
        messages: the conversation.
        ground_truth: `{"name": …, "arguments": {…}}`, `{"type": "function", "function": {…}}` with arguments as object
            or JSON text, `{"tool_calls": […]}`, a list of these, JSON text of any of them, or
            `[{"function": {"argument": [allowed values…]}}]`, where "" allows an argument to be left out. `[]` earns 1
            where no call is made, also with `extra="ignore"`.
        sample: its field `tools`, `functions` or `function` has the specifications, unless the option gives them.
        assistant_turns: the positions of the agent's own messages; examples in its prompt do not count.
        turns: "last": the calls of the last message that has any; "all": those of all messages.
        ordered: they are made in the expected order.
        extra: "ignore" pays also where other calls are made besides.
        partial: "calls": the share of calls that are right; "arguments": each call counts by the share of its arguments
            that are right, among those expected or given. Unless ignored, calls that were not expected lower the share.
        tools: the specifications, as in a request: `{"type": "function", "function": {"name", "parameters"}}`, or that
            inner part alone.
        validate: "names" checks only the names of a call's arguments against its schema, not their values; it is what
            the leaderboard's truths need that expect a variable's name in the place of a number.
        strings: "casefold" ignores case, in enums too; "bfcl" also drops blanks and ,./-_*^ as the leaderboard does,
            so that "1.5" is "15".
        coerce: "5" is 5, and "true" is true, where the schema wants that; it needs specifications.
        any_order: the order of no array counts.
        text_calls: calls written as `<tool_call>{…}</tool_call>`, or as blocks ```json, count too, in messages that
            make no other.

    Raises:
        RewardError: there is no ground truth, or it or the sample's tools cannot be read, so that it is unscored.
        ConfigError: `tools` cannot be read.

    Example:
        ```python
        tool_calls_match(messages, {"name": "get_weather", "arguments": {"city": "Oslo"}})
        ```
    """
    expected = read_expected(needed(ground_truth, "tool_calls_match"))
    same = Same(strings, coerce, any_order)
    schemas = _schemas(tools, sample, same)
    if coerce and schemas is None:
        raise RewardError("tool_calls_match: `coerce` needs tool specifications; give the option or sample a `tools`")
    turns_seen = _turns(messages, assistant_turns)
    if not turns_seen:
        return passed(False, "the agent said nothing and made no call")
    written = _written(turns_seen, turns, text_calls)
    if len(written) > MOST_CALLS or sum(len(call.arguments) for call in written) > LONGEST:
        return passed(False, f"{len(written)} calls are more, or longer, than are looked at")
    with boundary(RewardError, "tool_calls_match: a tool's schema is malformed"):
        made = [_made(call, schemas, validate) for call in written]
        by_name = _Schemas(schemas or {}, ToolSchema(True, same))
        found = [[agreement(one, call, by_name.of(one.name)) for call in made] for one in expected]
        return _result(_Outcome(expected, made, found, by_name, ordered), extra, partial)


class _Schemas(NamedTuple):
    known: Mapping[str, ToolSchema]
    other: ToolSchema

    def of(self, name: str) -> ToolSchema:
        """The schema of a tool, or one that says nothing."""
        return self.known.get(name, self.other)


class _Outcome(NamedTuple):
    expected: list[ExpectedCall]
    made: list[MadeCall]
    agreements: list[list[Agreement]]
    schemas: _Schemas
    ordered: bool

    def total(self, weights: Sequence[Sequence[float]]) -> tuple[float, list[int | None]]:
        """The best sum of weights over pairs of expected and made calls, and the pairs."""
        pairs = (best_in_order if self.ordered else best_pairs)(weights)
        return sum(weights[row][column] for row, column in enumerate(pairs) if column is not None), pairs


def _result(outcome: _Outcome, extra: Extra, partial: Partial) -> EvaluateResult:
    expected, made = outcome.expected, outcome.made
    if not expected:
        called = ", ".join(shown(call.name) for call in made[:3])
        return passed(not made, f"no call was expected, and {called or 'none'} was made")
    exact, pairs = outcome.total([[float(one.is_right) for one in row] for row in outcome.agreements])
    fractional, _ = outcome.total([[one.share for one in row] for row in outcome.agreements])
    names = sum((Counter(call.name for call in expected) & Counter(call.name for call in made)).values())
    count = len(expected) if extra == "ignore" else max(len(expected), len(made))
    parts = {"calls": exact / count, "names": names / count, "arguments": min(fractional / count, 1.0)}
    right = round(exact)
    reason = f"{right} of {len(expected)} expected calls were made{_first_problem(outcome, pairs, extra)}"
    metrics = {name: MetricResult(score=share, reason=reason) for name, share in parts.items()}
    is_right = right == len(expected) and (extra == "ignore" or len(made) == len(expected))
    return EvaluateResult(score=1.0 if is_right else parts.get(partial, 0.0), reason=reason, metrics=metrics)


def _first_problem(outcome: _Outcome, pairs: Sequence[int | None], extra: Extra) -> str:
    """What is wrong with the first expected call that was not made, or the first call that was not expected."""
    for row, column in enumerate(pairs):
        found, expected = outcome.agreements[row], outcome.expected[row]
        if column is not None and found[column].is_right:
            continue
        name = expected.name
        near = [place for place, call in enumerate(outcome.made) if call.name == name and not found[place].is_right]
        if near:
            nearest = outcome.made[max(near, key=lambda place: found[place].share)]
            return f"; {shown(name)}: {first_wrong(expected, nearest, outcome.schemas.of(name))}"
        others = [call.name for call in outcome.made]
        return f"; {shown(name)} was not called" + (f", {shown(others[0])} was" if others else "")
    taken = set(pairs)
    unexpected = [call for index, call in enumerate(outcome.made) if index not in taken]
    return f"; a call of {shown(unexpected[0].name)} was not expected" if unexpected and extra == "wrong" else ""


def _made(call: _Written, schemas: Mapping[str, ToolSchema] | None, validate: str) -> MadeCall:
    if call.problem:
        return MadeCall(call.name, {}, call.problem)
    try:
        # Some models write nothing at all for a tool without parameters.
        arguments = read_json(call.arguments) if call.arguments.strip() else {}
    except ValueError as error:
        return MadeCall(call.name, {}, f"its arguments cannot be read: {error}")
    if not isinstance(arguments, dict):
        return MadeCall(call.name, {}, "its arguments are no JSON object")
    if schemas is None:
        return MadeCall(call.name, arguments)
    if call.name not in schemas:
        return MadeCall(call.name, arguments, "there is no such tool")
    schema = schemas[call.name]
    problem = schema.problem(arguments) if validate == "full" else schema.missing_or_unknown(arguments)
    return MadeCall(call.name, arguments, problem)


def _turns(messages: Sequence[Message], assistant_turns: Any) -> list[Message]:
    """The agent's own messages; all assistant messages where their places are not known."""
    own = set(assistant_turns) if isinstance(assistant_turns, list | tuple) else None
    return [
        message
        for place, message in enumerate(messages)
        if message.role == "assistant" and (own is None or place in own)
    ]


def _written(turns: Sequence[Message], which: str, text_calls: bool) -> list[_Written]:
    if which == "all":
        return [call for message in turns for call in _calls_of(message, text_calls)]
    return next((calls for message in reversed(turns) if (calls := _calls_of(message, text_calls))), [])


def _calls_of(message: Message, text_calls: bool) -> list[_Written]:
    calls = [_Written(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    if not calls and message.function_call is not None:
        calls = [_Written(message.function_call.name, message.function_call.arguments)]
    return calls or (_from_text(last_answer([message])) if text_calls else [])


def _from_text(text: str) -> list[_Written]:
    """The calls that a text writes out. One in `<tool_call>` that cannot be read is a call all the same, and wrong."""
    if len(text) > LONGEST:
        return []
    if _OPENS in text:
        return [call for part in text.split(_OPENS)[1:] for call in _read(part.partition(_CLOSES)[0], True)]
    blocks = [block.text for block in fenced_blocks(text) if block.tag in ("json", "")]
    return [call for block in blocks for call in _read(block, False)]


def _read(text: str, is_call: bool) -> Iterator[_Written]:
    try:
        value = read_json(text.strip())
    except ValueError as error:
        if is_call:
            yield _Written("", "", f"a call cannot be read: {error}")
        return
    for item in value if isinstance(value, list) else [value]:
        inner = item.get("function", item) if isinstance(item, dict) else None
        if isinstance(inner, dict) and isinstance(inner.get("name"), str) and "arguments" in inner:
            arguments = inner["arguments"]
            yield _Written(inner["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))
        elif is_call:
            yield _Written("", "", "a call has no name or no arguments")


def _schemas(tools: Any, sample: Any, same: Same) -> dict[str, ToolSchema] | None:
    """The schemas of the tools by name; None where no tools are known."""
    if tools is not None:
        return _by_name(tools, same, ConfigError, "option 'tools': tools")
    fields = sample if isinstance(sample, Mapping) else {}
    for field in _TOOL_FIELDS:
        given = fields.get(field)
        try:
            given = read_json(given) if isinstance(given, str) and given.strip().startswith("[") else given
        except ValueError as error:
            raise RewardError(f"tool_calls_match: the sample's field {field!r} cannot be read: {error}") from None
        # Only `tools` can mean nothing else.
        if isinstance(given, list) and given and (field == "tools" or all(map(_is_tool, given))):
            return _by_name(given, same, RewardError, f"tool_calls_match: the sample's field {field!r}")
    return None


def _is_tool(item: Any) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("name"), str)


def _by_name(given: Any, same: Same, error: type[Exception], where: str) -> dict[str, ToolSchema]:
    found: dict[str, ToolSchema] = {}
    for index, item in enumerate(given):
        inner = item.get("function", item) if isinstance(item, Mapping) else None
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(name, str):
            raise error(f'{where}[{index}] is no tool; write {{"name": …, "parameters": {{…}}}}')
        try:
            schema = as_json(inner.get("parameters", True))
        except ValueError as problem:
            raise error(f"{where}[{index}].parameters: {problem}") from None
        found[name] = ToolSchema(True if schema is None else schema, same, name)
    return found
