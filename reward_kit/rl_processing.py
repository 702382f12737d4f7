"""From what reward functions said to what each action was worth: alignment, then an estimator called by name.

`RLDataAligner` puts an `EvaluateResult`'s step outputs onto the steps they name, and is strict: an output that names no
step, or a step that is named twice, raises `AlignmentError`. `CreditAssigner` does this for a batch of episodes and
their scores and calls the estimator. An episode that cannot be aligned is unscored with that failure recorded; the
others go on. Nothing given is ever changed.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from reward_kit.agent.models import StepData, steps_of
from reward_kit.episodes.record import facts_of
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import AlignmentError, ConfigError, Failure, did_you_mean
from reward_kit.models import EvaluateResult, StepOutput, match_to_steps
from reward_kit.reward_agent.scoring import Scored
from reward_kit.rl_helpers import ESTIMATORS, StepCredit, with_credit

StepRewards = Literal["reward_function", "environment"]


class RLDataAligner:
    """Matches the step outputs of reward functions to the steps of rollouts."""

    def align_data_for_rl_processing(
        self, current_eval_result: EvaluateResult, current_step_data_list: Sequence[StepData], rollout_id: str
    ) -> list[StepData]:
        """Copies of the steps with the rewards that the result gives them.

        A `StepOutput` belongs to the step whose `step_info["assistant_turn_index"]` is its `step_index`; 3 and "3" are
        the same. Its `base_reward` becomes the step's, its metrics and reason `step_info["metrics"]` and
        `step_info["reward_reason"]`. A step that no output names stays as it is.

        Args:
            current_eval_result: what a reward function returned.
            current_step_data_list: the steps of the rollout it was called on.
            rollout_id: the rollout, for messages.

        Raises:
            AlignmentError: an output names no step, or two name the same one, or the steps cannot be told apart.
        """
        positions = _positions(current_step_data_list, rollout_id)
        aligned = [step.model_copy(update={"step_info": dict(step.step_info)}) for step in current_step_data_list]
        matched = match_to_steps(current_eval_result.step_outputs, positions, f"rollout {rollout_id}")
        for index, output in matched.items():
            _apply(output, aligned[positions[index]])
        return aligned


def _positions(steps: Sequence[StepData], rollout_id: str) -> dict[str, int]:
    """Where the step of each assistant turn is in the list."""
    positions: dict[str, int] = {}
    for position, step in enumerate(steps):
        turn = step.step_info.get("assistant_turn_index")
        if turn is None:
            raise AlignmentError(f"rollout {rollout_id}: the step at {position} has no assistant_turn_index")
        if str(turn) in positions:
            raise AlignmentError(f"rollout {rollout_id}: two steps have the assistant_turn_index {turn!r}")
        positions[str(turn)] = position
    return positions


def _apply(output: StepOutput, step: StepData) -> None:
    step.base_reward = output.base_reward
    step.step_info["metrics"] = {name: metric.model_dump() for name, metric in output.metrics.items()}
    if output.reason is not None:
        step.step_info["reward_reason"] = output.reason


@dataclass(frozen=True, slots=True)
class CreditBatch:
    """A batch of episodes on its way from scores to advantages; every sequence has one item per episode.

    Attributes:
        rollout_ids: the episodes.
        group_ids: the group of each.
        steps: copies of their steps: aligned and, once `credit` is there, with advantages.
        scores: None where an episode is unscored.
        failures: why an episode is unscored, by rollout id.
        credit: what the estimator returned, flat over all steps.
    """

    rollout_ids: list[str]
    group_ids: list[str]
    steps: list[list[StepData]]
    scores: list[float | None]
    failures: dict[str, Failure]
    credit: StepCredit | None = None

    def summary(self) -> dict[str, float]:
        """The mean `score` of the scored episodes, left out where there is none, and the number of `unscored` ones."""
        scores = [score for score in self.scores if score is not None]
        mean = {"score": sum(scores) / len(scores)} if scores else {}
        return {**mean, "unscored": float(len(self.scores) - len(scores))}

    def rows(self) -> Iterator[dict[str, Any]]:
        """The lines of `credit.jsonl`, one per step; None where the episode is unscored.

        Raises:
            ConfigError: no estimator has been called yet.
        """
        if self.credit is None:
            raise ConfigError("there is no credit yet; call CreditAssigner.advantages first")
        columns = zip(*(values_S.tolist() for values_S in self.credit), strict=True)
        for rollout_id, group_id, steps in zip(self.rollout_ids, self.group_ids, self.steps, strict=True):
            for step in steps:
                episode, peers, combined, discounted = (None if math.isnan(x) else x for x in next(columns))
                yield {
                    "rollout_id": rollout_id,
                    "step": step.system_step_index,
                    "state_key": step.step_info.get("state_key"),
                    "return_to_go": discounted,
                    "A_E": episode,
                    "A_S": peers,
                    "A": combined,
                    "group_id": group_id,
                }


class CreditAssigner:
    """Scored episodes in, advantages out.

    Args:
        estimator: a name of `rl_helpers.ESTIMATORS`.
        step_rewards: where the base rewards of an episode come from whose result has no step outputs.
            "reward_function": from nowhere, they stay unset; "environment": the rewards that the environment gave.
        **options: the estimator's own, by keyword (for "gigpo": omega, gamma, state_hash, …).

    Raises:
        ConfigError: the name or an option is unknown, missing or out of range.
    """

    def __init__(
        self, estimator: str = "gigpo", *, step_rewards: StepRewards = "reward_function", **options: Any
    ) -> None:
        if estimator not in ESTIMATORS:
            raise ConfigError(f"unknown estimator {estimator!r}{did_you_mean(estimator, ESTIMATORS)}")
        if step_rewards not in ("reward_function", "environment"):
            known = did_you_mean(str(step_rewards), ("reward_function", "environment"))
            raise ConfigError(f"unknown step_rewards {step_rewards!r}{known}")
        self.estimator, self.step_rewards, self.options = estimator, step_rewards, options
        self._aligner = RLDataAligner()
        _check_options(estimator, options)

    def assign(self, episodes: Sequence[SingleAgentEpisode], scored: Sequence[Scored]) -> CreditBatch:
        """`align`, then `advantages`."""
        return self.advantages(self.align(episodes, scored))

    def align(self, episodes: Sequence[SingleAgentEpisode], scored: Sequence[Scored]) -> CreditBatch:
        """The episodes' steps with their base rewards.

        An episode is unscored where its reward failed, where the episode itself failed, and where its step outputs
        cannot be aligned.

        Args:
            episodes: what the rollout worker collected.
            scored: their scores in any order, joined by rollout id.

        Raises:
            ConfigError: an episode has no scored counterpart, or two have one id.
        """
        twice = [rollout_id for rollout_id, n in Counter(episode.id_ for episode in episodes).items() if n > 1]
        if twice:
            raise ConfigError(f"{twice[0]} stands in the batch more than once; rollout ids are unique")
        by_id = {result.rollout_id: result for result in scored}
        missing = [episode.id_ for episode in episodes if episode.id_ not in by_id]
        if missing:
            raise ConfigError(f"no scores for {len(missing)} episodes, the first of them {missing[0]}")
        batch = CreditBatch([], [], [], [], {})
        for episode in episodes:
            steps, score, failure = self._align_one(episode, by_id[episode.id_])
            batch.rollout_ids.append(episode.id_)
            batch.group_ids.append(str(facts_of(episode).get("group_id") or episode.id_))
            batch.steps.append(steps)
            batch.scores.append(score)
            if failure is not None:
                batch.failures[episode.id_] = failure
        return batch

    def advantages(self, batch: CreditBatch) -> CreditBatch:
        """The batch with the estimator's credit, on fresh copies of its steps."""
        credit = ESTIMATORS[self.estimator](batch.steps, batch.scores, group_ids=batch.group_ids, **self.options)
        return replace(batch, steps=with_credit(batch.steps, credit), credit=credit)

    def _align_one(
        self, episode: SingleAgentEpisode, scored: Scored
    ) -> tuple[list[StepData], float | None, Failure | None]:
        """The steps of one episode with base rewards, its score, and why it has none."""
        steps, result = steps_of(episode), scored.result
        recorded = facts_of(episode).get("failure")
        failure = Failure.from_json(recorded) if recorded else scored.failure
        if failure is None and result is not None and result.step_outputs:
            try:
                return self._aligner.align_data_for_rl_processing(result, steps, episode.id_), scored.score, None
            except AlignmentError as error:
                return steps, None, Failure.from_exception(error)
        if self.step_rewards == "environment":
            rewards = episode.environment_rewards()
            # Where the environment gave rewards at all, a step that did not call it earned none.
            gave = any(reward is not None for reward in rewards)
            for step, reward in zip(steps, rewards, strict=True):
                step.base_reward = 0.0 if gave and reward is None else reward
        return steps, scored.score if failure is None else None, failure


def _check_options(estimator: str, options: Mapping[str, Any]) -> None:
    function = ESTIMATORS[estimator]
    parameters = inspect.signature(function).parameters
    known = {p.name: p for p in parameters.values() if p.kind is p.KEYWORD_ONLY and p.name != "group_ids"}
    for name in options:
        if name not in known:
            raise ConfigError(f"{estimator} has no option {name!r}{did_you_mean(name, known)}")
    missing = [p.name for p in known.values() if p.default is p.empty and p.name not in options]
    if missing:
        raise ConfigError(f"{estimator} needs the option {missing[0]!r}")
    # An empty batch costs nothing and lets the estimator check the values now, not after the first collection.
    function([], [], group_ids=[], **options)
