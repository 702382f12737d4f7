"""Scores of episodes by way of a reward manager: as rewards on tokens, and back as what credit is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.rl.reward_manager import RewardManager
from reward_kit.rl_processing import CreditBatch
from reward_kit.tokens import TokenBatch, build_rows


def placed_scores(
    manager: RewardManager, episodes: Sequence[SingleAgentEpisode], aligned: CreditBatch, pad_token_id: int
) -> CreditBatch:
    """The batch with the scores that the manager places on the episodes' last tokens.

    An episode without a token of the policy's bears no reward and keeps its score: no row of it is trained on, and it
    is compared with the others of its group all the same.
    """
    rows = build_rows(episodes, aligned.steps, scores=aligned.scores, pad_token_id=pad_token_id)
    if not len(rows):
        return aligned
    placed = rewards_by_episode(manager, rows)
    scores = [
        placed.get(rollout_id, score) if score is not None else None
        for rollout_id, score in zip(aligned.rollout_ids, aligned.scores, strict=True)
    ]
    return replace(aligned, scores=scores)


def rewards_by_episode(manager: RewardManager, rows: TokenBatch) -> dict[str, float]:
    """What the manager places on each episode, by rollout id; those that get nothing are absent."""
    found = manager(rows, return_dict=True)["reward_extra_info"]["score"].tolist()
    ids = rows.non_tensor_batch["rollout_id"].tolist()
    return {rollout_id: score for rollout_id, score in zip(ids, found, strict=True) if score == score}
