"""Regression tests for defects known from the row building of other training stacks."""

from __future__ import annotations

import numpy as np
import pytest

from reward_kit.agent.models import episode_steps
from reward_kit.rl_helpers import ESTIMATORS, with_credit
from reward_kit.tokens import TokenBatch, build_rows, micro_batches
from tests.tokens.episode_strategies import PAD, PlayedEpisode, play

# Two rollouts of a group, of different length, in rows that do not stand together.
FIRST = [([1], [2, 3]), ([1, 2, 3, 4], [5]), ([9], [6, 7])]
SECOND = [([1], [8])]


def group() -> list[PlayedEpisode]:
    made = [play("a", FIRST), play("b", SECOND)]
    for one, won in zip(made, (True, False), strict=True):
        one.episode.custom_data["group_id"] = "g"
        one.episode.get_infos(-1)["success"] = won
    return made


@pytest.mark.parametrize("padding", ["right", "left", "outer"])
@pytest.mark.parametrize("per", ["segment", "action"])
def test_empty_response_puts_no_reward_into_padding(per: str, padding: str) -> None:
    """verl indexes `valid length - 1`, which is -1 here and hits the padding."""
    made = [play("empty", [([1], [])], [{"base_reward": 5.0, "advantage": 1.0}]), play("other", [([1], [2, 3])])]
    batch = build_rows(
        [one.episode for one in made], [one.steps for one in made], pad_token_id=PAD, per=per, padding=padding
    )
    for key in ("step_rewards", "advantages", "loss_mask", "action_mask"):
        assert not batch.batch[key][batch.non_tensor_batch["rollout_id"] == "empty"].any()
    assert not batch.non_tensor_batch["ends_episode"][batch.non_tensor_batch["rollout_id"] == "empty"].any()


def test_empty_last_action_moves_episode_end_to_previous_row() -> None:
    made = play("r", [([1], [2]), ([9], [])])
    batch = build_rows([made.episode], pad_token_id=PAD)
    assert batch.non_tensor_batch["ends_episode"].tolist() == [True, False]


def test_no_row_is_copied_or_dropped_to_make_a_batch_divisible() -> None:
    """verl-agent copies or deletes random rows before advantages, which changes every group's mean."""
    rows = build_rows([one.episode for one in group()], pad_token_id=PAD)
    assert len(rows) == 3
    for parts in (
        rows.chunk(2),
        rows.split(2),
        [rows[part] for part in micro_batches(rows.lengths(), 6, multiple_of=2)],
    ):
        names = [(i.non_tensor_batch["rollout_id"], i.non_tensor_batch["segment"]) for part in parts for i in part]
        assert sorted(names) == [("a", 0), ("a", 1), ("b", 0)]


@pytest.mark.parametrize("per", ["segment", "action"])
def test_episode_advantage_is_constant_along_a_trajectory(per: str) -> None:
    """In verl-agent a penalty on one row's score changes that row's A_E and not its siblings'."""
    made = group()
    steps = [episode_steps(one.episode) for one in made]
    steps[0][1].step_info["is_action_valid"] = False
    credit = ESTIMATORS["grpo"](steps, [1.0, 0.0], group_ids=["g", "g"])
    rows = build_rows([one.episode for one in made], with_credit(steps, credit), pad_token_id=PAD, per=per)
    owners = np.broadcast_to(rows.non_tensor_batch["rollout_id"][:, None], rows.batch["advantages"].shape)
    for name in ("a", "b"):
        values = rows.batch["advantages"][(owners == name) & (rows.batch["action_mask"] == 1)]
        assert len(set(values.tolist())) == 1 and values[0] != 0.0


def test_action_values_do_not_depend_on_episode_order() -> None:
    """verl-agent discounts in the order of the batch's rows."""
    values = [{"advantage": float(t), "return_to_go": 10.0 + t, "base_reward": -float(t)} for t in range(3)]
    made = [play("a", FIRST, values), play("b", SECOND, values[2:])]

    def by_name(order: list[PlayedEpisode]) -> dict[tuple[str, int], list[float]]:
        rows = build_rows([one.episode for one in order], [one.steps for one in order], pad_token_id=PAD)
        return {
            (item.non_tensor_batch["rollout_id"], item.non_tensor_batch["segment"]): item.batch["returns"].tolist()
            for item in rows
        }

    assert by_name(made) == by_name(made[::-1])


def test_episode_facts_are_per_episode_and_not_batch_means() -> None:
    """verl-agent writes the mean success of the batch onto every row."""
    rows = build_rows([one.episode for one in group()], pad_token_id=PAD, scores=[1.0, None])
    assert rows.non_tensor_batch["success"].tolist() == [True, True, False]
    np.testing.assert_array_equal(rows.non_tensor_batch["episode_rewards"], [1.0, 1.0, np.nan])
    assert rows.non_tensor_batch["episode_lengths"].tolist() == [3, 3, 1]


def test_rows_of_one_episode_share_no_dict() -> None:
    rows = build_rows([one.episode for one in group()], pad_token_id=PAD)
    rows.non_tensor_batch["extra_info"][0]["seen"] = True
    assert ["seen" in info for info in rows.non_tensor_batch["extra_info"]] == [True, False, False]


def test_only_the_last_row_of_an_episode_ends_it() -> None:
    """verl-agent puts the whole score on every step's row."""
    rows = build_rows([one.episode for one in group()], pad_token_id=PAD, per="action")
    assert rows.non_tensor_batch["ends_episode"].tolist() == [False, False, True, True]


def test_repeat_repeats_row_facts_once() -> None:
    """verl's separated trainer repeats facts twice, and misaligns ground truths."""
    rows = build_rows([one.episode for one in group()], pad_token_id=PAD).repeat(2)
    assert isinstance(rows, TokenBatch)
    assert rows.non_tensor_batch["rollout_id"].tolist() == ["a", "a", "a", "a", "b", "b"]
