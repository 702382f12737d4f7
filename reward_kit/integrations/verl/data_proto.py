"""Conversion of episodes to verl's `DataProto` and back.

`verl_rows` arranges episodes in NumPy arrays, and `to_data_proto` converts these arrays. `from_data_proto` is the
inverse. `step_columns` adds the columns that describe the actions of a row. `agent_loop_outputs` converts an episode to
the result of a verl agent loop.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from reward_kit.agent.models import StepData, episode_steps
from reward_kit.credit.state_hashes import readable_keys
from reward_kit.episodes.segments import ActionSpan
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.rl.learner.training_rows import to_tensors
from reward_kit.rl.reward_manager import EpisodeRewardManager
from reward_kit.tokens import TokenBatch, pad_rows, row_columns, verl_batch
from reward_kit.tokens.batch import concat_arrays, get_axis, get_widths
from reward_kit.tokens.columns import Array, Columns
from reward_kit.tokens.pipeline import RowPer, RowPipeline
from reward_kit.validation import check_choice

EPISODE = "reward_kit_episode"
"""The row column that contains the whole episode, for `from_data_proto`."""
STEP_COLUMNS = ("steps", "action_lengths", "state_keys", "step_rewards", "valid_actions")
"""The row columns that have one item for each action of the row."""
Unscored = Literal["leave_out", "mask"]
_STEP_CREDIT = ("base_reward", "advantage", "return_to_go")
_ALIGNED = ("metrics", "reward_reason")  # Keys that the alignment adds to a step's info.
_NOT_IN_VERL = ("step_rewards", "values", "value_mask")
"""Columns of reward-kit's rows that verl lacks or defines differently.

In verl, `values` belong to tokens. In reward-kit, they belong to actions.
"""
_ROW_KEYS = ("rollout_id", "segment", "steps")
_CREDIT = {"advantages": "advantage", "returns": "return_to_go"}
logger = logging.getLogger("reward_kit.integrations.verl")


def step_columns(columns: Columns, *, with_episodes: bool = True) -> Columns:
    """Add columns that contain a list for each row. The list has one item for each action.

    This function can be used as a connector. `steps` contains the step numbers of the actions, and `action_lengths`
    contains the number of tokens in each action. `state_keys` contains the keys of the states before the actions, as
    strings. `step_rewards` contains the base rewards, or None if they are not set. `valid_actions` is False for an
    action that the environment could not parse. If every row has one action, `anchor_obs` (the name in verl-agent) is
    the state key of the action. `reward_kit_episode` is the whole episode, an object that all rows of the episode
    share.

    Args:
        columns: the columns, with rows from `segment_rows` or `action_rows`.
        with_episodes: whether to add `reward_kit_episode`.

    Raises:
        ConfigError: If the rows are missing, or if an episode has tokens for only some of its steps.
    """
    if "segment" not in columns.rows:
        raise ConfigError("no row column 'segment'; add segment_rows or action_rows to the pipeline")
    steps_E = columns.step_data or [episode_steps(episode) for episode in columns.episodes]
    keys_E = [readable_keys([steps]) for steps in steps_E]
    spans_by_segment: dict[tuple[int, int], list[ActionSpan]] = defaultdict(list)
    for owner, episode in enumerate(columns.episodes):
        for span in episode.tokens.spans:
            spans_by_segment[owner, span.segment].append(span)
    owners, segments = columns.episodes_B.tolist(), columns.rows["segment"].tolist()
    only_step_B = columns.rows["step"].tolist() if "step" in columns.rows else [None] * len(owners)
    present: dict[int, set[int]] = defaultdict(set)
    rows: dict[str, list[Any]] = {name: [] for name in STEP_COLUMNS}
    for owner, segment, only in zip(owners, segments, only_step_B, strict=True):
        spans = [span for span in spans_by_segment[owner, segment] if only is None or span.step == only]
        steps = [steps_E[owner][span.step] for span in spans]
        present[owner].update(span.step for span in spans)
        rows["steps"].append([span.step for span in spans])
        rows["action_lengths"].append([span.stop - span.start for span in spans])
        rows["state_keys"].append([keys_E[owner][span.step] for span in spans])
        rows["step_rewards"].append([step.base_reward for step in steps])
        rows["valid_actions"].append([step.step_info.get("is_action_valid") is not False for step in steps])
    for owner, known in present.items():
        # Credit needs complete trajectories.
        if missing := sorted(set(range(len(steps_E[owner]))) - known):
            raise ConfigError(
                f"episode {columns.episodes[owner].id_}: step {missing[0]} has no tokens in these rows, but "
                "other steps do; verl identifies steps by their tokens. Export only episodes whose policy "
                "records the tokens of all steps"
            )
    if rows["steps"] and all(len(numbers) == 1 for numbers in rows["steps"]):
        rows["anchor_obs"] = [keys[0] for keys in rows["state_keys"]]
    if with_episodes:
        whole_E = [
            {
                "state": episode.get_state(),
                "steps": [
                    {
                        **{name: getattr(step, name) for name in _STEP_CREDIT},
                        "step_info": {name: step.step_info[name] for name in _ALIGNED if name in step.step_info},
                    }
                    for step in steps
                ],
            }
            for episode, steps in zip(columns.episodes, steps_E, strict=True)
        ]
        rows[EPISODE] = [whole_E[owner] for owner in owners]
    return columns.with_columns(rows={name: objects(values) for name, values in rows.items()})


def objects(values: Sequence[Any]) -> Array:
    """Return a (B,) array of arbitrary objects. `np.array` would split lists."""
    return np.fromiter(values, dtype=object, count=len(values))


def agent_loop_outputs(
    episode: SingleAgentEpisode,
    steps: Sequence[StepData] | None = None,
    *,
    score: float | None = None,
    with_episode: bool = True,
) -> list[Any]:
    """Return a verl `AgentLoopOutput` for each segment of an episode, in order, for `AgentLoopBase.run`.

    The `extra_fields` contain the `step_columns` for reward-kit's trainers, and the episode for its reward manager.

    Args:
        episode: the collected episode.
        steps: the steps of the episode with their base rewards. By default, the steps have no rewards.
        score: the score of the episode. If None, verl's reward loop scores the episode.
        with_episode: whether to pass the whole episode to the reward.

    Raises:
        ConfigError: If an action has no tokens.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    columns = step_columns(row_columns([episode], None if steps is None else [steps]))
    if not len(columns.lengths_B):
        raise ConfigError(f"episode {episode.id_} has no tokens, which verl needs for training")
    outputs = []
    places = zip(columns.starts_B.tolist(), columns.lengths_B.tolist(), columns.prompt_lengths_B.tolist(), strict=True)
    for row, (start, length, prompt) in enumerate(places):
        ids, mask, logprobs = (
            columns.tokens[name][start : start + length].tolist() for name in ("input_ids", "action_mask", "logprobs")
        )
        outputs.append(
            AgentLoopOutput(
                prompt_ids=ids[:prompt],
                response_ids=ids[prompt:],
                response_mask=mask[prompt:],
                response_logprobs=None if np.isnan(logprobs[prompt:]).any() else logprobs[prompt:],
                reward_score=score,
                num_turns=len(episode.messages),
                metrics=AgentLoopMetrics(),
                extra_fields={name: columns.rows[name][row] for name in STEP_COLUMNS},
            )
        )
    if with_episode:
        outputs[-1].extra_fields[EPISODE] = columns.rows[EPISODE][0]
    return outputs


def to_data_proto(
    episodes: Sequence[SingleAgentEpisode],
    step_data_lists: Sequence[Sequence[StepData]] | None = None,
    **options: Any,
) -> Any:
    """Convert the result of `verl_rows` to a `DataProto`. Ids and masks are int64, and other numbers are float32.

    Args:
        episodes: the episodes, as in `verl_rows`.
        step_data_lists: the steps of each episode, as in `verl_rows`.
        **options: the options of `verl_rows`. `pad_token_id` is required.

    Raises:
        ConfigError: As for `verl_rows`, or if verl is not installed.
    """
    rows = verl_rows(episodes, step_data_lists, **options)
    try:
        from verl import DataProto
    except ImportError as error:
        raise ConfigError(f"verl is not installed: {error}; install verl as its documentation describes") from error
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
    """Convert episodes to rows with verl's names, axes and padding.

    Prompts are padded on the left, and responses on the right. If `scores` is passed, the rows have `rm_scores` and
    `token_level_scores`. These two columns are equal and contain the score of each episode at its last sampled token.
    If a step has an advantage, the rows have `advantages` and `returns`. If all log-probabilities are known, the rows
    also have `rollout_log_probs`. `step_columns` and `reward_kit.tokens.connectors` describe the other columns.

    Args:
        episodes: the episodes. An episode without tokens gets no row.
        step_data_lists: the steps of each episode, with rewards and credit. By default, the steps have neither.
        pad_token_id: the token id for padding.
        scores: the score of each episode, or None if it is unscored. If None is passed instead of a list, verl scores
            the episodes.
        per: the content of a row: a "segment" (the default), or an "action" with all text before it as the prompt.
        pipeline: the connectors. The default is `default_pipeline(per)`.
        unscored: whether to omit the rows of an unscored episode, or to keep them with a `response_mask` of zeros.
        prompt_length: the number of columns of `prompts`. The default is the length of the longest prompt.
        response_length: the number of columns of `responses`. The default is the length of the longest response.
        with_episodes: whether to store the episodes in `reward_kit_episode`, so that `from_data_proto` can restore
            them.

    Raises:
        ConfigError: If the number of items in a list differs from the number of episodes, if an option is unknown, if a
            row is too long, if there are no rows, or if an episode has tokens for only some of its steps.
    """
    check_choice("unscored", unscored, get_args(Unscored))
    columns = row_columns(episodes, step_data_lists, scores=scores, per=per, pipeline=pipeline)
    columns = step_columns(columns, with_episodes=with_episodes)
    if scores is not None and unscored == "leave_out":
        is_scored_B = ~np.isnan(columns.scores_E)[columns.episodes_B]
        if not is_scored_B.all():
            lost = len(set(columns.episodes_B[~is_scored_B].tolist()))
            logger.info("%d of %d episodes are unscored and excluded", lost, len(columns.episodes))
        columns = columns.select_rows(is_scored_B)
    if not len(columns.lengths_B):
        raise ConfigError(
            "no episode has both tokens and a score, so the batch is empty; verl requires at least one row"
        )
    columns = replace(columns, tokens={key: v for key, v in columns.tokens.items() if key not in _NOT_IN_VERL})
    rows = verl_batch(pad_rows(columns, pad_token_id=pad_token_id, padding="outer"))
    arrays = _widened(rows, prompt_length, response_length)
    others = {key: v for key, v in rows.non_tensor_batch.items() if scores is not None or key != "episode_rewards"}
    parts, allowed = others.pop("message_parts", None), others.pop("allowed_ids", None)
    if parts is not None and any(parts):
        others["message_parts"] = parts
    if allowed is not None and any(ids is not None for ids in allowed):
        others["allowed_ids"] = allowed
    has_credit = not np.isnan(columns.steps.get("advantage", np.full(1, np.nan))).all()
    return TokenBatch(_verl_arrays(arrays, others, has_credit=has_credit), others, dict(rows.meta_info))


def _widened(rows: TokenBatch, prompt: int | None, response: int | None) -> dict[str, Array]:
    """Pad the arrays to the requested numbers of columns."""
    needed = get_widths(rows.batch, rows.meta_info)
    wanted = {"prompt": prompt or needed.prompt or 0, "completion": response or needed.completion or 0}
    for name, least, asked in (
        ("prompt_length", needed.prompt or 0, prompt),
        ("response_length", needed.completion or 0, response),
    ):
        if asked is not None and asked < least:
            raise ConfigError(
                f"{name} is {asked}, but a row needs {least} tokens, and rows are never truncated; "
                f"set it to at least {least}, or omit such episodes"
            )
    wanted["both"] = wanted["prompt"] + wanted["completion"]
    # This is an empty batch. The concatenated batch adopts its width.
    wide = {
        key: np.zeros((0, wanted[get_axis(key, rows.meta_info)]), dtype=values.dtype)
        for key, values in rows.batch.items()
    }
    return concat_arrays([rows.batch, wide], rows.meta_info)


def _verl_arrays(arrays: dict[str, Array], others: dict[str, Array], *, has_credit: bool) -> dict[str, Array]:
    made = {key: values for key, values in arrays.items() if key not in ("completion_mask", "loss_mask")}
    # In verl, positions continue in the padding on the right.
    made["position_ids"] = np.clip(np.cumsum(arrays["attention_mask"], axis=1) - 1, 0, None)
    if np.isnan(made["rollout_log_probs"]).any():
        del made["rollout_log_probs"]
    if has_credit:
        made["response_mask"] = arrays["loss_mask"]
    else:
        made = {key: values for key, values in made.items() if key not in ("advantages", "returns")}
    if "episode_rewards" in others:
        made["response_mask"] = made["response_mask"] * ~np.isnan(others["episode_rewards"])[:, None]
        batch = TokenBatch({**made, "response_mask": arrays["response_mask"]}, others)
        placed = EpisodeRewardManager(_NoTokenizer(), 0)(batch)
        made["rm_scores"], made["token_level_scores"] = placed.numpy(), placed.numpy().copy()
    return made


class _NoTokenizer:
    """A placeholder for the tokenizer of a reward manager that never decodes an answer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        raise ConfigError("no answer is decoded here")


class RestoredEpisodes(NamedTuple):
    """The episodes that were restored from a batch.

    Attributes:
        episodes: the episodes, in the order of their first rows.
        step_data_lists: the steps of each episode, with their original rewards and their current credit.
        scores: the score of each episode, or None if the episode is unscored.
    """

    episodes: list[SingleAgentEpisode]
    step_data_lists: list[list[StepData]]
    scores: list[float | None]


def from_data_proto(data: Any) -> RestoredEpisodes:
    """Return the episodes of a batch from `to_data_proto`, even if its rows were reordered, repeated or dropped.

    If verl or an estimator has added `advantages` and `returns` to the batch, they are stored on the steps. If a number
    differs only because it was rounded to float32, the number on the step keeps its original precision. An episode is
    omitted if all of its rows were dropped.

    Args:
        data: a `DataProto`, or rows from `verl_rows`.

    Raises:
        ConfigError: If the batch was created by different code or without its episodes, or if the tokens of a row
            differ from the tokens of its episode.
    """
    columns = data.non_tensor_batch
    if missing := [name for name in (*_ROW_KEYS, EPISODE) if name not in columns]:
        raise ConfigError(
            f"non_tensor_batch has no {missing[0]!r}{did_you_mean(missing[0], map(str, columns))} (batches contain "
            "their episodes only if to_data_proto is called with with_episodes=True)"
        )
    arrays = {key: np.asarray(data.batch[key]) for key in set(data.batch.keys())}
    names = list(map(str, columns["rollout_id"]))
    whole = dict(zip(names, columns[EPISODE], strict=True))
    episodes = {name: SingleAgentEpisode.from_state(carried["state"]) for name, carried in whole.items()}
    steps = {
        name: [
            step.model_copy(update={**left_with, "step_info": {**step.step_info, **left_with["step_info"]}})
            for step, left_with in zip(episode_steps(episodes[name]), carried["steps"], strict=True)
        ]
        for name, carried in whole.items()
    }
    scores: dict[str, float | None] = dict.fromkeys(names)
    for row, name in enumerate(names):
        wanted = set(columns["steps"][row])
        spans = [span for span in episodes[name].tokens.spans if span.step in wanted]
        begin = _check_tokens(episodes[name], arrays, spans, row, per_action="step" in columns)
        _take_credit(steps[name], arrays, spans, begin, row)
        if "episode_rewards" in columns:
            score = columns["episode_rewards"][row]
            scores[name] = None if score is None or np.isnan(score) else float(score)
        elif "rm_scores" in arrays and arrays["response_mask"][row].any():
            scores[name] = (scores[name] or 0.0) + float(arrays["rm_scores"][row].sum(dtype=np.float64))
    return RestoredEpisodes(list(episodes.values()), list(steps.values()), [scores[name] for name in episodes])


def _check_tokens(
    episode: SingleAgentEpisode, arrays: Mapping[str, Array], spans: list[ActionSpan], row: int, *, per_action: bool
) -> int:
    """Check that a row's tokens match its episode's tokens, and return the position at which its response starts."""
    tokens = episode.tokens
    number = spans[0].segment
    start = tokens.segments[number].start
    stop = tokens.segments[number + 1].start if number + 1 < len(tokens.segments) else len(tokens)
    stop = spans[-1].stop if per_action else stop
    is_token = arrays["attention_mask"][row] != 0
    recorded, given = np.array(tokens.ids[start:stop]), arrays["input_ids"][row][is_token]
    if not np.array_equal(recorded, given):
        raise ConfigError(
            f"the {len(given)} tokens of row {row} differ from the {len(recorded)} tokens of episode "
            f"{episode.id_}; rows must not be changed or sampled again"
        )
    if "rollout_log_probs" in arrays:
        width = arrays["responses"].shape[1]
        logprobs = arrays["rollout_log_probs"][row][is_token[-width:]] if width else np.zeros(0)
        # In a row of one action, earlier actions are part of the prompt and have no log-probabilities.
        sampled_with = np.array(tokens.logprobs[start:stop])[stop - start - len(logprobs) :]
        if not np.array_equal(sampled_with.astype(np.float32), logprobs.astype(np.float32)):
            raise ConfigError(f"row {row}: rollout_log_probs differ from the log-probabilities of the episode")
    return start + int(is_token[: arrays["prompts"].shape[1]].sum())


def _take_credit(
    steps: list[StepData], arrays: Mapping[str, Array], spans: list[ActionSpan], begin: int, row: int
) -> None:
    """Store the advantages and returns of a row on the steps of its actions."""
    for span in spans:
        if span.stop == span.start:
            continue  # The batch has no entry for an action without tokens.
        step, column = steps[span.step], span.start - begin
        is_masked, had_credit = arrays["response_mask"][row, column] == 0, step.advantage is not None
        for key, name in _CREDIT.items():
            if key not in arrays:
                continue
            before, now = getattr(step, name), np.float32(arrays[key][row, column])
            # A zero may also stand for a missing value.
            if before is None and (is_masked or (had_credit and now == 0)):
                continue
            if before is None or np.float32(before) != now:
                setattr(step, name, float(now))
