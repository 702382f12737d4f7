"""`RecordingEndpoint`: an OpenAI-compatible server on loopback, through which agents of other frameworks ask the model.

Each episode has a private address with a random token, so that requests need no key and cannot meet. The episode's own
function answers a request; the server only speaks the protocol of OpenAI's API reference ("Create chat completion" and
"The chat completion chunk object"), whole or as a stream.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import anyio
import pydantic
from aiohttp import web

from reward_kit.errors import EpisodeError, kind_of
from reward_kit.models import Message
from reward_kit.providers.completion import ChatCompletion
from reward_kit.safe_input import AGENT_REQUEST_BYTES, read_strictly
from reward_kit.validation import describe_validation_error

ChatMessage = dict[str, Any]
"""A message in chat form, unchanged."""

_MESSAGES = pydantic.TypeAdapter(list[Message])
_NOT_PASSED_ON = frozenset({"model", "messages", "stream", "stream_options", "n", "seed", "logprobs", "top_logprobs"})


class RefusedRequest(Exception):
    """A request that cannot be served; the client reads the message with a status of 400."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A client's request.

    Attributes:
        messages: the conversation in chat form, every key unchanged.
        options: the further keys, such as `tools` and `response_format`, without those that the server sets.
        stream: answer with server-sent events.
        include_usage: end the stream with a chunk that holds the usage.
    """

    messages: list[ChatMessage]
    options: dict[str, Any]
    stream: bool = False
    include_usage: bool = False


def read_request(data: bytes) -> ChatRequest:
    """Parse the body of a request.

    Raises:
        RefusedRequest: it is not a chat completion request, or asks for what the recording endpoint does not do.
    """
    try:
        body = read_strictly(data)
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise RefusedRequest(f"the body is a JSON object, not {kind_of(body)}")
    if body.get("n") not in (None, 1):
        raise RefusedRequest(f"n: one answer a request, got {body['n']!r}; ask several times for several")
    for key in ("logprobs", "top_logprobs"):
        if body.get(key):
            raise RefusedRequest(f"{key}: log-probabilities go into the record, not to the agent; leave this key out")
    for key in ("functions", "function_call"):
        if body.get(key):
            raise RefusedRequest(f"{key}: this form is no longer served; use tools and tool_choice")
    messages, stream_options = body.get("messages"), body.get("stream_options")
    if not isinstance(messages, list) or not messages:
        raise RefusedRequest("messages: expected a list of at least one message")
    try:
        _MESSAGES.validate_python(messages)
    except pydantic.ValidationError as error:
        raise RefusedRequest(f"messages: {describe_validation_error(error)[0]}") from error
    return ChatRequest(
        messages,
        {key: value for key, value in body.items() if key not in _NOT_PASSED_ON and value is not None},
        stream=bool(body.get("stream")),
        include_usage=isinstance(stream_options, Mapping) and bool(stream_options.get("include_usage")),
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion for a client, with its id and the model's name."""

    completion: ChatCompletion
    id: str
    model: str

    def to_json(self) -> dict[str, Any]:
        """Return the chat completion object."""
        message = self.completion.message.to_chat()
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self._finish_reason()}
        return {**self._head("chat.completion"), "choices": [choice], **self._usage()}

    def chunks(self, include_usage: bool) -> Iterator[dict[str, Any]]:
        """Return it as chat completion chunks; the usage comes last if it is wanted and known."""
        message, head = self.completion.message, self._head("chat.completion.chunk")
        deltas: list[dict[str, Any]] = [
            {"role": "assistant", "content": None if message.tool_calls and not message.text else ""}
        ]
        if message.reasoning_content:
            deltas.append({"reasoning_content": message.reasoning_content})
        if message.text:
            deltas.append({"content": message.text})
        for index, call in enumerate(message.tool_calls or ()):
            name = {"name": call.function.name, "arguments": ""}
            deltas.append({"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": name}]})
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": call.function.arguments}}]})
        for delta in deltas:
            yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": self._finish_reason()}]}
        if include_usage and self.completion.usage:
            yield {**head, "choices": [], **self._usage()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model}

    def _finish_reason(self) -> str:
        return self.completion.finish_reason or ("tool_calls" if self.completion.message.tool_calls else "stop")

    def _usage(self) -> dict[str, Any]:
        usage = self.completion.usage
        if not usage:
            return {}
        counts = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }
        return {"usage": counts}


Answerer = Callable[[ChatRequest], Awaitable[Answer]]
"""Answers one request of an episode's agent; raises an `EpisodeError` if the episode is over."""


class RecordingEndpoint:
    """One server for all episodes of a policy. It starts with its first address and stops with `close`.

    Args:
        model: the name in the list of models.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._answerers: dict[str, Answerer] = {}
        self._runner: web.AppRunner | None = None
        self._starting = anyio.Lock()
        self._url = ""

    async def open(self, answerer: Answerer) -> str:
        """Return a new address, such as "http://127.0.0.1:41233/TOKEN/v1", whose requests `answerer` answers."""
        async with self._starting:
            if self._runner is None:
                await self._start()
        token = secrets.token_urlsafe(18)
        self._answerers[token] = answerer
        return f"{self._url}/{token}/v1"

    def forget(self, base_url: str) -> None:
        """Answer requests to this address with 404 from now on."""
        self._answerers.pop(base_url.split("/")[-2], None)

    async def close(self) -> None:
        """Stop the server. Called once, when no address is in use."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _start(self) -> None:
        app = web.Application(client_max_size=AGENT_REQUEST_BYTES, middlewares=[_errors_as_json])
        app.router.add_post("/{token}/v1/chat/completions", self._complete)
        app.router.add_get("/{token}/v1/models", self._models)
        app.router.add_route("*", "/{token}/v1/{rest:.*}", self._unserved)
        # The request of a client that hangs up is cancelled, so that the model is not asked in vain.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def _answerer(self, request: web.Request) -> Answerer:
        answerer = self._answerers.get(request.match_info["token"])
        if answerer is None:
            raise web.HTTPNotFound(text="no episode has this address; it may be over")
        return answerer

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        answerer = self._answerer(request)
        try:
            parsed = read_request(await request.read())
            answer = await answerer(parsed)
        except (RefusedRequest, EpisodeError) as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        if not parsed.stream:
            return web.json_response(answer.to_json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in answer.chunks(parsed.include_usage)]
        await response.write("".join([*events, "data: [DONE]\n\n"]).encode())
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        self._answerer(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "reward-kit"}
        return web.json_response({"object": "list", "data": [model]})

    async def _unserved(self, request: web.Request) -> web.Response:
        self._answerer(request)
        raise web.HTTPNotFound(text=f"{request.match_info['rest']} is not served here; use POST chat/completions")


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Return errors in the form that clients of the API read."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        body = {"error": {"message": error.text, "type": "invalid_request_error", "param": None, "code": None}}
        return web.json_response(body, status=error.status)
