"""Episodes as verl's `DataProto`: `verl_rows` lays them out in NumPy, `to_data_proto` makes them verl's own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from reward_kit.agent.models import StepData
from reward_kit.credit.options import check_choice
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError
from reward_kit.integrations.verl.step_columns import step_columns
from reward_kit.rl.learner.training_rows import to_tensors
from reward_kit.rl.reward_manager import EpisodeRewardManager
from reward_kit.tokens import TokenBatch, pad_rows, row_columns, verl_batch
from reward_kit.tokens.batch import axis_of, joined, widths_of
from reward_kit.tokens.columns import Array, Columns
from reward_kit.tokens.pipeline import RowPer, RowPipeline

Unscored = Literal["leave_out", "mask"]
_NOT_VERLS = ("step_rewards", "values", "value_mask", "policy_versions")
"""What our rows have besides. verl's `values` are of tokens, and ours of actions; the rest it has in other forms."""
logger = logging.getLogger("reward_kit.integrations.verl")


def to_data_proto(
    episodes: Sequence[SingleAgentEpisode],
    step_data_lists: Sequence[Sequence[StepData]] | None = None,
    **options: Any,
) -> Any:
    """Episodes as a `DataProto` of verl: `verl_rows`, with tensors.

    Args:
        episodes: what was collected.
        step_data_lists: for each its steps, see `verl_rows`.
        **options: those of `verl_rows`, of which `pad_token_id` is required.

    Raises:
        ConfigError: as `verl_rows`, or verl is not installed.
    """
    rows = verl_rows(episodes, step_data_lists, **options)
    return as_data_proto(rows)


def as_data_proto(rows: TokenBatch) -> Any:
    """Rows of `verl_rows` as a `DataProto`: ids and masks in int64, numbers in float32.

    Raises:
        ConfigError: verl is not installed.
    """
    try:
        from verl import DataProto
    except ImportError as error:
        raise ConfigError(f"verl is not installed here: {error}. It has to be, as its own documents say") from error
    return DataProto.from_dict(
        tensors=to_tensors(rows), non_tensors=dict(rows.non_tensor_batch), meta_info=dict(rows.meta_info)
    )


def verl_rows(
    episodes: Sequence[SingleAgentEpisode],
    step_data_lists: Sequence[Sequence[StepData]] | None = None,
    *,
    pad_token_id: int,
    scores: Sequence[float | None] | None = None,
    per: RowPer | None = None,
    pipeline: RowPipeline | None = None,
    unscored: Unscored = "leave_out",
    prompt_length: int | None = None,
    response_length: int | None = None,
    with_episodes: bool = True,
) -> TokenBatch:
    """Rows under verl's names, on its axes and padded as it pads: prompts on the left, responses on the right.

    With `scores` they have `rm_scores` and, the same, `token_level_scores`: each score on the last token that its
    episode sampled. `advantages` and `returns` are there where a step has an advantage, `rollout_log_probs` where all
    are known. What stands beside the arrays is in `step_columns` and in `reward_kit.tokens.connectors`.

    Args:
        episodes: what was collected; one without tokens has no row.
        step_data_lists: for each its steps, with rewards and credit where they have them; by default the bare steps.
        pad_token_id: what fills up the ids.
        scores: for each its score, None where it is unscored. None as a whole: verl is to score them.
        per: what becomes a row: "segment" (the default), or "action", with everything before it as its prompt.
        pipeline: the connectors; by default `default_pipeline(per)`.
        unscored: rows of an unscored episode are left out, or kept with a `response_mask` of zeros.
        prompt_length: columns of `prompts`; by default as many as the longest needs.
        response_length: columns of `responses`, likewise.
        with_episodes: keep the episodes in `reward_kit_episode`, so that `from_data_proto` gives them back.

    Raises:
        ConfigError: the lists are not as long as the episodes, an option is unknown, a row is longer than it may be,
            no row is left, or an episode has tokens of only some of its steps.
    """
    check_choice("unscored", unscored, get_args(Unscored))
    columns = row_columns(episodes, step_data_lists, scores=scores, per=per, pipeline=pipeline)
    columns = step_columns(columns, with_episodes=with_episodes)
    if scores is not None and unscored == "leave_out":
        columns = _scored_only(columns)
    if not len(columns.lengths_B):
        raise ConfigError("no episode has both tokens and a score, so there is no row; verl takes at least one")
    columns = replace(columns, tokens={key: v for key, v in columns.tokens.items() if key not in _NOT_VERLS})
    rows = verl_batch(pad_rows(columns, pad_token_id=pad_token_id, padding="outer"))
    arrays = _widened(rows, prompt_length, response_length)
    others = _others(rows.non_tensor_batch, has_scores=scores is not None)
    return TokenBatch(_arrays(arrays, others, has_credit=_has_credit(columns)), others, dict(rows.meta_info))


def _scored_only(columns: Columns) -> Columns:
    is_scored_B = ~np.isnan(columns.scores_E)[columns.episodes_B]
    if not is_scored_B.all():
        lost = len(set(columns.episodes_B[~is_scored_B].tolist()))
        logger.info("%d of %d episodes are unscored and left out", lost, len(columns.episodes))
    return columns.taking(is_scored_B)


def _has_credit(columns: Columns) -> bool:
    return not np.isnan(columns.steps.get("advantage", np.full(1, np.nan))).all()


def _widened(rows: TokenBatch, prompt: int | None, response: int | None) -> dict[str, Array]:
    """The arrays, with as many columns as are asked for."""
    found = widths_of(rows.batch, rows.meta_info)
    for name, needed, asked in (
        ("prompt_length", found.prompt or 0, prompt),
        ("response_length", found.completion or 0, response),
    ):
        if asked is not None and asked < needed:
            raise ConfigError(
                f"{name} is {asked}, and a row has {needed} tokens there; nothing is cut off: give at least {needed}, "
                "or leave such episodes out"
            )
    wanted = {"prompt": prompt or found.prompt or 0, "completion": response or found.completion or 0}
    wanted["both"] = wanted["prompt"] + wanted["completion"]
    # Without a row of its own, but as wide as is wanted.
    wide = {
        key: np.zeros((0, wanted[axis_of(key, rows.meta_info)]), dtype=values.dtype)
        for key, values in rows.batch.items()
    }
    return joined([rows.batch, wide], rows.meta_info)


def _arrays(arrays: dict[str, Array], others: dict[str, Array], *, has_credit: bool) -> dict[str, Array]:
    """verl's own arrays, of ours."""
    made = {key: values for key, values in arrays.items() if key not in ("completion_mask", "loss_mask")}
    # verl counts on in the padding on the right.
    made["position_ids"] = np.clip(np.cumsum(arrays["attention_mask"], axis=1) - 1, 0, None)
    if np.isnan(made["rollout_log_probs"]).any():
        del made["rollout_log_probs"]
    if has_credit:
        made["response_mask"] = arrays["loss_mask"]
    else:
        made = {key: values for key, values in made.items() if key not in ("advantages", "returns")}
    if "episode_rewards" in others:
        made["response_mask"] = made["response_mask"] * ~np.isnan(others["episode_rewards"])[:, None]
        placed = EpisodeRewardManager(_NoTokenizer(), 0)(
            TokenBatch({**made, "response_mask": arrays["response_mask"]}, others)
        )
        made["rm_scores"], made["token_level_scores"] = placed.numpy(), placed.numpy().copy()
    return made


class _NoTokenizer:
    """Where nothing is shown, nothing is decoded."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        raise ConfigError("nothing is decoded here")


def _others(others: dict[str, Array], *, has_scores: bool) -> dict[str, Array]:
    """The row columns, without those that would mislead verl, or say nothing."""
    kept = {key: values for key, values in others.items() if has_scores or key != "episode_rewards"}
    # What verl calls so is what a processor made of pictures, and is given to the model.
    pictures, allowed = kept.pop("multi_modal_inputs", None), kept.pop("allowed_ids", None)
    if pictures is not None and any(pictures):
        kept["message_parts"] = pictures
    if allowed is not None and any(ids is not None for ids in allowed):
        kept["allowed_ids"] = allowed
    return kept
