"""`create_app` of reward-kit 0.4, which serves a reward as an ASGI application.

The application has no authentication, limits or sandbox; `reward-kit serve` has all three.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio.to_thread

from reward_kit.errors import RewardKitError
from reward_kit.reward_function import RewardFunction

_Receive = Callable[[], Awaitable[Mapping[str, Any]]]
_Send = Callable[[Mapping[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Mapping[str, Any], _Receive, _Send], Awaitable[None]]
MAX_BODY_BYTES = 16 * 2**20


def create_app(reward_func: Callable[..., Any]) -> ASGIApp:
    """Return an ASGI application for a synchronous reward that you trust. Mount it behind your own authentication.

    `POST /reward` expects an object with `messages`, an optional `ground_truth`, and additional keyword parameters. It
    returns the fields of the `EvaluateResult`. `GET /health` returns `{"status": "ok"}`.
    """
    reward = RewardFunction(func=reward_func)

    async def answer(method: str, path: str, receive: _Receive) -> tuple[int, Any]:
        if (method, path) == ("GET", "/health"):
            return 200, {"status": "ok"}
        if (method, path) != ("POST", "/reward"):
            return 404, {"detail": "known: POST /reward, GET /health"}
        body, more = b"", True
        while more:
            part = await receive()
            body, more = body + part.get("body", b""), part.get("more_body", False)
            if len(body) > MAX_BODY_BYTES:
                return 413, {"detail": f"the request body exceeds the limit of {MAX_BODY_BYTES} bytes"}
        try:
            arguments = json.loads(body)
            if not isinstance(arguments, dict) or not isinstance(arguments.get("messages"), list):
                return 422, {"detail": "the request body must be a JSON object with a list of messages"}
            result = await anyio.to_thread.run_sync(lambda: reward(**arguments))
        except (RewardKitError, ValueError, TypeError, RecursionError) as error:
            return 422, {"detail": str(error)}
        return 200, result.model_dump(mode="json")

    async def app(scope: Mapping[str, Any], receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this application serves only HTTP requests, got {scope['type']!r}")
        status, data = await answer(scope["method"], scope["path"], receive)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(data).encode()})

    return app
