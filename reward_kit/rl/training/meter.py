"""What is measured while training goes on: seconds of each stage, scores, episodes and credit of one update."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import Failure
from reward_kit.rl.training.figures import (
    Figures,
    credit_figures,
    episode_figures,
    merged_credit,
    prefixed,
    sampled_tokens,
    score_figures,
)
from reward_kit.rl_processing import CreditBatch

WAIT = "wait_for_scores"
SCORING = "scoring"
"""Stages of the clock: nothing could be learned for want of scores; and from the first call of a batch to its last."""


@dataclass(slots=True)
class Meter:
    """Collects the figures of one update after the other.

    Attributes:
        pass_threshold: a score of at least this passes.
        totals: `episodes`, `env_steps` and `sampled_tokens` since training began.
    """

    pass_threshold: float = 1.0
    totals: Counter[str] = field(default_factory=Counter)
    _seconds: Counter[str] = field(default_factory=Counter)
    _episodes: list[SingleAgentEpisode] = field(default_factory=list)
    _scores: list[float | None] = field(default_factory=list)
    _failures: list[Failure] = field(default_factory=list)
    _credit: list[Figures] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Count the seconds of the block; of one that several do at once, each of them counts."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add_seconds(stage, time.perf_counter() - began)

    def add_seconds(self, stage: str, seconds: float) -> None:
        """Count seconds."""
        self._seconds[stage] += seconds  # type: ignore[assignment]

    def count(self, name: str, number: int = 1) -> None:
        """Count what happened, under a name of its own."""
        self._counts[name] += number

    @property
    def episodes(self) -> Sequence[SingleAgentEpisode]:
        """Those that were scored since the last `take`."""
        return self._episodes

    def add_collected(self, episodes: Sequence[SingleAgentEpisode]) -> None:
        """Episodes are over."""
        self.totals["episodes"] += len(episodes)
        self.totals["env_steps"] += sum(map(len, episodes))
        self.totals["sampled_tokens"] += sum(map(sampled_tokens, episodes))

    def add_scored(self, episodes: Sequence[SingleAgentEpisode], aligned: CreditBatch) -> None:
        """Episodes of this update's batch have their scores; those of groups that are dropped too."""
        self._episodes += episodes
        self._scores += aligned.scores
        self._failures += aligned.failures.values()

    def add_credit(self, credited: CreditBatch) -> None:
        """Episodes have their advantages and are trained on."""
        self._credit.append(credit_figures(credited))

    def take(self) -> Figures:
        """The figures since the last call."""
        figures = prefixed("score", score_figures(self._scores, self._failures, self.pass_threshold))
        figures |= prefixed("episode", episode_figures(self._episodes))
        figures |= merged_credit(self._credit) if self._credit else {}
        figures |= {name: float(count) for name, count in self._counts.items()}
        seconds: Mapping[str, float] = self._seconds
        figures |= {f"time/{stage}_s": value for stage, value in seconds.items()}
        if seconds.get(SCORING):
            figures["overlap/hidden_share"] = max(0.0, 1.0 - seconds.get(WAIT, 0.0) / seconds[SCORING])
        fresh = Meter(self.pass_threshold, self.totals)
        self._seconds, self._episodes, self._scores = fresh._seconds, fresh._episodes, fresh._scores
        self._failures, self._credit, self._counts = fresh._failures, fresh._credit, fresh._counts
        return figures
