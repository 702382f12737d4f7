"""A reward agent that stays open between calls, for trainers that score in loops and tasks of their own.

They have no hook at the end, and opening a confined reward for each rollout would cost a third of a second each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.scoring import Scored, ScoringRequest


@dataclass(slots=True, eq=False)
class _Held:
    """The agent of one loop, and the task that opens and closes it: calls come from tasks that end."""

    ready: asyncio.Future[AsyncRewardAgent]
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class KeptOpenAgent:
    """Scores in whatever loop asks. Each has an agent of its own, opened by its first call and closed when it ends.

    Args:
        make: an agent that is not open yet, for one loop.
    """

    def __init__(self, make: Callable[[], AsyncRewardAgent]) -> None:
        self._make = make
        # Loops run in several threads, and each touches its own entry alone.
        self._held: dict[asyncio.AbstractEventLoop, _Held] = {}

    async def score(self, request: ScoringRequest) -> Scored:
        """The score of one rollout, or why there is none; where the caller is cancelled, so is the call."""
        agent = await asyncio.shield(self._opened())
        return (await agent.score_all([request]))[0]

    async def close(self) -> None:
        """End what is open in the running loop; another call opens it anew. Who forgets it leaves that to the loop."""
        held = self._held.pop(asyncio.get_running_loop(), None)
        if held is not None and held.task is not None:
            held.leave.set()
            await held.task

    def _opened(self) -> asyncio.Future[AsyncRewardAgent]:
        loop = asyncio.get_running_loop()
        held = self._held.get(loop)
        if held is None:
            for ended in [each for each in list(self._held) if each.is_closed()]:  # without ending its tasks
                self._held.pop(ended, None)
            held = self._held[loop] = _Held(loop.create_future())
            held.task = loop.create_task(self._hold(loop, held))
        return held.ready

    async def _hold(self, loop: asyncio.AbstractEventLoop, held: _Held) -> None:
        """Hold it open until it is to end, or the loop cancels what is left."""
        try:
            async with self._make() as agent:
                held.ready.set_result(agent)
                await held.leave.wait()
        except Exception as error:
            if held.ready.done():
                raise
            held.ready.set_exception(error)  # raised where it was to be opened; the next call tries again
        finally:
            held.ready.cancel()  # does nothing to one that is done
            if self._held.get(loop) is held:
                del self._held[loop]
