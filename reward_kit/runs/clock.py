"""`RunClock`: what the clock says of a score, in seconds since its run began."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

from reward_kit.reward_agent.tickets import Ticket


class RunClock:
    """Counts from the beginning of a run, also where another process began it. Make it inside the event loop.

    Within a process it is monotonic, however the machine's clock is set meanwhile.

    Args:
        started_at: when the run began.
    """

    def __init__(self, started_at: datetime.datetime) -> None:
        self._loop = asyncio.get_running_loop()
        elapsed = datetime.datetime.now(datetime.UTC) - started_at
        self._zero_s = self._loop.time() - elapsed.total_seconds()

    def times_of(self, ticket: Ticket, index: int) -> dict[str, Any]:
        """When a result was asked for, when each call for it began and ended, and when it was there, which is now."""
        return {
            "submitted_s": self._since(ticket.submitted_at),
            "attempts": [[self._since(began), self._since(ended)] for began, ended in ticket.spans[index]],
            "done_s": self._since(self._loop.time()),
        }

    def _since(self, loop_s: float) -> float:
        return round(loop_s - self._zero_s, 6)
