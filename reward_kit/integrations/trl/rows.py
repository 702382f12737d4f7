"""Episodes as what a `rollout_func` returns: one row of token ids, mask and log-probabilities for each, and extras.

A row is the episode's segment `a1 o1 a2 o2 … aN`, its ids exactly those that the model saw and sampled. What TRL calls
`env_mask` is our `action_mask`: 1 where the policy sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from reward_kit.credit.options import check_choice
from reward_kit.episodes.record import environment_return, facts_of
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError
from reward_kit.reward_agent.scoring import Scored
from reward_kit.rl_processing import CreditBatch
from reward_kit.tokens.columns import Array, Columns
from reward_kit.tokens.pipeline import row_columns

Segments = Literal["refuse", "last"]
ADVANTAGES = "token_advantages"
"""The column of advantages: for each row a number per token of the completion, 0.0 off the actions."""
_TOKENS = {"env_mask": "action_mask", "logprobs": "logprobs"}


class RowOutcome(NamedTuple):
    """What became of episodes: their scores, and what each step was worth; None where nobody asked."""

    scored: Sequence[Scored] | None = None
    credited: CreditBatch | None = None


def rollout_output(
    episodes: Sequence[SingleAgentEpisode],
    outcome: RowOutcome = RowOutcome(),  # noqa: B008 - a named tuple is never changed
    *,
    filler_id: int,
    segments: Segments = "refuse",
) -> dict[str, list[Any]]:
    """What a `rollout_func` returns for these episodes: `len(episodes)` rows, in their order.

    `prompt_ids`, `completion_ids`, `env_mask` and `logprobs`; and for reward functions `rollout_id`, `sample_id`,
    `messages`, `assistant_turns`, `stop_reason`, `failure`, `environment_return` and `num_steps`; `score` where there
    are scores, None where an episode is unscored; `token_advantages` where there is credit. An unscored episode, and an
    action without an advantage, has no part: its `env_mask` is 0. An episode that broke before anything was sampled is
    a row of two filler tokens that has no part either, because TRL wants a row for each prompt and no empty completion.

    Args:
        episodes: what was collected.
        outcome: their scores and credit.
        filler_id: the token of rows without any.
        segments: what to do with an episode whose context was rewritten, so that its tokens are several rows: "refuse",
            or train its "last" one alone.

    Raises:
        ConfigError: an episode has several segments, its log-probabilities are unknown, or a constraint was at work.
    """
    check_choice("segments", segments, get_args(Segments))
    steps = outcome.credited.steps if outcome.credited is not None else None
    columns = row_columns(episodes, steps)
    places = _rows_of(columns, segments)
    rows = [_row(columns, place, with_credit=steps is not None) if place is not None else None for place in places]
    filler: dict[str, list[Any]] = {
        "prompt_ids": [filler_id],
        "completion_ids": [filler_id],
        "env_mask": [0],
        "logprobs": [0.0],
    }
    filler |= {ADVANTAGES: [0.0]} if steps is not None else {}
    whole = [row if row and row["prompt_ids"] and row["completion_ids"] else filler for row in rows]
    made = [{key: list(values) for key, values in row.items()} for row in whole]
    output: dict[str, list[Any]] = {key: [row[key] for row in made] for key in filler}
    output |= _facts(episodes)
    if outcome.scored is not None:
        _add_scores(output, episodes, outcome)
    both = zip(output["logprobs"], output["env_mask"], strict=True)
    output["logprobs"] = [[x if sampled else 0.0 for x, sampled in zip(*row, strict=True)] for row in both]
    return output


def _rows_of(columns: Columns, segments: Segments) -> list[int | None]:
    """The row of each episode; None where nothing was sampled in it."""
    found: list[int | None] = [None] * len(columns.episodes)
    for row, owner in enumerate(columns.episodes_B.tolist()):
        if found[owner] is not None and segments == "refuse":
            raise ConfigError(_several(columns.episodes[owner]))
        found[owner] = row
    return found


def _several(episode: SingleAgentEpisode) -> str:
    reasons = ", ".join(dict.fromkeys(segment.reason for segment in episode.tokens.segments[1:]))
    return (
        f"episode {episode.id_} has {len(episode.tokens.segments)} segments ({reasons}), and TRL takes one row for an "
        "episode: use a chat template that keeps what was said as it was said, or segments='last', with which only the "
        "last segment is trained"
    )


def _row(columns: Columns, place: int, *, with_credit: bool) -> dict[str, list[Any]]:
    start, length = int(columns.starts_B[place]), int(columns.lengths_B[place])
    first = start + int(columns.prompt_lengths_B[place])
    completion = slice(first, start + length)
    ids = columns.tokens["input_ids"]
    row: dict[str, Array] = {"prompt_ids": ids[start:first], "completion_ids": ids[completion]}
    row |= {name: columns.tokens[ours][completion] for name, ours in _TOKENS.items()}
    _check_row(columns, place, row)
    if with_credit:
        row["env_mask"] = columns.tokens["loss_mask"][completion]
        row[ADVANTAGES] = columns.tokens["advantages"][completion]
    return {name: values.tolist() for name, values in row.items()}


def _check_row(columns: Columns, place: int, row: dict[str, Array]) -> None:
    """Refuse what TRL would train wrongly without a word."""
    episode = columns.episodes[int(columns.episodes_B[place])]
    if columns.rows["allowed_ids"][place] is not None:
        raise ConfigError(
            f"episode {episode.id_}: a constraint left the policy a part of the vocabulary to sample from, and TRL "
            "computes log-probabilities over all of it; set constrain to False"
        )
    if not np.isfinite(row["logprobs"]).all():
        raise ConfigError(
            f"episode {episode.id_}: the policy did not say with which log-probabilities it sampled, which TRL needs"
        )


def _facts(episodes: Sequence[SingleAgentEpisode]) -> dict[str, list[Any]]:
    facts = [facts_of(episode) for episode in episodes]
    failures = [found.get("failure") for found in facts]
    return {
        "rollout_id": [episode.id_ for episode in episodes],
        "sample_id": [found.get("sample_id") for found in facts],
        "messages": [[message.to_chat() for message in episode.messages] for episode in episodes],
        "assistant_turns": [list(episode.assistant_turns) for episode in episodes],
        "stop_reason": [found.get("stop_reason") for found in facts],
        "failure": [f"{broke['class']}: {broke['message']}" if broke else None for broke in failures],
        "environment_return": [environment_return(episode) for episode in episodes],
        "num_steps": [len(episode) for episode in episodes],
    }


def _add_scores(output: dict[str, list[Any]], episodes: Sequence[SingleAgentEpisode], outcome: RowOutcome) -> None:
    assert outcome.scored is not None
    scored = {one.rollout_id: one for one in outcome.scored}
    failures = {one.rollout_id: one.failure for one in outcome.scored}
    if outcome.credited is not None:
        failures |= outcome.credited.failures
    ordered = [episode.id_ for episode in episodes]
    output["score"] = [scored[id_].score if failures[id_] is None else None for id_ in ordered]
    told = {id_: why.to_line() for id_, why in failures.items() if why is not None}
    output["failure"] = [told.get(id_) or broke for id_, broke in zip(ordered, output["failure"], strict=True)]
    output["env_mask"] = [
        mask if score is not None else [0] * len(mask)
        for mask, score in zip(output["env_mask"], output["score"], strict=True)
    ]
