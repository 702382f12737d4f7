"""What a run consists of, who watches it, and how it is stopped from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import anyio

from reward_kit.agent.limits import Exhausted
from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.agent.samples import Sample
from reward_kit.agent.simulated_user import SimulatedUser
from reward_kit.environments.tools import ToolRegistry
from reward_kit.models import TaskDefinitionModel
from reward_kit.reward_agent.scoring import Reward
from reward_kit.runs.summary import EpisodeRow


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy and the label under which its results stand. One that is lent to the run is not closed with it."""

    label: str
    policy: AgentPolicy
    is_lent: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run consists of: episodes to collect, and a reward that scores them.

    Attributes:
        definition: the task's; its limits bound the run.
        policies: each runs every sample.
        samples: the selected ones.
        rollouts: episodes of each sample and policy.
        seed: everything random derives from it.
        max_concurrency: episodes in flight, and scores.
        reward: scores every episode; None where they are only collected.
        tools: the task's own tools, None where it has none.
        user: who answers the agents' texts; None where nobody does.
        given: how many further episodes are there already and are only to be scored.
    """

    definition: TaskDefinitionModel
    policies: Sequence[NamedPolicy] = ()
    samples: Sequence[Sample] = ()
    rollouts: int = 1
    seed: int = 0
    max_concurrency: int = 16
    reward: Reward | None = None
    tools: ToolRegistry | None = None
    user: SimulatedUser | None = None
    given: int = 0

    @property
    def total(self) -> int:
        """The number of episodes."""
        return self.given + len(self.policies) * len(self.samples) * self.rollouts


class Listener(Protocol):
    """Who watches a run. Called in the run's own event loop."""

    def episode_stopped(self, row: EpisodeRow) -> None: ...

    def episode_scored(self, row: EpisodeRow) -> None: ...


@dataclass(slots=True)
class Control:
    """How a run is stopped from outside, and why it stopped.

    Attributes:
        stop_reason: set once no further episode begins; what is in flight is finished.
        reached: the run's limit that stopped it, where one did.
        is_failure: the run cannot go on by itself, such as where an endpoint stays away.
        scope: cancel it to stop at once; what is in flight is lost and runs again on resume.
    """

    stop_reason: str | None = None
    reached: Exhausted | None = None
    is_failure: bool = False
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def finish(self, reason: str) -> None:
        """Begin no further episode."""
        self.stop_reason = self.stop_reason or reason

    def reach(self, limit: Exhausted) -> None:
        """Begin no further episode, because a limit of the run is reached; told again, it says how far by now."""
        if self.stop_reason is None or self.reached is not None:
            self.reached = limit
            self.stop_reason = f"the run's limit is reached, {limit.text} (run_limits.{limit.key})"

    def give_up(self, reason: str) -> None:
        """Stop at once, because nothing that is in flight can succeed."""
        self.stop_reason, self.is_failure = reason, True
        self.scope.cancel()
