"""Forms that a server asks the episode's user to fill in ("elicitation" in the Model Context Protocol).

The runner sets `CURRENT_USER` if the task has a simulated user. An environment calls `fill_form`, which validates the
user's answer against the form's schema.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import anyio

from reward_kit.environments.base import canonical_json
from reward_kit.environments.schema_check import schema_violation
from reward_kit.safe_input import TooLargeError, parse_json

_MAX_FORM_CHARS = 16 * 1024
_SHOWN_CHARS = 200
_FORM = """{message}

Fill in this form. Answer with only a JSON object that has these fields: {fields}
Required: {required}. To refuse, answer with only the word decline."""


class UserAnswer(NamedTuple):
    """The user's answer to one message.

    If `text` is `None`, `reason` describes why the answer is missing. If both are set, `text` is the last message from
    a user who ended the conversation, and `reason` applies only if the text is not a valid answer.
    """

    text: str | None
    reason: str = ""
    facts: Mapping[str, Any] = {}


AskUser = Callable[[str], Awaitable[UserAnswer]]
CURRENT_USER: ContextVar[AskUser | None] = ContextVar("CURRENT_USER", default=None)
"""A function that shows a message to the user of the current episode, or None if the task has no user."""


@dataclass(frozen=True, slots=True)
class FormAnswer:
    """An answer to a form. `content` is set if the user filled in the form; otherwise, `reason` is set.

    `facts` contains information about how the user produced the answer, such as the usage.
    """

    action: Literal["accept", "decline", "cancel"]
    content: dict[str, Any] | None = None
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


async def fill_form(ask: AskUser, message: str, schema: Mapping[str, Any]) -> FormAnswer:
    """Show a form to the user, and return the answer. An answer that does not match the schema counts as a refusal."""
    fields = schema.get("properties")
    fields = fields if isinstance(fields, Mapping) else {}
    required = schema.get("required")
    names = ", ".join(map(str, required)) if isinstance(required, list) and required else "none"
    form = _FORM.format(message=message, fields=canonical_json(fields), required=names)
    if len(form) > _MAX_FORM_CHARS:
        return FormAnswer("decline", reason=f"the form has more than {_MAX_FORM_CHARS:,} characters")
    text, reason, facts = await ask(form)
    if text is None:
        return FormAnswer("cancel", reason=reason, facts=facts)
    if text.strip().strip(".").lower() in ("decline", "cancel"):
        return FormAnswer("decline", reason="the simulated user declined", facts=facts)
    try:
        content = _read_object(text)
        content = {key: item["default"] for key, item in fields.items() if _has_default(item)} | content
        problem = schema_violation(content, {**schema, "additionalProperties": False})
    except (ValueError, TooLargeError, RecursionError) as error:
        problem = str(error)
    problem = problem or next(
        (f"{key}: nested values are not allowed" for key in content if not _is_flat(content[key])), ""
    )
    if problem and reason:
        return FormAnswer("cancel", reason=reason, facts=facts)
    if problem:
        reason = f"the simulated user's answer does not match the form: {problem}"
        return FormAnswer("decline", reason=reason, facts=facts)
    return FormAnswer("accept", content, facts=facts)


def _read_object(text: str) -> dict[str, Any]:
    """Return the JSON object that a string contains, from the first to the last brace."""
    start, end = text.find("{"), text.rfind("}")
    value = parse_json(text[start : end + 1]) if 0 <= start < end else None
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object: {text[:_SHOWN_CHARS]!r}")
    return value


def _has_default(item: Any) -> bool:
    return isinstance(item, Mapping) and "default" in item


def _is_flat(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    return value is None or isinstance(value, str | int | float | bool)


@contextmanager
def without_deadline(scope: anyio.CancelScope | None) -> Iterator[None]:
    """Suspend a scope's deadline while the user answers."""
    if scope is None:
        yield
        return
    left = scope.deadline - anyio.current_time()
    scope.deadline = math.inf
    try:
        yield
    finally:
        scope.deadline = anyio.current_time() + left
