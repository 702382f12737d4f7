"""What each request to a reward server comes to: whether it has a key, where it leads, and what is answered."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import anyio
from aiohttp import web

from reward_kit.errors import RewardError, RewardKitError, boundary
from reward_kit.integrations.reward_server.bodies import Held, body_of, requests_in
from reward_kit.integrations.reward_server.keys import Keys
from reward_kit.integrations.reward_server.metrics import CONTENT_TYPE, Metrics
from reward_kit.integrations.reward_server.openapi import openapi_of
from reward_kit.integrations.reward_server.options import RefusedError, ServerOptions, json_response, plain_response
from reward_kit.integrations.reward_server.served import Named, ServedReward
from reward_kit.integrations.reward_server.wire import answer_of

_READS = ("GET", "HEAD")

logger = logging.getLogger("reward_kit.integrations.reward_server")


class _Route(NamedTuple):
    """Where a request leads: its name in figures, which methods it takes, what answers, and for which reward."""

    name: str
    methods: tuple[str, ...]
    answer: Callable[[web.BaseRequest], Awaitable[web.Response]]
    reward: str | None = None


@dataclass(slots=True)
class _Seen:
    """What is known of a request, also of one that is not answered because whoever sent it hung up."""

    key: int
    route: str = "unknown"
    reward: str | None = None
    status: int = 499


class Service:
    """Answers requests.

    Args:
        named: the rewards.
        keys: without one of them, nothing is answered but `/health`.
        options: limits.

    Attributes:
        rewards: by name.
        connections: tells how many are open.
        is_hurried: `stop` was called.
    """

    def __init__(self, named: Sequence[Named], keys: Keys, options: ServerOptions) -> None:
        self.rewards = {one.name: ServedReward(one, options) for one in named}
        self.connections: Callable[[], int] = lambda: 0
        self._keys, self._options = keys, options
        self._held = Held(options.held_bytes)
        self._metrics = Metrics(self.rewards.values())
        self._in_flight = 0
        self._is_ending = self.is_hurried = False
        self._idle = anyio.Event()
        self._fixed = {
            "/health": _Route("health", _READS, self._health),
            "/metrics": _Route("metrics", _READS, self._figures),
            "/openapi.json": _Route("openapi", _READS, self._document),
            "/v1/rewards": _Route("list", _READS, self._list),
        }

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Answer one request, count it, and say so in the log."""
        began = asyncio.get_running_loop().time()
        seen = _Seen(self._keys.number_of(request.headers.getall("Authorization", [])))
        self._in_flight += 1
        try:
            response = await self._answered(request, seen)
            seen.status = response.status
            return response
        finally:
            self._in_flight -= 1
            if not self._in_flight and self._is_ending:
                self._idle.set()
            seconds = asyncio.get_running_loop().time() - began
            self._metrics.answered(seen.route, seen.status, seconds)
            facts = {"route": seen.route, "reward": seen.reward, "status": seen.status, "key": seen.key or None}
            logger.info("%s", request.method, extra={**facts, "peer": request.remote, "seconds": round(seconds, 6)})

    async def end(self, timeout_s: float) -> bool:
        """Take no further request, and wait for those in flight; whether all of them were answered in time."""
        self._is_ending = True
        if self._in_flight:
            with anyio.move_on_after(timeout_s):
                await self._idle.wait()
        return not self._in_flight

    def stop(self) -> None:
        """Have `end` wait no longer."""
        self.is_hurried = True
        self._idle.set()

    async def _answered(self, request: web.BaseRequest, seen: _Seen) -> web.Response:
        """The answer; a fault of ours is logged and told without details."""
        try:
            with boundary(RewardError, "a request"):
                route = self._route(request, seen.key)
                seen.route, seen.reward = route.name, route.reward
                response = await route.answer(request)
        except RefusedError as refusal:
            response = refusal.response()
        except RewardKitError as error:
            logger.error("%s failed", seen.route, exc_info=error)
            told = "a fault of the server; its log says more"
            response = RefusedError(500, "internal", told, closes=True).response()
        if not seen.key:  # whoever has none gets one answer, and cannot keep us waiting for more
            response.force_close()
        return response

    def _route(self, request: web.BaseRequest, key: int) -> _Route:
        """Where a request leads.

        Raises:
            RefusedError: it has no key, the server ends, or there is no such address or method.
        """
        path = request.rel_url.raw_path
        route = self._fixed.get(path)
        if not key and (route is None or route.name != "health" or request.method not in route.methods):
            told = "send a key of this server: Authorization: Bearer KEY"
            raise RefusedError(401, "unauthorized", told, {"WWW-Authenticate": "Bearer"}, closes=True)
        route = route or self._route_of_reward(path)
        if request.method not in route.methods:
            allowed = ", ".join(route.methods)
            told = f"{path:.200} takes {allowed}"
            raise RefusedError(405, "method_not_allowed", told, {"Allow": allowed}, closes=True)
        if self._is_ending and route.name != "health":
            raise RefusedError(503, "ending", "the server is ending", {"Retry-After": "1"}, closes=True)
        return route

    def _route_of_reward(self, path: str) -> _Route:
        prefix, _, rest = path.partition("/v1/rewards/")
        name, _, action = rest.partition("/")
        if prefix or action not in ("", "score", "score_batch") or (action == "" and path.endswith("/")):
            raise RefusedError(404, "not_found", f"there is no {path!r:.200}; /openapi.json lists what is", closes=True)
        if (reward := self.rewards.get(name)) is None:
            known = ", ".join(self.rewards)
            raise RefusedError(404, "not_found", f"there is no reward {name!r:.100}; there is {known}", closes=True)
        if not action:
            return _Route("about", _READS, functools.partial(self._about, reward), name)
        return _Route(action, ("POST",), functools.partial(self._score, reward, action == "score_batch"), name)

    async def _health(self, request: web.BaseRequest) -> web.Response:
        return json_response({"status": "ending" if self._is_ending else "ok"}, 503 if self._is_ending else 200)

    async def _figures(self, request: web.BaseRequest) -> web.Response:
        text = self._metrics.text(self.connections(), self._held.bytes)
        return plain_response(text.encode(), CONTENT_TYPE)

    async def _document(self, request: web.BaseRequest) -> web.Response:
        return plain_response(self._openapi, "application/json")

    @functools.cached_property
    def _openapi(self) -> bytes:
        return openapi_of(self.rewards, self._options)

    async def _list(self, request: web.BaseRequest) -> web.Response:
        return json_response({"rewards": [reward.about.model_dump() for reward in self.rewards.values()]})

    async def _about(self, reward: ServedReward, request: web.BaseRequest) -> web.Response:
        return json_response(reward.about.model_dump())

    async def _score(self, reward: ServedReward, is_batch: bool, request: web.BaseRequest) -> web.Response:
        reward.check_room()
        async with body_of(request, self._options, self._held) as body:
            requests, codec = await requests_in(
                body, self._options, is_batch=is_batch, wants_episodes=reward.wants_episodes
            )
            body.clear()
            with reward.room_for(len(requests)):
                scored = await reward.score(requests)
        answers = [answer_of(one, codec) for one in scored]
        return json_response({"scores": answers} if is_batch else answers[0])
