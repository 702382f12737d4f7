"""`RecordingEndpoint`, the server on the loopback interface to which agents send the requests of their episodes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio
import pydantic
from aiohttp import web

from reward_kit.agent.recording.api import AgentApi, ChatRequest, RecordedAnswer, ServedModel, bad_request, error_body
from reward_kit.agent.recording.chat_api import ChatApi
from reward_kit.agent.recording.messages_api import MessagesApi, messages_error_body
from reward_kit.agent.recording.responses_api import ResponsesApi
from reward_kit.errors import EpisodeError, type_name
from reward_kit.models import Message
from reward_kit.safe_input import AGENT_REQUEST_BYTES, parse_json
from reward_kit.validation import describe_validation_error

Answerer = Callable[[ChatRequest], Awaitable[RecordedAnswer]]
"""Answers one request from an episode's agent; raises an `EpisodeError` if the episode is over."""

APIS: Mapping[str, type[AgentApi]] = {api.name: api for api in (ChatApi, ResponsesApi, MessagesApi)}
"""The APIs that agents may use, keyed by name."""
_PATHS = {
    "chat/completions": ChatApi.name,
    "responses": ResponsesApi.name,
    "messages": MessagesApi.name,
    "v1/messages": MessagesApi.name,  # Anthropic's SDK appends it to its base URL
}
_MESSAGES = pydantic.TypeAdapter(list[Message])


@dataclass(frozen=True, slots=True)
class _Episode:
    """An episode that has a base URL: the function that answers its requests, and its APIs keyed by name."""

    answerer: Answerer
    apis: Mapping[str, AgentApi]


class RecordingEndpoint:
    """The server for all episodes of a policy. The first `open` starts it.

    The token in the path of a base URL is its only credential. Keys that clients send are ignored.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._episodes: dict[str, _Episode] = {}
        self._runner: web.AppRunner | None = None
        self._starting = anyio.Lock()
        self._url = ""

    async def open(self, answerer: Answerer) -> str:
        """Return a new base URL, such as "http://127.0.0.1:41233/TOKEN/v1".

        `answerer` answers the requests that are sent to this URL.
        """
        async with self._starting:
            if self._runner is None:
                app = web.Application(client_max_size=AGENT_REQUEST_BYTES, middlewares=[_errors_as_json])
                app.router.add_get("/{token}/v1/models", self._models)
                for path in _PATHS:
                    app.router.add_post(f"/{{token}}/v1/{{path:{path}}}", self._complete)
                app.router.add_route("*", "/{token}/v1/{rest:.*}", self._unserved)
                # Cancel the requests of disconnected clients, to save calls to the model.
                self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
                await self._runner.setup()
                await web.TCPSite(self._runner, "127.0.0.1", 0).start()
                self._url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        token = secrets.token_urlsafe(18)
        self._episodes[token] = _Episode(answerer, {name: api(self._model) for name, api in APIS.items()})
        return f"{self._url}/{token}/v1"

    def forget(self, base_url: str) -> None:
        """Remove a base URL. Later requests to it receive status 404."""
        self._episodes.pop(base_url.split("/")[-2], None)

    async def close(self) -> None:
        """Stop the server. Call this method once, when no base URL is in use anymore."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _episode(self, request: web.Request) -> _Episode:
        episode = self._episodes.get(request.match_info["token"])
        if episode is None:
            raise web.HTTPNotFound(text="no running episode uses this URL")
        return episode

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        episode = self._episode(request)
        api = episode.apis[_PATHS[request.match_info["path"]]]
        parsed = _parse_request(await request.read(), api)
        try:
            answer = await episode.answerer(parsed)
        except EpisodeError as error:
            raise bad_request(str(error)) from error
        if not parsed.stream:
            return web.json_response(api.to_json(parsed, answer))
        events = "".join([*map(_encode_event, api.events(parsed, answer)), api.end_of_stream])
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        return web.Response(body=events.encode(), headers=headers)

    async def _models(self, request: web.Request) -> web.Response:
        self._episode(request)
        model = {"id": self._model.name, "object": "model", "created": 0, "owned_by": "reward-kit"}
        return web.json_response({"object": "list", "data": [model]})

    async def _unserved(self, request: web.Request) -> web.Response:
        self._episode(request)
        served = "POST chat/completions, responses or messages"
        raise web.HTTPNotFound(text=f"{request.method} {request.match_info['rest']} is not supported; use {served}")


def _parse_request(data: bytes, api: AgentApi) -> ChatRequest:
    """Parse the body of a request. An invalid body raises an error with HTTP status 400."""
    try:
        body = parse_json(data)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise bad_request(f"the body must be a JSON object, got {type_name(body)}")
    try:
        parsed = api.parse(body)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise bad_request(f"the request does not have the format of the API: {error!r:.200}") from error
    try:
        _MESSAGES.validate_python(parsed.messages)
    except pydantic.ValidationError as error:
        raise bad_request(f"messages: {describe_validation_error(error)[0]}") from error
    return parsed


def _encode_event(event: Mapping[str, Any]) -> str:
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n"


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Return errors in the JSON format of the client's API."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        is_messages = "/messages" in request.path or "anthropic-version" in request.headers
        message = error.text or error.reason
        body = messages_error_body(error.status, message) if is_messages else error_body(message)
        return web.json_response(body, status=error.status)
