"""`RecordingEndpoint`: an OpenAI-compatible server on loopback, through which agents of other frameworks ask the model.

Each episode has a private address with a token that cannot be guessed, so that requests need no key and cannot meet.
What a request is answered with is for the episode's own function to say; the server only speaks the form.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable

import anyio
from aiohttp import web

from reward_kit.agent.policies.own_agent.chat_wire import Answer, ChatRequest, RefusedRequest, read_request
from reward_kit.errors import EpisodeError
from reward_kit.safe_input import AGENT_REQUEST_BYTES

Answerer = Callable[[ChatRequest], Awaitable[Answer]]
"""Answers one request of an episode's agent; an `EpisodeError` says that the episode is over."""


class RecordingEndpoint:
    """One server for all episodes of a policy. It starts with its first address and stops with `close`.

    Args:
        model: the name that the list of models shows.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._answerers: dict[str, Answerer] = {}
        self._runner: web.AppRunner | None = None
        self._starting = anyio.Lock()
        self._url = ""

    async def open(self, answerer: Answerer) -> str:
        """A new address, such as "http://127.0.0.1:41233/TOKEN/v1", whose requests `answerer` answers."""
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
        """Stop the server. Called once, when no address is in use any more."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _start(self) -> None:
        app = web.Application(client_max_size=AGENT_REQUEST_BYTES, middlewares=[_errors_as_json])
        app.router.add_post("/{token}/v1/chat/completions", self._complete)
        app.router.add_get("/{token}/v1/models", self._models)
        app.router.add_route("*", "/{token}/v1/{rest:.*}", self._unserved)
        # A client that hangs up takes its request back, so that the model is not asked for nobody.
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
            asked = read_request(await request.read())
            answer = await answerer(asked)
        except (RefusedRequest, EpisodeError) as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        return await _stream(request, answer, asked.include_usage) if asked.stream else _whole(answer)

    async def _models(self, request: web.Request) -> web.Response:
        self._answerer(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "reward-kit"}
        return web.json_response({"object": "list", "data": [model]})

    async def _unserved(self, request: web.Request) -> web.Response:
        self._answerer(request)
        raise web.HTTPNotFound(text=f"{request.match_info['rest']} is not served here; use POST chat/completions")


def _whole(answer: Answer) -> web.Response:
    return web.json_response(answer.to_json())


async def _stream(request: web.Request, answer: Answer, include_usage: bool) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in answer.chunks(include_usage)]
    await response.write("".join([*events, "data: [DONE]\n\n"]).encode())
    await response.write_eof()
    return response


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Errors in the form that clients of the API read."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        body = {"error": {"message": error.text, "type": "invalid_request_error", "param": None, "code": None}}
        return web.json_response(body, status=error.status)
