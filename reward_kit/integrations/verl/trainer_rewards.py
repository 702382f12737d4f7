"""Rewards that verl's trainer asks for itself, for whole groups, in the place of its reward loop.

For rewards that score a group in one call, or finish its scores together (`post_process_scores`): verl's reward loop
shows a reward one rollout at a time. `+reward.reward_kit.in_trainer=true` with one of reward_kit's trainers.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reward_kit.errors import ConfigError
from reward_kit.integrations.verl.held_reward import SECTION, RewardOptions
from reward_kit.integrations.verl.reward_pipeline import RewardPipeline, ScoredRows
from reward_kit.integrations.verl.step_columns import objects
from reward_kit.tokens.columns import Array

_TOKENS = ("prompts", "responses", "response_mask")
_COLUMNS = ("uid", "raw_prompt", "data_source", "reward_model", "extra_info", "extra_fields")


class TrainerRewards:
    """What a trainer of reward_kit has in the place of verl's `RewardLoopManager`.

    All groups of a batch are asked for at once. A rollout without a score has NaN as its reward, which the trainer
    leaves out of the loss.

    Args:
        config: verl's; `reward.reward_kit` has `reward`, `folder` and the keys of `RewardOptions`.
        tokenizer: decodes prompts and answers, and fills up rows.

    Raises:
        ConfigError: no reward is named or it cannot be loaded, or a key of the section is unknown or has no effect.
    """

    reward_loop_worker_handles = None
    """For verl: rollouts are not scored as they finish."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        section = dict(config.reward.reward_kit)
        section.pop("in_trainer", None)
        reward, folder = section.pop("reward", None), section.pop("folder", None)
        if reward is None:
            raise ConfigError(f"name a reward: +{SECTION}.reward=file.py:function")
        for key in ("on_unscored", "metrics"):
            if key in section:
                raise ConfigError(f"{SECTION}.{key} has no effect with in_trainer; leave it out")
        options = RewardOptions.of(section, SECTION)
        self._tokenizer = tokenizer
        self._pipeline = RewardPipeline(
            reward,
            tokenizer,
            folder=folder and Path(folder),
            level=options.level,
            options=dict(options.options),
            max_concurrency=options.max_concurrency,
            deadline_s=options.deadline_s,
        )
        self._pipeline.__enter__()

    def score(self, batch: Any) -> Any:
        """Puts `rm_scores` beside the rows of a batch in verl's queue; each score on the last sampled token, once.

        Args:
            batch: verl's `KVBatchMeta`.
        """
        queue = queue_of_verl()
        fetched = queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=[*_TOKENS, *_COLUMNS]
        )
        data = rows_of_queue(batch.keys, fetched, self._tokenizer.pad_token_id)
        rewards = self._scored(data)
        lengths = [len(row) for row in fetched["responses"].unbind()]
        rows = [rewards[row, :length] for row, length in enumerate(lengths)]
        from tensordict import TensorDict

        fields = TensorDict(
            {"rm_scores": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, batch_size=len(rows)
        )
        return queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _scored(self, data: Any) -> Tensor:
        """(B,T) the rewards of all rows, NaN in the first column of what is unscored, which no row is without."""
        uids = data.non_tensor_batch["uid"]
        groups = [np.flatnonzero(uids == uid) for uid in dict.fromkeys(uids.tolist())]
        tickets = []
        for rows in groups:
            group = data.select_idxs(rows)
            size = len(set(group.non_tensor_batch["traj_uid"].tolist()))
            tickets.append((rows, size, self._pipeline.submit(group, size)))
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for rows, size, ticket in tickets:
            rewards[torch.from_numpy(rows)] = _with_nan(self._pipeline.get(size, ticket=ticket))
        return rewards


def queue_of_verl() -> Any:
    """verl's queue, which comes with it."""
    return importlib.import_module("transfer_queue")


def _with_nan(scored: ScoredRows) -> Tensor:
    rewards: Tensor = scored.data.batch["rm_scores"].clone()
    rewards[torch.from_numpy(np.isnan(scored.data.non_tensor_batch["episode_rewards"])), 0] = float("nan")
    return rewards


def rows_of_queue(keys: list[str], fetched: Any, pad_token_id: int) -> Any:
    """Rows of verl's queue, of different lengths, as a `DataProto`: prompts padded on the left, responses on the right.

    Args:
        keys: their keys, `uid_session_output`: of a session the last output ends the rollout.
        fetched: what the queue has of them.
        pad_token_id: what fills up the ids.
    """
    from verl import DataProto

    prompts, responses, masks = (list(fetched[name].unbind()) for name in _TOKENS)
    attention = [
        _padded([torch.ones_like(row) for row in rows], 0, on_left=on_left)
        for rows, on_left in ((prompts, True), (responses, False))
    ]
    sessions, ends = sessions_of(keys)
    return DataProto.from_dict(
        tensors={
            "prompts": _padded(prompts, pad_token_id, on_left=True),
            "responses": _padded(responses, pad_token_id, on_left=False),
            "response_mask": _padded(masks, 0, on_left=False),
            "attention_mask": torch.cat(attention, dim=1),
        },
        non_tensors={
            **{name: objects(list(fetched[name])) for name in _COLUMNS if name in set(fetched.keys())},
            "traj_uid": sessions,
            "ends_episode": ends,
        },
    )


def sessions_of(keys: Sequence[str]) -> tuple[Array, Array]:
    """(B,) the session of each row, and whether it is the last output of it.

    Args:
        keys: `uid_session_output` of each row.
    """
    numbered = [key.rsplit("_", 1) for key in keys]
    last: dict[str, int] = {}
    for session, output in numbered:
        last[session] = max(last.get(session, -1), int(output))
    return objects([session for session, _ in numbered]), np.array([int(out) == last[of] for of, out in numbered])


def _padded(rows: list[Tensor], fill: int, *, on_left: bool) -> Tensor:
    side = "left" if on_left else "right"
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill, padding_side=side)
