"""Test the reward agent over verl's `DataProto`: mini-batches, one step off-policy, and score positions."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from reward_kit import reward_function
from reward_kit.errors import ConfigError
from reward_kit.integrations.verl.data_proto import from_data_proto, to_data_proto
from reward_kit.integrations.verl.estimators import compute_advantage
from reward_kit.integrations.verl.trainer_rewards import RewardPipeline
from reward_kit.rl_helpers import system_apply_gigpo_to_batch_steps
from tests.integrations.verl_episodes import GROUP_SIZE, Collected, collected

pytestmark = pytest.mark.campaign


@reward_function
def by_length(messages, assistant_turns, rollout_id):
    if rollout_id == "r2":
        raise ValueError("no answer")
    return {"score": len(assistant_turns) / 8}


def score_of(given: Collected, number: int) -> float | None:
    return None if number == 2 else len(given.episodes[number]) / 8


def batch_of(given: Collected) -> Any:
    return to_data_proto(given.episodes, given.steps, pad_token_id=0)


def test_mini_batches_of_two_batches_keep_every_score_in_place(tokenizer: Any) -> None:
    old, new = collected(1, groups=3), collected(2, groups=3)
    with RewardPipeline(by_length, tokenizer, max_concurrency=4) as rewards:
        # One step off: the next batch is asked for before the last one is fetched.
        first = rewards.submit(batch_of(old), GROUP_SIZE)
        assert rewards.compute_reward_pipeline(batch_of(new), GROUP_SIZE) == len(new.episodes)
        parts = list(rewards.mini_batches(GROUP_SIZE, ticket=first))
        following = rewards.get(2 * GROUP_SIZE, order="submission")
    assert len(parts) == 3 and sorted(row for part in parts for row in part.rows) == list(range(len(batch_of(old))))
    assert len(following.chunk.data_idxs) == 2 * GROUP_SIZE
    for part in [*parts, following]:
        given = new if part is following else old
        data, beside = part.data, part.data.non_tensor_batch
        expected = [score_of(given, int(name[1:])) for name in beside["rollout_id"]]
        assert data.batch["rm_scores"].sum(dim=1).tolist() == [
            (score or 0.0) * bool(is_end) for score, is_end in zip(expected, beside["ends_episode"], strict=True)
        ]
        last = data.batch["rm_scores"] != 0
        assert (data.batch["response_mask"][last] == 1).all()  # on an action, and not on a tool's answer
        unscored = np.array([score is None for score in expected])
        assert np.isnan(beside["episode_rewards"][unscored].astype(float)).all()
        assert not data.batch["response_mask"][unscored].any() and data.batch["response_mask"][~unscored].any()
        assert set(beside["failure_class"][unscored].tolist()) <= {"crash"}


def test_mini_batch_credit_equals_whole_batch_credit(tokenizer: Any) -> None:
    given = collected(6, groups=3)
    scores = [score_of(given, number) for number in range(len(given.episodes))]
    wanted = system_apply_gigpo_to_batch_steps(given.steps, scores, 0.5, 0.95, "state_key", group_ids=given.group_ids)
    seen = 0
    with RewardPipeline(by_length, tokenizer) as rewards:
        rewards.submit(batch_of(given), GROUP_SIZE)
        for part in rewards.mini_batches(GROUP_SIZE):
            part.data.batch["token_level_rewards"] = part.data.batch["token_level_scores"]
            data = compute_advantage(part.data, "reward_kit_gigpo", config=OmegaConf.create({"gamma": 0.95}))
            back = from_data_proto(data)
            for episode, steps in zip(back.episodes, back.step_data_lists, strict=True):
                theirs = [step.advantage for step in wanted[int(episode.id_[1:])]]
                assert [step.advantage for step in steps] == pytest.approx(theirs, abs=1e-6)
                seen += 1
    assert seen == len(given.episodes)


def test_groups_are_returned_on_completion_despite_a_slow_one(tokenizer: Any) -> None:
    given, freed = collected(1, groups=2), threading.Event()

    @reward_function
    def held_up(messages, rollout_id):
        if rollout_id == "r1":
            freed.wait(60)
        return {"score": 1.0}

    with RewardPipeline(held_up, tokenizer, max_concurrency=4) as rewards:
        rewards.submit(batch_of(given), GROUP_SIZE)
        quick = rewards.get(GROUP_SIZE)
        freed.set()
        slow = rewards.get(GROUP_SIZE)
    assert set(quick.data.non_tensor_batch["uid"].tolist()) == {"g1"}
    assert set(slow.data.non_tensor_batch["uid"].tolist()) == {"g0"}


def test_group_reward_is_called_once_per_group(tokenizer: Any) -> None:
    given, sizes = collected(1, groups=2), []

    @reward_function(mode="batch")
    def ranked(rollouts_messages):
        sizes.append(len(rollouts_messages))
        return [{"score": place / 4} for place in range(len(rollouts_messages))]

    with RewardPipeline(ranked, tokenizer) as rewards:
        rewards.submit(batch_of(given), GROUP_SIZE)
        found = rewards.get(2 * GROUP_SIZE, order="submission")
    assert sizes == [GROUP_SIZE] * 2 and found.chunk.rewards == [0.0, 0.25, 0.5, 0.75] * 2


def test_split_groups_are_rejected(tokenizer: Any) -> None:
    refused = pytest.raises(ConfigError, match="rollouts 3 to 5 form a group, but have 2 uids")
    with RewardPipeline(by_length, tokenizer) as rewards, refused:
        rewards.submit(batch_of(collected(1, groups=3)), 3)
