"""The form of a verdict: told to the judge, sent as a JSON schema, and read back without any good will.

A verdict is one JSON object with exactly the members of its form. A score out of range, a member too many or too few, a
name that stands twice, text around the object: each makes it unreadable, and nothing is guessed from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reward_kit.safe_input import Pairs, strict_decoder

_LONGEST = 200_000
_MOST_LISTED = 12


class UnreadableVerdict(ValueError):
    """What came back is no verdict of the form."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words or whole numbers."""

    values: tuple[str | int, ...]

    def schema(self) -> dict[str, Any]:
        """The JSON schema."""
        return {"type": "string" if isinstance(self.values[0], str) else "integer", "enum": list(self.values)}

    def told(self) -> str:
        """The form in words."""
        if len(self.values) > _MOST_LISTED and isinstance(self.values[0], int):
            return f"<a whole number from {self.values[0]} to {self.values[-1]}>"
        return "<" + " or ".join(json.dumps(value, ensure_ascii=False) for value in self.values) + ">"

    def read(self, value: Any, where: str) -> Any:
        """The value, where it is one of them; True is not 1."""
        if type(value) not in (str, int) or value not in self.values:
            raise UnreadableVerdict(f"{where} is {_shown(value)}, not {self.told()}")
        return value


@dataclass(frozen=True, slots=True)
class Several:
    """A list of whole numbers, each from 1 to `most` and at most once."""

    most: int

    def schema(self) -> dict[str, Any]:
        """The JSON schema."""
        return {"type": "array", "items": {"type": "integer"}}

    def told(self) -> str:
        """The form in words."""
        return f"[<whole numbers from 1 to {self.most}>]" if self.most else "[]"

    def read(self, value: Any, where: str) -> Any:
        """The numbers, sorted."""
        if not isinstance(value, list) or any(type(item) is not int or not 1 <= item <= self.most for item in value):
            raise UnreadableVerdict(f"{where} is {_shown(value)}, not a list of whole numbers from 1 to {self.most}")
        return sorted(set(value))


@dataclass(frozen=True, slots=True)
class Words:
    """Any text; `told_as` says which."""

    told_as: str

    def schema(self) -> dict[str, Any]:
        """The JSON schema."""
        return {"type": "string"}

    def told(self) -> str:
        """The form in words."""
        return json.dumps(f"<{self.told_as}>")

    def read(self, value: Any, where: str) -> Any:
        """The text."""
        if not isinstance(value, str):
            raise UnreadableVerdict(f"{where} is {_shown(value)}, not a text")
        return value


@dataclass(frozen=True, slots=True)
class Members:
    """An object with exactly these members."""

    parts: Mapping[str, Choice | Several | Words | Members]

    def schema(self) -> dict[str, Any]:
        """The JSON schema, as strict structured output wants it."""
        return {
            "type": "object",
            "properties": {name: part.schema() for name, part in self.parts.items()},
            "required": list(self.parts),
            "additionalProperties": False,
        }

    def told(self) -> str:
        """The form in words."""
        told = (f"{json.dumps(name, ensure_ascii=False)}: {part.told()}" for name, part in self.parts.items())
        return "{" + ", ".join(told) + "}"

    def read(self, value: Any, where: str) -> Any:
        """The members, each read."""
        if not isinstance(value, dict):
            raise UnreadableVerdict(f"{where} is {_shown(value)}, not an object")
        if value.keys() != self.parts.keys():
            missing, extra = self.parts.keys() - value.keys(), value.keys() - self.parts.keys()
            problem = f"lacks {min(missing)!r}" if missing else f"has a member {min(extra)!r:.60} that is not asked for"
            raise UnreadableVerdict(f"{where} {problem}")
        return {name: part.read(value[name], f"{where}.{name}") for name, part in self.parts.items()}


def read_verdict(text: str, form: Members) -> dict[str, Any]:
    """The verdict in a judge's answer: the whole of it, but for what a model thought before, and one Markdown fence.

    Raises:
        UnreadableVerdict: it is none; the message says why.
    """
    if len(text) > _LONGEST:
        raise UnreadableVerdict(f"the answer has {len(text)} characters")
    text = _without_fence(text.rpartition("</think>")[2].strip())
    if not text:
        raise UnreadableVerdict("the answer is empty")
    try:
        value = _decoder.decode(text)
    except UnreadableVerdict:
        raise
    except (ValueError, RecursionError):
        raise UnreadableVerdict(f"the answer is not one JSON object: {_shown(text)}") from None
    verdict: dict[str, Any] = form.read(value, "the verdict")
    return verdict


def _without_fence(text: str) -> str:
    first, _, rest = text.partition("\n")
    is_fenced = first.strip() in ("```", "```json", "```JSON") and rest.endswith("```")
    return rest.removesuffix("```").strip() if is_fenced else text


def _object(pairs: Pairs) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise UnreadableVerdict("a member stands twice")
    return found


_decoder = strict_decoder(_object)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
