"""Test that credit on padded token rows equals the credit of the steps that they contain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from reward_kit.credit import ESTIMATORS, token_advantages
from reward_kit.credit.estimators import resolve_options
from reward_kit.credit.row_credit import ROW_ESTIMATORS
from reward_kit.errors import ConfigError, InvalidResultError
from reward_kit.integrations.verl.data_proto import step_columns
from reward_kit.rl_helpers import with_credit
from reward_kit.tokens import build_rows, default_pipeline
from tests.integrations.verl_episodes import collected


@pytest.mark.parametrize("form", ["array", "lists", "tensor"])
@pytest.mark.parametrize("per", ["segment", "action"])
@pytest.mark.parametrize("name", ROW_ESTIMATORS)
def test_credit_on_rows_equals_credit_on_steps(name: str, per: str, form: str) -> None:
    """The rows of `build_rows` carry the advantages that the estimator gave to the steps."""
    given = collected(5)
    if form != "lists":  # an array has no missing rewards
        given = given._replace(
            steps=[
                [step.model_copy(update={"base_reward": step.base_reward or 0.0}) for step in each]
                for each in given.steps
            ]
        )
    options = resolve_options(name, {})
    credit = ESTIMATORS[name](given.steps, given.scores, group_ids=given.group_ids, **options)
    pipeline = default_pipeline(per)  # type: ignore[arg-type]
    pipeline.append(step_columns)
    rows = build_rows(
        given.episodes, with_credit(given.steps, credit), scores=given.scores, pad_token_id=0, pipeline=pipeline
    )
    assert None in given.scores and (rows.batch["loss_mask"] != rows.batch["action_mask"]).any()
    batch: dict[str, Any] = dict(rows.batch)
    if form == "tensor":
        batch = {key: torch.from_numpy(batch[key]) for key in ("action_mask", "step_rewards")}
    others = rows.non_tensor_batch
    found = token_advantages(
        batch["action_mask"],
        others["step_rewards"] if form == "lists" else batch["step_rewards"],
        others["uid"],
        traj_uid=others["traj_uid"],
        scores=others["episode_rewards"],
        state_keys=others["state_keys"],
        valid_actions=others["valid_actions"],
        action_lengths=others["action_lengths"],
        estimator=name,
    )
    np.testing.assert_allclose(found.advantages, rows.batch["advantages"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.returns, rows.batch["returns"], rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(found.loss_mask, rows.batch["loss_mask"])
    assert np.abs(found.advantages).max() > 0


MASK = [[1, 1, 0, 1], [1, 0, 1, 0], [0, 0, 0, 0]]
REWARDS = np.array([[0.0, 0.5, 0.0, 1.0], [0.25, 0.0, 0.25, 0.0], [0.0, 0.0, 0.0, 0.0]])


def test_sum_of_step_rewards_is_the_default_score() -> None:
    found = token_advantages(MASK, REWARDS, [7, 7, 7], estimator="rloo")
    assert found.advantages.tolist() == [[1.0, 1.0, 0, 1.0], [-1.0, 0, -1.0, 0], [0, 0, 0, 0]]
    assert found.loss_mask.tolist() == MASK
    lists = [[0.5, 1.0], [0.25, 0.25], []]
    # The ids in a tensor are compared by value.
    same = token_advantages(torch.tensor(MASK), lists, torch.tensor([7, 7, 7]), estimator="rloo")
    np.testing.assert_array_equal(same.advantages, found.advantages)


def test_unscored_row_is_excluded_from_its_group() -> None:
    mask = [[1, 1], [1, 1], [1, 0]]
    found = token_advantages(mask, None, "uuu", scores=[1.0, 0.0, None], estimator="rloo")
    assert found.advantages.tolist() == [[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]]
    assert found.loss_mask.tolist() == [[1, 1], [1, 1], [0, 0]]


def test_rows_of_a_trajectory_form_one_episode() -> None:
    found = token_advantages([[1, 0], [1, 0], [1, 0]], [[0.5], [1.0], [0.5]], "uuu", traj_uid="xxy", estimator="rloo")
    assert found.advantages[:, 0].tolist() == [1.0, 1.0, -1.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_mask": [[2, 0, 0, 0]] * 3}, "action_mask must be a .B, T. array of 0 and 1"),
        ({"action_mask": [1, 0, 1]}, "action_mask must be a .B, T. array"),
        ({"uid": "uu"}, "'uid' has 2 items, but there are 3 rows"),
        ({"step_rewards": REWARDS[:, :3]}, r"step_rewards has shape \(3, 3\), but action_mask has shape \(3, 4\)"),
        ({"step_rewards": REWARDS[:, [0, 2, 1, 3]]}, r"step_rewards\[0, 2\] is 0.5, but the token is not part of an"),
        ({"step_rewards": [[1.0], [1.0, 2.0], []]}, r"step_rewards\[0\] must be a list with one item for each of the"),
        ({"step_rewards": [[None, 1.0], [1.0, 2.0], []]}, "step_rewards has no reward for some actions"),
        ({"step_rewards": None}, "there are neither step_rewards nor scores"),
        ({"traj_uid": "xxy", "scores": [1.0, 0.0, 0.0]}, "rows 0 and 1 of one trajectory have the scores 1 and 0"),
        ({"estimator": "gigpo"}, "gigpo needs 'state_keys' for every row, .* 'turn_level_grpo'"),
        ({"estimator": "gae"}, "unknown row estimator 'gae'"),
        ({"gama": 0.5}, "rloo has no option 'gama'"),
    ],
)
def test_inconsistent_arguments_are_rejected(changes: dict[str, Any], message: str) -> None:
    given = {"action_mask": MASK, "step_rewards": REWARDS, "uid": "uuu", "estimator": "rloo", **changes}
    with pytest.raises(ConfigError, match=message):
        token_advantages(**given)


def test_reward_that_is_not_finite_is_rejected() -> None:
    with pytest.raises(InvalidResultError, match="trajectory 0, step 1: a base reward is not finite"):
        token_advantages(MASK, [[0.0, np.nan], [0.0, 1.0], []], "uuu", scores=[1.0, 0.0, 0.0], estimator="rloo")
