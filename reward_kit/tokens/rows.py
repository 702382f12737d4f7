"""Episodes in, a batch of training rows out: the default way through the pipeline, in one call."""

from __future__ import annotations

from collections.abc import Sequence

from reward_kit.agent.models import StepData
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError
from reward_kit.tokens.batch import TokenBatch
from reward_kit.tokens.columns import Columns
from reward_kit.tokens.layout import pad_rows
from reward_kit.tokens.pipeline import RowPer, RowPipeline, default_pipeline
from reward_kit.tokens.widths import Padding


def row_columns(
    episodes: Sequence[SingleAgentEpisode],
    step_data_lists: Sequence[Sequence[StepData]] | None = None,
    *,
    scores: Sequence[float | None] | None = None,
    per: RowPer | None = None,
    pipeline: RowPipeline | None = None,
) -> Columns:
    """The rows of these episodes as columns, which `pad_rows` and `pack_rows` lay out.

    Args:
        episodes: what was collected.
        step_data_lists: for each episode its steps with `advantage`, `return_to_go` and `base_reward`. A step without
            an advantage has loss_mask 0. None: no step has one.
        scores: for each episode its score, None where it is unscored.
        per: what becomes a row: "segment" (the default), or "action", with everything before it as its prompt.
        pipeline: the connectors; by default `default_pipeline(per)`.

    Raises:
        ConfigError: the lists are not as long as the episodes, or both `per` and `pipeline` are given.
        EpisodeError: an episode's tokens belong to a step that is not among its steps.
    """
    if per is not None and pipeline is not None:
        raise ConfigError("per is the default pipeline's; with a pipeline of your own use default_pipeline(per) for it")
    return (pipeline or default_pipeline(per or "segment"))(Columns.of(episodes, step_data_lists, scores))


def build_rows(
    episodes: Sequence[SingleAgentEpisode],
    step_data_lists: Sequence[Sequence[StepData]] | None = None,
    *,
    pad_token_id: int,
    scores: Sequence[float | None] | None = None,
    padding: Padding = "right",
    per: RowPer | None = None,
    pipeline: RowPipeline | None = None,
) -> TokenBatch:
    """Padded rows, in the order of the episodes; an episode without tokens has none.

    Args:
        episodes: what was collected.
        step_data_lists: for each episode its steps with `advantage`, `return_to_go` and `base_reward`. A step without
            an advantage has loss_mask 0. None: no step has one.
        pad_token_id: what fills up the ids.
        scores: for each episode its score, None where it is unscored.
        padding: "right", "left", or "outer" (`tokens.layout.pad_rows`).
        per: what becomes a row: "segment" (the default), or "action", with everything before it as its prompt.
        pipeline: the connectors; by default `default_pipeline(per)`.

    Raises:
        ConfigError: the lists are not as long as the episodes, or an option is unknown.
        EpisodeError: an episode's tokens belong to a step that is not among its steps.
    """
    columns = row_columns(episodes, step_data_lists, scores=scores, per=per, pipeline=pipeline)
    return pad_rows(columns, pad_token_id=pad_token_id, padding=padding)
