"""What an agent with a loop of its own did after a model's answer: read from its next request, or from its calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reward_kit.agent.execution import NOT_CARRIED_OUT
from reward_kit.agent.policies.own_agent.chat_wire import ChatMessage
from reward_kit.agent.policy_interface import Action, tool_calls_of


@dataclass(slots=True)
class CallMade:
    """A call that the agent had carried out in the episode's world, and the text that answered it."""

    name: str
    answer: str


def same_conversation(given: Sequence[ChatMessage], other: Sequence[ChatMessage]) -> bool:
    """Both say the same to a model, whatever keys, nulls and spaces around an answer frameworks add or drop."""
    return len(given) == len(other) and all(map(_same_message, given, other))


def read_results(
    given: Sequence[ChatMessage], answer: ChatMessage, later: Sequence[ChatMessage]
) -> list[ChatMessage] | None:
    """The messages that followed the answer to `given` in a later request of the agent.

    Args:
        given: the earlier request's messages.
        answer: what the model said to them. It may come back in another shape; its place tells it.
        later: the later request's messages.

    Returns:
        The messages after the answer. Where the agent rewrote its context, those of them that name one of the answer's
        calls; None where there are none either.
    """
    size = len(given)
    goes_on = len(later) > size and later[size]["role"] == "assistant"
    if goes_on and same_conversation(given, later[:size]):
        return list(later[size + 1 :])
    call_ids = {call["id"] for call in answer.get("tool_calls") or ()}
    answers = [message for message in later if message["role"] == "tool" and message.get("tool_call_id") in call_ids]
    return answers or None


def results_of_calls(action: Action, made: Sequence[CallMade], is_over: bool) -> list[ChatMessage]:
    """What came of an action, where no later request of the agent tells it.

    Args:
        action: what the model said.
        made: the calls that the agent had carried out after it, in order.
        is_over: the world ended the episode in one of them.

    Returns:
        A tool message for each of the action's calls that was carried out, matched by name and order; a user message
        with the answer of each other call, which the agent made of its own accord.
    """
    left, messages = list(made), []
    for call in tool_calls_of(action):
        found = next((one for one in left if one.name == call["name"]), None)
        if found is not None:
            left.remove(found)
        if found is not None or is_over:
            text = NOT_CARRIED_OUT if found is None else found.answer
            answer = {"role": "tool", "name": call["name"], "tool_call_id": call.get("id"), "content": text}
            messages.append(answer)
    return [*messages, *({"role": "user", "content": one.answer} for one in left)]


def _same_message(given: ChatMessage, other: ChatMessage) -> bool:
    return given == other or _meaning(given) == _meaning(other)


def _meaning(message: ChatMessage) -> tuple[Any, ...]:
    calls = [_call_meaning(call) for call in message.get("tool_calls") or ()]
    content = _content_meaning(message.get("content"))
    if message["role"] == "assistant" and isinstance(content, str):
        content = content.strip()
    return message["role"], content, message.get("tool_call_id"), calls


def _content_meaning(content: Any) -> Any:
    """Content parts that are all text count as the text they hold, no content as none."""
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    return content or ""


def _call_meaning(call: Mapping[str, Any]) -> tuple[Any, ...]:
    function = call["function"]
    text = function.get("arguments") or "{}"
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = text
    return call["id"], function["name"], arguments
