"""The line of `scores.jsonl` that a score becomes."""

from __future__ import annotations

from typing import Any

from reward_kit.reward_agent.scoring import Reward, Scored


def score_record(scored: Scored, reward: Reward, scorer_hash: str, group: str | None = None) -> dict[str, Any]:
    """The line of `scores.jsonl` for one score. What the reward wrote is there where it wrote something.

    Args:
        scored: the score.
        reward: what gave it.
        scorer_hash: of its files.
        group: names the episodes beside which a batch reward gave it.
    """
    output = {"stdout": scored.stdout, "stderr": scored.stderr, "is_output_cut": scored.is_output_cut}
    return {
        "rollout_id": scored.rollout_id,
        "scorer": {"id": reward.id, "hash": scorer_hash},
        **({"scored_group": group} if group is not None else {}),
        "score": scored.score,
        "result": scored.result.model_dump(mode="json", exclude_none=True) if scored.result else None,
        "failure": scored.failure.to_json() if scored.failure else None,
        "sandbox": dict(scored.sandbox) if scored.sandbox else None,
        **({"output": output} if scored.stdout or scored.stderr else {}),
        "timing": {"duration_s": round(scored.duration_s, 6)},
    }
