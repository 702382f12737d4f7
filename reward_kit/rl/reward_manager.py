"""`EpisodeRewardManager`: scores of episodes become rewards on tokens, each on the last that its episode sampled."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args, overload

import numpy as np
import torch
from torch import Tensor

from reward_kit.errors import ConfigError, Failure, RewardError, RewardKitError, boundary, did_you_mean
from reward_kit.rl.reward_batches import Bools, Floats, Placed, RewardBatch, as_numbers, as_tensor
from reward_kit.rl.reward_reports import Column, Echo, ExampleLog, Tokenizer, columns_of
from reward_kit.rl.reward_statistics import RunningStatistics

NormalizationType = Literal["none", "length", "variance"]
VisualRule = Literal["multiply", "add"]
VisualScorer = Callable[[Mapping[str, Any]], float | None]

logger = logging.getLogger("reward_kit.rl")


class Scores(NamedTuple):
    """What a manager found for a batch.

    Attributes:
        scores_B: what is placed on each row's last valid token; NaN where nothing is.
        info: facts for each row, (B,) each.
        step_rewards: rewards besides; None where there are none.
        statistics: those that now hold; None where none are kept.
    """

    scores_B: Floats
    info: dict[str, Column]
    step_rewards: Placed | None = None
    statistics: RunningStatistics | None = None


class RewardManager(ABC):
    """What all reward managers do: take ready rewards as they are, else score, place, and show examples.

    Args:
        tokenizer: decodes what is shown, and what is scored.
        num_examine: how many rows of each data source are shown of a batch, at most.
        seed: of the generator that chooses them.
        echo: takes each line that is shown; by default the logger "reward_kit.rl", at the level INFO.

    Raises:
        ConfigError: an option is wrong.
    """

    skips_special_tokens = True

    def __init__(self, tokenizer: Tokenizer, num_examine: int, *, seed: int = 0, echo: Echo | None = None) -> None:
        self.tokenizer = tokenizer
        self.statistics = RunningStatistics()
        self._examples = ExampleLog(tokenizer, num_examine, seed, echo)

    @overload
    def __call__(self, data: Any, return_dict: Literal[False] = False) -> Tensor: ...
    @overload
    def __call__(self, data: Any, return_dict: Literal[True]) -> dict[str, Any]: ...
    def __call__(self, data: Any, return_dict: bool = False) -> Tensor | dict[str, Any]:
        """The rewards of a batch: float32, shaped like `responses` (in our names: `action_mask`), on its device.

        Args:
            data: a batch (`rl.reward_batches`). Where it has `rm_scores`, they are the rewards.
            return_dict: give `reward_tensor`, and `reward_extra_info`: for each fact an array with one item per row.

        Raises:
            ConfigError: the batch lacks something; nothing is kept of such a call.
            RewardError: the tokenizer cannot decode what is to be shown.
        """
        rewards, info = _given(data) if "rm_scores" in set(data.batch.keys()) else self._rewarded(data)
        return {"reward_tensor": rewards, "reward_extra_info": info} if return_dict else rewards

    def _rewarded(self, data: Any) -> tuple[Tensor, dict[str, Column]]:
        batch = RewardBatch.of(data)
        found = self._score(batch)
        rewards = batch.placed(found.scores_B, found.step_rewards)
        if empty := int(batch.is_empty_B.sum()):
            logger.info("%d of %d rows have no valid token and get no reward", empty, len(batch))
        self._examples.show(batch, found.scores_B, self.skips_special_tokens)
        # Last, so that a call that fails leaves nothing behind, and can be made again.
        self.statistics = found.statistics or self.statistics
        return rewards, {**found.info, "score": found.scores_B, "is_empty": batch.is_empty_B}

    @abstractmethod
    def _score(self, batch: RewardBatch) -> Scores:
        """The scores of a batch. It changes nothing."""


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
        if visual_rule not in get_args(VisualRule):
            raise ConfigError(f"unknown visual_rule {visual_rule!r}{did_you_mean(visual_rule, get_args(VisualRule))}")
        self.normalization_type = _normalization(normalize_by_length, normalization_type)
        self._step_rewards, self._visual_scorer, self._visual_rule = step_rewards, visual_scorer, visual_rule

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to hold: plain JSON."""
        return {"normalization_type": self.normalization_type, **self.statistics._asdict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint.

        Raises:
            ConfigError: it is of another normalization, or no such state.
        """
        if (kind := state.get("normalization_type")) != self.normalization_type:
            raise ConfigError(
                f"the state is of normalization_type {kind!r}, the manager of {self.normalization_type!r}"
            )
        self.statistics = RunningStatistics.from_json(state)

    def _score(self, batch: RewardBatch) -> Scores:
        scores = batch.numbers("episode_rewards")
        is_scored = ~np.isnan(scores)
        is_borne = batch.ends_B & ~batch.is_empty_B & is_scored
        failures: list[dict[str, str]] = [{"failure_class": "", "failure": ""} for _ in scores]
        if self._visual_scorer is not None:
            self._look(batch, self._visual_scorer, scores, np.flatnonzero(is_borne), failures)
            lost = batch.episodes_B[is_borne & np.isnan(scores)]
            is_scored &= ~np.isin(batch.episodes_B, lost)
            is_borne &= is_scored
        scores, statistics = self._normalized(batch, scores, is_borne)
        told = columns_of(failures) if self._visual_scorer is not None else {}
        steps = _step_rewards(batch, is_scored) if self._step_rewards else None
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
            if inputs is None or inputs[row] is None or not len(inputs[row]):
                continue
            try:
                with boundary(RewardError, f"visual scorer on row {row}"):
                    seen = as_numbers([scorer(inputs[row])], "what it returned")[0]
                if np.isnan(seen):
                    raise RewardError(f"visual scorer on row {row}: it gave no number")
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


def _normalization(by_length: bool, kind: NormalizationType | None) -> NormalizationType:
    if kind is None:
        return "length" if by_length else "none"
    if kind not in get_args(NormalizationType):
        known = did_you_mean(str(kind), get_args(NormalizationType))
        raise ConfigError(f"unknown normalization_type {kind!r}{known}")
    if by_length and kind != "length":
        raise ConfigError(f"normalize_by_length=True is normalization_type='length'; got {kind!r} besides")
    return kind


def _given(data: Any) -> tuple[Tensor, dict[str, Column]]:
    """Rewards that the batch brings along as `rm_scores`, and the facts that it names as belonging to them."""
    rewards = as_tensor(data.batch["rm_scores"])
    scores = rewards.detach().reshape(len(rewards), -1).sum(dim=1).to("cpu", torch.float64).numpy()
    keys = (getattr(data, "meta_info", None) or {}).get("reward_extra_keys", ())
    if missing := [key for key in keys if key not in data.non_tensor_batch]:
        raise ConfigError(f"reward_extra_keys names {missing[0]!r}{did_you_mean(missing[0], data.non_tensor_batch)}")
    named = {key: data.non_tensor_batch[key] for key in keys}
    return rewards, {"score": scores, "is_scored": ~np.isnan(scores), **named}


def _step_rewards(batch: RewardBatch, is_scored_B: Bools) -> Placed:
    """The batch's step rewards in their places; none in rows of unscored episodes, nor where one is None or NaN."""
    rows, columns, values = (_dense if "step_rewards" in batch.arrays else _listed)(batch)
    kept = is_scored_B[rows] & ~np.isnan(values)
    return Placed(rows[kept], columns[kept], values[kept])


def _dense(batch: RewardBatch) -> Placed:
    given = batch.arrays["step_rewards"]
    if given.shape != batch.actions_BT.shape:
        raise ConfigError(
            f"step_rewards is {tuple(given.shape)}, and actions are {tuple(batch.actions_BT.shape)}; give rewards on "
            "tokens, or for each row a list with one reward per action in non_tensor_batch"
        )
    rows, columns = torch.where((given != 0) & batch.valid_BT)
    values = given[rows, columns].to("cpu", torch.float64).numpy()
    return Placed(rows.cpu().numpy(), columns.cpu().numpy(), values)


def _listed(batch: RewardBatch) -> Placed:
    lists = batch.column("step_rewards")
    if lists is None:
        raise ConfigError("step_rewards=True, and the batch has no 'step_rewards', on tokens or in non_tensor_batch")
    rows, columns = batch.action_ends()
    values: list[Any] = []
    for row, (given, actions) in enumerate(zip(lists, np.bincount(rows, minlength=len(batch)).tolist(), strict=True)):
        known = [None] * actions if given is None else [given] if np.ndim(given) == 0 else given
        if len(known) != actions:
            raise ConfigError(
                f"non_tensor_batch['step_rewards'][{row}] has {len(known)} rewards, and the row has {actions} actions "
                "(unbroken runs of its mask)"
            )
        values.extend(known)
    return Placed(rows, columns, as_numbers(values, "non_tensor_batch['step_rewards']"))
