"""Of an episode that ran again only its latest attempt counts, and it stands where that one's line does."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class LatestAttempts(Generic[T]):
    """What is known of the latest attempt of each episode, of the lines that were read so far.

    Attributes:
        earlier: how many of the lines that were put do not count, since there is another attempt of their episode.
    """

    def __init__(self) -> None:
        self.earlier = 0
        self._known: dict[str, tuple[int, T]] = {}

    def is_outdated(self, rollout_id: str, attempt: int) -> bool:
        """Whether a later attempt is known, so that a line of this one does not count."""
        return rollout_id in self._known and self._known[rollout_id][0] > attempt

    def put(self, rollout_id: str, attempt: int, value: T) -> None:
        """Take what a line says, unless a later attempt is known; of two lines of one attempt the second counts."""
        if self.is_outdated(rollout_id, attempt):
            self.earlier += 1
            return
        self.earlier += self._known.pop(rollout_id, None) is not None
        self._known[rollout_id] = attempt, value

    def attempt(self, rollout_id: str) -> int | None:
        """Which attempt of an episode is the latest; None where no line of it was put."""
        return self._known[rollout_id][0] if rollout_id in self._known else None

    def items(self) -> dict[str, T]:
        """What is known of each episode by its `rollout_id`, in the order of the lines that count."""
        return {rollout_id: value for rollout_id, (_, value) in self._known.items()}

    def values(self) -> list[T]:
        """What is known of each episode, in the order of the lines that count."""
        return [value for _, value in self._known.values()]
