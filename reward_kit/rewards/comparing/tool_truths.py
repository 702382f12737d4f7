"""Expected tool calls in the forms in which data sets write them, and how far a call that was made is one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from reward_kit.errors import RewardError, kind_of
from reward_kit.rewards.comparing.json_values import as_json, in_short, read_json
from reward_kit.rewards.comparing.tool_schemas import ToolSchema
from reward_kit.rewards.reading.texts import shown

MOST_EXPECTED: Final = 64
_KEYS: Final = {"function", "name", "arguments", "id", "type", "index"}
_FORMS: Final = (
    'write {"name": …, "arguments": {…}}, {"type": "function", "function": {…}}, {"tool_calls": […]}, a list of these, '
    'or [{"name of the function": {"argument": [allowed values…]}}]'
)


class ExpectedCall(NamedTuple):
    """A call that is expected.

    Attributes:
        name: of the tool.
        arguments: by name its value, or a list of allowed ones.
        has_choices: they are lists of allowed values; "" among them says that the argument may be left out.
    """

    name: str
    arguments: Mapping[str, Any]
    has_choices: bool = False


class MadeCall(NamedTuple):
    """A call that was made; `problem` says why it is none that could be carried out, else it is ""."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""


class Agreement(NamedTuple):
    """How far a call is the expected one.

    Attributes:
        right: how many arguments are.
        of: how many were expected or given.
        is_call: it is a call of that tool, and one that could be carried out.
    """

    right: int
    of: int
    is_call: bool = True

    @property
    def is_right(self) -> bool:
        """It is the expected call."""
        return self.is_call and self.right == self.of

    @property
    def share(self) -> float:
        """Of the arguments that are right; 0 where it is no such call."""
        return 0.0 if not self.is_call else self.right / self.of if self.of else 1.0


def read_expected(ground_truth: Any) -> list[ExpectedCall]:
    """The calls of a ground truth in any of its forms.

    Raises:
        RewardError: it is none of them; the message names the place.
    """
    value = ground_truth
    try:
        value = read_json(value) if isinstance(value, str) else as_json(value)
    except ValueError as error:
        raise RewardError(f"tool_calls_match: the ground_truth cannot be read: {error}") from None
    if isinstance(value, Mapping):
        value = value["tool_calls"] or [] if "tool_calls" in value else [value]
    if not isinstance(value, list | tuple):
        raise RewardError(f"tool_calls_match: the ground_truth is {kind_of(value)}; {_FORMS}")
    if len(value) > MOST_EXPECTED:
        raise RewardError(f"tool_calls_match: the ground_truth has {len(value)} calls; at most {MOST_EXPECTED} are")
    return [_expected(item, f"ground_truth[{index}]") for index, item in enumerate(value)]


def agreement(expected: ExpectedCall, made: MadeCall, schema: ToolSchema) -> Agreement:
    """How far a call is the expected one; a call that could not be carried out, or of another tool, not at all."""
    if made.problem or made.name != expected.name:
        return Agreement(0, 1, is_call=False)
    return Agreement(
        len(_same_arguments(expected, made, schema)), len(expected.arguments.keys() | made.arguments.keys())
    )


def first_wrong(expected: ExpectedCall, made: MadeCall, schema: ToolSchema) -> str:
    """What is wrong with a call of the expected tool, in words."""
    if made.problem:
        return made.problem
    same = _same_arguments(expected, made, schema)
    wrong = (name for name in (*expected.arguments, *made.arguments) if name not in same)
    return next((_differs(name, expected.arguments, made.arguments) for name in wrong), "it is right")


def _expected(item: Any, where: str) -> ExpectedCall:
    if not isinstance(item, Mapping):
        raise RewardError(f"tool_calls_match: {where} is {kind_of(item)}; {_FORMS}")
    if len(item) == 1:
        ((name, choices),) = item.items()
        if isinstance(choices, Mapping) and _are_choices(choices) and (choices or name not in _KEYS):
            return ExpectedCall(name, choices, has_choices=True)
    call = item.get("function", item)
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise RewardError(f"tool_calls_match: {where} names no function; {_FORMS}")
    unknown = sorted((call.keys() | item.keys()) - _KEYS)
    if unknown:
        raise RewardError(f"tool_calls_match: {where} has the unknown key {unknown[0]!r}; {_FORMS}")
    return ExpectedCall(call["name"], _arguments(call.get("arguments"), where))


def _arguments(given: Any, where: str) -> Mapping[str, Any]:
    try:
        value = (read_json(given) if given.strip() else {}) if isinstance(given, str) else given or {}
    except ValueError as error:
        raise RewardError(f"tool_calls_match: {where}: its arguments cannot be read: {error}") from None
    if not isinstance(value, Mapping):
        raise RewardError(f"tool_calls_match: {where}: its arguments are {kind_of(value)}; write an object")
    return value


def _same_arguments(expected: ExpectedCall, made: MadeCall, schema: ToolSchema) -> set[str]:
    """The names of the arguments that are right, of those that are expected or given."""
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
    name: str, expected: Mapping[str, Any], made: Mapping[str, Any], of_name: Any, schema: ToolSchema
) -> bool:
    """Whether an argument is one of its allowed values. One that is left out has its default."""
    if name not in expected:
        return schema.has_default(of_name) and schema.key(made[name], of_name) == schema.key(
            of_name["default"], of_name
        )
    choices = expected[name]
    if name in made:
        return any(_fits_choice(choice, made[name], of_name, schema) for choice in choices)
    if "" in choices:
        return True
    return schema.has_default(of_name) and any(
        _fits_choice(choice, of_name["default"], of_name, schema) for choice in choices
    )


def _fits_choice(choice: Any, value: Any, of_value: Any, schema: ToolSchema) -> bool:
    """Whether a value is an allowed one. In allowed objects each field has a list of allowed values in its turn."""
    if isinstance(choice, Mapping) and isinstance(value, Mapping) and _are_choices(choice):
        properties = schema.properties(value, of_value)
        names = dict.fromkeys((*choice, *value))
        return all(_is_allowed(name, choice, value, properties.get(name, True), schema) for name in names)
    if isinstance(choice, list | tuple) and isinstance(value, list) and any(isinstance(one, Mapping) for one in choice):
        inner = schema.items(value, of_value)
        return len(choice) == len(value) and all(
            _fits_choice(one, other, inner, schema) for one, other in zip(choice, value, strict=True)
        )
    return schema.key(choice, of_value) == schema.key(value, of_value)


def _are_choices(value: Mapping[str, Any]) -> bool:
    return all(isinstance(choices, list | tuple) for choices in value.values())


def _differs(name: str, expected: Mapping[str, Any], made: Mapping[str, Any]) -> str:
    if name not in made:
        return f"argument {shown(name)} is missing, {in_short(expected[name])} was expected"
    wanted = f"{in_short(expected[name])} was expected" if name in expected else "it was not expected"
    return f"argument {shown(name)} is {in_short(made[name])}, {wanted}"
