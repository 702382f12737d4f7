"""A scorer whose every call waits until the test answers it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from reward_kit.errors import Failure
from reward_kit.models import EvaluateResult, Message
from reward_kit.reward_agent import Scored, ScoringRequest


def requests(*names, **values):
    return [ScoringRequest(str(name), [Message(role="assistant", content=str(name))], **values) for name in names]


def scored(name, score):
    return Scored(name, EvaluateResult(score=score))


def failed(name, failure_class):
    return Scored(name, None, Failure(failure_class, "Test", f"{name} failed"))


@dataclass
class HeldScorer:
    """`calls` are those in flight by request name; `asked` and `cancelled` are in order."""

    mode: str = "pointwise"
    calls: dict[str, asyncio.Future] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    most: int = 0

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.calls.clear()

    async def score(self, request):
        name = request.rollout_id
        self.asked.append(name)
        assert name not in self.calls
        answer = self.calls[name] = asyncio.get_running_loop().create_future()
        self.most = max(self.most, len(self.calls))
        try:
            return await answer
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        finally:
            self.calls.pop(name, None)

    async def score_group(self, requests):
        return [await self.score(request) for request in requests]

    def answer(self, *names, score=1.0):
        for name in map(str, names):
            self.calls[name].set_result(scored(name, score))

    def fail(self, name, failure_class="crash"):
        self.calls[str(name)].set_result(failed(str(name), failure_class))

    def raise_in(self, name, error):
        self.calls[str(name)].set_exception(error)
