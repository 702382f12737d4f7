"""Episodes that were scored before: each score on the last token that its episode sampled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Literal, get_args

import numpy as np

from reward_kit.credit.options import check_choice
from reward_kit.errors import ConfigError, Failure, InvalidResultError, RewardError, RewardKitError, boundary
from reward_kit.rl.reward_manager.base import RewardManager, Scores
from reward_kit.rl.reward_manager.batches import Bools, Floats, RewardBatch, finite_number
from reward_kit.rl.reward_manager.reports import Column, Echo, Tokenizer, columns_of
from reward_kit.rl.reward_manager.statistics import RunningStatistics
from reward_kit.rl.reward_manager.step_rewards import placed_step_rewards

NormalizationType = Literal["none", "length", "variance"]
VisualRule = Literal["multiply", "add"]
VisualScorer = Callable[[Mapping[str, Any]], float | None]


class EpisodeRewardManager(RewardManager):
    """Rewards from episodes that were scored before: `non_tensor_batch["episode_rewards"]`, one score per row.

    An episode's score stands on the last valid token of the row that ends it (`RewardBatch.ends_B`), once, however many
    rows it has. An episode whose score is None or NaN is unscored: its rows get no reward, and `is_scored` is false.

    The visual scorer's number comes first, then normalization, and step rewards are added as they are.

    Args:
        tokenizer: decodes what is shown.
        num_examine: how many rows of each data source are shown of a batch, at most; each with probability 0.1.
        normalize_by_length: the same as normalization_type="length".
        normalization_type: "none"; "length": divided by `episode_lengths`; "variance": (score - mean) / (std + 1e-8),
            running over all episodes placed so far, those of this batch included. Save `state_dict()` with checkpoints.
        step_rewards: also place the `step_rewards` of the batch, each on its action's last token: a (B,T) array, as
            our rows have it, or in `non_tensor_batch` for each row a list with one reward per action.
        visual_scorer: takes the `multi_modal_inputs` of the row that ends an episode (`pixel_values`,
            `image_grid_thw`); not called where there are none. None or NaN, or an error, leaves the episode unscored.
        visual_rule: its number multiplies the score, or is added to it.
        seed: of the generator that chooses what is shown.
        echo: takes each line that is shown; by default the logger "reward_kit.rl", at the level INFO.

    Raises:
        ConfigError: an option is unknown, or two contradict each other.
    """

    skips_special_tokens = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_examine: int,
        normalize_by_length: bool = False,
        *,
        normalization_type: NormalizationType | None = None,
        step_rewards: bool = False,
        visual_scorer: VisualScorer | None = None,
        visual_rule: VisualRule = "multiply",
        seed: int = 0,
        echo: Echo | None = None,
    ) -> None:
        super().__init__(tokenizer, num_examine, seed=seed, echo=echo)
        check_choice("visual_rule", visual_rule, get_args(VisualRule))
        for name, flag in (("normalize_by_length", normalize_by_length), ("step_rewards", step_rewards)):
            if not isinstance(flag, bool):
                raise ConfigError(f"{name} is True or False; got {flag!r}")
        if visual_scorer is not None and (not callable(visual_scorer) or inspect.iscoroutinefunction(visual_scorer)):
            raise ConfigError(f"visual_scorer is a plain function of one row's inputs; got {visual_scorer!r:.80}")
        self.normalization_type = _normalization(normalize_by_length, normalization_type)
        self._step_rewards, self._visual_scorer, self._visual_rule = step_rewards, visual_scorer, visual_rule

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to hold: plain JSON."""
        return {"normalization_type": self.normalization_type, **asdict(self.statistics)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint.

        Raises:
            ConfigError: it is of another normalization, or no such state.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(f"a state is what state_dict() gave; got {state!r:.80}")
        if (kind := state.get("normalization_type")) != self.normalization_type:
            raise ConfigError(
                f"the state is of normalization_type {kind!r}, the manager of {self.normalization_type!r}"
            )
        self.statistics = RunningStatistics.from_json(state)

    def _score(self, batch: RewardBatch) -> Scores:
        scores = _scores_of_episodes(batch)
        is_scored = ~np.isnan(scores)
        is_borne = batch.ends_B & ~batch.is_empty_B & is_scored
        told: dict[str, Column] = {}
        if self._visual_scorer is not None:
            failures = [{"failure_class": "", "failure": ""} for _ in scores]
            self._look(batch, self._visual_scorer, scores, np.flatnonzero(is_borne), failures)
            lost = batch.episodes_B[is_borne & np.isnan(scores)]
            is_scored &= ~np.isin(batch.episodes_B, lost)
            is_borne &= is_scored
            told = columns_of(failures)
        scores, statistics = self._normalized(batch, scores, is_borne)
        steps = placed_step_rewards(batch, is_scored) if self._step_rewards else None
        return Scores(np.where(is_borne, scores, np.nan), {"is_scored": is_scored, **told}, steps, statistics)

    def _look(
        self,
        batch: RewardBatch,
        scorer: VisualScorer,
        scores_B: Floats,
        rows: np.ndarray[Any, Any],
        failures: list[dict[str, str]],
    ) -> None:
        """Ask the visual scorer about these rows, and bring what it says into their scores."""
        inputs = batch.column("multi_modal_inputs")
        for row in rows.tolist():
            if inputs is None or inputs[row] is None or (isinstance(inputs[row], Mapping) and not inputs[row]):
                continue
            try:
                seen = _seen(scorer, inputs[row], row)
            except RewardKitError as error:
                failure = Failure.from_exception(error)
                failures[row] = {"failure_class": failure.failure_class, "failure": failure.message}
                seen = np.nan
            scores_B[row] = scores_B[row] * seen if self._visual_rule == "multiply" else scores_B[row] + seen

    def _normalized(
        self, batch: RewardBatch, scores_B: Floats, is_borne_B: Bools
    ) -> tuple[Floats, RunningStatistics | None]:
        """The scores, and the statistics that they were normalized with."""
        if self.normalization_type == "variance":
            statistics = self.statistics.including(scores_B[is_borne_B])
            return statistics.normalized(scores_B), statistics
        if self.normalization_type == "none":
            return scores_B, None
        lengths = batch.numbers("episode_lengths")
        if (wrong := np.flatnonzero(is_borne_B & ~(lengths >= 1))).size:
            row = int(wrong[0])
            raise ConfigError(
                f"episode_lengths[{row}] is {lengths[row]:g}, and a score divided by it is none; it counts an "
                "episode's steps, at least 1"
            )
        return np.divide(scores_B, lengths, where=is_borne_B, out=np.full_like(scores_B, np.nan)), None


def _scores_of_episodes(batch: RewardBatch) -> Floats:
    """Each row's score, which all rows of an episode share."""
    scores = batch.numbers("episode_rewards")
    first = np.unique(batch.episodes_B, return_index=True)[1]
    of_episode = scores[first][batch.episodes_B]
    if (wrong := np.flatnonzero((scores != of_episode) & ~(np.isnan(scores) & np.isnan(of_episode)))).size:
        row = int(wrong[0])
        raise ConfigError(
            f"episode_rewards[{row}] is {scores[row]:g}, and an earlier row of the same traj_uid has "
            f"{of_episode[row]:g}; it is the score of the whole episode, and what single steps got is 'step_rewards'"
        )
    return scores


def _seen(scorer: VisualScorer, inputs: Any, row: int) -> float:
    """What the visual scorer says of a row.

    Raises:
        RewardKitError: it failed, or gave no finite number.
    """
    with boundary(RewardError, f"visual scorer on row {row}"):
        answer = scorer(inputs)
    if (seen := finite_number(answer)) is None:
        raise InvalidResultError(f"visual scorer on row {row}: it gave {answer!r:.80}, which is no finite number")
    return seen


def _normalization(by_length: bool, kind: NormalizationType | None) -> NormalizationType:
    if kind is None:
        return "length" if by_length else "none"
    check_choice("normalization_type", kind, get_args(NormalizationType))
    if by_length and kind != "length":
        raise ConfigError(f"normalize_by_length=True is normalization_type='length'; got {kind!r} besides")
    return kind
