"""Episodes as verl's `DataProto`: `verl_rows` lays them out in NumPy, `to_data_proto` makes them verl's own.

`from_data_proto` is the inverse; `step_columns` makes the columns that rows carry beside their tokens.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from reward_kit.agent.models import StepData, steps_of
from reward_kit.credit.options import check_choice
from reward_kit.credit.state_hashes import readable_keys
from reward_kit.episodes.segments import ActionSpan
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.rl.learner.training_rows import to_tensors
from reward_kit.rl.reward_manager import EpisodeRewardManager
from reward_kit.tokens import TokenBatch, pad_rows, row_columns, verl_batch
from reward_kit.tokens.batch import axis_of, joined, widths_of
from reward_kit.tokens.columns import Array, Columns
from reward_kit.tokens.pipeline import RowPer, RowPipeline

EPISODE = "reward_kit_episode"
"""The row column with the whole episode, by which it comes back."""
STEP_COLUMNS = ("steps", "action_lengths", "state_keys", "step_rewards", "valid_actions")
"""The row columns with one item for each action of the row."""
_STEP_CREDIT = ("base_reward", "advantage", "return_to_go")
_ALIGNED = ("metrics", "reward_reason")  # what alignment adds to a step's info


def step_columns(columns: Columns, *, with_episodes: bool = True) -> Columns:
    """A connector that adds, for each row, lists with one item for each of its actions.

    `steps` are the actions' numbers in their episode; `action_lengths` count the tokens of each; `state_keys` name the
    state in which it was taken, by equal texts for equal keys; `step_rewards` are base rewards, None where unset;
    `valid_actions` is False where the environment could not read an action. Where every row has one action,
    `anchor_obs` is its state key, as verl-agent calls it. `reward_kit_episode` is the whole episode, once for all of
    its rows.

    Args:
        columns: with rows, by `segment_rows` or `action_rows`.
        with_episodes: add `reward_kit_episode`.

    Raises:
        ConfigError: there are no such rows, or an episode has tokens of only some of its steps.
    """
    if "segment" not in columns.rows:
        raise ConfigError("no row column 'segment': the pipeline needs segment_rows or action_rows")
    steps_E = columns.step_data or [steps_of(episode) for episode in columns.episodes]
    spans_B = _spans_of_rows(columns)
    _check_whole(columns, spans_B, steps_E)
    keys_E = [readable_keys([steps]) for steps in steps_E]
    rows: dict[str, list[Any]] = {name: [] for name in STEP_COLUMNS}
    for owner, spans in zip(columns.episodes_B.tolist(), spans_B, strict=True):
        steps = [steps_E[owner][span.step] for span in spans]
        rows["steps"].append([span.step for span in spans])
        rows["action_lengths"].append([span.stop - span.start for span in spans])
        rows["state_keys"].append([keys_E[owner][span.step] for span in spans])
        rows["step_rewards"].append([step.base_reward for step in steps])
        rows["valid_actions"].append([step.step_info.get("is_action_valid") is not False for step in steps])
    if rows["steps"] and all(len(steps) == 1 for steps in rows["steps"]):
        rows["anchor_obs"] = [keys[0] for keys in rows["state_keys"]]
    if with_episodes:
        whole_E = [_whole(columns, place, steps_E) for place in range(len(columns.episodes))]
        rows[EPISODE] = [whole_E[owner] for owner in columns.episodes_B.tolist()]
    return columns.adding(rows={name: objects(values) for name, values in rows.items()})


def objects(values: Sequence[Any]) -> Array:
    """(B,) of any objects. `np.array` would take lists apart."""
    return np.fromiter(values, dtype=object, count=len(values))


def _spans_of_rows(columns: Columns) -> list[list[ActionSpan]]:
    by_segment: list[dict[int, list[ActionSpan]]] = []
    for episode in columns.episodes:
        found: dict[int, list[ActionSpan]] = defaultdict(list)
        for span in episode.tokens.spans:
            found[span.segment].append(span)
        by_segment.append(found)
    steps: Sequence[int | None] = (
        columns.rows["step"].tolist() if "step" in columns.rows else [None] * len(columns.lengths_B)
    )
    places = zip(columns.episodes_B.tolist(), columns.rows["segment"].tolist(), steps, strict=True)
    return [
        [span for span in by_segment[owner][segment] if step is None or span.step == step]
        for owner, segment, step in places
    ]


def _check_whole(columns: Columns, spans_B: list[list[ActionSpan]], steps_E: Sequence[Sequence[StepData]]) -> None:
    """Credit looks at whole trajectories: where a row stands for some of an episode's steps, none may be missing."""
    present: dict[int, set[int]] = defaultdict(set)
    for owner, spans in zip(columns.episodes_B.tolist(), spans_B, strict=True):
        present[owner].update(span.step for span in spans)
    for owner, found in present.items():
        missing = sorted(set(range(len(steps_E[owner]))) - found)
        if missing:
            raise ConfigError(
                f"episode {columns.episodes[owner].id_}: step {missing[0]} has no tokens in these rows, and the others "
                "have; verl knows steps by their tokens. Export episodes of one policy that records all of them"
            )


def _whole(columns: Columns, place: int, steps_E: Sequence[Sequence[StepData]]) -> dict[str, Any]:
    steps = [
        {
            **{name: getattr(step, name) for name in _STEP_CREDIT},
            "step_info": {name: step.step_info[name] for name in _ALIGNED if name in step.step_info},
        }
        for step in steps_E[place]
    ]
    return {"state": columns.episodes[place].get_state(), "steps": steps}


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


_ROW_KEYS = ("rollout_id", "segment", "steps")
_CREDIT = {"advantages": "advantage", "returns": "return_to_go"}


class Returned(NamedTuple):
    """What came back.

    Attributes:
        episodes: in the order of their first rows.
        step_data_lists: for each its steps, with the rewards that they left with and the credit that they have now.
        scores: for each its score, None where it is unscored.
    """

    episodes: list[SingleAgentEpisode]
    step_data_lists: list[list[StepData]]
    scores: list[float | None]


def from_data_proto(data: Any) -> Returned:
    """The episodes of a batch that `to_data_proto` made, whatever became of its order and its number of rows.

    Where verl, or an estimator within it, has put `advantages` and `returns` into the batch, the steps have these;
    what a number was before it became a float32 it is again. An episode of which no row is left does not come back.

    Args:
        data: a `DataProto`, or rows of `verl_rows`.

    Raises:
        ConfigError: the batch was made by somebody else or without its episodes, or the tokens of a row are not those
            of its episode.
    """
    columns = data.non_tensor_batch
    if missing := [name for name in (*_ROW_KEYS, EPISODE) if name not in columns]:
        raise ConfigError(
            f"non_tensor_batch has no {missing[0]!r}{did_you_mean(missing[0], map(str, columns))} (a batch gives back "
            "the episodes that to_data_proto made it of, with_episodes=True)"
        )
    arrays = {key: np.asarray(data.batch[key]) for key in set(data.batch.keys())}
    whole = {str(name): carried for name, carried in zip(columns["rollout_id"], columns[EPISODE], strict=True)}
    episodes = {name: SingleAgentEpisode.from_state(carried["state"]) for name, carried in whole.items()}
    steps = {name: _steps(episodes[name], carried["steps"]) for name, carried in whole.items()}
    for row, name in enumerate(map(str, columns["rollout_id"])):
        spans = _spans(episodes[name], columns, row)
        begin = _check_tokens(episodes[name], arrays, spans, row, per_action="step" in columns)
        _take_credit(steps[name], arrays, spans, begin, row)
    scores = _scores(list(map(str, columns["rollout_id"])), arrays, columns)
    return Returned(list(episodes.values()), list(steps.values()), [scores[name] for name in episodes])


def _steps(episode: SingleAgentEpisode, carried: Sequence[Mapping[str, Any]]) -> list[StepData]:
    steps = []
    for step, left_with in zip(steps_of(episode), carried, strict=True):
        update = {**left_with, "step_info": {**step.step_info, **left_with["step_info"]}}
        steps.append(step.model_copy(update=update))
    return steps


def _spans(episode: SingleAgentEpisode, columns: Mapping[str, Any], row: int) -> list[ActionSpan]:
    """The actions of a row."""
    wanted = set(columns["steps"][row])
    return [span for span in episode.tokens.spans if span.step in wanted]


def _check_tokens(
    episode: SingleAgentEpisode, arrays: Mapping[str, Array], spans: list[ActionSpan], row: int, *, per_action: bool
) -> int:
    """That a row's tokens are its episode's. Returns where its response begins in them."""
    tokens = episode.tokens
    number = spans[0].segment
    start = tokens.segments[number].start
    stop = tokens.segments[number + 1].start if number + 1 < len(tokens.segments) else len(tokens)
    stop = spans[-1].stop if per_action else stop
    is_token = arrays["attention_mask"][row] != 0
    recorded, found = np.array(tokens.ids[start:stop]), arrays["input_ids"][row][is_token]
    if not np.array_equal(recorded, found):
        raise ConfigError(
            f"row {row} has {len(found)} tokens, and they are not the {len(recorded)} of episode {episode.id_}: rows "
            "that were changed, or answers that verl sampled anew, are no longer those episodes"
        )
    _check_logprobs(np.array(tokens.logprobs[start:stop]), arrays, is_token, row)
    return start + int(is_token[: arrays["prompts"].shape[1]].sum())


def _check_logprobs(recorded: Array, arrays: Mapping[str, Array], is_token: Array, row: int) -> None:
    if "rollout_log_probs" not in arrays:
        return
    width = arrays["responses"].shape[1]
    found = arrays["rollout_log_probs"][row][is_token[-width:]] if width else np.zeros(0)
    # An earlier action is part of the prompt where a row is an action, and has no log-probabilities there.
    if not np.array_equal(recorded[len(recorded) - len(found) :].astype(np.float32), found.astype(np.float32)):
        raise ConfigError(f"row {row}: rollout_log_probs are not those that the episode was sampled with")


def _take_credit(
    steps: list[StepData], arrays: Mapping[str, Array], spans: list[ActionSpan], begin: int, row: int
) -> None:
    """Writes what the batch says of a row's actions onto their steps."""
    for span in spans:
        if span.stop == span.start:
            continue  # The batch says nothing of an action without tokens.
        step, place = steps[span.step], span.start - begin
        is_masked, had_credit = arrays["response_mask"][row, place] == 0, step.advantage is not None
        for key, name in _CREDIT.items():
            if key not in arrays:
                continue
            before, now = getattr(step, name), np.float32(arrays[key][row, place])
            # A zero stands where there was nothing, too.
            if before is None and (is_masked or (had_credit and now == 0)):
                continue
            if before is None or np.float32(before) != now:
                setattr(step, name, float(now))


def _scores(names: Sequence[str], arrays: Mapping[str, Array], columns: Mapping[str, Any]) -> dict[str, float | None]:
    """Of each episode: its `episode_rewards`; without them what verl gave its rows, where any of them counts."""
    if "episode_rewards" in columns:
        pairs = zip(names, columns["episode_rewards"], strict=True)
        return {name: None if score is None or np.isnan(score) else float(score) for name, score in pairs}
    found: dict[str, float | None] = dict.fromkeys(names)
    if "rm_scores" in arrays:
        for row, name in enumerate(names):
            if arrays["response_mask"][row].any():
                found[name] = (found[name] or 0.0) + float(arrays["rm_scores"][row].sum(dtype=np.float64))
    return found
