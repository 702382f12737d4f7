"""What the driver and its rollout actors say to each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reward_kit.agent.limits import RunBudget, Used
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample
from reward_kit.providers.session import ProviderSession
from reward_kit.task_parts import RunLimitsModel

Build = Callable[[ProviderSession, RunBudget], Mapping[str, RLRolloutWorker]]
"""Makes the workers of one process, by label. It is pickled and called there; what it needs on the way it holds.

Args: the traffic that all requests of the process share, and the account that its workers spend from.
Raises ConfigError where something is not there that it needs.
"""


class Spent(NamedTuple):
    """What episodes used: tokens, US dollars, steps. It only grows."""

    tokens: int = 0
    cost: float = 0.0
    steps: int = 0

    def plus(self, other: Spent) -> Spent:
        """The two together."""
        return Spent(self.tokens + other.tokens, self.cost + other.cost, self.steps + other.steps)

    def since(self, before: Spent) -> Spent:
        """What came to it."""
        return Spent(self.tokens - before.tokens, self.cost - before.cost, self.steps - before.steps)


class Rest(NamedTuple):
    """What a process does not know of a run: what all others have spent, and how long the run has lasted."""

    spent: Spent
    seconds: float


class SharedBudget(RunBudget):
    """The account of a run as one process sees it: its own spending at once, that of the others as it is told.

    Attributes:
        own: what the episodes of this process used, those in flight included.
    """

    def __init__(self, limits: RunLimitsModel | None = None) -> None:
        super().__init__(limits)
        self.own = self._others = Spent()

    def spend(self, used: Used, steps: int = 0) -> None:
        """As `RunBudget`."""
        super().spend(used, steps)
        self.own = self.own.plus(Spent(used.tokens, used.cost or 0.0, steps))

    def hear(self, rest: Rest) -> None:
        """Take over what all others have spent by now, and how late it is."""
        news, self._others = rest.spent.since(self._others), rest.spent
        super().spend(Used(news.tokens, news.cost), news.steps)
        self._began = time.monotonic() - rest.seconds


@dataclass(frozen=True, slots=True)
class Setup:
    """What a process is told before its first episode. It goes straight to the process, and into no file.

    Attributes:
        build: makes its workers.
        limits: of the run.
        max_concurrency: episodes that may be in flight there.
        env: environment variables, secrets among them.
    """

    build: Build
    limits: RunLimitsModel = field(default_factory=RunLimitsModel)
    max_concurrency: int = 16
    env: Mapping[str, str] = field(default_factory=dict, repr=False)


class Assignment(NamedTuple):
    """One episode to collect.

    Attributes:
        label: of the worker that collects it.
        sample: what it is about.
        run_seed: of the run.
        group_id: of its group.
        rollout_index: its place there.
        keeps_start: its group begins from one start, which is kept until `close_group`.
    """

    label: str
    sample: Sample
    run_seed: int
    group_id: str
    rollout_index: int
    keeps_start: bool


class Reply(NamedTuple):
    """One episode, and what has happened in its process since the last one.

    Attributes:
        record: of the episode, as a line of `episodes.jsonl` has it, its final state included.
        spent: by the process, so far.
        logs: level, logger and text of what was logged.
        notices: lines for the user about an endpoint.
        gave_up: why further requests are in vain, where they are.
    """

    record: dict[str, Any]
    spent: Spent
    logs: list[tuple[int, str, str]]
    notices: list[str]
    gave_up: str | None
