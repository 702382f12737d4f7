"""Rewards for whole groups, which verl's trainer requests itself instead of its reward loop.

They are needed for a reward that scores a group in one call or post-processes its scores (`post_process_scores`),
because verl's reward loop passes single rollouts to a reward. Set `+reward.reward_kit.in_trainer=true` with one of
reward-kit's trainers.

`RewardPipeline` is the reward agent for a `DataProto`. `submit` returns immediately, and results can be fetched as
groups finish. A loop that is one step off-policy submits the next batch before it fetches the results of the last one.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from reward_kit.errors import ConfigError
from reward_kit.integrations.verl.compute_score import SECTION, RewardOptions, RowRequests, scorer_factory
from reward_kit.integrations.verl.data_proto import objects
from reward_kit.reward_agent import ScoredChunk, SyncRewardAgent, Ticket
from reward_kit.reward_agent.tickets import Order
from reward_kit.rl.reward_batches import Ints, RewardBatch
from reward_kit.task_parts import SandboxLevel
from reward_kit.tokens.columns import Array

_TOKENS = ("prompts", "responses", "response_mask")
_COLUMNS = ("uid", "raw_prompt", "data_source", "reward_model", "extra_info", "extra_fields")


class ScoredRows(NamedTuple):
    """Rows with their rewards.

    Attributes:
        rows: the indices in the submitted batch, in ascending order.
        data: the rows, as a `DataProto`. `rm_scores` and `token_level_scores` are equal. In an unscored row, both are
            NaN in the first column, and `response_mask` is 0. `non_tensor_batch` contains `episode_rewards` (NaN for
            unscored rows), `failure_class` and `failure`.
        chunk: the results of the agent for these rollouts.
    """

    rows: list[int]
    data: Any
    chunk: ScoredChunk


@dataclass(slots=True)
class _Submitted:
    """A batch with results that have not been fetched."""

    data: Any
    rollouts_B: Ints
    ends_B: Any
    left: int


class RewardPipeline:
    """Rewards for batches of verl. Use it as a context manager.

    A rollout consists of all rows with the same `traj_uid` or, without that column, of one row. `group_size`
    consecutive rollouts form a group and have the same `uid`. A reward that scores groups is called once for each
    group.

    Args:
        reward: `file.py:function`, which runs in a sandbox as on the command line, or a reward function or class.
        tokenizer: the tokenizer that decodes prompts and answers.
        folder: the directory for relative file paths. The default is the working directory.
        level: the sandbox level of a reward that is passed by name.
        options: keyword arguments that are always passed to the reward.
        **agent_options: the options of `AsyncRewardAgent`: `max_concurrency`, `deadline_s`, `retries`, ….

    Attributes:
        agent: the reward agent.

    Raises:
        ConfigError: If the reward cannot be loaded, or an option is invalid.
    """

    def __init__(
        self,
        reward: Any,
        tokenizer: Any,
        *,
        folder: str | Path | None = None,
        level: SandboxLevel | None = None,
        options: dict[str, Any] | None = None,
        **agent_options: Any,
    ) -> None:
        made = RewardOptions(level=level, options=options or {})
        self.agent = SyncRewardAgent(scorer_factory(reward, made, Path(folder) if folder else None)(), **agent_options)
        self._requests = RowRequests(tokenizer)
        self._submitted: dict[Ticket, _Submitted] = {}

    def __enter__(self) -> Self:
        self.agent.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._submitted.clear()
        self.agent.__exit__(kind, error, trace)

    def submit(self, data: Any, group_size: int = 1, *, deadline_s: float | None = None) -> Ticket:
        """Request the rewards of a batch and return immediately. `get` and `mini_batches` fetch the results.

        Args:
            data: a `DataProto` with `prompts`, `responses` and `attention_mask`.
            group_size: the number of consecutive rollouts in a group.
            deadline_s: the time limit in seconds after which a rollout without a score is unscored.

        Raises:
            ConfigError: If the rollouts do not form groups, or the rows are incomplete.
        """
        batch = RewardBatch.of(data)
        rollouts_B, ends_B = batch.episodes_B, batch.ends_B | batch.is_empty_B
        firsts = np.unique(rollouts_B, return_index=True)[1]
        # The row that represents a rollout: the row that ends it, or its last row.
        lasts = np.zeros(len(firsts), dtype=np.int64)
        lasts[rollouts_B] = np.arange(len(rollouts_B))
        lasts[rollouts_B[ends_B]] = np.flatnonzero(ends_B)
        uids = data.non_tensor_batch.get("uid")
        for start in range(0, len(firsts), group_size) if uids is not None and group_size > 1 else ():
            known = set(uids[firsts[start : start + group_size]].tolist())
            if len(known) > 1:
                raise ConfigError(
                    f"rollouts {start} to {start + group_size - 1} form a group, but have {len(known)} uids; "
                    "pass the group_size rollouts of each prompt consecutively"
                )
        requests = self._requests.of(data.select_idxs(lasts))
        ticket = self.agent.submit(requests, group_size, deadline_s=deadline_s)
        self._submitted[ticket] = _Submitted(data, rollouts_B, np.isin(np.arange(len(data)), lasts), len(requests))
        return ticket

    def compute_reward_pipeline(self, data: Any, group_size: int = 1) -> int:
        """Submit a batch without a ticket, and return the number of its rollouts for `get`."""
        return len(self.submit(data, group_size).requests)

    def get(self, rollouts: int, *, ticket: Ticket | None = None, order: Order = "completion") -> ScoredRows:
        """Wait until the next `rollouts` rollouts, in whole groups, are scored, and return their rows.

        Args:
            rollouts: the number of rollouts.
            ticket: the ticket of the batch. The default is the oldest batch that has results left.
            order: "completion" returns the groups that finish first; "submission" returns those that were submitted
                first.

        Raises:
            RewardError: If there are fewer rollouts left, or the number would split a group.
        """
        return self._rows(self.agent.get(rollouts, ticket=ticket, order=order))

    def mini_batches(
        self, rollouts: int, *, ticket: Ticket | None = None, order: Order = "completion"
    ) -> Iterator[ScoredRows]:
        """Call `get` until the batch has no results left. The last part may be smaller."""
        for chunk in self.agent.mini_batches(rollouts, ticket=ticket, order=order):
            yield self._rows(chunk)

    def _rows(self, chunk: ScoredChunk) -> ScoredRows:
        """Return the rows of the rollouts in a chunk, with their scores."""
        submitted = self._submitted[chunk.ticket]
        submitted.left -= len(chunk.data_idxs)
        if not submitted.left:
            del self._submitted[chunk.ticket]
        rows = np.flatnonzero(np.isin(submitted.rollouts_B, chunk.data_idxs))
        data = submitted.data.select_idxs(rows)
        index_of = {rollout: index for index, rollout in enumerate(chunk.data_idxs)}
        chunk_index_B = np.array([index_of[rollout] for rollout in submitted.rollouts_B[rows].tolist()])
        batch, scores_B = RewardBatch.of(data), chunk.rewards_B[chunk_index_B]
        is_scored = torch.from_numpy(~np.isnan(scores_B)).to(batch.device)
        rewards = batch.placed(np.where(submitted.ends_B[rows], scores_B, np.nan))
        # An estimator that does not know of unscored rows returns NaN for their group, instead of counting zeros. The
        # first column exists in every row.
        rewards[~is_scored, 0] = float("nan")
        data.batch["response_mask"] = (batch.valid_BT & is_scored[:, None]).to(torch.int64)
        data.batch["rm_scores"], data.batch["token_level_scores"] = rewards, rewards.clone()
        failures = [chunk.extra_infos[index].failure for index in chunk_index_B.tolist()]
        data.non_tensor_batch["episode_rewards"] = scores_B
        data.non_tensor_batch["failure_class"] = objects([each.failure_class if each else "" for each in failures])
        data.non_tensor_batch["failure"] = objects([each.message if each else "" for each in failures])
        return ScoredRows(rows.tolist(), data, chunk)


class TrainerRewards:
    """Replaces verl's `RewardLoopManager` in a trainer of reward-kit.

    It requests all groups of a batch at once. The reward of an unscored rollout is NaN, and the trainer excludes it
    from the loss. `reward.reward_kit` contains `reward`, `folder` and the keys of `RewardOptions`.

    Raises:
        ConfigError: If no reward is set, it cannot be loaded, or a key of the section is unknown or has no effect.
    """

    reward_loop_worker_handles = None
    """None, so that verl does not score rollouts as they finish."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        section = dict(config.reward.reward_kit)
        section.pop("in_trainer", None)
        reward, folder = section.pop("reward", None), section.pop("folder", None)
        if reward is None:
            raise ConfigError(f"no reward is set; set +{SECTION}.reward=file.py:function")
        for key in ("on_unscored", "metrics"):
            if key in section:
                raise ConfigError(f"{SECTION}.{key} has no effect with in_trainer; remove it")
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
        """Write `rm_scores` to the rows of a `KVBatchMeta`. Each score is written once, at the last sampled token."""
        from tensordict import TensorDict

        queue = import_verl_queue()
        fetched = queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=[*_TOKENS, *_COLUMNS]
        )
        data = _rows_of_queue(batch.keys, fetched, self._tokenizer.pad_token_id)
        uids = data.non_tensor_batch["uid"]
        tickets = []
        for uid in dict.fromkeys(uids.tolist()):
            rows = np.flatnonzero(uids == uid)
            group = data.select_idxs(rows)
            size = len(set(group.non_tensor_batch["traj_uid"].tolist()))
            tickets.append((rows, size, self._pipeline.submit(group, size)))
        rewards_BT = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for rows, size, ticket in tickets:
            rewards_BT[torch.from_numpy(rows)] = self._pipeline.get(size, ticket=ticket).data.batch["rm_scores"]
        unpadded = [rewards_BT[row, : len(ids)] for row, ids in enumerate(fetched["responses"].unbind())]
        nested = torch.nested.as_nested_tensor(unpadded, layout=torch.jagged)
        fields = TensorDict({"rm_scores": nested}, batch_size=len(unpadded))
        return queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def import_verl_queue() -> Any:
    """Return the module of verl's queue, which is installed with verl."""
    return importlib.import_module("transfer_queue")


def _rows_of_queue(keys: list[str], fetched: Any, pad_token_id: int) -> Any:
    """Return rows of verl's queue as a `DataProto`, with prompts padded on the left and responses on the right."""
    from verl import DataProto

    def padded(rows: list[Tensor], fill: int, side: str) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill, padding_side=side)

    prompts, responses, masks = (list(fetched[name].unbind()) for name in _TOKENS)
    attention = [
        padded([torch.ones_like(row) for row in rows], 0, side)
        for rows, side in ((prompts, "left"), (responses, "right"))
    ]
    sessions, ends = parse_sessions(keys)
    return DataProto.from_dict(
        tensors={
            "prompts": padded(prompts, pad_token_id, "left"),
            "responses": padded(responses, pad_token_id, "right"),
            "response_mask": padded(masks, 0, "right"),
            "attention_mask": torch.cat(attention, dim=1),
        },
        non_tensors={
            **{name: objects(list(fetched[name])) for name in _COLUMNS if name in set(fetched.keys())},
            "traj_uid": sessions,
            "ends_episode": ends,
        },
    )


def parse_sessions(keys: Sequence[str]) -> tuple[Array, Array]:
    """Return (B,) the session in each `uid_session_output` key, and True for the last output of each session."""
    numbered = [key.rsplit("_", 1) for key in keys]
    last: dict[str, int] = {}
    for session, output in numbered:
        last[session] = max(last.get(session, -1), int(output))
    return objects([session for session, _ in numbered]), np.array([int(out) == last[of] for of, out in numbered])
