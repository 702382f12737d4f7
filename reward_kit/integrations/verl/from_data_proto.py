"""The way back: a `DataProto` that was made of episodes gives them again, with what verl made of them meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from reward_kit.agent.models import StepData, steps_of
from reward_kit.episodes.segments import ActionSpan
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.integrations.verl.step_columns import EPISODE
from reward_kit.tokens.columns import Array

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
