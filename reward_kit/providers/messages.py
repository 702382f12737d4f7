"""Anthropic's Messages API. Thinking blocks are kept with their signatures and sent back unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reward_kit.models import PROVIDER_ITEMS
from reward_kit.providers.completion import EventStream
from reward_kit.providers.dialect import AnswerStream, Dialect, encode_json, stored_items, text_parts
from reward_kit.safe_input import MODEL_ANSWER_CALLS, TooLargeError

API = "messages"
VERSION = "2023-06-01"
MAX_TOKENS = 8192
"""The `max_tokens` of a request that does not set it. The API requires a value."""
INVALID_ARGUMENTS = "invalid_arguments"
"""The key of the `input` of a call whose arguments are not a JSON object."""
_NOT_SENT = (
    *("seed", "stream_options", "logprobs", "top_logprobs", "n", "tools", "tool_choice", "parallel_tool_calls"),
    *("stop", "max_completion_tokens", "response_format"),
)
_DATA_URL = re.compile(r"data:(?P<type>[\w/+.-]+);base64,")
_FINISH_REASONS = {
    **{"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "refusal": "content_filter"},
    **{"max_tokens": "length", "model_context_window_exceeded": "length"},
}
_DELTAS = {
    **{"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"},
    "input_json_delta": "partial_json",
}


class Messages(Dialect):
    """The Messages API: https://docs.claude.com/en/api/messages."""

    path = "/messages"
    has_logprobs = False
    provider = "anthropic"
    key_variable = "ANTHROPIC_API_KEY"

    def headers(self, api_key: str | None) -> dict[str, str]:
        """Return the API version and, if there is one, the key."""
        return {"anthropic-version": VERSION, **({"x-api-key": api_key} if api_key else {})}

    def encode_message(self, message: Mapping[str, Any]) -> str:
        """Return the role and the blocks of a message as `ROLE BLOCK,BLOCK`.

        `join_messages` joins consecutive messages with the same role.
        """
        role, blocks = message["role"], stored_items(message, API)
        kind = {"system": "system", "developer": "system", "assistant": "assistant"}.get(role, "user")
        if kind == "system" and blocks:
            kind = "system_blocks"
        if not blocks:
            blocks = assistant_blocks(message) if role == "assistant" else _content_blocks(message)
            if role == "tool":
                blocks = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": blocks}]
        return f"{kind} {','.join(map(encode_json, blocks))}"

    def join_messages(self, encoded: Sequence[str]) -> dict[str, str]:
        """Return the keys `system` and `messages`.

        A system message after the first non-system message gets the role `user`, which all models support. The role is
        kept if the system message comes from a client of this API.
        """
        system: list[str] = []
        turns: list[tuple[str, list[str]]] = []
        for kind, _, blocks in (text.partition(" ") for text in encoded):
            if not blocks:
                continue
            if kind.startswith("system") and not turns:
                system.append(blocks)
                continue
            role = {"assistant": "assistant", "system_blocks": "system"}.get(kind, "user")
            if not turns or turns[-1][0] != role:
                turns.append((role, []))
            turns[-1][1].append(blocks)
        messages = ",".join(f'{{"role":"{role}","content":[{",".join(blocks)}]}}' for role, blocks in turns)
        return {**({"system": f"[{','.join(system)}]"} if system else {}), "messages": f"[{messages}]"}

    def to_body(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body without the conversation.

        Keys that the API does not support, such as `seed`, are not sent.
        """
        body = {key: value for key, value in request.items() if key not in _NOT_SENT}
        body["max_tokens"] = request.get("max_completion_tokens") or request.get("max_tokens") or MAX_TOKENS
        if stop := request.get("stop"):
            body["stop_sequences"] = [stop] if isinstance(stop, str) else stop
        if (wanted := request.get("response_format")) and wanted["type"] == "json_schema":
            form = {"type": "json_schema", "schema": wanted["json_schema"]["schema"]}
            body["output_config"] = {**body.get("output_config", {}), "format": form}
        if tools := request.get("tools"):
            body["tools"] = [_to_tool(tool["function"]) for tool in tools]
            if (choice := _to_choice(request.get("tool_choice"), request.get("parallel_tool_calls"))) is not None:
                body["tool_choice"] = choice
        return body

    def stream(self, where: str, secrets: Iterable[str]) -> AnswerStream:
        """Return the parser for a streamed response."""
        return _MessageStream(where, secrets)

    def to_completion(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message as a chat completion.

        If the message contains blocks other than text and calls, all blocks are kept.
        """
        blocks = answer["content"]
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        thinking = [block["thinking"] for block in blocks if block["type"] == "thinking"]
        calls = [
            {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": block["input"]}}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts else None}
        message |= {"tool_calls": calls} if calls else {}
        message |= {"reasoning_content": "\n\n".join(filter(None, thinking)) or None} if thinking else {}
        if any(block["type"] not in ("text", "tool_use") for block in blocks):
            message[PROVIDER_ITEMS] = {API: [*map(_with_object_input, blocks)]}
        reason = answer.get("stop_reason")
        choice = {"message": message, "finish_reason": _FINISH_REASONS.get(str(reason), reason)}
        usage = {"usage": _usage(answer["usage"])} if answer.get("usage") else {}
        return {"choices": [choice], "model": answer.get("model"), **usage}


class _MessageStream(EventStream):
    """A reader that combines the events of a streamed message."""

    def __init__(self, where: str, secrets: Iterable[str]) -> None:
        super().__init__(where, secrets)
        self._message: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._pieces: dict[int, dict[str, list[str]]] = {}  # by block and key
        self._is_complete = False

    def add(self, event: Mapping[str, Any]) -> None:
        """Process an event. Unknown types are skipped, as the API requires."""
        kind = event["type"]
        if kind == "message_start":
            self._message = dict(event["message"])
        elif kind == "content_block_start":
            if len(self._blocks) == MODEL_ANSWER_CALLS:
                raise TooLargeError(f"{MODEL_ANSWER_CALLS:,} content blocks")
            self._blocks[event["index"]] = dict(self.keep_values([event["content_block"]])[0])
            self._pieces[event["index"]] = {}
        elif kind == "content_block_delta":
            delta = event["delta"]
            if key := _DELTAS.get(delta["type"]):
                self._pieces[event["index"]].setdefault(key, []).append(self.keep_text(delta[key]))
        elif kind == "message_delta":
            delta, usage = self.keep_values([event["delta"], event.get("usage") or {}])
            self._message |= delta
            known = {key: value for key, value in usage.items() if value is not None}
            self._message["usage"] = {**(self._message.get("usage") or {}), **known}
        elif kind == "message_stop":
            self._done = self._is_complete = True

    def result(self) -> Any:
        """Return the message.

        Raises:
            TransientError: If the stream was interrupted.
        """
        if not self._is_complete:
            raise self.closed_early("message_stop")
        for index, block in self._blocks.items():
            for key, pieces in self._pieces[index].items():
                if key == "partial_json":
                    block["input"] = _parsed("".join(pieces))
                else:
                    block[key] = (block.get(key) or "") + "".join(pieces)
        return {**self._message, "content": [self._blocks[index] for index in sorted(self._blocks)]}


def assistant_blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the blocks of an assistant message in chat form."""
    blocks = _content_blocks(message)
    for call in message.get("tool_calls") or ():
        function = call["function"]
        block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        blocks.append(_with_object_input({**block, "input": _parsed(function["arguments"])}))
    return blocks


def _content_blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [_to_block(part) for part in text_parts(message.get("content"))]


def _parsed(arguments: str) -> Any:
    """Return the JSON value of arguments, or the arguments if they are not JSON.

    Empty arguments become an empty object.
    """
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def _with_object_input(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a block with its `input`, if present, as an object, because the API requires an object."""
    if isinstance(block.get("input", {}), dict):
        return dict(block)
    return {**block, "input": {INVALID_ARGUMENTS: block["input"]}}


def _to_block(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a content part as a block."""
    if part.get("type") != "image_url":
        return dict(part)
    url = part["image_url"]["url"]
    if match := _DATA_URL.match(url):
        return {
            "type": "image",
            "source": {"type": "base64", "media_type": match["type"], "data": url[match.end() :]},
        }
    return {"type": "image", "source": {"type": "url", "url": url}}


def _to_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    tool = {"name": function["name"], "description": function.get("description")}
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return {key: value for key, value in tool.items() if value} | {"input_schema": schema}


def _to_choice(choice: Any, parallel: bool | None) -> dict[str, Any] | None:
    if choice == "none":
        return {"type": "none"}
    chosen = {"type": "any" if choice == "required" else "auto"}
    if isinstance(choice, Mapping):
        chosen = {"type": "tool", "name": choice["function"]["name"]}
    if parallel is False:
        return {**chosen, "disable_parallel_tool_use": True}
    return None if choice is None else chosen


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the usage. `input_tokens` excludes the tokens that were read from or written to the cache."""
    read, written = (usage.get(f"cache_{key}_input_tokens") or 0 for key in ("read", "creation"))
    thinking = (usage.get("output_tokens_details") or {}).get("thinking_tokens")
    return {
        "prompt_tokens": usage["input_tokens"] + read + written,
        "completion_tokens": usage["output_tokens"],
        "prompt_tokens_details": {"cached_tokens": read, "cache_write_tokens": written},
        **({} if thinking is None else {"completion_tokens_details": {"reasoning_tokens": thinking}}),
    }
