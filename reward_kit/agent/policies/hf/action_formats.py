"""Action formats, which define how a model writes tool calls. They are used to parse calls and to constrain them.

The model's text is converted to an assistant message and then to an action, in the same way as an endpoint's response.
Arguments that are not a JSON object are stored unchanged as `arguments_text`, and the worker responds to such a call
with a tool error.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple

from reward_kit.agent.actions import json_text
from reward_kit.agent.message_actions import RawToolCall, action_from_parts
from reward_kit.agent.policy_interface import Action, get_tool_calls
from reward_kit.environments.base import ToolSpec
from reward_kit.errors import ConfigError, PolicyError, boundary, did_you_mean
from reward_kit.safe_input import parse_json

MAX_LISTED = 10_000
"""Maximum number of listed calls; above it, a grammar is used."""
Literal = Callable[[str], str]
Schema = Callable[[Mapping[str, Any]], str]
_THINK_END = "</think>"
_NAME = re.compile(r'"(?:name|function)"\s*:\s*"((?:[^"\\]|\\.)*)"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class ToolSchema:
    """A tool that can be called now, and the JSON schema of its arguments, which form an object."""

    name: str
    schema: Mapping[str, Any]

    @cached_property
    def parameters(self) -> Mapping[str, Any]:
        """The schema of each parameter, keyed by name."""
        parameters: Mapping[str, Any] = self.schema.get("properties") or {}
        return parameters

    @cached_property
    def text_parameter(self) -> str | None:
        """The name of the parameter if the tool has only one and it is a string. Otherwise None."""
        if len(self.parameters) != 1:
            return None
        ((name, schema),) = self.parameters.items()
        values = _listed_values(schema)
        is_text = schema.get("type") == "string" or (values and all(isinstance(value, str) for value in values))
        return name if is_text else None

    @property
    def takes_any_text(self) -> bool:
        """True if the parameter accepts any string."""
        return all(schema.keys() <= {"type", "description", "title", "default"} for schema in self.parameters.values())

    def listed_calls(self) -> list[dict[str, Any]] | None:
        """Return every possible set of arguments, or None if the sets cannot be listed."""
        required = set(self.schema.get("required") or ())
        choices: list[list[tuple[str, Any] | None]] = []
        for name, schema in self.parameters.items():
            values = _listed_values(schema)
            if values is None:
                return None
            left_out: list[tuple[str, Any] | None] = [] if name in required else [None]
            choices.append([*left_out, *((name, value) for value in values)])
        if not required <= self.parameters.keys() or prod(map(len, choices)) > MAX_LISTED:
            return None
        return [dict(filter(None, pairs)) for pairs in product(*choices)]


def _listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return all values that a schema allows, or None if the values cannot be listed."""
    if "enum" in schema:
        return list(schema["enum"])
    if "const" in schema:
        return [schema["const"]]
    closed: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}
    return closed.get(str(schema.get("type")))


def tools_of(specs: Sequence[ToolSpec] | None) -> list[ToolSchema]:
    functions = [spec["function"] for spec in specs or ()]
    return [ToolSchema(function["name"], function.get("parameters") or {"type": "object"}) for function in functions]


def all_calls(tools: Sequence[ToolSchema]) -> Iterator[tuple[str, dict[str, Any]]] | None:
    """Return the name and arguments of every possible call of every tool, or None if the calls cannot be listed."""
    listed = [(tool.name, tool.listed_calls()) for tool in tools]
    calls = [(name, arguments) for name, arguments in listed if arguments is not None]
    if len(calls) < len(listed) or sum(len(arguments) for _, arguments in calls) > MAX_LISTED:
        return None
    return ((name, arguments) for name, each in calls for arguments in each)


class Written(NamedTuple):
    """The content, tool calls and reasoning in a model's text."""

    content: str
    calls: Sequence[RawToolCall] = ()
    reasoning: str = ""


class ActionFormat(ABC):
    """A format for tool calls. Options refer to it by its `name`."""

    name: str

    @abstractmethod
    def read(self, text: str, tools: Sequence[ToolSchema]) -> Written:
        """Parse text that does not contain reasoning. This method never raises an error."""

    @abstractmethod
    def write(self, tool: ToolSchema, arguments: Mapping[str, Any]) -> str:
        """Return the text of a turn that consists of this call.

        Raises:
            PolicyError: If the format cannot express the call.
        """

    def write_action(self, action: Action, tools: Sequence[ToolSchema]) -> str:
        """Return the text of a turn with this action: its reasoning, its content and its calls.

        Raises:
            PolicyError: If the format cannot express a call.
        """
        known = {tool.name: tool for tool in tools}
        calls = [
            self.write(
                known.get(call["name"]) or ToolSchema(call["name"], {"type": "object"}), call.get("arguments") or {}
            )
            for call in get_tool_calls(action)
        ]
        text = "\n".join([*([action["content"]] if action.get("content") else []), *calls])
        reasoning = action.get("reasoning_content")
        return f"<think>\n{reasoning}\n</think>\n\n{text}" if reasoning else text

    @abstractmethod
    def rule(self, tool: ToolSchema, literal: Literal, schema: Schema) -> str:
        """Return the right-hand side of a Lark rule for a turn that consists of one call of this tool.

        `literal` converts a string to a terminal of the grammar, and `schema` converts a JSON schema.
        """

    def check(self, tools: Sequence[ToolSchema]) -> None:
        """Raise a PolicyError if this format cannot express calls of one of the tools."""
        return

    def call_id(self, turn: int, position: int) -> str:
        """Return the id of the call at `position` in this turn. If it is "", the conversation assigns an id."""
        return ""

    def action(self, text: str, tools: Sequence[ToolSchema], turn: int = 0, *, may_reason: bool = True) -> Action:
        """Return the action for the text of a turn. The text does not include the token that ended the turn.

        The ids of calls contain `turn`. If `may_reason` is false, the marker for the end of reasoning is ordinary text.
        """
        before, end, rest = text.partition(_THINK_END) if may_reason else (text, "", "")
        content, calls, reasoning = self.read(rest.strip("\n") if end else text, tools)
        if end:
            reasoning = before.strip().removeprefix("<think>").strip()
        calls = [call._replace(id=call.id or self.call_id(turn, i)) for i, call in enumerate(calls)]
        action = action_from_parts(content, calls, reasoning)
        for each in (action, *action.get("calls", ())):
            if each.get("id") == "":  # the conversation assigns an id
                del each["id"]
        return action


class Hermes(ActionFormat):
    """Calls of the form `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, optionally surrounded by text."""

    name = "hermes"
    _BEGIN, _END = "<tool_call>", "</tool_call>"

    def read(self, text: str, tools: Sequence[ToolSchema]) -> Written:
        content = text.partition(self._BEGIN)[0]
        parts, calls, rest = [content], [], text[len(content) :]
        while rest.startswith(self._BEGIN):
            rest = rest.removeprefix(self._BEGIN).lstrip()
            # The end tag may occur in a JSON string of the call.
            block, behind = _split_json(rest)
            if behind.lstrip().startswith(self._END):
                rest = behind.lstrip().removeprefix(self._END)
            else:
                block, _, rest = rest.partition(self._END)
                block = block.strip()
            calls.append(_read_call(block))
            between, begin, rest = rest.partition(self._BEGIN)
            parts.append(between)
            rest = begin + rest
        return Written("".join(parts).strip() if calls else text, calls)

    def write(self, tool: ToolSchema, arguments: Mapping[str, Any]) -> str:
        call = json_text({"name": tool.name, "arguments": arguments})
        return f"<tool_call>\n{call}\n</tool_call>"

    def rule(self, tool: ToolSchema, literal: Literal, schema: Schema) -> str:
        head = literal(f'\n{{"name": {json_text(tool.name)}, "arguments": ')
        tail = literal("}\n")
        return f"{literal(self._BEGIN)} {head} {schema(tool.schema)} {tail} {literal(self._END)}"


class Llama(ActionFormat):
    """Only calls of the form `{"name": …, "parameters": {…}}`, separated by `;`. `<|python_tag|>` may precede them."""

    name = "llama"

    def read(self, text: str, tools: Sequence[ToolSchema]) -> Written:
        rest = text.strip().removeprefix("<|python_tag|>").strip()
        if not rest.startswith("{") or not _NAME.search(rest):
            return Written(text)
        calls = []
        while rest.startswith("{"):
            part, rest = _split_json(rest)
            calls.append(_read_call(part))
            rest = rest.lstrip().removeprefix(";").lstrip()
        return Written(rest, calls)

    def write(self, tool: ToolSchema, arguments: Mapping[str, Any]) -> str:
        return json_text({"name": tool.name, "parameters": arguments})

    def rule(self, tool: ToolSchema, literal: Literal, schema: Schema) -> str:
        head = literal(f'{{"name": {json_text(tool.name)}, "parameters": ')
        return f"{head} {schema(tool.schema)} {literal('}')}"


class Mistral(ActionFormat):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or one `[TOOL_CALLS]name[ARGS]{…}` for each call."""

    name = "mistral"
    _TAG = "[TOOL_CALLS]"

    def read(self, text: str, tools: Sequence[ToolSchema]) -> Written:
        content, *parts = text.split(self._TAG)
        calls = [call for part in parts for call in self._calls(part.strip())]
        return Written(content.strip() if calls else text, calls)

    def _calls(self, part: str) -> list[RawToolCall]:
        if not part.startswith("["):
            name, _, arguments = part.partition("[ARGS]") if "[ARGS]" in part else part.partition("{")
            name = name.partition("[CALL_ID]")[0].strip()
            return [RawToolCall(name, arguments if "[ARGS]" in part else f"{{{arguments}")] if name else []
        calls, rest = [], part[1:].lstrip()
        while rest.startswith("{"):
            one, rest = _split_json(rest)
            calls.append(_read_call(one))
            rest = rest.lstrip().removeprefix(",").lstrip()
        return calls

    def call_id(self, turn: int, position: int) -> str:
        # These models' templates accept only ids of nine letters and digits.
        return f"c{turn:05d}{position:03d}"

    def write(self, tool: ToolSchema, arguments: Mapping[str, Any]) -> str:
        return self._TAG + json_text([{"name": tool.name, "arguments": arguments}])

    def rule(self, tool: ToolSchema, literal: Literal, schema: Schema) -> str:
        head = literal(f'[{{"name": {json_text(tool.name)}, "arguments": ')
        return f"{literal(self._TAG)} {head} {schema(tool.schema)} {literal('}]')}"


class Plain(ActionFormat):
    """Calls of the form `tool_name {json}`.

    A call may also be `tool_name value` if the only parameter is a string, or `tool_name` if there are no parameters.
    """

    name = "plain"

    def check(self, tools: Sequence[ToolSchema]) -> None:
        for tool in tools:
            if tool.name.split() != [tool.name]:
                problem = f"action_format plain cannot call {tool.name!r}, because the tool's name contains a space"
                raise PolicyError(f"{problem}; set action_format: hermes")

    def read(self, text: str, tools: Sequence[ToolSchema]) -> Written:
        name, *rest = text.strip().split(maxsplit=1)[:2] or [""]
        tool = next((tool for tool in tools if tool.name == name), None)
        value = rest[0].strip() if rest else ""
        if tool is None or (value and not tool.parameters and not value.startswith("{")):
            return Written(text)
        if tool.text_parameter is not None and not _is_object_of(value, tool.text_parameter):
            # An empty text is not passed as a value, so that the tool reports what is missing.
            return Written("", [RawToolCall(name, json_text({tool.text_parameter: value} if value else {}))])
        return Written("", [RawToolCall(name, value or "{}")])

    def write(self, tool: ToolSchema, arguments: Mapping[str, Any]) -> str:
        parameter = tool.text_parameter
        if not arguments and not tool.parameters:
            return tool.name
        if parameter is not None and list(arguments) == [parameter]:
            value = arguments[parameter]
            if value and value == value.strip() and not _is_object_of(value, parameter):
                return f"{tool.name} {value}"
        return f"{tool.name} {json_text(arguments)}"

    def rule(self, tool: ToolSchema, literal: Literal, schema: Schema) -> str:
        if not tool.parameters:
            return literal(tool.name)
        is_free = tool.text_parameter is not None and tool.takes_any_text
        value = r"/[^\s{][^\n]*/" if is_free else schema(tool.schema)
        return f"{literal(tool.name + ' ')} {value}"


class Bare(ActionFormat):
    """A format in which the whole text is the only argument of the only tool."""

    name = "bare"

    def check(self, tools: Sequence[ToolSchema]) -> None:
        if len(tools) != 1 or tools[0].text_parameter is None:
            problem = "action_format bare needs exactly one tool with one text parameter"
            names = ", ".join(tool.name for tool in tools)
            raise PolicyError(f"{problem}, got {names}; set action_format: plain")

    def read(self, text: str, tools: Sequence[ToolSchema]) -> Written:
        if not tools:
            return Written(text)
        self.check(tools)
        return Written("", [RawToolCall(tools[0].name, json_text({tools[0].text_parameter: text.strip()}))])

    def write(self, tool: ToolSchema, arguments: Mapping[str, Any]) -> str:
        value = arguments.get(tool.text_parameter or "")
        if not isinstance(value, str) or not value or value != value.strip():
            raise PolicyError(f"action_format bare cannot express {tool.name}({json_text(arguments)})")
        return value

    def rule(self, tool: ToolSchema, literal: Literal, schema: Schema) -> str:
        if tool.takes_any_text:
            return r"/\S[^\n]*/"
        raise PolicyError(f"constrain: {tool.name} has too many values to list; choose a different action_format")


class ResponseTemplate(ActionFormat):
    """The tokenizer's `response_template`, which can only parse; see `PreTrainedTokenizerBase.parse_response`.

    `opening` is the text that the chat template adds between the last message and an answer. It may contain the
    beginning of the reasoning.
    """

    name = "template"

    def __init__(self, tokenizer: Any, opening: str) -> None:
        self._tokenizer, self._opening = tokenizer, opening

    def read(self, text: str, tools: Sequence[ToolSchema]) -> Written:
        try:
            with boundary(PolicyError, "response_template"):
                parsed = self._tokenizer.parse_response(text, prefix=self._opening)
        except PolicyError:
            # The tokenizer raises on a call with broken JSON.
            return Written("", [_read_call(text)]) if _NAME.search(text) else Written(text)
        functions = [call.get("function") or call for call in parsed.get("tool_calls") or ()]
        calls = [RawToolCall(str(each.get("name") or ""), _as_text(each.get("arguments"))) for each in functions]
        reasoning = parsed.get("reasoning_content") or parsed.get("thinking") or ""
        return Written(parsed.get("content") or "", calls, reasoning)

    def action(self, text: str, tools: Sequence[ToolSchema], turn: int = 0, *, may_reason: bool = True) -> Action:
        return super().action(text, tools, turn, may_reason=False)  # the template parses the reasoning

    def write(self, tool: ToolSchema, arguments: Mapping[str, Any]) -> str:
        raise PolicyError(
            "constrain: a response_template can only parse calls; set action_format to the format of the model's calls"
        )

    def rule(self, tool: ToolSchema, literal: Literal, schema: Schema) -> str:
        return self.write(tool, {})


def _is_object_of(value: str, parameter: str) -> bool:
    """Return True if the string is a JSON object with only this key."""
    try:
        parsed = parse_json(value) if value.startswith("{") else None
    except (ValueError, RecursionError):
        return False
    return isinstance(parsed, dict) and list(parsed) == [parameter]


def _split_json(text: str) -> tuple[str, str]:
    """Split a string into the JSON value at its beginning and the rest. If the JSON is invalid, the rest is ""."""
    try:
        _, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return text, ""
    return text[:end], text[end:]


def _read_call(block: str) -> RawToolCall:
    """Parse a call in JSON. If the JSON is invalid, return the parts that can be recognized."""
    try:
        value = _DECODER.decode(block)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        name, arguments = _NAME.search(block), _ARGUMENTS.search(block)
        return RawToolCall(name[1] if name else "", block[arguments.end() :] if arguments else block)
    key = "arguments" if "arguments" in value else "parameters"
    return RawToolCall(value["name"], _as_text(value.get(key)), str(value.get("id") or ""))


def _as_text(arguments: Any) -> str:
    """Return the arguments of a call as a JSON string. Some models already write the arguments as a string."""
    if isinstance(arguments, str):
        return arguments
    return "{}" if arguments is None else json_text(arguments)


FORMATS: dict[str, type[ActionFormat]] = {kind.name: kind for kind in (Hermes, Llama, Mistral, Plain, Bare)}
_CHOOSE = "set action_format to hermes, llama, mistral, plain or bare"


def find_action_format(
    name: str, tokenizer: Any, template: str | None, opening: str = ""
) -> ActionFormat | PolicyError:
    """Return the format with this name. For "auto", return the model's format.

    "auto" selects the first format that applies: the tokenizer's `response_template`; hermes if the chat template
    contains `<tool_call>` and JSON calls; mistral if it contains `[TOOL_CALLS]`; llama if it contains `<|python_tag|>`,
    or both `"parameters"` and `<|start_header_id|>`. `opening` is the text that the template adds between the last
    message and an answer.

    If "auto" finds no format, this function returns a PolicyError, which the caller raises if an episode has tools.

    Raises:
        ConfigError: If the format is unknown, or if it is "template" and the tokenizer has no `response_template`.
    """
    if name in FORMATS:
        return FORMATS[name]()
    if name not in ("auto", "template"):
        raise ConfigError(f"action_format: unknown format {name!r}{did_you_mean(name, [*FORMATS, 'auto', 'template'])}")
    if getattr(tokenizer, "response_template", None) is not None:
        return ResponseTemplate(tokenizer, opening)
    if name == "template":
        raise ConfigError(f"action_format: the tokenizer has no response_template; {_CHOOSE}")
    template = template or ""
    if "<tool_call>" in template:
        if "<function=" in template or "<arg_key>" in template:
            reason = "this model writes tool calls as XML, which is not supported"
            return PolicyError(f"action_format auto: {reason}; {_CHOOSE}")
        return Hermes()
    if "[TOOL_CALLS]" in template:
        return Mistral()
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return Llama()
    return PolicyError(f"action_format auto: the chat template does not define a known format of tool calls; {_CHOOSE}")
