"""The three forms in which an agent may give its commands: free text, a choice among those open now, or tools.

A form turns a tool call into the command that the engines take, and a command into the tool call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from reward_kit.environments.base import ToolSpec, tool_spec
from reward_kit.errors import ToolError, did_you_mean

ActionForm = Literal["text", "choice", "tools"]

_ACT = "act"
_ACT_TEXT = 'Carry out one command of the household game, such as "go to fridge 1". The command "help" lists them all.'
_TEMPLATES = {
    "go_to": ("go to {receptacle}", "Go to a receptacle."),
    "open": ("open {receptacle}", "Open the receptacle before you."),
    "close": ("close {receptacle}", "Close the receptacle before you."),
    "take": ("take {object} from {receptacle}", "Take an object from the receptacle before you."),
    "move": ("move {object} to {receptacle}", "Put the object you hold into or onto the receptacle before you."),
    "clean": ("clean {object} with {receptacle}", "Clean the object you hold at a sink."),
    "heat": ("heat {object} with {receptacle}", "Heat the object you hold with a microwave."),
    "cool": ("cool {object} with {receptacle}", "Cool the object you hold with a fridge."),
    "slice": ("slice {object} with {knife}", "Slice an object before you with the knife you hold."),
    "use": ("use {object}", "Switch on a lamp before you."),
    "examine": ("examine {thing}", "Look closely at the receptacle before you, or at the object you hold."),
    "look": ("look", "Look around."),
    "inventory": ("inventory", "See what you hold."),
}
_FIELD = re.compile(r"\{(\w+)\}")
_PATTERNS = {
    name: re.compile(_FIELD.sub(r"(?P<\1>[^ ]+ [^ ]+)", template)) for name, (template, _) in _TEMPLATES.items()
}
_PARAMETERS = {name: _FIELD.findall(template) for name, (template, _) in _TEMPLATES.items()}


def tools_spec(form: ActionForm, admissible: Sequence[str]) -> list[ToolSpec]:
    """The tools of a form, where `admissible` are the commands open now."""
    if form == "tools":
        return [tool_spec(name, text, _schema(_PARAMETERS[name])) for name, (_, text) in _TEMPLATES.items()]
    schema = _schema(["command"])
    if form == "choice":
        schema["properties"]["command"]["enum"] = list(admissible)
    return [tool_spec(_ACT, _ACT_TEXT, schema)]


def command_of(form: ActionForm, tool: str, arguments: Mapping[str, Any]) -> str:
    """The command that a tool call means.

    Raises:
        ToolError: there is no such tool, or its arguments are not what its schema says.
    """
    parameters = _PARAMETERS if form == "tools" else {_ACT: ["command"]}
    if tool not in parameters:
        raise ToolError(f"unknown tool {tool!r}{did_you_mean(tool, parameters)}")
    for name in arguments:
        if name not in parameters[tool]:
            raise ToolError(f"{tool}: unknown argument {name!r}{did_you_mean(str(name), parameters[tool])}")
    for name in parameters[tool]:
        if not isinstance(arguments.get(name), str):
            raise ToolError(f"{tool}: {name}: {'must be text' if name in arguments else 'missing'}")
    return _TEMPLATES[tool][0].format(**arguments) if form == "tools" else str(arguments["command"])


def call_of(form: ActionForm, command: str) -> dict[str, Any] | None:
    """The tool call for a command, as `{"name", "arguments"}`; None where the form has none ("help" among tools)."""
    if form != "tools":
        return {"name": _ACT, "arguments": {"command": command}}
    for name, pattern in _PATTERNS.items():
        if found := pattern.fullmatch(command):
            return {"name": name, "arguments": found.groupdict()}
    return None


def _schema(parameters: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": "string", "description": _DESCRIPTIONS[name]} for name in parameters},
        "required": list(parameters),
        "additionalProperties": False,
    }


_DESCRIPTIONS = {
    "command": "one command, in the words of the game",
    "receptacle": 'its name, such as "fridge 1"',
    "object": 'its name, such as "mug 1"',
    "knife": 'its name, such as "knife 1"',
    "thing": 'the name of a receptacle or an object, such as "fridge 1"',
}
