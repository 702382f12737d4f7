"""The reward agent for verl's `DataProto`: rewards are asked for at once, and fetched as groups are done.

One step off-policy, a loop submits the next batch before it fetches the last one, and updates by mini-batches while
the other rewards are still being made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from reward_kit.errors import ConfigError
from reward_kit.integrations.verl.held_reward import RewardOptions, scorer_maker
from reward_kit.integrations.verl.row_requests import RowRequests
from reward_kit.integrations.verl.step_columns import objects
from reward_kit.reward_agent import ScoredChunk, SyncRewardAgent, Ticket
from reward_kit.reward_agent.tickets import Order
from reward_kit.rl.reward_manager.batches import Ints, RewardBatch
from reward_kit.task_parts import SandboxLevel


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
