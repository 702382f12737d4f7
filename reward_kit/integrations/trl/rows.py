"""Conversion of episodes to the result of a `rollout_func`, with one row for each episode.

A row contains a segment `a1 o1 a2 o2 … aN` of the episode with exactly the token ids that the model read and sampled.
It also contains their mask, their log-probabilities, and additional columns. TRL's `env_mask` is reward-kit's
`action_mask`: 1 for tokens that the policy sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from reward_kit.credit.state_hashes import readable_keys
from reward_kit.episodes.record import environment_return, get_facts
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError
from reward_kit.reward_agent.scoring import Scored
from reward_kit.rl_processing import CreditAssigner, CreditBatch
from reward_kit.tokens.columns import Columns
from reward_kit.tokens.pipeline import row_columns
from reward_kit.validation import check_choice

Segments = Literal["refuse", "last"]
ADVANTAGES = "token_advantages"
"""The column of advantages. For each row, it has one number per token of the completion, 0.0 outside the actions."""


class RowOutcome(NamedTuple):
    """The scores and the credit of episodes. Each is `None` if it is not computed here."""

    scored: Sequence[Scored] | None = None
    credited: CreditBatch | None = None


def rollout_output(
    episodes: Sequence[SingleAgentEpisode],
    outcome: RowOutcome = RowOutcome(),  # noqa: B008 - a named tuple is never changed
    *,
    filler_id: int,
    segments: Segments = "refuse",
) -> dict[str, list[Any]]:
    """Convert episodes to the result of a `rollout_func`. The result has a row for each episode, in the same order.

    The columns are `prompt_ids`, `completion_ids`, `env_mask` and `logprobs`. For reward functions, there are also
    `rollout_id`, `sample_id`, `messages`, `assistant_turns`, `stop_reason`, `failure`, `environment_return` and
    `num_steps`. For `token_advantages`, there are `action_lengths`, `step_rewards` and `state_keys`, which have an item
    for each action of the row. Without credit, the step rewards are the step outputs of the reward or, if the reward
    returns no step outputs, the rewards of the environment. If scores are computed, there is a column `score`, which is
    `None` for an unscored episode. If credit is computed, there is a column `token_advantages`.

    Unscored episodes and actions without an advantage are excluded from training: their `env_mask` is 0. TRL requires a
    row for each prompt and rejects empty completions. If an episode failed before the policy sampled a token, its row
    therefore consists of two filler tokens and is excluded as well.

    Args:
        episodes: the episodes that were collected for TRL's prompts.
        outcome: the scores and the credit of the episodes.
        filler_id: the token id for rows without sampled tokens.
        segments: what to do with an episode whose context was rewritten, so that its tokens form multiple segments:
            "refuse" it, or train only on its "last" segment.

    Raises:
        ConfigError: If an episode has multiple segments, if its log-probabilities are unknown, or if its tokens were
            sampled under a constraint.
    """
    check_choice("segments", segments, get_args(Segments))
    steps = outcome.credited.steps if outcome.credited is not None else None
    columns = row_columns(episodes, steps)
    row_of_episode: dict[int, int] = {}
    for row, owner in enumerate(columns.episodes_B.tolist()):
        if owner in row_of_episode and segments == "refuse":
            tokens = columns.episodes[owner].tokens
            reasons = ", ".join(dict.fromkeys(segment.reason for segment in tokens.segments[1:]))
            raise ConfigError(
                f"episode {columns.episodes[owner].id_} has {len(tokens.segments)} segments ({reasons}), but "
                "TRL supports one row per episode; use a chat template that keeps earlier messages "
                "unchanged, or set segments='last' to train only on the last segment"
            )
        row_of_episode[owner] = row
    filler: dict[str, list[Any]] = {
        "prompt_ids": [filler_id],
        "completion_ids": [filler_id],
        "env_mask": [0],
        "logprobs": [0.0],
    }
    filler |= {ADVANTAGES: [0.0]} if steps is not None else {}
    rows = []
    for owner in range(len(episodes)):
        row_tokens = (
            _tokens_of_row(columns, row_of_episode[owner], steps is not None) if owner in row_of_episode else {}
        )
        rows.append(row_tokens if row_tokens.get("prompt_ids") and row_tokens["completion_ids"] else filler)
    facts = [get_facts(episode) for episode in episodes]
    failures = [each.get("failure") for each in facts]
    output: dict[str, list[Any]] = {key: [list(row[key]) for row in rows] for key in filler} | {
        "rollout_id": [episode.id_ for episode in episodes],
        "sample_id": [each.get("sample_id") for each in facts],
        "messages": [[message.to_chat() for message in episode.messages] for episode in episodes],
        "assistant_turns": [list(episode.assistant_turns) for episode in episodes],
        "stop_reason": [each.get("stop_reason") for each in facts],
        "failure": [f"{failure['class']}: {failure['message']}" if failure else None for failure in failures],
        "environment_return": [environment_return(episode) for episode in episodes],
        "num_steps": [len(episode) for episode in episodes],
    }
    output |= _actions(columns, [row_of_episode.get(owner) for owner in range(len(episodes))], outcome)
    if outcome.scored is not None:
        _add_scores(output, outcome)
    output["logprobs"] = [
        [logprob if is_sampled else 0.0 for logprob, is_sampled in zip(*row, strict=True)]
        for row in zip(output["logprobs"], output["env_mask"], strict=True)
    ]
    return output


def _tokens_of_row(columns: Columns, row: int, with_credit: bool) -> dict[str, list[Any]]:
    """Return the columns that contain tokens. Raise an error if TRL would silently train incorrectly on the row."""
    episode = columns.episodes[int(columns.episodes_B[row])]
    start, length = int(columns.starts_B[row]), int(columns.lengths_B[row])
    first = start + int(columns.prompt_lengths_B[row])
    completion = slice(first, start + length)
    if columns.rows["allowed_ids"][row] is not None:
        raise ConfigError(
            f"episode {episode.id_}: a constraint restricted sampling to part of the vocabulary, but TRL "
            "computes log-probabilities over the whole vocabulary; set constrain to False"
        )
    if not np.isfinite(columns.tokens["logprobs"][completion]).all():
        raise ConfigError(f"episode {episode.id_}: TRL needs log-probabilities, but the policy did not record any")
    tokens = {
        "prompt_ids": columns.tokens["input_ids"][start:first],
        "completion_ids": columns.tokens["input_ids"][completion],
        "env_mask": columns.tokens["loss_mask" if with_credit else "action_mask"][completion],
        "logprobs": columns.tokens["logprobs"][completion],
    }
    tokens |= {ADVANTAGES: columns.tokens["advantages"][completion]} if with_credit else {}
    return {name: values.tolist() for name, values in tokens.items()}


def _actions(columns: Columns, row_of_episode: Sequence[int | None], outcome: RowOutcome) -> dict[str, list[list[Any]]]:
    """Return the columns that have an item for each action of an episode's row, for `token_advantages`."""
    credited = outcome.credited
    if credited is None:
        # If there are no scores, only the rewards of the environment are known.
        scored = outcome.scored or [Scored(episode.id_, None) for episode in columns.episodes]
        credited = CreditAssigner(step_rewards="environment").align(columns.episodes, scored)
    keys_E = [readable_keys([steps], credited.state_hash) for steps in credited.steps]
    output: dict[str, list[list[Any]]] = {"action_lengths": [], "step_rewards": [], "state_keys": []}
    for owner, (row, steps) in enumerate(zip(row_of_episode, credited.steps, strict=True)):
        segment = None if row is None else columns.rows["segment"][row]
        spans = [span for span in columns.episodes[owner].tokens.spans if span.segment == segment]
        output["action_lengths"].append([span.stop - span.start for span in spans])
        output["step_rewards"].append([steps[span.step].base_reward for span in spans])
        output["state_keys"].append([keys_E[owner][span.step] for span in spans])
    return output


def _add_scores(output: dict[str, list[Any]], outcome: RowOutcome) -> None:
    scores = {one.rollout_id: one.score for one in outcome.scored or ()}
    failures = {one.rollout_id: one.failure for one in outcome.scored or ()}
    if outcome.credited is not None:
        failures |= outcome.credited.failures
    output["score"] = []
    for row, rollout_id in enumerate(output["rollout_id"]):
        failure = failures[rollout_id]
        score = scores[rollout_id] if failure is None else None
        output["score"].append(score)
        if failure is not None:
            output["failure"][row] = failure.to_line() or output["failure"][row]
        if score is None:
            output["env_mask"][row] = [0] * len(output["env_mask"][row])
