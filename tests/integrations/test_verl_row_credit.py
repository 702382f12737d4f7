"""Test that credit on verl's rows equals the credit of their episodes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from reward_kit.agent.models import StepData
from reward_kit.credit.row_credit import ROW_ESTIMATORS
from reward_kit.errors import ConfigError
from reward_kit.integrations.verl.data_proto import verl_rows
from reward_kit.integrations.verl.estimators import (
    estimator_for_verl,
    estimator_options,
    row_credit,
    use_row_columns,
)
from reward_kit.rl.learner.training_rows import to_tensors
from reward_kit.rl_helpers import ESTIMATORS, system_apply_gigpo_to_batch_steps, with_credit
from reward_kit.rl_processing import CreditAssigner
from tests.integrations.verl_episodes import Collected, collected

Credit = dict[tuple[str, int], tuple[float | None, float | None]]


def credited(name: str, given: Collected, per: str, unscored: str, **options: Any) -> Credit:
    """Return advantage and return of each step from its tokens, which must all agree."""
    rows = verl_rows(given.episodes, given.steps, pad_token_id=0, scores=given.scores, per=per, unscored=unscored)  # type: ignore[arg-type]
    rows = rows.reorder(np.random.default_rng(1).permutation(len(rows)))
    tensors, columns = to_tensors(rows), rows.non_tensor_batch
    found = row_credit(name, tensors["token_level_scores"], tensors["response_mask"], columns, options)
    credit: Credit = {}
    for row, (rollout, steps, lengths) in enumerate(
        zip(columns["rollout_id"], columns["steps"], columns["action_lengths"], strict=True)
    ):
        mask = tensors["response_mask"][row] != 0
        off = [values[row][~mask] for values in found]
        assert not off[0].any() and not off[1].any()
        if not mask.any():
            credit |= {(rollout, step): (None, None) for step in steps}
            continue
        parts = [values[row][mask].split(lengths) for values in found]
        for step, *values in zip(steps, *parts, strict=True):
            assert all(len(set(part.tolist())) == 1 for part in values)
            credit[rollout, step] = values[0][0].item(), values[1][0].item()
    return credit


def expected(steps: list[list[StepData]], given: Collected) -> Credit:
    return {
        (episode.id_, t): (step.advantage, step.return_to_go)
        for episode, of in zip(given.episodes, steps, strict=True)
        for t, step in enumerate(of)
    }


def assert_same(found: Credit, wanted: Credit, *, whole: bool) -> None:
    assert found.keys() == wanted.keys() if whole else found.keys() <= wanted.keys()
    for key, pair in found.items():
        for ours, theirs in zip(pair, wanted[key], strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("unscored", ["mask", "leave_out"])
@pytest.mark.parametrize("per", ["segment", "action"])
@pytest.mark.parametrize("seed", range(6))
def test_gigpo_on_rows_equals_gigpo_on_steps(seed: int, per: str, unscored: str) -> None:
    given = collected(seed)
    wanted = system_apply_gigpo_to_batch_steps(
        given.steps, given.scores, 0.3, 0.9, "state_key", group_ids=given.group_ids, invalid_action_penalty=0.1
    )
    found = credited("gigpo", given, per, unscored, omega=0.3, gamma=0.9, invalid_action_penalty=0.1)
    assert_same(found, expected(wanted, given), whole=unscored == "mask")
    assert any(advantage for advantage, _ in found.values())


@pytest.mark.parametrize("name", ROW_ESTIMATORS)
def test_other_estimators_on_rows_equal_those_on_steps(name: str) -> None:
    given = collected(3, unscored=False)
    options = CreditAssigner(name).options
    wanted = with_credit(given.steps, ESTIMATORS[name](given.steps, given.scores, group_ids=given.group_ids, **options))
    assert_same(credited(name, given, "segment", "mask"), expected(wanted, given), whole=True)


# Two rollouts of one group that met "a"; rows in verl's form, with a tool's answer in between.
MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
REWARDS = torch.tensor([[0.0, 0, 0, 1.0], [0, 0, 0, 0], [0, 0, 0, 0]])


def columns(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "uid": ["u", "u", "pad"],
        "traj_uid": ["x", "y", "x"],
        "state_keys": [["a", "b"], ["a"], ["a", "b"]],
        "step_rewards": [[0.0, 1.0], [0.5], [0.0, 1.0]],
        **changes,
    }
    return {key: values for key, values in made.items() if values is not None}


def test_actions_are_contiguous_runs_without_action_lengths() -> None:
    advantages, returns = row_credit("gigpo", REWARDS, MASK, columns(), {"omega": 0.0, "gamma": 0.5})
    # In "a" the returns were 0 + 0.5 * 1 and 0.5: alike.
    assert not advantages.any() and returns.tolist() == [[0.5, 0.5, 0, 1], [0.5, 0, 0, 0], [0, 0, 0, 0]]
    split = columns(action_lengths=[[1, 2], [1], [1, 2]])
    returns = row_credit("gigpo", REWARDS, MASK, split, {"gamma": 0.5})[1]
    assert returns.tolist() == [[0.5, 1, 0, 1], [0.5, 0, 0, 0], [0, 0, 0, 0]]


def test_anchor_observations_group_single_action_rows() -> None:
    row_columns = columns(state_keys=None, anchor_obs=["a", "a", "a"], step_rewards=None)
    one = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    advantages = row_credit("gigpo", REWARDS[:, [3, 0, 1, 2]], one, row_columns, {"omega": 0.5, "epsilon": 0.0})[0]
    assert torch.allclose(advantages, one * torch.tensor([[0.5**0.5], [-(0.5**0.5)], [0.0]]))
    with pytest.raises(ConfigError, match="row 0 has 2 actions, but 'anchor_obs' has one item for each row"):
        row_credit("gigpo", REWARDS, MASK, row_columns)


# verl-agent's rows: one for each step, each with the score of its episode

ALL = torch.ones(4, 2)


def verl_agent_columns(**changes: Any) -> dict[str, Any]:
    """Return the columns of an episode of three steps that fails with 0.25, and one of one step that succeeds."""
    return {
        "uid": ["u"] * 4,
        "traj_uid": ["x", "x", "x", "y"],
        "anchor_obs": ["a", "b", "c", "a"],
        "rewards": np.array([0.0, 0.0, 0.25, 1.0]),
        "is_action_valid": np.array([True, False, True, True]),
        "episode_rewards": np.array([0.25, 0.25, 0.25, 1.0]),
        **changes,
    }


def test_score_in_each_row_counts_once_per_episode() -> None:
    scores = torch.tensor([[0.0, 0.25]] * 3 + [[0.0, 1.0]])
    found = row_credit("rloo", scores, ALL, verl_agent_columns())[0]
    # Three times 0.25 would still be below 1, so also compare the other order.
    assert found[:, 0].tolist() == [-0.75] * 3 + [0.75]
    scores = torch.tensor([[0.0, 0.5]] * 3 + [[0.0, 1.0]])
    columns = verl_agent_columns(episode_rewards=np.array([0.5, 0.5, 0.5, 1.0]))
    assert row_credit("rloo", scores, ALL, columns)[0][:, 0].tolist() == [-0.5] * 3 + [0.5]


def test_score_in_each_row_includes_the_mean_penalty() -> None:
    # A KL penalty in the reward: only `rows` can tell both layouts apart.
    scores = torch.tensor([[0.0, 0.5]] * 3 + [[0.0, 1.0]]) - torch.tensor([[0.25, 0.0]] * 2 + [[0.0, 0.0]] * 2)
    columns = verl_agent_columns(episode_rewards=np.array([0.5, 0.5, 0.5, 1.0]))
    found = row_credit("rloo", scores, ALL, columns, rows="each")[0]
    assert found[:, 0].tolist() == pytest.approx([0.5 - 0.5 / 3 - 1.0] * 3 + [1.0 - 0.5 + 0.5 / 3])


def test_credit_on_rows_of_verl_agent_equals_credit_on_steps() -> None:
    columns = verl_agent_columns()
    scores = torch.zeros(4, 2, dtype=torch.float64)
    scores[:, 1] = torch.tensor(columns["episode_rewards"])
    options = {"omega": 0.5, "gamma": 0.5, "invalid_action_penalty": 0.25}
    found = row_credit("gigpo", scores, ALL, columns, options)[0][:, 0]
    steps = [
        StepData(
            system_step_index=0,
            observation_data="",
            action_taken={},
            base_reward=float(columns["rewards"][row]),
            step_info={
                "state_key": columns["anchor_obs"][row],
                "is_action_valid": bool(columns["is_action_valid"][row]),
            },
        )
        for row in range(4)
    ]
    credit = ESTIMATORS["gigpo"]([steps[:3], steps[3:]], [0.25, 1.0], group_ids=["u", "u"], **options)
    assert found.tolist() == pytest.approx(credit.advantages_S.tolist())


def test_trajectory_with_nan_rewards_is_unscored() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.5], [math.nan, 0.0]])
    found = row_credit("rloo", rewards, torch.ones(3, 2), {"uid": ["u"] * 3})[0]
    assert found[:, 0].tolist() == [0.5, -0.5, 0.0]


def test_rejected_tokens_get_no_credit_but_count_in_baselines() -> None:
    rejected = MASK.clone()
    rejected[0] = 0
    row_columns = columns(sampled_mask=MASK)
    whole, part = (row_credit("gigpo", REWARDS, mask, row_columns)[0] for mask in (MASK, rejected))
    assert not part[0].any() and part[1, 0] == whole[1, 0] != 0


@pytest.mark.parametrize("name", ROW_ESTIMATORS)
def test_row_without_actions_counts_in_its_group_but_gets_no_credit(name: str) -> None:
    row_columns = columns(uid=["u"] * 3, traj_uid=["x", "y", "z"], step_rewards=None, action_lengths=[[3], [1], []])
    row_columns["state_keys"] = [["a"], ["a"], []]
    scores = REWARDS + torch.tensor([[0.0], [0.0], [0.125]])
    advantages, returns = row_credit(name, scores, MASK, row_columns)
    assert not advantages[2].any() and not returns[2].any()
    steps = [
        StepData(
            system_step_index=0,
            observation_data="",
            action_taken={},
            policy_logprobs={"token_ids": [0] * length},
            step_info={"state_key": "a"},
        )
        for length in (3, 1)
    ]
    options = CreditAssigner(name).options
    credit = ESTIMATORS[name]([steps[:1], steps[1:], []], [1.0, 0.0, 0.5], group_ids=["u"] * 3, **options)
    assert advantages[:2, 0].tolist() == pytest.approx(credit.advantages_S.tolist())


def test_trajectory_score_is_read_from_a_last_row_without_actions() -> None:
    told = columns(uid=["u"] * 3, traj_uid=["x", "y", "x"], step_rewards=None, action_lengths=[[1, 2], [1], []])
    told |= {"state_keys": [["a", "b"], ["a"], []], "ends_episode": [False, True, True]}
    last = torch.tensor([[0.0, 0, 0, 0], [0, 0, 0, 0], [1.0, 0, 0, 0]])
    whole, empty = row_credit("rloo", last, MASK, told)[0], row_credit("rloo", last * 0, MASK, told)[0]
    assert whole[0, 0] > 0 > whole[1, 0] and not empty.any()


def test_verl_reward_penalty_is_included() -> None:
    scores = np.array([1.0, 0.0, np.nan])
    plain = row_credit("grpo", REWARDS, MASK, columns(episode_rewards=scores))[0]
    with_kl = row_credit("grpo", REWARDS - 2.0 * MASK, MASK, columns(episode_rewards=scores))[0]
    # Scores of 1 and 0 became -5 and -2.
    assert plain[0, 0] > 0 > with_kl[0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_keys": None}, "gigpo needs 'state_keys' for every row"),
        ({"uid": None}, "gigpo needs 'uid' for every row"),
        ({"uid": ["u", "u"]}, "'uid' has 2 items, but there are 3 rows"),
        (
            {"state_keys": [["a"], ["a"], ["a"]]},
            r"state_keys\[0\] must be a list with one item for each of the row's 2",
        ),
        ({"step_rewards": ["ab", ["a"], ["a"]]}, r"step_rewards\[0\] must be a list"),
        (
            {"action_lengths": [[2], [1], [1]]},
            r"row 0: action_lengths \[2\] add up to 2 tokens, but the row's mask has 3",
        ),
        ({"steps": [[1, 2], [0], [0]]}, r"has the steps \[1, 2\] in this batch; credit needs whole trajectories"),
    ],
)
def test_inconsistent_rows_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        row_credit("gigpo", REWARDS, MASK, columns(**changes))


def test_estimator_reads_rows_and_options_from_verl() -> None:
    estimate = estimator_for_verl("gigpo")
    config = {"gamma": 0.5, "reward_kit": {"omega": 0.0, "normalization": "mean"}}
    row_columns = columns(step_rewards=[[0.0, 1.0], [1.5], [0.0, 1.0]])
    given = {"token_level_rewards": REWARDS, "response_mask": MASK, "index": row_columns.pop("uid"), "config": config}
    with pytest.raises(ConfigError, match="use reward_kit's trainers, or compute_advantage from"):
        estimate(**given)
    with use_row_columns(row_columns):
        found = estimate(**given)
    assert found[0].tolist() == [[-0.5, -0.5, 0, 0], [0.5, 0, 0, 0], [0, 0, 0, 0]]
    assert torch.equal(estimate(**given, non_tensor_batch=row_columns)[0], found[0])
    assert estimator_options("gigpo", config) == {"gamma": 0.5, "omega": 0.0, "normalization": "mean"}
    assert estimator_options("grpo", {"gamma": 1.0}) == (
        {"gamma": 1.0} if "gamma" in CreditAssigner("grpo").options else {}
    )
    with pytest.raises(ConfigError, match="omega"), use_row_columns(row_columns):
        estimate(**{**given, "config": {"reward_kit": {"omeg": 0.5}}})


def test_equal_trajectory_ids_of_different_prompts_are_not_mixed() -> None:
    """Both rows are rollout 0 of their prompt: two groups of one, which get zeros."""
    row_columns = columns(uid=["u", "v", "pad"], traj_uid=["0", "0", "0"])
    advantages, returns = row_credit("gigpo", REWARDS, MASK, row_columns, {"gamma": 0.5})
    assert not advantages.any() and returns.tolist() == [[0.5, 0.5, 0, 1], [0.5, 0, 0, 0], [0, 0, 0, 0]]
