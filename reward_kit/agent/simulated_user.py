"""The other side of a dialogue: a policy, model or script, that answers the agent between its turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from reward_kit.agent.starts import EpisodeStart
from reward_kit.models import Message


@dataclass(frozen=True, slots=True)
class UserTurn:
    """One message of the user.

    Attributes:
        text: what the agent reads, without the stop signal.
        is_over: the user ends the conversation with it.
        facts: JSON-safe facts for the record: the raw output, `usage`, token ids where known.
    """

    text: str
    is_over: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


class UserSession(Protocol):
    """The user of one episode.

    Attributes:
        opens: the user speaks first.
    """

    opens: bool

    async def reply(self, messages: Sequence[Message]) -> UserTurn:
        """The user's next message in the conversation so far, as the agent sees it."""

    async def close(self) -> None:
        """Release what the session holds."""


class SimulatedUser(Protocol):
    """Who plays the user in all episodes of a run."""

    async def open(self, start: EpisodeStart) -> UserSession:
        """The user of one episode."""
