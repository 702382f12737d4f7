"""Conversion of reward results to step advantages: results are aligned with steps and passed to an estimator.

`RLDataAligner` adds the step outputs of an `EvaluateResult` to the steps that they refer to. `CreditAssigner` does this
for a batch of scored episodes, and then calls the estimator. An episode that cannot be aligned is unscored, and its
failure is recorded. Other episodes are not affected. Arguments are never modified.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

import numpy as np

from reward_kit.agent.models import StepData, episode_steps
from reward_kit.credit.estimators import get_estimator, resolve_options
from reward_kit.credit.own_estimators import OwnEstimator
from reward_kit.credit.state_hashes import readable_keys
from reward_kit.credit.step_arrays import factorize
from reward_kit.credit.step_credit import StepCredit, known_value, with_credit
from reward_kit.episodes.record import get_facts
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import AlignmentError, ConfigError, Failure, InvalidResultError, did_you_mean
from reward_kit.loading import calling, reject_coroutine
from reward_kit.models import EvaluateResult, match_to_steps
from reward_kit.reward_agent.scoring import Scored
from reward_kit.task_parts import StepRewards


class RLDataAligner:
    """Aligns the step outputs of reward functions with rollout steps."""

    def align_data_for_rl_processing(
        self, current_eval_result: EvaluateResult, current_step_data_list: Sequence[StepData], rollout_id: str
    ) -> list[StepData]:
        """Return copies of the steps, with the rewards from the result.

        A `StepOutput` belongs to the step whose `step_info["assistant_turn_index"]` equals the output's `step_index`.
        The index can be a number or a string, such as 3 or "3". The output's `base_reward` becomes the base reward of
        the step, and its metrics and reason are stored in `step_info["metrics"]` and `step_info["reward_reason"]`. A
        step without an output is unchanged.

        Args:
            current_eval_result: the result of a reward function.
            current_step_data_list: the steps of the scored rollout.
            rollout_id: the id of the rollout, for messages.

        Raises:
            AlignmentError: If an output refers to an unknown step, two outputs refer to the same step, or two steps
                have the same index.
        """
        positions: dict[str, int] = {}
        for position, step in enumerate(current_step_data_list):
            turn = step.step_info.get("assistant_turn_index")
            if turn is None:
                raise AlignmentError(f"rollout {rollout_id}: the step at {position} has no assistant_turn_index")
            if str(turn) in positions:
                raise AlignmentError(f"rollout {rollout_id}: two steps have the same assistant_turn_index, {turn!r}")
            positions[str(turn)] = position
        aligned = _copies(current_step_data_list)
        matched = match_to_steps(current_eval_result.step_outputs, positions, f"rollout {rollout_id}")
        for index, output in matched.items():
            step = aligned[positions[index]]
            step.base_reward = output.base_reward
            step.step_info["metrics"] = output.model_dump()["metrics"]
            if output.reason is not None:
                step.step_info["reward_reason"] = output.reason
        return aligned

    def align_batch_for_rl_processing(
        self,
        current_eval_results: Sequence[EvaluateResult | None],
        current_step_data_lists: Sequence[Sequence[StepData]],
        rollout_ids: Sequence[str],
    ) -> list[list[StepData]]:
        """Call `align_data_for_rl_processing` for each rollout in a batch. A single error rejects the whole batch.

        Args:
            current_eval_results: the result for each rollout, or None for an unscored rollout. The steps of an unscored
                rollout are unchanged.
            current_step_data_lists: the steps of each rollout.
            rollout_ids: the id of each rollout.

        Raises:
            AlignmentError: If the lengths differ, an id is repeated, or a result cannot be aligned. The message has one
                line per problem.
        """
        lengths = [len(current_eval_results), len(current_step_data_lists), len(rollout_ids)]
        if len(set(lengths)) > 1:
            raise AlignmentError(
                "the batch has {} results, {} lists of steps and {} rollout ids; the numbers must be equal".format(
                    *lengths
                )
            )
        if duplicate := _first_duplicate(rollout_ids):
            raise AlignmentError(f"rollout {duplicate} is in the batch more than once; rollout ids must be unique")
        batch, problems = [], []
        for result, steps, rollout_id in zip(current_eval_results, current_step_data_lists, rollout_ids, strict=True):
            try:
                if result is None:
                    batch.append(_copies(steps))
                else:
                    batch.append(self.align_data_for_rl_processing(result, steps, rollout_id))
            except AlignmentError as error:
                problems.append(str(error))
        if problems:
            more = [f"… and {len(problems) - 10} more"] if len(problems) > 10 else []
            raise AlignmentError("\n".join([*problems[:10], *more]))
        return batch


def _copies(steps: Sequence[StepData]) -> list[StepData]:
    return [step.model_copy(update={"step_info": dict(step.step_info)}) for step in steps]


def _first_duplicate(names: Iterable[str]) -> str | None:
    return next((name for name, n in Counter(names).items() if n > 1), None)


class AlignedEpisode(NamedTuple):
    """An aligned episode: its steps, including base rewards, and its score or failure."""

    rollout_id: str
    group_id: str
    steps: list[StepData]
    score: float | None
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class CreditBatch:
    """A batch of aligned episodes, to which credit is added later. Each sequence has one item per episode.

    Attributes:
        rollout_ids: the ids of the episodes.
        group_ids: the episodes' group ids.
        steps: aligned copies of the episodes' steps. The steps have advantages once `credit` is set.
        scores: the scores; None for an unscored episode.
        failures: the failures of unscored episodes, keyed by rollout id.
        credit: the estimator's result, as flat arrays over all steps.
        state_hash: the estimator's `state_hash` option; None for the default hash and for estimators without states.
    """

    rollout_ids: list[str]
    group_ids: list[str]
    steps: list[list[StepData]]
    scores: list[float | None]
    failures: dict[str, Failure]
    credit: StepCredit | None = None
    state_hash: Any = None

    @classmethod
    def from_episodes(cls, episodes: Iterable[AlignedEpisode]) -> CreditBatch:
        """Return a batch of aligned episodes. Raise a `ConfigError` if an id is repeated."""
        batch = cls([], [], [], [], {})
        for episode in episodes:
            batch.rollout_ids.append(episode.rollout_id)
            batch.group_ids.append(episode.group_id)
            batch.steps.append(episode.steps)
            batch.scores.append(episode.score)
            if episode.failure is not None:
                batch.failures[episode.rollout_id] = episode.failure
        if duplicate := _first_duplicate(batch.rollout_ids):
            raise ConfigError(f"rollout {duplicate} is in the batch more than once; rollout ids must be unique")
        return batch

    def summary(self) -> dict[str, float]:
        """Return the number of `unscored` episodes and, if any episode is scored, the mean `score`."""
        scores = [score for score in self.scores if score is not None]
        mean = {"score": sum(scores) / len(scores)} if scores else {}
        return {**mean, "unscored": float(len(self.scores) - len(scores))}

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of `credit.jsonl`, one per step. An unscored episode has None instead of numbers.

        `anchor` is the number of the step's anchor, counted in order of first appearance. Steps have the same anchor if
        they have the same group and state. `peers` is the number of other scored steps that have the same anchor. Both
        are `None` for an estimator without states.

        Raises:
            ConfigError: If the batch has no credit yet.
        """
        if (credit := self.credit) is None:
            raise ConfigError("the batch has no credit yet; call CreditAssigner.advantages first")
        keys = readable_keys(self.steps, self.state_hash)
        anchors: list[int | None] = [None] * len(credit.anchors_S)
        peers = anchors
        if not (credit.anchors_S < 0).any():
            anchors_S, is_scored_S = factorize(credit.anchors_S.tolist()), ~np.isnan(credit.advantages_S)
            sizes_S = np.bincount(anchors_S, is_scored_S)[anchors_S].astype(np.int64) if len(anchors_S) else anchors_S
            anchors = anchors_S.tolist()
            pairs = zip(sizes_S.tolist(), is_scored_S.tolist(), strict=True)
            peers = [size - 1 if is_scored else None for size, is_scored in pairs]
        numbers = [
            [value if value == value else None for value in values_S.tolist()]  # None for NaN
            for values_S in (
                credit.episode_advantages_S,
                credit.step_advantages_S,
                credit.advantages_S,
                credit.returns_S,
            )
        ]
        columns = zip(keys, anchors, peers, *numbers, strict=True)
        for rollout_id, group_id, steps in zip(self.rollout_ids, self.group_ids, self.steps, strict=True):
            for step in steps:
                state_key, anchor, peer_count, episode_advantage, step_advantage, advantage, discounted = next(columns)
                row = {
                    "rollout_id": rollout_id,
                    "group_id": group_id,
                    "step": step.system_step_index,
                    "state_key": state_key,
                    "anchor": anchor,
                    "peers": peer_count,
                    "base_reward": step.base_reward,
                    "return_to_go": discounted,
                    "A_E": episode_advantage,
                    "A_S": step_advantage,
                    "A": advantage,
                }
                value = known_value(step.policy_value_estimate)
                yield row if value is None else {**row, "value": value}


class CreditAssigner:
    """Computes the advantages of scored episodes.

    Args:
        estimator: a key of `rl_helpers.ESTIMATORS`, a custom function, or a reference to one of the form
            "file.py:function". A custom function is called with a `StepArrays` and its keyword-only options, and
            returns one advantage per step. Its values for unscored episodes are ignored.
        step_rewards: the source of base rewards for an episode whose result has no step outputs. "reward_function"
            leaves the base rewards unset; "environment" uses the environment's rewards.
        **options: the estimator's options, such as omega, gamma and state_hash for "gigpo". Required options default to
            their values in `USUAL_OPTIONS`.

    Attributes:
        estimator: the name of the estimator, or the reference to the custom function.
        options: all options of the estimator, including defaults.
        annotate_step: a function that is called with each aligned step and its episode. The returned mapping becomes
            `step_info["annotations"]`, which estimators can read. The default is None.

    Raises:
        ConfigError: If the estimator is unknown, or an option is unknown, missing, of the wrong type or out of range.
    """

    def __init__(
        self,
        estimator: str | Callable[..., Any] = "gigpo",
        *,
        step_rewards: StepRewards = "reward_function",
        **options: Any,
    ) -> None:
        self._estimate = get_estimator(estimator)
        if step_rewards not in get_args(StepRewards):
            known = did_you_mean(str(step_rewards), get_args(StepRewards))
            raise ConfigError(f"unknown step_rewards {step_rewards!r}{known}")
        own = self._estimate if isinstance(self._estimate, OwnEstimator) else None
        self.estimator = estimator if isinstance(estimator, str) else getattr(own, "name", "")
        self.step_rewards = step_rewards
        self.options: Mapping[str, Any] = resolve_options(own.name if own else self.estimator, options, own)
        self.annotate_step: Callable[[StepData, SingleAgentEpisode], Mapping[str, Any]] | None = None
        self._aligner = RLDataAligner()
        # Calling the estimator with an empty batch checks its options now, before episodes are collected.
        self._estimate([], [], group_ids=[], **self.options)

    def assign(self, episodes: Sequence[SingleAgentEpisode], scored: Sequence[Scored]) -> CreditBatch:
        """Call `align`, then `advantages`."""
        return self.advantages(self.align(episodes, scored))

    def align(self, episodes: Sequence[SingleAgentEpisode], scored: Sequence[Scored]) -> CreditBatch:
        """Return a batch that contains the episodes' steps, including base rewards.

        An episode is unscored if its reward or the episode itself failed, if its step outputs cannot be aligned, or if
        `step_rewards` is "environment" and an environment reward is not finite.

        Args:
            episodes: the episodes from the rollout worker.
            scored: the scored episodes in any order. They are matched by rollout id.

        Raises:
            ConfigError: If an episode has no score, or two episodes have the same id.
        """
        by_id = {result.rollout_id: result for result in scored}
        missing = [episode.id_ for episode in episodes if episode.id_ not in by_id]
        if missing:
            raise ConfigError(f"{len(missing)} of the episodes have no score, for example {missing[0]}")
        return CreditBatch.from_episodes(self.align_one(episode, by_id[episode.id_]) for episode in episodes)

    def advantages(self, batch: CreditBatch) -> CreditBatch:
        """Return a copy of the batch that contains the estimator's credit and updated copies of the steps.

        Raises:
            ConfigError: If the episodes lack an input that the estimator requires, such as values.
            InvalidResultError: If a reward or a score is not finite.
        """
        try:
            credit = self._estimate(batch.steps, batch.scores, group_ids=batch.group_ids, **self.options)
        except (ConfigError, InvalidResultError) as error:
            # Estimators identify trajectories by index, while users identify them by id.
            message = re.sub(
                r"\btrajectory (\d+)", lambda match: f"rollout {batch.rollout_ids[int(match[1])]}", str(error)
            )
            raise type(error)(message) from error
        steps = with_credit(batch.steps, credit)
        return replace(batch, steps=steps, credit=credit, state_hash=self.options.get("state_hash"))

    def align_one(self, episode: SingleAgentEpisode, scored: Scored) -> AlignedEpisode:
        """Align a single episode; see `align`. Use this method for batches that do not fit into memory."""
        steps, result, score = episode_steps(episode), scored.result, scored.score
        recorded = get_facts(episode).get("failure")
        failure = Failure.from_json(recorded) if recorded else scored.failure
        try:
            if failure is None and result is not None and result.step_outputs:
                steps = self._aligner.align_data_for_rl_processing(result, steps, episode.id_)
            elif self.step_rewards == "environment":
                _take_environment_rewards(steps, episode)
        except (AlignmentError, InvalidResultError) as error:
            failure = failure or Failure.from_exception(error)
        for step in steps if self.annotate_step is not None else ():
            step.step_info["annotations"] = self._annotations(step, episode)
        group_id = str(get_facts(episode).get("group_id") or episode.id_)
        return AlignedEpisode(episode.id_, group_id, steps, score if failure is None else None, failure)

    def _annotations(self, step: StepData, episode: SingleAgentEpisode) -> dict[str, Any]:
        hook: Any = self.annotate_step
        what = f"hook annotate_step {getattr(hook, '__name__', '')!r}, rollout {episode.id_}"
        with calling(f"{what}, step {step.system_step_index}"):
            returned = hook(step, episode)
        reject_coroutine(returned, what)
        if not isinstance(returned, Mapping):
            raise ConfigError(f"{what} must return a mapping, got {returned!r:.80}")
        return dict(returned)


def _take_environment_rewards(steps: Sequence[StepData], episode: SingleAgentEpisode) -> None:
    """Use the environment's rewards as base rewards.

    If the environment returned any rewards, a step without a reward counts as 0.
    """
    rewards = episode.environment_rewards()
    for t, reward in enumerate(rewards):
        if reward is not None and not math.isfinite(reward):
            raise InvalidResultError(f"rollout {episode.id_}: the environment's reward at step {t} is {reward}")
    has_rewards = any(reward is not None for reward in rewards)
    for step, reward in zip(steps, rewards, strict=True):
        step.base_reward = 0.0 if has_rewards and reward is None else reward
