"""Test the reward agent over verl's `DataProto`: mini-batches, one step off-policy, and score positions."""

from __future__ import annotations

import math
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from anyio.from_thread import start_blocking_portal
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo import ray_trainer

from reward_kit import reward_function
from reward_kit.credit.row_credit import ROW_ESTIMATORS
from reward_kit.errors import ConfigError
from reward_kit.integrations.ray.reward_agent import RayAsyncRewardAgent
from reward_kit.integrations.verl.data_proto import from_data_proto, objects, to_data_proto
from reward_kit.integrations.verl.estimators import compute_advantage
from reward_kit.integrations.verl.row_format import DataProtoFormat
from reward_kit.integrations.verl.trainer_rewards import RewardPipeline
from reward_kit.reward_agent import AsyncRewardAgent
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
    assert len(parts) == 3 and sorted(row for part in parts for row in part.data_idxs) == list(
        range(len(batch_of(old)))
    )
    assert len(following.chunk.data_idxs) == 2 * GROUP_SIZE
    for part in [*parts, following]:
        given = new if part is following else old
        data, beside = part.data, part.data.non_tensor_batch
        expected = [score_of(given, int(name[1:])) for name in beside["rollout_id"]]
        np.testing.assert_array_equal(
            data.batch["rm_scores"].sum(dim=1),
            [
                math.nan if score is None else score * bool(is_end)
                for score, is_end in zip(expected, beside["ends_episode"], strict=True)
            ],
        )
        last = data.batch["rm_scores"].nan_to_num() != 0
        assert (data.batch["response_mask"][last] == 1).all()  # on an action, and not on a tool's answer
        unscored = np.array([score is None for score in expected])
        assert np.isnan(beside["episode_rewards"][unscored].astype(float)).all()
        assert not data.batch["response_mask"][unscored].any() and data.batch["response_mask"][~unscored].any()
        assert set(beside["failure_class"][unscored].tolist()) <= {"crash"}


JUDGE = """
from reward_kit import reward_function


@reward_function
def judge_that_fails_once(messages):
    if messages[-1].text.startswith("7"):
        raise RuntimeError("the judge is down")
    return {"score": int(messages[-1].text.split()[0]) / 4}
"""
names: dict[str, Any] = {}
exec(JUDGE, names)
judge_that_fails_once = names["judge_that_fails_once"]


VERL_ESTIMATORS = [
    "grpo",
    "grpo_vectorized",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "grpo_passk",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
]


class Numbers:
    """A tokenizer that decodes each token to its id."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))


def numbered_rows(answers: list[int]) -> Any:
    """Return one group of answers of two tokens. Token 7 makes the judge fail."""
    size = len(answers)
    return DataProto.from_dict(
        tensors={
            "prompts": torch.ones(size, 2, dtype=torch.int64),
            "responses": torch.tensor([[number, 9] for number in answers]),
            "attention_mask": torch.ones(size, 4, dtype=torch.int64),
            "response_mask": torch.ones(size, 2, dtype=torch.int64),
        },
        non_tensors={"uid": np.array(["g"] * size, dtype=object)},
    )


def group_with_a_failed_judge(answers: list[int]) -> Any:
    """Return these rows with their scores."""
    with RewardPipeline(judge_that_fails_once, Numbers()) as rewards:
        rewards.submit(numbered_rows(answers), len(answers))
        scored = rewards.get(len(answers)).data
    scored.batch["token_level_rewards"] = scored.batch["token_level_scores"]
    return scored


@pytest.mark.parametrize("name", [*VERL_ESTIMATORS, *(f"reward_kit_{name}" for name in ROW_ESTIMATORS)])
def test_unscored_row_counts_in_no_estimator(name: str) -> None:
    config = OmegaConf.create({"gamma": 1.0})
    with_failure, without = (group_with_a_failed_judge(row) for row in ([7, 1, 2, 3], [1, 2, 3]))
    for data in (with_failure, without):  # each row is one state
        data.non_tensor_batch["state_keys"] = objects([["s"]] * len(data))
    found = compute_advantage(with_failure, name, config=config).batch["advantages"]
    expected = compute_advantage(without, name, config=config).batch["advantages"]
    assert not found[0].any() and found[1:].any()
    torch.testing.assert_close(found[1:], expected)
    if name == "grpo":
        torch.testing.assert_close(found[:, 0], torch.tensor([0.0, -1.0, 0.0, 1.0]), atol=1e-4, rtol=0)


def test_verl_alone_returns_nan_for_a_group_with_an_unscored_row() -> None:
    data = group_with_a_failed_judge([7, 1, 2, 3])
    assert ray_trainer.compute_advantage(data, "grpo").batch["advantages"].isnan().all()


def test_group_without_any_score_gets_no_credit() -> None:
    data = compute_advantage(group_with_a_failed_judge([7, 7]), "grpo")
    assert not data.batch["advantages"].any() and not data.batch["returns"].any()


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


def test_groups_of_other_sizes_are_rejected(tokenizer: Any) -> None:
    refused = pytest.raises(ConfigError, match="the group with uid 'g0' has 4 rollouts, but group_size is 3")
    with RewardPipeline(by_length, tokenizer) as rewards, refused:
        rewards.submit(batch_of(collected(1, groups=3)), 3)


# One contract: the pipeline, the asynchronous agent and the actor


def interleaved() -> Any:
    """Return six rows of the groups "a" and "b" in turn; the judge fails on row 2."""
    data = numbered_rows([1, 2, 7, 3, 3, 1])
    data.non_tensor_batch["uid"] = np.array([*"ababab"], dtype=object)
    return data


class Pipeline:
    """The agents under test with one interface."""

    def __init__(self, folder: Path) -> None:
        self.agent = RewardPipeline(judge_that_fails_once, Numbers())

    def __enter__(self) -> Pipeline:
        self.agent.__enter__()
        return self

    def __exit__(self, *ended: Any) -> None:
        self.agent.__exit__(*ended)

    def compute_reward_pipeline(self, data: Any, group_size: int) -> int:
        return self.agent.compute_reward_pipeline(data, group_size)

    def get(self, *arguments: Any, **options: Any) -> Any:
        return self.agent.get(*arguments, **options)


class Asynchronous(Pipeline):
    def __init__(self, folder: Path) -> None:
        self.agent = AsyncRewardAgent(judge_that_fails_once, batch_format=DataProtoFormat(Numbers()))
        self.closing = ExitStack()

    def __enter__(self) -> Pipeline:
        self.portal = self.closing.enter_context(start_blocking_portal())
        self.closing.enter_context(self.portal.wrap_async_context_manager(self.agent))
        return self

    def __exit__(self, *ended: Any) -> None:
        self.closing.__exit__(*ended)

    def compute_reward_pipeline(self, data: Any, group_size: int) -> int:
        return self.portal.call(self.agent.compute_reward_pipeline, data, group_size)

    def get(self, *arguments: Any, **options: Any) -> Any:
        return self.portal.call(partial(self.agent.get, *arguments, **options))


class Actor(Pipeline):
    def __init__(self, folder: Path) -> None:
        (folder / "judge.py").write_text(JUDGE, encoding="utf-8")
        self.agent = RayAsyncRewardAgent.remote(
            "judge.py:judge_that_fails_once", folder, batch_format=DataProtoFormat(Numbers())
        )

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *ended: Any) -> None:
        ray.get(self.agent.shutdown.remote())
        ray.kill(self.agent)

    def compute_reward_pipeline(self, data: Any, group_size: int) -> int:
        return ray.get(self.agent.compute_reward_pipeline.remote(data, group_size))

    def get(self, *arguments: Any, **options: Any) -> Any:
        return ray.get(self.agent.get.remote(*arguments, **options))


def negated(rows: list[int], rewards: torch.Tensor, infos: dict[str, list[Any]], scale: float) -> Any:
    return rows, -scale * rewards, infos


def broken(*_: Any) -> None:
    raise RuntimeError("the hook is broken")


@pytest.mark.parametrize("kind", [Pipeline, Asynchronous, Actor])
def test_agents_return_rows_rewards_and_lists(kind: type[Pipeline], tmp_path: Path, ray_cluster: None) -> None:
    nan = math.nan
    with kind(tmp_path) as agent:
        assert agent.compute_reward_pipeline(interleaved(), group_size=3) == 6
        with pytest.raises(RuntimeError, match="the hook is broken"):
            agent.get(3, broken, order="submission")
        rows, rewards, infos = agent.get(3, order="submission")
        assert rows == [0, 2, 4]
        np.testing.assert_array_equal(rewards, [[0, 0.25], [nan, 0], [0, 0.75]])
        assert infos["score"] == [0.25, None, 0.75] and infos["failure_class"] == ["", "crash", ""]
        assert "the judge is down" in infos["failure"][1]
        rows, rewards, _ = agent.get(3, negated, scale=2.0)
        assert rows == [1, 3, 5] and rewards.tolist() == [[0, -1.0], [0, -1.5], [0, -0.5]]
        with pytest.raises(ConfigError, match="no results are outstanding"):
            agent.get(3)


def test_policy_versions_and_response_lengths_are_kept(tokenizer: Any) -> None:
    given = collected(1, groups=2)
    data = batch_of(given)
    with RewardPipeline(by_length, tokenizer) as rewards:
        rewards.submit(data, GROUP_SIZE)
        part = rewards.get(2 * GROUP_SIZE)
    assert torch.equal(part.data.batch["policy_versions"], data.batch["policy_versions"])
    ends = data.non_tensor_batch["ends_episode"].astype(bool)
    last = [int(row.nonzero()[-1]) + 1 for row in data.batch["response_mask"][torch.from_numpy(ends)]]
    assert part.chunk.lengths == last
