"""`DataProtoFormat`, which lets a reward agent score the rows of a `DataProto` and return token rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError
from reward_kit.integrations.verl.data_proto import EPISODE, objects
from reward_kit.reward_agent import ScoredChunk, ScoringRequest
from reward_kit.rl.reward_batches import Bools, Ints, RewardBatch
from reward_kit.rl.reward_manager import NaiveRewardManager, RewardManager, Tokenizer, check_tokenizer, result_facts


class RowRequests(NaiveRewardManager):
    """A factory that creates the scoring request for a row.

    If the row contains an episode, the request is for this episode. Otherwise, the request contains the prompt and the
    decoded answer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        RewardManager.__init__(self, tokenizer, 0)
        check_tokenizer(tokenizer)

    def of(self, data: Any) -> list[ScoringRequest]:
        """Return the request for each row.

        Raises:
            ConfigError: If a column of a row is missing or invalid.
        """
        carried = [_carried_episode(data.non_tensor_batch, row) for row in range(len(data))]
        decoded = self._requests(RewardBatch.of(data)) if None in carried else []
        return [
            decoded[row] if episode is None else ScoringRequest.from_episode(episode)
            for row, episode in enumerate(carried)
        ]


def _carried_episode(columns: Mapping[str, Any], row: int) -> SingleAgentEpisode | None:
    """Return the episode in a row's columns or in its agent loop's `extra_fields`, or None if there is none.

    In verl's reward loop, these fields are called `tool_extra_fields`.
    """
    carried = columns[EPISODE][row] if EPISODE in columns else None
    for name in ("extra_fields", "tool_extra_fields"):
        if carried is None and name in columns:
            carried = (columns[name][row] or {}).get(EPISODE)
    return None if carried is None else SingleAgentEpisode.from_state(carried["state"])


class _RewardColumns(NamedTuple):
    data_idxs: list[int]
    reward_tensor: Tensor
    reward_extra_infos: dict[str, list[Any]]


class ScoredRows(_RewardColumns):
    """Rows of a `DataProto` with their rewards. They unpack as (data_idxs, reward_tensor, reward_extra_infos).

    Attributes:
        data_idxs: the indices of the rows in the submitted batch, in ascending order.
        reward_tensor: a (rows, T) float32 tensor with the rewards of the response tokens, on the batch's device. The
            score of a rollout is on the last sampled token of its last row. For an unscored row, the first column is
            NaN.
        reward_extra_infos: a list for each name, with one item per row. The names are `score` (None if unscored),
            `failure_class`, `failure`, and those of the metrics and other values in the results.
        data: the rows, as a `DataProto`. `rm_scores` and `token_level_scores` are the reward tensor, and
            `response_mask` is 0 for unscored rows. `non_tensor_batch` also contains `episode_rewards` (NaN for
            unscored rows), `failure_class` and `failure`.
        chunk: the results of the agent for these rollouts.
    """

    data: Any
    chunk: ScoredChunk


class DataProtoFormat:
    """The `batch_format` of a reward agent for verl batches.

    A rollout consists of all rows with the same `traj_uid`. If this column is missing, each row is a rollout. Rollouts
    with the same `uid` form a group and do not have to be adjacent. If there is no `uid`, a group consists of adjacent
    rollouts.

    Args:
        tokenizer: the tokenizer that decodes prompts and answers.

    Raises:
        ConfigError: If the tokenizer cannot decode.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._row_requests = RowRequests(tokenizer)

    def arrange(self, data: Any, group_size: int) -> _Arrangement | None:
        """Return the scoring requests and the rows of a `DataProto`, or None if `data` is not a `DataProto`.

        Raises:
            ConfigError: If the rollouts do not form groups, or if the rows are incomplete.
        """
        return _Arrangement(data, group_size, self._row_requests) if hasattr(data, "non_tensor_batch") else None


class _Arrangement:
    """The rows of a submitted batch, and the requests for its rollouts, ordered by group."""

    def __init__(self, data: Any, group_size: int, row_requests: RowRequests) -> None:
        batch = RewardBatch.of(data)
        rollouts_B = batch.episodes_B
        firsts = np.unique(rollouts_B, return_index=True)[1]
        order = _by_group(data.non_tensor_batch.get("uid"), firsts, group_size)
        # The row that represents a rollout is the row that ends the rollout, or its last row.
        ends_B: Bools = batch.ends_B | batch.is_empty_B
        lasts = np.zeros(len(firsts), dtype=np.int64)
        lasts[rollouts_B] = np.arange(len(rollouts_B))
        lasts[rollouts_B[ends_B]] = np.flatnonzero(ends_B)
        self._data = data
        self._request_B = np.argsort(order)[rollouts_B]
        self._ends_B = np.isin(np.arange(len(rollouts_B)), lasts)
        # The number of response tokens up to the last sampled token.
        lengths = (batch.last_B[lasts[order]] + 1).tolist()
        self.requests = [
            replace(request, extra={**request.extra, "response_length": length})
            for request, length in zip(row_requests.of(data.select_idxs(lasts[order])), lengths, strict=True)
        ]

    def result(self, chunk: ScoredChunk) -> ScoredRows:
        """Return the rows and the scores of the rollouts in a chunk."""
        rows = np.flatnonzero(np.isin(self._request_B, chunk.data_idxs))
        index_of = {request: index for index, request in enumerate(chunk.data_idxs)}
        index_B = np.array([index_of[request] for request in self._request_B[rows].tolist()], dtype=np.int64)
        data = self._data.select_idxs(rows)
        batch, scores_B = RewardBatch.of(data), chunk.rewards_B[index_B]
        is_scored = torch.from_numpy(~np.isnan(scores_B)).to(batch.device)
        rewards = batch.placed(np.where(self._ends_B[rows], scores_B, np.nan))
        # An estimator that does not handle unscored rows returns NaN for their group instead of counting zeros. The
        # first column exists in every row.
        rewards[~is_scored, 0] = float("nan")
        facts = [result_facts(chunk.extra_infos[index]) for index in index_B.tolist()]
        infos: dict[str, list[Any]] = {"score": [chunk.rewards[index] for index in index_B.tolist()]}
        for name in dict.fromkeys(name for one in facts for name in one):
            infos[name] = [one.get(name) for one in facts]
        data.batch["response_mask"] = (batch.valid_BT & is_scored[:, None]).to(torch.int64)
        data.batch["rm_scores"], data.batch["token_level_scores"] = rewards, rewards.clone()
        data.non_tensor_batch["episode_rewards"] = scores_B
        for name in ("failure_class", "failure"):
            data.non_tensor_batch[name] = objects(infos[name])
        scored = ScoredRows(rows.tolist(), rewards, infos)
        scored.data, scored.chunk = data, chunk
        return scored


def _by_group(uids: Any, firsts: Ints, group_size: int) -> Ints:
    """Return the rollouts ordered by group. `firsts` is the first row of each rollout."""
    if uids is None or group_size == 1:
        return np.arange(len(firsts))
    members: dict[Any, list[int]] = {}
    for rollout, uid in enumerate(uids[firsts].tolist()):
        members.setdefault(uid, []).append(rollout)
    for uid, rollouts in members.items():
        if len(rollouts) != group_size:
            raise ConfigError(
                f"the group with uid {uid!r:.80} has {len(rollouts)} rollouts, but group_size is {group_size}; pass "
                "whole groups that all have this size"
            )
    return np.array([rollout for rollouts in members.values() for rollout in rollouts], dtype=np.int64)
