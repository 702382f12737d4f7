"""OpenAI's Responses API. The provider does not store conversations, and the reasoning is sent back encrypted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reward_kit.models import PROVIDER_ITEMS
from reward_kit.providers.completion import EventStream
from reward_kit.providers.dialect import AnswerStream, Dialect, encode_json, stored_items, text_parts
from reward_kit.providers.faults import error_in_body
from reward_kit.safe_input import MODEL_ANSWER_CALLS, TooLargeError

API = "responses"
_RENAMED = {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"}
_NOT_SENT = ("seed", "stream_options", "logprobs", "reasoning_effort", "response_format", "tools", "stop", "n")
_ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
_ENDS = ("response.completed", "response.incomplete", "response.failed")


class Responses(Dialect):
    """The Responses API: https://platform.openai.com/docs/api-reference/responses."""

    path = "/responses"

    def encode_message(self, message: Mapping[str, Any]) -> str:
        """Return the items of a message as JSON, separated by commas."""
        items = stored_items(message, API)
        return ",".join(map(encode_json, _to_items(message) if items is None else items))

    def join_messages(self, encoded: Sequence[str]) -> dict[str, str]:
        """Return the key `input`."""
        return {"input": f"[{','.join(filter(None, encoded))}]"}

    def to_body(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body without `input`. `seed` and `stop` are not sent, because the API does not support them."""
        body = {_RENAMED.get(key, key): value for key, value in request.items() if key not in _NOT_SENT}
        body = {"store": False, "stream": False} | body  # `transformers serve` streams by default
        include = [] if body["store"] else [_ENCRYPTED]
        include += [LOGPROBS] if request.get("logprobs") else []
        if include:
            body["include"] = list(dict.fromkeys([*include, *body.get("include", ())]))
        if effort := request.get("reasoning_effort"):
            body["reasoning"] = {"effort": effort, **body.get("reasoning", {})}
        if wanted := request.get("response_format"):
            body["text"] = {**body.get("text", {}), "format": {**wanted, **wanted.get("json_schema", {})}}
            body["text"]["format"].pop("json_schema", None)
        if tools := request.get("tools"):
            # Without `strict`, the API would change the schema of the parameters.
            body["tools"] = [{"type": "function", "strict": False, **tool["function"]} for tool in tools]
        if isinstance(choice := request.get("tool_choice"), Mapping):
            body["tool_choice"] = {"type": "function", "name": choice["function"]["name"]}
        return body

    def stream(self, where: str, secrets: Iterable[str]) -> AnswerStream:
        """Return the parser for a streamed response."""
        return _ResponseStream(where, secrets)

    def to_completion(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a response as a chat completion.

        If the response contains items other than messages and calls, all items are kept.
        """
        texts: list[str] = []
        refusals: list[str] = []
        reasons: list[str] = []
        logprobs: list[Any] = []
        calls: list[dict[str, Any]] = []
        output = answer["output"]
        if (answer.get("status") or "completed") not in ("completed", "incomplete"):  # failed, or still running
            raise ValueError(f"the status is {answer['status']!r} instead of 'completed'")
        for item in output:
            if item["type"] == "message":
                for part in item["content"]:
                    if part["type"] == "refusal":
                        refusals.append(part["refusal"])
                    elif part["type"] == "output_text":
                        texts.append(part["text"])
                    logprobs += part.get("logprobs") or []
            elif item["type"] == "function_call":
                function = {"name": item["name"], "arguments": item.get("arguments")}
                calls.append({"id": item.get("call_id") or item.get("id"), "type": "function", "function": function})
            elif item["type"] == "reasoning":
                # Open models return their reasoning. OpenAI's models return only a summary.
                parts = item.get("content") or item.get("summary") or []
                reasons += [part["text"] for part in parts]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts else None}
        message |= {"refusal": "".join(refusals)} if refusals else {}
        message |= {"tool_calls": calls} if calls else {}
        message |= {"reasoning_content": "\n\n".join(reasons)} if reasons else {}
        if any(item["type"] not in ("message", "function_call") for item in output):
            message[PROVIDER_ITEMS] = {API: output}
        choice: dict[str, Any] = {"message": message, "finish_reason": _finish_reason(answer, bool(calls))}
        choice |= {"logprobs": {"content": logprobs}} if logprobs else {}
        usage = {"usage": _usage(answer["usage"])} if answer.get("usage") else {}
        return {"choices": [choice], "model": answer.get("model"), **usage}


class _ResponseStream(EventStream):
    """A reader that takes the response from the last event.

    If the last event does not contain the items, they are taken from the `response.output_item.done` events.
    """

    def __init__(self, where: str, secrets: Iterable[str]) -> None:
        super().__init__(where, secrets)
        self._items: list[Any] = []
        self._response: Mapping[str, Any] | None = None

    def add(self, event: Mapping[str, Any]) -> None:
        """Process an event."""
        if event["type"] == "response.output_item.done":
            if len(self._items) == MODEL_ANSWER_CALLS:
                raise TooLargeError(f"{MODEL_ANSWER_CALLS:,} output items")
            self._items += self.keep_values([event["item"]])
        elif event["type"] in _ENDS:
            self._response, self._done = event["response"], True
        elif event["type"] == "error":
            raise error_in_body(event, self._where, self._secrets)

    def result(self) -> Any:
        """Return the response.

        Raises:
            TransientError: If the stream was interrupted.
        """
        if self._response is None:
            raise self.closed_early("response.completed")
        return self._response if self._response.get("output") else {**self._response, "output": self._items}


def _to_items(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the input items for a message in chat form."""
    role, content = message["role"], message.get("content")
    if role == "tool":
        output = content if isinstance(content, str) or content is None else [*map(_to_part, text_parts(content))]
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": output or ""}]
    items: list[dict[str, Any]] = []
    if role == "assistant":
        if text := "".join(part.get("text", "") for part in text_parts(content)):
            items.append({"role": role, "content": text})
    elif content:
        items.append({"role": role, "content": content if isinstance(content, str) else [*map(_to_part, content)]})
    for call in message.get("tool_calls") or ():
        items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return items


def _to_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a content part of a user, system or tool message."""
    if part.get("type") == "text":
        return {"type": "input_text", "text": part["text"]}
    if part.get("type") == "image_url":
        image = part["image_url"]
        return {"type": "input_image", "image_url": image["url"], "detail": image.get("detail", "auto")}
    return dict(part)


def _finish_reason(answer: Mapping[str, Any], has_calls: bool) -> str:
    if answer.get("status") == "incomplete":
        reason = (answer.get("incomplete_details") or {}).get("reason") or "max_output_tokens"
        return "length" if reason == "max_output_tokens" else str(reason)
    return "tool_calls" if has_calls else "stop"


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.get("input_tokens"),
        "completion_tokens": usage.get("output_tokens"),
        "prompt_tokens_details": usage.get("input_tokens_details"),
        "completion_tokens_details": usage.get("output_tokens_details"),
    }
