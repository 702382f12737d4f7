"""OpenAI's Responses API for agents of the recording endpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
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
from reward_kit.agent.recording.chat_api import NO_LOGPROBS
from reward_kit.models import PROVIDER_ITEMS
from reward_kit.providers.dialect import stored_items
from reward_kit.providers.responses import LOGPROBS, Responses

Item = Mapping[str, Any]
"""An input or output item."""
_PASSED_ON = ("temperature", "top_p", "top_logprobs")
_PASSED_ON_WITH_TOOLS = ("parallel_tool_calls", "tool_choice")
_CONVERTED = frozenset(
    {
        *("model", "input", "instructions", "previous_response_id", "stream", "stream_options", "store", "background"),
        *("tools", "max_output_tokens", "reasoning", "text", *_PASSED_ON, *_PASSED_ON_WITH_TOOLS),
    }
)
_NOT_SERVED = {
    "background": "responses in the background are not supported",
    "conversation": "stored conversations are not supported; send the conversation as input, or previous_response_id",
    "prompt": "stored prompts are not supported; send instructions and input",
}
_DIALECT = Responses()
_TEXT_TYPES = ("input_text", "output_text", "text")


class ResponsesApi(AgentApi):
    """Responses: https://platform.openai.com/docs/api-reference/responses.

    The items of the episode are kept, so that requests may refer to them by id. They are not stored at the model's own
    endpoint.
    """

    name = "responses"

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model)
        self._conversations: dict[str, list[Item]] = {}  # input and output, by the id of the response
        self._items: dict[str, Item] = {}
        self._origins: dict[str, set[str]] = {}  # the ids of the responses, by the id of an item or a call

    def parse(self, body: Mapping[str, Any]) -> ChatRequest:
        """Return a request in chat format."""
        for key, problem in _NOT_SERVED.items():
            if body.get(key):
                raise bad_request(f"{key}: {problem}")
        if not self._model.has_logprobs and (body.get("top_logprobs") or LOGPROBS in (body.get("include") or ())):
            raise bad_request(f"{'top_logprobs' if body.get('top_logprobs') else 'include'}: {NO_LOGPROBS}")
        items = [*self._earlier_items(body.get("previous_response_id")), *self._input_items(body.get("input"))]
        if not items:
            raise bad_request("input must not be empty")
        instructions = only(body.get("instructions") or "", str, "instructions")
        messages = [{"role": "system", "content": instructions}] if instructions else []
        messages += self._to_messages(items)
        return ChatRequest(messages, self._options(body), self.name, {**body, "input": items})

    def to_json(self, request: ChatRequest, answer: RecordedAnswer) -> dict[str, Any]:
        """Return a response and keep its items."""
        body, completion = request.body, answer.completion
        output = _output(answer, LOGPROBS in (body.get("include") or ()))
        status, details = "completed", None
        if completion.finish_reason in ("length", "content_filter"):
            reason = {"length": "max_output_tokens"}.get(completion.finish_reason, completion.finish_reason)
            status, details = "incomplete", {"reason": reason}
        value = {
            **{"id": f"resp_{answer.id}", "object": "response", "created_at": int(time.time()), "status": status},
            **{"error": None, "incomplete_details": details, "model": answer.model, "output": output},
            **{
                key: body.get(key) for key in ("instructions", "max_output_tokens", "previous_response_id", "reasoning")
            },
            **{key: body.get(key) for key in ("temperature", "top_p", "user")},
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "store": body.get("store") is not False,
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "truncation": body.get("truncation") or "disabled",
            "usage": _usage(answer),
        }
        self._keep(value, body["input"])
        return value

    def events(self, request: ChatRequest, answer: RecordedAnswer) -> Iterator[Mapping[str, Any]]:
        """Yield the events of a response."""
        response = self.to_json(request, answer)
        for number, event in enumerate(_events(response)):
            yield {**event, "sequence_number": number}

    def _earlier_items(self, response_id: Any) -> Sequence[Item]:
        if response_id is None:
            return ()
        if response_id not in self._conversations:
            raise bad_request(f"previous_response_id: the episode has no response {response_id!r:.80}")
        return self._conversations[response_id]

    def _input_items(self, given: Any) -> list[Item]:
        """Return the input items. References to items of earlier responses are replaced by the items themselves."""
        if isinstance(given, str):
            return [{"type": "message", "role": "user", "content": given}]
        items: list[Item] = []
        for index, item in enumerate(only([] if given is None else given, list, "input")):
            only(item, Mapping, f"input.{index}")
            item_id = item.get("id")
            known = self._items.get(item_id) if isinstance(item_id, str) else None
            kind = item.get("type")
            if kind == "item_reference" and known is None:
                raise bad_request(f"input.{index}: the episode has no item {item_id!r:.80}")
            # The answer to a client that relies on stored items has more than it sends back.
            is_shortened = kind == "reasoning" and not item.get("encrypted_content")
            items.append(known if known is not None and (kind == "item_reference" or is_shortened) else item)
        return items

    def _to_messages(self, items: Sequence[Item]) -> list[ChatMessage]:
        """Return the messages that the items represent. The items of one response become one message."""
        turns: list[ChatMessage | list[Item]] = []
        answer: list[Item] = []
        for index, item in enumerate(items):
            kind = item.get("type") or "message"
            if kind in ("reasoning", "function_call") or (kind == "message" and item["role"] == "assistant"):
                if not (answer and self._continues(answer[-1], item, turns[-1] is answer)):
                    answer = []
                    turns.append(answer)
                answer.append(item)
            elif kind == "function_call_output":
                content = self._to_content(item.get("output"), f"input.{index}.output")
                turns.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
            elif kind == "message":
                content = self._to_content(item["content"], f"input.{index}.content")
                turns.append({"role": item["role"], "content": content})
            else:
                raise bad_request(f"input.{index}: items of type {kind!r:.80} are not supported")
        return [self._to_assistant(turn) if isinstance(turn, list) else turn for turn in turns]

    def _continues(self, last: Item, item: Item, is_next: bool) -> bool:
        """Return True if an item belongs to the same response as the last item of that response.

        Some clients send the result of each call directly after the call, so there may be results in between.
        """
        one, other = (self._origins.get(_own_id(item), set()) for item in (last, item))
        if not (one and other):
            return is_next
        return bool(one & other) if is_next else len(one) == 1 and one == other

    def _to_assistant(self, items: list[Item]) -> ChatMessage:
        answer = _DIALECT.to_completion({"output": [*map(_with_parts, items)]})
        message: ChatMessage = dict(answer["choices"][0]["message"])
        if message.pop(PROVIDER_ITEMS, None) and self._is_native:
            message = with_items(message, self.name, items)
        refusal = message.pop("refusal", None)
        return message if message["content"] is not None else {**message, "content": refusal}

    def _to_content(self, content: Any, where: str) -> str | list[dict[str, Any]]:
        """Return the content of a user, system or tool message."""
        if content is None or isinstance(content, str):
            return content or ""
        parts = []
        for index, part in enumerate(only(content, (str, list), where)):
            kind = part["type"]
            if kind in _TEXT_TYPES:
                parts.append({"type": "text", "text": part["text"]})
            elif kind == "input_image" and part.get("image_url"):
                detail = {"detail": part["detail"]} if part.get("detail") else {}
                parts.append({"type": "image_url", "image_url": {"url": part["image_url"], **detail}})
            elif self._is_native:
                parts.append(dict(part))
            else:
                problem = "files must be sent as image_url" if kind == "input_image" else "this type is not supported"
                raise bad_request(
                    f"{where}.{index}: {kind!r:.80}: {problem} by the API of the model ({self._model.api})"
                )
        return content_of_parts(parts)

    def _options(self, body: Mapping[str, Any]) -> dict[str, Any]:
        options = {key: body.get(key) for key in _PASSED_ON}
        options["max_completion_tokens"] = body.get("max_output_tokens")
        if tools := [_to_tool(tool, f"tools.{index}") for index, tool in enumerate(body.get("tools") or ())]:
            options |= {"tools": tools, **{key: body.get(key) for key in _PASSED_ON_WITH_TOOLS}}
            if isinstance(choice := options["tool_choice"], Mapping):
                if choice.get("type") != "function":
                    raise bad_request(f"tool_choice: type {choice.get('type')!r:.80} is not supported; name a function")
                options["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
        reasoning, text = (dict(body.get(key) or {}) for key in ("reasoning", "text"))
        options["reasoning_effort"] = reasoning.pop("effort", None)
        if (wanted := dict(text.pop("format", None) or {})).get("type") == "json_schema":
            schema = {key: value for key, value in wanted.items() if key != "type" and value is not None}
            options["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif wanted.get("type") == "json_object":
            options["response_format"] = wanted
        if self._is_native:
            options |= {key: value for key, value in body.items() if key not in _CONVERTED}
            options |= {key: value for key, value in (("reasoning", reasoning), ("text", text)) if value}
        return {key: value for key, value in options.items() if value is not None}

    def _keep(self, response: Mapping[str, Any], given: list[Item]) -> None:
        """Keep the items of a response, so that later requests may refer to them."""
        self._conversations[response["id"]] = [*given, *response["output"]]
        for item in response["output"]:
            if isinstance(item.get("id"), str):
                self._items[item["id"]] = item
            self._origins.setdefault(_own_id(item), set()).add(response["id"])


def _own_id(item: Item) -> str:
    return str(item.get("call_id") or item.get("id"))


def _with_parts(item: Item) -> Item:
    """Return an item. If it is a message, its content is converted to a list of parts."""
    if (item.get("type") or "message") != "message":
        return item
    content = item["content"]
    parts = [{"type": "output_text", "text": content}] if isinstance(content, str) else content
    return {"type": "message", "content": [{**part, "type": _output_type(part["type"])} for part in parts]}


def _output_type(kind: str) -> str:
    return "output_text" if kind in _TEXT_TYPES else kind


def _to_tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a function tool in chat format."""
    if tool.get("type", "function") != "function":
        raise bad_request(f"{where}: tools of type {tool['type']!r:.80} are not supported; use functions")
    keys = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in keys if tool.get(key) is not None}}


def _output(answer: RecordedAnswer, with_logprobs: bool) -> list[dict[str, Any]]:
    """Return the output items of a response.

    If the model's own endpoint uses the same API, these are the items that it returned.
    """
    message, id_ = answer.completion.message, answer.id
    if items := stored_items(message.model_extra or {}, ResponsesApi.name):
        return items
    output: list[dict[str, Any]] = []
    if message.reasoning_content:
        summary = [{"type": "summary_text", "text": message.reasoning_content}]
        output.append({"id": f"rs_{id_}", "type": "reasoning", "summary": summary})
    if message.text or not message.tool_calls:
        entries = (answer.completion.logprob_entries or []) if with_logprobs else []
        part = {"type": "output_text", "text": message.text, "annotations": [], "logprobs": entries}
        head = {"id": f"msg_{id_}", "type": "message", "role": "assistant", "status": "completed"}
        output.append({**head, "content": [part]})
    for index, call in enumerate(message.tool_calls or ()):
        head = {"id": f"fc_{id_}_{index}", "type": "function_call", "status": "completed", "call_id": call.id}
        output.append({**head, "name": call.function.name, "arguments": call.function.arguments})
    return output


def _usage(answer: RecordedAnswer) -> dict[str, Any] | None:
    usage = answer.completion.usage
    if usage is None:
        return None
    cached = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.cache_write_tokens or 0}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _events(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        at = {"output_index": index, "item_id": item.get("id")}
        kind = item["type"]
        empty = {"status": "in_progress", "content": [], "summary": [], "arguments": ""}
        started = {key: empty.get(key, value) for key, value in item.items()}
        yield {"type": "response.output_item.added", "output_index": index, "item": started}
        if kind == "message":
            yield from _content_events(item["content"], at)
        elif kind == "function_call":
            arguments = item["arguments"]
            yield {"type": "response.function_call_arguments.delta", **at, "delta": arguments}
            done = {"name": item["name"], "arguments": arguments}
            yield {"type": "response.function_call_arguments.done", **at, **done}
        elif kind == "reasoning":
            for number, part in enumerate(item.get("summary") or ()):
                here = {**at, "summary_index": number}
                yield {"type": "response.reasoning_summary_part.added", **here, "part": {**part, "text": ""}}
                yield {"type": "response.reasoning_summary_text.delta", **here, "delta": part["text"]}
                yield {"type": "response.reasoning_summary_text.done", **here, "text": part["text"]}
                yield {"type": "response.reasoning_summary_part.done", **here, "part": part}
            for number, part in enumerate(item.get("content") or ()):
                here = {**at, "content_index": number}
                yield {"type": "response.reasoning_text.delta", **here, "delta": part["text"]}
                yield {"type": "response.reasoning_text.done", **here, "text": part["text"]}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


def _content_events(parts: Sequence[Mapping[str, Any]], at: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of the parts of a message."""
    for number, part in enumerate(parts):
        here = {**at, "content_index": number}
        if part["type"] == "refusal":
            yield {"type": "response.content_part.added", **here, "part": {**part, "refusal": ""}}
            yield {"type": "response.refusal.delta", **here, "delta": part["refusal"]}
            yield {"type": "response.refusal.done", **here, "refusal": part["refusal"]}
        else:
            entries = part.get("logprobs") or []
            yield {"type": "response.content_part.added", **here, "part": {**part, "text": "", "logprobs": []}}
            yield {"type": "response.output_text.delta", **here, "delta": part["text"], "logprobs": entries}
            yield {"type": "response.output_text.done", **here, "text": part["text"], "logprobs": entries}
        yield {"type": "response.content_part.done", **here, "part": part}
