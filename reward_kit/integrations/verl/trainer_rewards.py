"""Rewards that verl's trainer asks for itself, for whole groups, in the place of its reward loop.

For rewards that score a group in one call, or finish its scores together (`post_process_scores`): verl's reward loop
shows a reward one rollout at a time. `+reward.reward_kit.in_trainer=true` with one of reward_kit's trainers.

`RewardPipeline` is the reward agent for a `DataProto`: rewards are submitted at once and fetched as groups finish. One
step off-policy, a loop submits the next batch before it fetches the last one.
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
from reward_kit.integrations.verl.data_proto import objects
from reward_kit.integrations.verl.held_reward import SECTION, RewardOptions, RowRequests, scorer_maker
from reward_kit.reward_agent import ScoredChunk, SyncRewardAgent, Ticket
from reward_kit.reward_agent.tickets import Order
from reward_kit.rl.reward_batches import Ints, RewardBatch
from reward_kit.task_parts import SandboxLevel
from reward_kit.tokens.columns import Array


class ScoredRows(NamedTuple):
    """Rows whose rewards are there.

    Attributes:
        rows: their places in the batch that was submitted, ascending.
        data: they themselves, a `DataProto` with `rm_scores` and the same as `token_level_scores`, `response_mask` 0 on
            unscored rows, and `episode_rewards` (NaN there), `failure_class` and `failure` in `non_tensor_batch`.
        chunk: what the agent said of their rollouts.
    """

    rows: list[int]
    data: Any
    chunk: ScoredChunk


@dataclass(slots=True)
class _Submitted:
    """A batch of which not all is handed out."""

    data: Any
    rollouts_B: Ints
    ends_B: Any
    left: int


class RewardPipeline:
    """Rewards for batches of verl. Use it as a context manager.

    A rollout is the rows of one `traj_uid`; without it, each row. `group_size` rollouts that follow one another are a
    group, and have one `uid`; a reward that scores groups is called once for each.

    Args:
        reward: `file.py:function`, confined as on the command line, or a reward function or class.
        tokenizer: decodes prompts and answers.
        folder: what a file is relative to, by default the working directory.
        level: of the sandbox, for a reward that is named.
        options: the reward's own keyword parameters.
        **agent_options: those of `AsyncRewardAgent`: `max_concurrency`, `deadline_s`, `retries`, ….

    Attributes:
        agent: the reward agent.

    Raises:
        ConfigError: the reward cannot be loaded, or an option is wrong.
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
        self.agent = SyncRewardAgent(scorer_maker(reward, made, Path(folder) if folder else None)(), **agent_options)
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
        """Ask for the rewards of a batch; returns at once. `get` and `mini_batches` fetch them.

        Args:
            data: a `DataProto`, with `prompts`, `responses` and `attention_mask`.
            group_size: how many rollouts that follow one another are a group.
            deadline_s: what has no score by then is unscored.

        Raises:
            ConfigError: the rollouts do not make groups, or the rows lack something.
        """
        batch = RewardBatch.of(data)
        rollouts_B, ends_B = batch.episodes_B, batch.ends_B | batch.is_empty_B
        firsts = np.unique(rollouts_B, return_index=True)[1]
        lasts = _ends(rollouts_B, ends_B, len(firsts))
        _check_groups(data, firsts, group_size)
        requests = self._requests.of(data.select_idxs(lasts))
        ticket = self.agent.submit(requests, group_size, deadline_s=deadline_s)
        self._submitted[ticket] = _Submitted(data, rollouts_B, np.isin(np.arange(len(data)), lasts), len(requests))
        return ticket

    def compute_reward_pipeline(self, data: Any, group_size: int = 1) -> int:
        """As `submit`, for loops that keep no tickets: how many rollouts `get` will give of it."""
        return len(self.submit(data, group_size).requests)

    def get(self, rollouts: int, *, ticket: Ticket | None = None, order: Order = "completion") -> ScoredRows:
        """The rows of so many rollouts, in whole groups, once they are scored; waits for them.

        Args:
            rollouts: how many.
            ticket: of which batch; by default the oldest that is not handed out in full.
            order: "completion": groups that are done first come first; "submission": as they were submitted.

        Raises:
            RewardError: so many are not outstanding, or would cut a group.
        """
        return self._rows(self.agent.get(rollouts, ticket=ticket, order=order))

    def mini_batches(
        self, rollouts: int, *, ticket: Ticket | None = None, order: Order = "completion"
    ) -> Iterator[ScoredRows]:
        """`get` until the batch is handed out, the rest too."""
        for chunk in self.agent.mini_batches(rollouts, ticket=ticket, order=order):
            yield self._rows(chunk)

    def _rows(self, chunk: ScoredChunk) -> ScoredRows:
        submitted = self._submitted[chunk.ticket]
        submitted.left -= len(chunk.data_idxs)
        if not submitted.left:
            del self._submitted[chunk.ticket]
        rows = np.flatnonzero(np.isin(submitted.rollouts_B, chunk.data_idxs))
        data = submitted.data.select_idxs(rows)
        place_of = {rollout: place for place, rollout in enumerate(chunk.data_idxs)}
        places = np.array([place_of[rollout] for rollout in submitted.rollouts_B[rows].tolist()])
        _write_rewards(data, chunk, places, submitted.ends_B[rows])
        return ScoredRows(rows.tolist(), data, chunk)


def _ends(rollouts_B: Ints, ends_B: Any, count: int) -> Ints:
    """(R,) the row that stands for each rollout: the one that ends it, or its last one."""
    lasts = np.zeros(count, dtype=np.int64)
    lasts[rollouts_B] = np.arange(len(rollouts_B))  # of several rows the last one stays
    lasts[rollouts_B[ends_B]] = np.flatnonzero(ends_B)
    return lasts


def _check_groups(data: Any, firsts: Ints, group_size: int) -> None:
    uids = data.non_tensor_batch.get("uid")
    if uids is None or group_size <= 1:
        return
    for start in range(0, len(firsts), group_size):
        found = set(uids[firsts[start : start + group_size]].tolist())
        if len(found) > 1:
            raise ConfigError(
                f"rollouts {start} to {start + group_size - 1} are to be a group, and have {len(found)} uids; put the "
                "rollouts of one prompt one after another, group_size of them"
            )


def _write_rewards(data: Any, chunk: ScoredChunk, places_B: Ints, ends_B: Any) -> None:
    """Puts the scores of a chunk's rollouts onto their rows."""
    batch = RewardBatch.of(data)
    scores_B = chunk.rewards_B[places_B]
    is_scored = torch.from_numpy(~np.isnan(scores_B)).to(batch.device)
    mask = batch.valid_BT & is_scored[:, None]
    rewards = batch.placed(np.where(ends_B, scores_B, np.nan))
    data.batch["rm_scores"], data.batch["token_level_scores"] = rewards, rewards.clone()
    data.batch["response_mask"] = mask.to(torch.int64)
    failures = [chunk.extra_infos[place].failure for place in places_B.tolist()]
    data.non_tensor_batch["episode_rewards"] = scores_B
    data.non_tensor_batch["failure_class"] = objects([each.failure_class if each else "" for each in failures])
    data.non_tensor_batch["failure"] = objects([each.message if each else "" for each in failures])


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
