"""Chat completions for agents of the recording endpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from reward_kit.agent.recording.api import AgentApi, ChatRequest, RecordedAnswer, bad_request
from reward_kit.models import PROVIDER_ITEMS

_NOT_PASSED_ON = frozenset({"model", "messages", "stream", "stream_options", "n", "seed", "logprobs"})
_LOGPROBS = ("logprobs", "top_logprobs")
_NOT_SERVED = dict.fromkeys(("functions", "function_call"), "this key is not supported; use tools and tool_choice")
NO_LOGPROBS = "the policy does not request log-probabilities; set its option logprobs, or remove this key"


class ChatApi(AgentApi):
    """Chat completions: https://platform.openai.com/docs/api-reference/chat."""

    name = "chat"
    end_of_stream = "data: [DONE]\n\n"

    def parse(self, body: Mapping[str, Any]) -> ChatRequest:
        """Return a request with unmodified messages."""
        if body.get("n") not in (None, 1):
            raise bad_request(f"n must be 1, got {body['n']!r}; send one request per answer")
        for key, problem in {
            **_NOT_SERVED,
            **({} if self._model.has_logprobs else dict.fromkeys(_LOGPROBS, NO_LOGPROBS)),
        }.items():
            if body.get(key):
                raise bad_request(f"{key}: {problem}")
        options = {key: value for key, value in body.items() if key not in _NOT_PASSED_ON and value is not None}
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise bad_request("messages must be a non-empty list")
        return ChatRequest(messages, options, self.name, body)

    def to_json(self, request: ChatRequest, answer: RecordedAnswer) -> dict[str, Any]:
        """Return a chat completion."""
        completion, body = answer.completion, request.body
        message = {key: value for key, value in completion.message.to_chat().items() if key != PROVIDER_ITEMS}
        choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None}
        choice["finish_reason"] = completion.finish_reason or ("tool_calls" if message.get("tool_calls") else "stop")
        if body.get("logprobs") and completion.logprob_entries:
            choice["logprobs"] = {"content": completion.logprob_entries, "refusal": None}
        value = {**_head("chat.completion", answer), "choices": [choice], **_usage(answer)}
        if body.get("return_token_ids"):  # as in vLLM
            choice["token_ids"], value["prompt_token_ids"] = completion.token_ids, completion.prompt_ids
        return value

    def events(self, request: ChatRequest, answer: RecordedAnswer) -> Iterator[Mapping[str, Any]]:
        """Yield the chunks of a completion. If the usage was requested and is known, the last chunk contains it."""
        whole, head = self.to_json(request, answer), _head("chat.completion.chunk", answer)
        choice = whole["choices"][0]
        message, message_text = choice["message"], answer.completion.message.text
        calls = message.get("tool_calls") or ()
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None if calls and not message_text else ""}]
        if message.get("reasoning_content"):
            deltas.append({"reasoning_content": message["reasoning_content"]})
        if message_text:
            deltas.append({"content": message_text})
        for index, call in enumerate(calls):
            name = {"name": call["function"]["name"], "arguments": ""}
            arguments = {"arguments": call["function"]["arguments"]}
            deltas.append({"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": name}]})
            deltas.append({"tool_calls": [{"index": index, "function": arguments}]})
        first = {"prompt_token_ids": whole["prompt_token_ids"]} if "prompt_token_ids" in whole else {}
        for delta in deltas:
            yield {**head, **first, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
            first = {}
        last = {key: choice[key] for key in ("logprobs", "token_ids", "finish_reason") if key in choice}
        yield {**head, "choices": [{"index": 0, "delta": {}, **last}]}
        options = request.body.get("stream_options")
        if isinstance(options, Mapping) and options.get("include_usage") and "usage" in whole:
            yield {**head, "choices": [], "usage": whole["usage"]}


def _head(kind: str, answer: RecordedAnswer) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": int(time.time()), "model": answer.model}


def _usage(answer: RecordedAnswer) -> dict[str, Any]:
    usage = answer.completion.usage
    if not usage:
        return {}
    counts: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.cache_write_tokens is not None:
        counts["prompt_tokens_details"]["cache_write_tokens"] = usage.cache_write_tokens
    if usage.reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return {"usage": counts}
