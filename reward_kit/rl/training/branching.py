"""The choice of steps from which an update continues its episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from reward_kit.episodes.single_agent_episode import SingleAgentEpisode

BranchChoice = Literal["uniform", "first_visits", "uncertainty"]


class BranchPoint(NamedTuple):
    """A step of an episode, identified by the group index, the episode's index in the group, and the step index."""

    group: int
    episode: int
    step: int


@dataclass(frozen=True, slots=True)
class Branching:
    """The number of additional groups per update, and the rule for choosing their steps."""

    groups: int
    where: BranchChoice = "uniform"

    def choose(self, groups: Sequence[Sequence[SingleAgentEpisode]], seed: int) -> list[BranchPoint]:
        """Draw distinct steps from which to continue. The first step of an episode is never drawn.

        With `uniform`, all steps are equally likely. With `first_visits`, only the first visit of each state in a group
        can be drawn. With `uncertainty`, the probability of a step is proportional to the mean negative log-probability
        of its action's tokens. If there are not enough steps, fewer steps are returned.
        """
        points: list[BranchPoint] = []
        weights: list[float] = []
        for g, group in enumerate(groups):
            visited = {_state(episode, 0) for episode in group if len(episode)}
            for e, episode in enumerate(group):
                surprisals = _surprisals(episode) if self.where == "uncertainty" else {}
                for step in range(1, len(episode)):
                    if self.where == "first_visits":
                        if (key := _state(episode, step)) in visited:
                            continue
                        visited.add(key)
                    points.append(BranchPoint(g, e, step))
                    weights.append(surprisals.get(step, 0.0) if self.where == "uncertainty" else 1.0)
        weight_P = np.array(weights)
        count = min(self.groups, int(np.count_nonzero(weight_P)))
        if not count:
            return []
        drawn = np.random.default_rng(seed).choice(len(points), count, replace=False, p=weight_P / weight_P.sum())
        return [points[index] for index in drawn]


def _state(episode: SingleAgentEpisode, step: int) -> Any:
    """Return the recorded key that the default state hash compares."""
    info = episode.get_infos(step)
    return info.get("state_and_results") or info.get("state_key")


def _surprisals(episode: SingleAgentEpisode) -> dict[int, float]:
    """Return the mean negative log-probability of each action's tokens, in nats, keyed by step."""
    return {
        step: float(-np.mean(turn.logprobs))
        for step, turn in episode.tokens.turns().items()
        if turn.logprobs is not None and len(turn.logprobs)
    }
