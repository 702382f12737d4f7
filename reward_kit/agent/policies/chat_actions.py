"""What a chat completion becomes in an episode: an action, and the facts that go with it."""

from __future__ import annotations

import json
from typing import Any

from reward_kit.agent.policy_interface import Action, PolicyOutput
from reward_kit.models import Message, ToolCall
from reward_kit.providers.completion import ChatCompletion, Usage


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


strict_json = json.JSONDecoder(parse_constant=_refuse_constant).decode
"""A JSON text as a value; NaN and Infinity, which Python alone reads, raise a ValueError."""


def output_of(completion: ChatCompletion) -> PolicyOutput:
    """The completion as one action of a policy."""
    message = completion.message
    text = message.text
    raw = text if text or not message.tool_calls else None
    return PolicyOutput(_action(message, text), raw, _token_facts(completion))


def _action(message: Message, text: str) -> Action:
    """The message as an action. Its parts that are not there are left out."""
    calls = [_call(call) for call in message.tool_calls or ()]
    action: Action
    if not calls:
        action = {"type": "text", "content": text}
    elif len(calls) == 1 and not text:
        action = {"type": "tool_call", **calls[0]}
    else:
        action = {"type": "tool_calls", "calls": calls}
        if text:
            action["content"] = text
    if message.reasoning_content:
        action["reasoning_content"] = message.reasoning_content
    return action


def _call(call: ToolCall) -> dict[str, Any]:
    """One call; arguments that are no JSON object go along verbatim, for the worker to send back as a tool error."""
    text = call.function.arguments
    try:
        # Some models write nothing at all for a tool without parameters.
        arguments = strict_json(text) if text.strip() else {}
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return {"name": call.function.name, "arguments_text": text, "id": call.id}
    return {"name": call.function.name, "arguments": arguments, "id": call.id}


def _token_facts(completion: ChatCompletion) -> dict[str, Any]:
    """`PolicyOutput.log_probs`: only what the endpoint said."""
    facts = {
        "prompt_ids": completion.prompt_ids,
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "usage": _usage(completion.usage) if completion.usage else None,
        "finish_reason": completion.finish_reason,
    }
    return {key: value for key, value in facts.items() if value is not None}


def _usage(usage: Usage) -> dict[str, Any]:
    facts: dict[str, Any] = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    if usage.cached_tokens:
        facts["cached_tokens"] = usage.cached_tokens
    if usage.cost is not None:
        facts["cost"] = usage.cost
    return facts
