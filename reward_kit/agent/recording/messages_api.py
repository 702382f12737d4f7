"""Anthropic's Messages API for agents of the recording endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from reward_kit.agent.recording.api import (
    AgentApi,
    ChatMessage,
    ChatRequest,
    RecordedAnswer,
    ServedModel,
    bad_request,
    content_of_parts,
    only,
    with_items,
)
from reward_kit.models import PROVIDER_ITEMS
from reward_kit.providers.completion import Usage
from reward_kit.providers.dialect import stored_items
from reward_kit.providers.messages import INVALID_ARGUMENTS, Messages, assistant_blocks

_PASSED_ON = ("temperature", "top_p")
_NATIVE = ("thinking", "top_k", "metadata", "service_tier", "cache_control", "inference_geo", "speed")
_NOT_SERVED = ("mcp_servers", "container")
_KEPT_BY_THREAD = ("system", "tools", "messages")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
_ERROR_TYPES = {404: "not_found_error", 413: "request_too_large"}
_DIALECT = Messages()
_DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "signature": "signature_delta"}


class MessagesApi(AgentApi):
    """Messages: https://docs.claude.com/en/api/messages.

    The conversations of threads are kept so that a later request can continue a thread. No thread is created at the
    model's own endpoint.
    """

    name = "messages"

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model)
        self._threads: dict[str, dict[str, Any]] = {}  # the keys that a thread keeps, by the id of its last message

    def parse(self, body: Mapping[str, Any]) -> ChatRequest:
        """Return a request in chat format."""
        body = self._whole(body)
        for key in _NOT_SERVED:
            if body.get(key):
                raise bad_request(f"{key}: tools that run at the provider are not supported; run them in the agent")
        only(body.get("thinking") or {}, Mapping, "thinking")
        messages: list[ChatMessage] = []
        if system := body.get("system"):
            messages += self._to_messages("system", system, "system")
        if not only(body["messages"], list, "messages"):
            raise bad_request("messages must not be empty")
        for index, message in enumerate(body["messages"]):
            where = f"messages.{index}.content"
            messages += self._to_messages(message["role"], message["content"], where)
        return ChatRequest(messages, self._options(body), self.name, body)

    def to_json(self, request: ChatRequest, answer: RecordedAnswer) -> dict[str, Any]:
        """Return a message."""
        completion, body = answer.completion, request.body
        message = completion.message.to_chat()
        content = stored_items(message, self.name)
        if not content:
            content = assistant_blocks(message)
            wants_thinking = (body.get("thinking") or {}).get("type", "disabled") != "disabled"
            if wants_thinking and completion.message.reasoning_content:
                thinking = {"type": "thinking", "thinking": completion.message.reasoning_content, "signature": ""}
                content = [thinking, *content]
        has_calls = any(block["type"] == "tool_use" for block in content)
        reason = "tool_calls" if has_calls and completion.finish_reason == "stop" else completion.finish_reason
        reason = reason or ("tool_calls" if has_calls else "stop")
        head = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}
        stop = {"stop_reason": _STOP_REASONS.get(reason, reason), "stop_sequence": None}
        if body.get("thread"):
            kept = {key: body[key] for key in _KEPT_BY_THREAD if key in body}
            kept["messages"] = [*body["messages"], {"role": "assistant", "content": content}]
            self._threads[head["id"]] = kept
        return {**head, "content": content, **stop, "usage": _usage(answer)}

    def events(self, request: ChatRequest, answer: RecordedAnswer) -> Iterator[Mapping[str, Any]]:
        """Yield the events of a message."""
        message = self.to_json(request, answer)
        begun = {**message, "content": [], "stop_reason": None, "usage": {**message["usage"], "output_tokens": 0}}
        yield {"type": "message_start", "message": begun}
        for index, block in enumerate(message["content"]):
            deltas = [{"type": kind, key: block[key]} for key, kind in _DELTAS.items() if block.get(key)]
            empty: dict[str, Any] = {key: "" for key in _DELTAS if key in block}
            if block["type"] == "tool_use":
                empty["input"] = {}
                deltas.append({"type": "input_json_delta", "partial_json": json.dumps(block["input"])})
            yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
            for delta in deltas:
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        end = {key: message[key] for key in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": end, "usage": message["usage"]}
        yield {"type": "message_stop"}

    def _whole(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a request with the conversation of the thread that it continues."""
        thread = body.get("thread") or {}
        if thread.get("type") != "continue":
            return body
        message_id = thread["previous_message_id"]
        if message_id not in self._threads:
            raise bad_request(f"thread: the episode has no thread with the last message {message_id!r:.80}")
        kept = self._threads[message_id]
        return {**body, **kept, "messages": [*kept["messages"], *body["messages"]]}

    def _to_messages(self, role: str, content: Any, where: str) -> list[ChatMessage]:
        """Return the chat messages that represent a message. Each tool result becomes a separate message."""
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else only(content, (str, list), where)
        for index, block in enumerate(blocks):
            only(block, Mapping, f"{where}.{index}")
        if role == "assistant":
            return [self._to_assistant(blocks)] if blocks else []
        messages: list[ChatMessage] = []
        pending: list[Any] = []
        for index, block in enumerate(blocks):
            if block["type"] != "tool_result":
                pending.append(block)
                continue
            if pending:
                messages.append(self._to_message({"role": role}, pending, pending, where))
                pending = []
            result = block.get("content") or []
            parts = [{"type": "text", "text": result}] if isinstance(result, str) else result
            head = {"role": "tool", "tool_call_id": block["tool_use_id"]}
            messages.append(self._to_message(head, parts, [block], f"{where}.{index}.content"))
        if pending:
            messages.append(self._to_message({"role": role}, pending, pending, where))
        return messages

    def _to_message(self, head: ChatMessage, parts: list[Any], blocks: list[Any], where: str) -> ChatMessage:
        """Return a message with content parts. If chat format cannot express its blocks, they are included as well."""
        content = content_of_parts([self._to_part(part, f"{where}.{index}") for index, part in enumerate(parts)])
        message = {**head, "content": content}
        if not self._is_native:
            return message
        exact = with_items(message, self.name, blocks)
        return message if _DIALECT.encode_message(message) == _DIALECT.encode_message(exact) else exact

    def _to_part(self, block: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return a content part of a user, system or tool message."""
        kind, source = block["type"], block.get("source") or {}
        if kind == "text":
            return {"type": "text", "text": block["text"]}
        if kind == "image" and source.get("type") == "base64":
            return {
                "type": "image_url",
                "image_url": {"url": f"data:{source['media_type']};base64,{source['data']}"},
            }
        if kind == "image" and source.get("type") == "url":
            return {"type": "image_url", "image_url": {"url": source["url"]}}
        if kind == "document" and source.get("type") == "text":
            return {"type": "text", "text": source["data"]}
        if self._is_native:
            return dict(block)
        raise bad_request(
            f"{where}: blocks of type {kind!r:.80} are not supported by the API of the model ({self._model.api})"
        )

    def _to_assistant(self, blocks: list[Any]) -> ChatMessage:
        message: ChatMessage = dict(_DIALECT.to_completion({"content": blocks})["choices"][0]["message"])
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = _to_arguments(call["function"]["arguments"])
        if not message.get("reasoning_content"):
            message.pop("reasoning_content", None)
        if message.pop(PROVIDER_ITEMS, None) and self._is_native:
            message = with_items(message, self.name, blocks)
        return message

    def _options(self, body: Mapping[str, Any]) -> dict[str, Any]:
        options = {key: body.get(key) for key in _PASSED_ON}
        options |= {"max_completion_tokens": body.get("max_tokens"), "stop": body.get("stop_sequences") or None}
        if tools := [_to_tool(tool, f"tools.{index}") for index, tool in enumerate(body.get("tools") or ())]:
            options["tools"] = tools
            choice = body.get("tool_choice") or {}
            kind = choice.get("type")
            named = {"type": "function", "function": {"name": choice.get("name")}} if kind == "tool" else None
            options["tool_choice"] = named or _CHOICES.get(str(kind))
            if choice.get("disable_parallel_tool_use"):
                options["parallel_tool_calls"] = False
        output = dict(body.get("output_config") or {})
        if self._is_native:
            options |= {key: body.get(key) for key in _NATIVE}
            options["output_config"] = output or None
        elif (wanted := output.get("format") or {}).get("type") == "json_schema":
            schema = {"name": "answer", "schema": wanted["schema"], "strict": True}
            options["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {key: value for key, value in options.items() if value is not None}


def messages_error_body(status: int, message: str) -> dict[str, Any]:
    """Return an error in the format of the Messages API."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _to_tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a client's tool in chat format."""
    if tool.get("type") not in (None, "custom"):
        raise bad_request(f"{where}: tools of type {tool['type']!r:.80} are not supported; use tools with input_schema")
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"]}
    function["strict"] = tool.get("strict")
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _to_arguments(value: Any) -> str:
    """Return the arguments of a call as a string. A string that was not JSON is restored."""
    if isinstance(value, dict) and value.keys() == {INVALID_ARGUMENTS}:
        value = value[INVALID_ARGUMENTS]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _usage(answer: RecordedAnswer) -> dict[str, Any]:
    """Return the usage, which the API requires. `input_tokens` excludes tokens read from or written to the cache."""
    usage = answer.completion.usage or Usage(0, 0)
    read, written = usage.cached_tokens, usage.cache_write_tokens or 0
    counts: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - read - written,
        "output_tokens": usage.completion_tokens,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": written,
    }
    if usage.reasoning_tokens is not None:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counts
