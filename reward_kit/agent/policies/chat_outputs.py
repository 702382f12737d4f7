"""What a chat completion becomes in an episode: an action of its policy, and the facts that go with it."""

from __future__ import annotations

from typing import Any

from reward_kit.agent.chat_actions import action_of
from reward_kit.agent.policy_interface import PolicyOutput
from reward_kit.providers.completion import ChatCompletion, Usage


def output_of(completion: ChatCompletion) -> PolicyOutput:
    """The completion as one action of a policy."""
    message = completion.message
    text = message.text
    raw = text if text or not message.tool_calls else None
    return PolicyOutput(action_of(message), raw, _token_facts(completion))


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
