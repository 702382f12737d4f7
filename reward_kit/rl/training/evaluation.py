"""How well the policy does on samples that it is not trained on: the same samples and the same draws each time."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reward_kit.agent.samples import Sample, derive_seed
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.scoring import Scored, ScoringRequest
from reward_kit.rl.reward_manager import RewardManager
from reward_kit.rl.training.collecting import Collector, TrainingWorker
from reward_kit.rl.training.figures import Figures, episode_figures, prefixed, score_figures
from reward_kit.runs.statistics import mean_interval
from reward_kit.tokens import build_rows


@dataclass(slots=True)
class Evaluation:
    """Evaluates the weights that act.

    Attributes:
        worker: collects; its policy acts as it is to be evaluated.
        reward_agent: scores; open.
        samples: what the policy is evaluated on.
        rollouts: episodes of each.
        run_seed: the draws derive from it, the same ones in every evaluation.
        collector: collects groups of `rollouts`.
        examples: shows some of the episodes; None shows none.
        pad_token_id: of the policy, for the examples.
    """

    worker: TrainingWorker
    reward_agent: AsyncRewardAgent
    samples: Sequence[Sample]
    rollouts: int
    run_seed: int
    collector: Collector
    examples: RewardManager | None = None
    pad_token_id: int = 0

    async def measure(self) -> Figures:
        """The figures, each under `held_out/`."""
        seed = derive_seed("evaluate", self.run_seed)
        groups = await self.collector.collect(self.worker, [(sample, seed) for sample in self.samples])
        episodes = [episode for group in groups for episode in group]
        task = self.worker.task_definition
        requests = [ScoringRequest.of(episode, task) for episode in episodes]
        scored = await self.reward_agent.score_all(requests, self.rollouts)
        if self.examples is not None:
            self._show(self.examples, episodes, scored)
        return prefixed("held_out", self._figures(episodes, scored))

    def _figures(self, episodes: Sequence[SingleAgentEpisode], scored: Sequence[Scored]) -> Figures:
        scores = [one.score for one in scored]
        failures = [one.failure for one in scored if one.failure is not None]
        figures = score_figures(scores, failures, self.worker.task_definition.pass_threshold)
        if "mean" in figures:
            figures["score"] = figures.pop("mean")
            of_sample = [sample.id for sample in self.samples for _ in range(self.rollouts)]
            error = mean_interval(scores, of_sample).standard_error
            figures |= {"standard_error": error} if error is not None else {}
        kept = ("count", "steps_mean", "tokens_mean", "return_mean", "invalid_action_share")
        return figures | {name: value for name, value in episode_figures(episodes).items() if name in kept}

    def _show(self, manager: RewardManager, episodes: Sequence[SingleAgentEpisode], scored: Sequence[Scored]) -> None:
        rows = build_rows(episodes, scores=[one.score for one in scored], pad_token_id=self.pad_token_id)
        if len(rows):
            manager(rows)


def acting_as(policy: Any, temperature: float | None) -> Any:
    """The policy as it is evaluated: its own weights, at another temperature where one is given.

    Args:
        policy: that is trained.
        temperature: None leaves it.

    Raises:
        ConfigError: the policy knows no temperature.
    """
    if temperature is None:
        return policy
    sampling = getattr(policy, "sampling", None)
    if sampling is None or not hasattr(sampling, "temperature"):
        raise ConfigError(f"evaluation.temperature: {type(policy).__name__} says nothing of how it samples")
    # A second door to the same engine: what it opens is closed by sessions, and the policy itself by whoever made it.
    acting = copy.copy(policy)
    acting.sampling = sampling._replace(temperature=temperature)
    return acting
