"""Episodes as training rows: what the model saw and sampled, what counts, and what it was worth. In NumPy.

A row is one segment of an episode (`episodes.segments`): a prompt and its completion `a1 o1 a2 o2 … aN`. Layout of a
batch of B rows, all padded on the right:

    prompt_ids      (B,P)  the tokens before the first action
    completion_ids  (B,C)  the tokens from the first action on
    input_ids       (B,T)  the two without a gap: what the model runs on
    everything else (B,T)  lies on the axis of `input_ids`

On that axis: `attention_mask` is 1 on tokens and 0 on padding, `completion_mask` is 1 on the completion, `action_mask`
is 1 where the policy sampled, `loss_mask` = completion_mask · action_mask, 0 also where the action has no advantage.
`position_ids` count from 0. `logprobs` are those of the sampler, 0.0 off the actions. `step_rewards` stand on each
action's last token; `advantages` and `returns` on all tokens of the action. `returns` are what a critic is to expect:
A + V where the policy gave a value estimate V, and else G_k, the step's `return_to_go`. `policy_versions` are -1 off
the actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from reward_kit.agent.models import StepData
from reward_kit.episodes.record import facts_of
from reward_kit.episodes.segments import TokenRow
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, EpisodeError

Array = npt.NDArray[Any]
RowIndex = slice | Sequence[int] | Array


class TokenItem(NamedTuple):
    """One row of a `TokenBatch`: the same keys without the leading axis."""

    batch: dict[str, Array]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Training rows, in the shape of verl's `DataProto`.

    Attributes:
        batch: arrays whose first axis is the row; see the module's docstring.
        non_tensor_batch: (B,) object arrays: `rollout_id`, `group_id`, `segment`.
        meta_info: facts about the whole batch: `pad_token_id`.
    """

    batch: dict[str, Array]
    non_tensor_batch: dict[str, Array] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.batch.values()), ()))

    @overload
    def __getitem__(self, index: int) -> TokenItem: ...
    @overload
    def __getitem__(self, index: RowIndex) -> TokenBatch: ...
    def __getitem__(self, index: int | RowIndex) -> TokenItem | TokenBatch:
        """The row at an int; the rows of a slice, of a list of ints or of a boolean mask, as a batch.

        Raises:
            IndexError: a row is out of range.
        """
        rows = index if isinstance(index, int | slice) else np.asarray(index)
        if isinstance(rows, np.ndarray) and not rows.size:
            rows = rows.astype(np.int64)
        batch = {key: values[rows] for key, values in self.batch.items()}
        others = {key: values[rows] for key, values in self.non_tensor_batch.items()}
        if isinstance(index, int):
            return TokenItem(batch, others, dict(self.meta_info))
        return TokenBatch(batch, others, dict(self.meta_info))

    def __iter__(self) -> Iterator[TokenItem]:
        return (self[index] for index in range(len(self)))


def build_rows(
    episodes: Sequence[SingleAgentEpisode],
    step_data_lists: Sequence[Sequence[StepData]] | None = None,
    *,
    pad_token_id: int,
) -> TokenBatch:
    """One row per segment, in the order of the episodes; an episode without tokens has none.

    Args:
        episodes: what was collected.
        step_data_lists: for each episode its steps with `advantage`, `return_to_go` and `base_reward`. A step without
            an advantage has loss_mask 0. None: no step has one.
        pad_token_id: what fills up the ids.

    Raises:
        ConfigError: there are not as many step lists as episodes.
        EpisodeError: an episode's tokens belong to a step that is not among its steps.
    """
    if step_data_lists is not None and len(step_data_lists) != len(episodes):
        raise ConfigError(f"{len(episodes)} episodes need {len(episodes)} step lists; got {len(step_data_lists)}")
    if step_data_lists is None:
        values = [_StepValues.none(len(episode)) for episode in episodes]
    else:
        values = [_StepValues.of(steps) for steps in step_data_lists]
    rows: list[tuple[TokenRow, _StepValues]] = []
    owners: list[tuple[SingleAgentEpisode, int]] = []
    for episode, step_values in zip(episodes, values, strict=True):
        for segment, row in enumerate(episode.tokens.rows()):
            _check_steps(row, step_values, episode.id_)
            rows.append((row, step_values))
            owners.append((episode, segment))
    return TokenBatch(_pad(rows, pad_token_id), _names(owners), {"pad_token_id": pad_token_id})


class _StepValues(NamedTuple):
    """What is known of an episode's steps, NaN where it is not; each (S,)."""

    advantages_S: npt.NDArray[np.float64]
    returns_S: npt.NDArray[np.float64]
    rewards_S: npt.NDArray[np.float64]

    @classmethod
    def of(cls, steps: Sequence[StepData]) -> _StepValues:
        # float64 turns None into NaN.
        advantages_S = np.array([step.advantage for step in steps], dtype=np.float64)
        values_S = np.array([step.policy_value_estimate for step in steps], dtype=np.float64)
        returns_S = np.array([step.return_to_go for step in steps], dtype=np.float64)
        return cls(
            advantages_S,
            np.where(np.isnan(values_S), returns_S, advantages_S + values_S),
            np.array([step.base_reward for step in steps], dtype=np.float64),
        )

    @classmethod
    def none(cls, steps: int) -> _StepValues:
        return cls(*(np.full(steps, np.nan) for _ in range(3)))


def _check_steps(row: TokenRow, values: _StepValues, rollout_id: str) -> None:
    known, last = len(values.advantages_S), int(row.steps.max(initial=-1))
    if last >= known:
        raise EpisodeError(f"episode {rollout_id}: tokens of step {last}, but only {known} steps are given")


def _pad(rows: Sequence[tuple[TokenRow, _StepValues]], pad_token_id: int) -> dict[str, Array]:
    """The batch's arrays."""
    prompts = np.array([len(row.prompt_ids) for row, _ in rows], dtype=np.int64)
    completions = np.array([len(row.completion_ids) for row, _ in rows], dtype=np.int64)
    totals = prompts + completions
    width = int(totals.max(initial=0))
    batch: dict[str, Array] = {
        "prompt_ids": np.full((len(rows), int(prompts.max(initial=0))), pad_token_id, dtype=np.int64),
        "completion_ids": np.full((len(rows), int(completions.max(initial=0))), pad_token_id, dtype=np.int64),
        "input_ids": np.full((len(rows), width), pad_token_id, dtype=np.int64),
        "attention_mask": (np.arange(width) < totals[:, None]).astype(np.int8),
        "policy_versions": np.full((len(rows), width), -1, dtype=np.int64),
    }
    batch["position_ids"] = np.arange(width) * batch["attention_mask"]
    batch |= {
        key: np.zeros((len(rows), width), dtype=np.int8) for key in ("completion_mask", "action_mask", "loss_mask")
    }
    for key in ("logprobs", "step_rewards", "advantages", "returns"):
        batch[key] = np.zeros((len(rows), width))
    for index, (row, values) in enumerate(rows):
        batch["prompt_ids"][index, : prompts[index]] = row.prompt_ids
        batch["completion_ids"][index, : completions[index]] = row.completion_ids
        batch["input_ids"][index, : prompts[index]] = row.prompt_ids
        part = slice(int(prompts[index]), int(totals[index]))
        for key, column in _columns(row, values).items():
            batch[key][index, part] = column
    return batch


def _columns(row: TokenRow, values: _StepValues) -> dict[str, Array]:
    """What stands on the completion of a row, each (C,)."""
    completion_mask = np.ones(len(row.completion_ids), dtype=np.int8)
    # Off the actions `steps` is -1; index 0 stands in there and the mask removes what it gives.
    steps, is_action = np.maximum(row.steps, 0), row.action_mask == 1
    advantages = np.where(is_action, _take(values.advantages_S, steps), np.nan)
    is_last = is_action & (np.append(row.steps[1:], -1) != row.steps)
    return {
        "input_ids": row.completion_ids,
        "completion_mask": completion_mask,
        "action_mask": row.action_mask,
        "loss_mask": completion_mask * row.action_mask * ~np.isnan(advantages),
        "logprobs": row.logprobs,
        "policy_versions": row.policy_versions,
        "advantages": np.nan_to_num(advantages),
        "returns": np.nan_to_num(np.where(is_action, _take(values.returns_S, steps), 0.0)),
        "step_rewards": np.nan_to_num(np.where(is_last, _take(values.rewards_S, steps), 0.0)),
    }


def _take(values_S: npt.NDArray[np.float64], steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return values_S[steps] if len(values_S) else np.full(len(steps), np.nan)


def _names(owners: Sequence[tuple[SingleAgentEpisode, int]]) -> dict[str, Array]:
    return {
        "rollout_id": np.array([episode.id_ for episode, _ in owners], dtype=object),
        "group_id": np.array([facts_of(episode).get("group_id") for episode, _ in owners], dtype=object),
        "segment": np.array([segment for _, segment in owners], dtype=object),
    }
