"""A server's tools in the form that models call, and its results as the text that agents read."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reward_kit.environments.base import ToolSpec, tool_spec
from reward_kit.errors import ConfigError, ToolError, did_you_mean

if TYPE_CHECKING:
    import mcp_types

_MAX_NAME_CHARS = 64
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "if")

logger = logging.getLogger("reward_kit.environments.mcp")


class NoAnswerError(Exception):
    """A call was made, and what came back says nothing of what it did."""


@dataclass(frozen=True, slots=True)
class McpTool:
    """One tool: the name the server knows it by, and what the agent is shown."""

    name: str
    spec: ToolSpec

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Refuse what the server could not be sent, or would perhaps ignore.

        Raises:
            ToolError: an argument is unknown or missing, or is no JSON value.
        """
        function = self.spec["function"]
        schema = function["parameters"]
        properties = schema.get("properties", {})
        is_closed = not schema.get("additionalProperties") and not any(key in schema for key in _COMBINING)
        for key in arguments:
            if is_closed and key not in properties:
                raise ToolError(f"{function['name']}: unknown argument {key!r}{did_you_mean(str(key), properties)}")
        for key in schema.get("required", ()):
            if key not in arguments:
                raise ToolError(f"{function['name']}: {key}: missing")
        try:
            json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            problem = "not valid Unicode text" if isinstance(error, UnicodeError) else f"no JSON: {error}"
            raise ToolError(f"{function['name']}: the arguments are {problem}") from None


def check_wanted(found: Iterable[mcp_types.Tool], wanted: Iterable[str]) -> None:
    """Check an allow-list.

    Raises:
        ConfigError: the server has no tool of a wanted name.
    """
    names = {tool.name for tool in found}
    for name in wanted:
        if name not in names:
            raise ConfigError(f"mcp resource: tools: the server has no {name!r}{did_you_mean(name, names)}")


def tool_table(found: Iterable[mcp_types.Tool], wanted: Iterable[str] | None) -> dict[str, McpTool]:
    """The tools by the names that the agent calls them by.

    Args:
        found: what the server lists.
        wanted: the server's names of those to offer, None for all.
    """
    by_name: dict[str, mcp_types.Tool] = {}
    for tool in found:
        if by_name.setdefault(tool.name, tool) is not tool:
            logger.warning("the server lists two tools called %r; the first one counts", tool.name)
    offered = [by_name[name] for name in by_name if wanted is None or name in set(wanted)]
    shown = _callable_names([tool.name for tool in offered])
    return {shown[tool.name]: McpTool(tool.name, _spec(shown[tool.name], tool)) for tool in offered}


def _callable_names(names: list[str]) -> dict[str, str]:
    """Each name as models can call it: letters, digits, `_` and `-`, at most 64 of them, no two alike."""
    kept = {name for name in names if re.fullmatch(rf"[a-zA-Z0-9_-]{{1,{_MAX_NAME_CHARS}}}", name)}
    shown = {name: name for name in kept}
    for name in names:
        if name not in kept:
            plain = re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:_MAX_NAME_CHARS] or "tool"
            shown[name] = _free(plain, set(shown.values()))
    return shown


def _free(name: str, taken: set[str]) -> str:
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name[: _MAX_NAME_CHARS - len(str(number)) - 1]}_{number}"
    return free


def _spec(name: str, tool: mcp_types.Tool) -> ToolSpec:
    schema = {"type": "object", "properties": {}, **tool.input_schema}
    return tool_spec(name, tool.description or tool.title or "", schema)


def result_text(result: mcp_types.CallToolResult) -> str:
    """A result as one text: its text blocks; its structured value where there is none; a line for everything else."""
    texts = [_block_text(block) for block in result.content]
    if result.structured_content is not None and not any(block.type == "text" for block in result.content):
        texts.insert(0, json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(texts)


def _block_text(block: mcp_types.ContentBlock) -> str:
    if block.type == "text":
        return block.text
    if block.type == "image" or block.type == "audio":
        return f"[{block.type} {block.mime_type}, {_decoded_size(block.data):,} bytes]"
    if block.type == "resource_link":
        return f"[link to the resource {block.uri}{f', {block.mime_type}' if block.mime_type else ''}]"
    inner = block.resource
    blob = getattr(inner, "blob", None)
    if blob is None:
        return f"[resource {inner.uri}]\n{getattr(inner, 'text', '')}"
    return f"[resource {inner.uri}, {inner.mime_type or 'binary'}, {_decoded_size(blob):,} bytes]"


def _decoded_size(base64_text: str) -> int:
    return len(base64_text) * 3 // 4 - base64_text[-2:].count("=")
