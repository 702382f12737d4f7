"""A scripted server for tests that speaks chat completions, Responses and Messages, simulates faults, and records
requests.

    async with ChatServer([status(429, {"Retry-After": "0"}), answer("42")]) as server:
        ...  # an endpoint at server.base_url; afterwards server.requests

A script is a list of behaviors, one per request, or a function from the request's body to a behavior. `answer` and
`tool_calls` stream if the request sets `stream`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from aiohttp import web

Behavior = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
Script = Sequence[Behavior] | Callable[[dict[str, Any]], Behavior]
USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}


@dataclass(frozen=True, slots=True)
class Received:
    """A received request."""

    headers: dict[str, str]
    body: dict[str, Any]


class ChatServer:
    """A server of the three APIs below `/v1` on 127.0.0.1 in the running loop, by default on a free port."""

    def __init__(self, script: Script, port: int = 0, models: Sequence[str] = ()) -> None:
        self._script = script
        self._models = models
        self.port = port
        self._runner: web.AppRunner | None = None
        self.requests: list[Received] = []
        self.base_url = ""

    async def __aenter__(self) -> ChatServer:
        app = web.Application()
        for path in ("chat/completions", "responses", "messages"):
            app.router.add_post(f"/v1/{path}", self._handle)
        if self._models:
            app.router.add_get("/v1/models", self._list_models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]
        self.base_url = f"http://127.0.0.1:{self.port}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Return the bodies of the requests in order."""
        return [request.body for request in self.requests]

    async def _list_models(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": name} for name in self._models]})

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(Received(dict(request.headers), body))
        return await self._behavior(body)(request, body)

    def _behavior(self, body: dict[str, Any]) -> Behavior:
        if callable(self._script):
            return self._script(body)
        number = len(self.requests)
        if number > len(self._script):
            return status(400, text=f"the script has {len(self._script)} answers, this is request {number}")
        return self._script[number - 1]


def answer(
    text: str | None = "ok",
    *,
    calls: Sequence[tuple[str, Any]] = (),
    finish_reason: str | None = None,
    usage: dict[str, Any] | None = USAGE,
    call_ids: bool = True,
    message: dict[str, Any] | None = None,
    choice: dict[str, Any] | None = None,
    top: dict[str, Any] | None = None,
) -> Behavior:
    """Return a completion. `message`, `choice` and `top` are additional keys of the message, choice and response."""
    full_message: dict[str, Any] = {"role": "assistant", "content": text, **(message or {})}
    if calls:
        full_message["tool_calls"] = [_call(n, *call, with_id=call_ids) for n, call in enumerate(calls)]
    reason = finish_reason or ("tool_calls" if calls else "stop")
    full_choice = {"index": 0, "message": full_message, "finish_reason": reason, **(choice or {})}
    completion = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "m",
        "choices": [full_choice],
        **(top or {}),
    }
    if usage is not None:
        completion["usage"] = usage

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        convert, to_events = _APIS[request.path]
        value = convert(completion)
        return await _send_events(request, to_events(value)) if body.get("stream") else web.json_response(value)

    return behave


def to_response(completion: dict[str, Any]) -> dict[str, Any]:
    """Return a completion as a response of OpenAI. `message["items"]` are items before those of the message."""
    choice = completion["choices"][0]
    message, usage = choice["message"], completion.get("usage")
    output = list(message.get("items") or [])
    if message["content"] is not None:
        entries = (choice.get("logprobs") or {}).get("content") or []
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": entries}
        output.append({"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]})
    for n, call in enumerate(message.get("tool_calls") or []):
        ids = {"id": f"fc_{n}", "call_id": call.get("id"), "status": "completed"}
        output.append({"type": "function_call", **ids, **call["function"]})
    is_cut = choice["finish_reason"] == "length"
    response: dict[str, Any] = {
        **{"id": "resp_1", "object": "response", "created_at": 0, "model": "m", "output": output, "tools": []},
        **{"parallel_tool_calls": True, "tool_choice": "auto", "error": None, "metadata": {}, "instructions": None},
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
    }
    if usage is not None:
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 0}
            | usage.get("prompt_tokens_details", {}),
            "output_tokens_details": {"reasoning_tokens": 0} | usage.get("completion_tokens_details", {}),
        }
    return response


def response_events(response: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a streamed response."""
    begun = {**response, "output": [], "status": "in_progress", "usage": None}
    found: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
    for n, item in enumerate(response["output"]):
        empty = {"status": "in_progress", "content": [], "arguments": ""}
        added = {key: empty.get(key, value) for key, value in item.items()}
        found.append({"type": "response.output_item.added", "output_index": n, "item": added})
        for piece in _pieces(item.get("arguments") or ""):
            found.append({"type": "response.function_call_arguments.delta", "output_index": n, "delta": piece})
        for part in item.get("content") or [] if item["type"] == "message" else []:
            for piece in _pieces(part.get("text", "")):
                found.append({"type": "response.output_text.delta", "output_index": n, "delta": piece})
        found.append({"type": "response.output_item.done", "output_index": n, "item": item})
    found.append({"type": f"response.{response['status']}", "response": response})
    return [{**event, "sequence_number": n} for n, event in enumerate(found)]


def to_message(completion: dict[str, Any]) -> dict[str, Any]:
    """Return a completion as a message of Anthropic. `message["items"]` are blocks before those of the message."""
    choice = completion["choices"][0]
    message, usage = choice["message"], completion.get("usage") or {"prompt_tokens": 0, "completion_tokens": 0}
    content = list(message.get("items") or [])
    if message["content"]:
        content.append({"type": "text", "text": message["content"], "citations": None})
    for call in message.get("tool_calls") or []:
        value = json.loads(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call.get("id"), "name": call["function"]["name"], "input": value})
    prompt = usage.get("prompt_tokens_details", {})
    cached, written = prompt.get("cached_tokens", 0), prompt.get("cache_write_tokens", 0)
    counts: dict[str, Any] = {"input_tokens": usage["prompt_tokens"] - cached - written}
    counts |= {"output_tokens": usage["completion_tokens"]}
    if details := usage.get("completion_tokens_details"):
        counts["output_tokens_details"] = {"thinking_tokens": details["reasoning_tokens"]}
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {
        **{"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": content},
        **{"stop_reason": reasons[choice["finish_reason"]], "stop_sequence": None},
        "usage": {**counts, "cache_read_input_tokens": cached, "cache_creation_input_tokens": written},
    }


def message_events(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a streamed message."""
    begun = {**message, "content": [], "stop_reason": None, "usage": {**message["usage"], "output_tokens": 1}}
    found: list[dict[str, Any]] = [{"type": "message_start", "message": begun}, {"type": "ping"}]
    for n, block in enumerate(message["content"]):
        deltas = [{"type": "text_delta", "text": piece} for piece in _pieces(block.get("text", ""))]
        deltas += [{"type": "thinking_delta", "thinking": piece} for piece in _pieces(block.get("thinking", ""))]
        if "signature" in block:
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        if "input" in block:
            text = json.dumps(block["input"]) if block["input"] else ""
            deltas += [{"type": "input_json_delta", "partial_json": piece} for piece in ["", *_pieces(text)]]
        empty = {"text": "", "thinking": "", "signature": "", "input": {}}
        start = {key: empty.get(key, value) for key, value in block.items()}
        found.append({"type": "content_block_start", "index": n, "content_block": start})
        found += [{"type": "content_block_delta", "index": n, "delta": delta} for delta in deltas]
        found.append({"type": "content_block_stop", "index": n})
    end = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    usage = {"output_tokens": message["usage"]["output_tokens"]}
    return [*found, {"type": "message_delta", "delta": end, "usage": usage}, {"type": "message_stop"}]


def tool_calls(calls: Sequence[tuple[str, Any]], text: str | None = None, **rest: Any) -> Behavior:
    """Return a completion with tool calls, (name, arguments) pairs; text arguments are sent unchanged."""
    return answer(text, calls=calls, **rest)


def status(code: int, headers: dict[str, str] | None = None, text: str | None = None, error: Any = None) -> Behavior:
    """Return an HTTP status with an error text, or with any JSON value as `error`."""
    body = {"error": {"message": text or f"scripted {code}"} if error is None else error}

    async def behave(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(body, status=code, headers=headers)

    return behave


def raw(body: str, content_type: str = "application/json", code: int = 200) -> Behavior:
    """Return a text with a content type."""

    async def behave(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text=body, content_type=content_type, status=code)

    return behave


def html() -> Behavior:
    """Return a proxy's HTML page with status 200."""
    return raw("<html><body>Please wait while the gateway starts</body></html>", "text/html")


def events(*data: Any, done: bool = True) -> Behavior:
    """Return a raw event stream; values other than text are sent as JSON."""

    async def behave(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return await _send_events(request, [*data, "[DONE]"] if done else data)

    return behave


def dropped() -> Behavior:
    """Close the connection before any response."""

    async def behave(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        _hang_up(request)
        return web.Response()

    return behave


def cut_body() -> Behavior:
    """Send a body shorter than its Content-Length."""

    async def behave(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"choices": [{"message": {"content": "half')
        _hang_up(request)
        return response

    return behave


def cut_stream(
    keep: float = 0.5, *, half_event: bool = False, connection: bool = False, error: dict[str, Any] | None = None
) -> Behavior:
    """End a stream early.

    Args:
        keep: the fraction of the events to send; 1 omits only those that end the answer.
        half_event: whether to send half of the next event.
        connection: whether to close the connection.
        error: an event to send at the end.
    """

    async def behave(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        convert, to_events = _APIS[request.path]
        message = {"role": "assistant", "content": "half an answer"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        stream = [*to_events(convert({"choices": [choice], "usage": USAGE}))]
        count = max(1, int(keep * next(n for n, event in enumerate(stream) if _ends(event))))
        response = await _open_stream(request)
        for event in [*stream[:count], *([error] if error else [])]:
            await _event(response, event)
        if half_event:
            text = f"data: {json.dumps(stream[count])}"
            await response.write(text[: len(text) // 2].encode())
        if connection:
            _hang_up(request)
        return response

    return behave


def _ends(event: Any) -> bool:
    """Return whether an event ends an answer in any of the APIs."""
    if "choices" in event:
        return event["choices"][0].get("finish_reason") is not None
    return event["type"] in ("response.completed", "message_stop")


def silent() -> Behavior:
    """Send nothing until the server is closed."""
    return slow(3600.0, answer("too late"))


def trickle(pause_s: float = 0.01) -> Behavior:
    """Send an endless stream without pauses."""

    async def behave(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = await _open_stream(request)
        while True:
            await response.write(b": still here\n\n")
            await asyncio.sleep(pause_s)

    return behave


def slow(delay_s: float, then: Behavior) -> Behavior:
    """Delay another behavior."""

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(delay_s)
        return await then(request, body)

    return behave


def _call(number: int, name: str, arguments: Any, *, with_id: bool) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call = {"type": "function", "function": {"name": name, "arguments": text}}
    return {"id": f"call_{name}_{number}", **call} if with_id else call


def _hang_up(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.close()


async def _open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def _event(response: web.StreamResponse, data: Any) -> None:
    text = data if isinstance(data, str) else json.dumps(data)
    await response.write(f"data: {text}\n\n".encode())


async def _send_events(request: web.Request, data: Sequence[Any]) -> web.StreamResponse:
    response = await _open_stream(request)
    for item in data:
        await _event(response, item)
    return response


def completion_events(completion: dict[str, Any]) -> list[Any]:
    """Return the events of a completion streamed in pieces of three characters, as OpenAI and vLLM do."""
    top = {key: value for key, value in completion.items() if key not in ("choices", "usage")}
    choice = completion["choices"][0]
    chunks: list[dict[str, Any]] = [{"delta": delta} for delta in _deltas(choice["message"])]
    for entry in (choice.get("logprobs") or {}).get("content") or []:
        chunks.append({"delta": {}, "logprobs": {"content": [entry]}})
    chunks += [{"delta": {}, "token_ids": [token]} for token in choice.get("token_ids") or []]
    chunks.append({"delta": {}, "finish_reason": choice["finish_reason"]})
    data = [{**top, "choices": [{"index": 0, **chunk}]} for chunk in chunks]
    if "usage" in completion:
        data.append({**top, "choices": [], "usage": completion["usage"]})
    return [*data, "[DONE]"]


_APIS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], Callable[[dict[str, Any]], list[Any]]]] = {
    "/v1/chat/completions": (dict, completion_events),
    "/v1/responses": (to_response, response_events),
    "/v1/messages": (to_message, message_events),
}
"""The functions that convert a completion to the API of a path, and the result to the events of a stream."""


def _deltas(message: dict[str, Any]) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = [{"role": "assistant"}]
    for key in ("reasoning_content", "content"):
        deltas += [{key: piece} for piece in _pieces(message.get(key) or "")]
    calls = message.get("tool_calls") or []
    for n, call in enumerate(calls):
        head = {"index": n, **call, "function": {"name": call["function"]["name"], "arguments": ""}}
        deltas.append({"tool_calls": [head]})
    # Parallel calls are interleaved, so that a client that ignores the index mixes them up.
    queues = [_pieces(call["function"]["arguments"]) for call in calls]
    for turn in range(max(map(len, queues), default=0)):
        for n, queue in enumerate(queues):
            if turn < len(queue):
                deltas.append({"tool_calls": [{"index": n, "function": {"arguments": queue[turn]}}]})
    return deltas


def _pieces(text: str) -> list[str]:
    return [text[start : start + 3] for start in range(0, len(text), 3)]
