"""A prompt and a completion of TRL, texts or lists of messages, as one conversation in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pydantic

from reward_kit.errors import ConfigError, kind_of
from reward_kit.models import Message
from reward_kit.validation import describe_validation_error

_MESSAGES = pydantic.TypeAdapter(list[Message])


class Conversation(NamedTuple):
    """What was said.

    Attributes:
        messages: the prompt's and the completion's.
        assistant_turns: where the assistant's messages of the completion stand.
    """

    messages: list[Message]
    assistant_turns: list[int]


def conversation_of(prompt: Any, completion: Any) -> Conversation:
    """The conversation of a prompt and its completion.

    A text is the user's or the assistant's one message. TRL's tool calls have arguments that are no text, and no ids:
    they get both, and an answer of a tool belongs to the first call of its name that is not answered.

    Args:
        prompt: a text, or messages.
        completion: likewise.

    Raises:
        ConfigError: it is neither, or a message is none.
    """
    asked, said = _listed(prompt, "user", "prompt"), _listed(completion, "assistant", "completion")
    messages = validated([*asked, *said])
    turns = [place for place, message in enumerate(messages) if message.role == "assistant" and place >= len(asked)]
    return Conversation(messages, turns)


def validated(messages: Sequence[Any]) -> list[Message]:
    """Messages in TRL's form, or ours.

    Raises:
        ConfigError: one is no message.
    """
    try:
        return _MESSAGES.validate_python(_with_ids(messages))
    except pydantic.ValidationError as error:
        raise ConfigError(f"messages: {'; '.join(describe_validation_error(error, Message))}") from None


def _listed(given: Any, role: str, what: str) -> list[Any]:
    if isinstance(given, str):
        return [{"role": role, "content": given}]
    if isinstance(given, list):
        return given
    raise ConfigError(f"a {what} of TRL is a text or a list of messages; got {kind_of(given)}")


def _with_ids(messages: Sequence[Any]) -> list[Any]:
    waiting: list[tuple[str, str]] = []  # the names of calls that are not answered, and their ids
    made, count = [], 0
    for given in messages:
        if not isinstance(given, Mapping):
            made.append(given)
            continue
        # A column of a data set has every key in every row.
        message = {key: value for key, value in given.items() if value is not None or key == "content"}
        if message.get("tool_calls"):
            message["tool_calls"] = [_call(call, f"call_{count + i}") for i, call in enumerate(message["tool_calls"])]
            count += len(message["tool_calls"])
            waiting += [(call["function"]["name"], call["id"]) for call in message["tool_calls"]]
        elif message.get("role") == "tool":
            _answer(message, waiting)
        made.append(message)
    return made


def _call(call: Any, made_up: str) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise ConfigError(f"tool_calls: a call has a function; got {call!r:.80}")
    function = dict(call["function"])
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
    function.setdefault("name", "")
    return {**call, "type": "function", "id": call.get("id") or made_up, "function": function}


def _answer(message: dict[str, Any], waiting: list[tuple[str, str]]) -> None:
    """Name the call that a tool's message answers, and take it off those that wait."""
    if (known := message.get("tool_call_id")) is not None:
        waiting[:] = [one for one in waiting if one[1] != known]
        return
    found = next((one for one in waiting if one[0] == message.get("name")), waiting[0] if waiting else None)
    if found is not None:
        message["tool_call_id"] = found[1]
        waiting.remove(found)
