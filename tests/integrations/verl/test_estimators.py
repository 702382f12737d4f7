"""Test estimators in verl's registry, called by its `compute_advantage`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import AdvantageEstimator, get_adv_estimator_fn, get_policy_loss_fn
from verl.trainer.ppo.ray_trainer import apply_kl_penalty
from verl.workers.config import ActorConfig

from reward_kit.credit.row_credit import ROW_ESTIMATORS
from reward_kit.errors import ConfigError
from reward_kit.integrations.verl.data_proto import from_data_proto, to_data_proto
from reward_kit.integrations.verl.estimators import compute_advantage, register_estimators
from reward_kit.rl.learner.training_rows import to_tensors
from reward_kit.rl.losses import ppo_clip_loss
from reward_kit.rl_helpers import ESTIMATORS, system_apply_gigpo_to_batch_steps, with_credit
from reward_kit.rl_processing import CreditAssigner
from reward_kit.tokens import build_rows
from tests.integrations.verl_episodes import Collected, collected

pytestmark = pytest.mark.campaign

ALGORITHM = {"gamma": 0.9, "reward_kit": {"omega": 0.3}}


def exported(given: Collected, **options: Any) -> Any:
    data = to_data_proto(given.episodes, given.steps, pad_token_id=0, scores=given.scores, **options)
    data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    return data


def greatest_difference(data: Any, given: Collected, wanted: Any) -> float:
    """Return the greatest difference over advantages and returns; missing ones must be missing on both sides."""
    back = from_data_proto(data)
    place = {episode.id_: number for number, episode in enumerate(given.episodes)}
    found = [0.0]
    for episode, steps in zip(back.episodes, back.step_data_lists, strict=True):
        for ours, theirs in zip(steps, wanted[place[episode.id_]], strict=True):
            assert (ours.advantage is None) == (theirs.advantage is None)
            if ours.advantage is not None:
                found += [abs(ours.advantage - theirs.advantage), abs(ours.return_to_go - theirs.return_to_go)]
    return max(found)


@pytest.mark.parametrize("per", ["segment", "action"])
@pytest.mark.parametrize("unscored", ["mask", "leave_out"])
@pytest.mark.parametrize("seed", range(10))
def test_gigpo_in_verl_equals_gigpo_on_episodes(seed: int, unscored: str, per: str) -> None:
    given = collected(seed)
    data = compute_advantage(
        exported(given, per=per, unscored=unscored), "reward_kit_gigpo", config=OmegaConf.create(ALGORITHM)
    )
    wanted = system_apply_gigpo_to_batch_steps(
        given.steps, given.scores, 0.3, 0.9, "state_key", group_ids=given.group_ids
    )
    assert greatest_difference(data, given, wanted) < 1e-6


def test_every_estimator_is_registered_with_equal_results() -> None:
    given = collected(3, unscored=False)
    register_estimators()
    for name in ROW_ESTIMATORS:
        options = dict(CreditAssigner(name).options)
        section = {key: value for key, value in options.items() if value is not None and key != "gamma"}
        config = OmegaConf.create({"gamma": options.get("gamma", 1.0), "reward_kit": section})
        data = compute_advantage(exported(given), f"reward_kit_{name}", config=config)
        credit = ESTIMATORS[name](given.steps, given.scores, group_ids=given.group_ids, **options)
        assert greatest_difference(data, given, with_credit(given.steps, credit)) < 1e-6, name
        assert get_adv_estimator_fn(f"reward_kit_{name}").__name__ == f"reward_kit_{name}"


def test_verl_grpo_agrees_if_each_row_is_an_episode() -> None:
    given = collected(5, unscored=False)
    whole = [at for at, episode in enumerate(given.episodes) if len(episode.tokens.segments) == 1]
    given = Collected(*([part[at] for at in whole] for part in given))
    ours = compute_advantage(exported(given), "reward_kit_grpo", config=OmegaConf.create({"gamma": 1.0}))
    verls = compute_advantage(exported(given), AdvantageEstimator.GRPO, config=OmegaConf.create({"gamma": 1.0}))
    uids = ours.non_tensor_batch["uid"].tolist()
    # One that is alone in its group gets zero here, and its raw score of verl.
    shared = np.array([uids.count(uid) > 1 for uid in uids])
    assert shared.sum() >= 4
    assert np.allclose(ours.batch["advantages"][shared], verls.batch["advantages"][shared], atol=1e-5)


def test_kl_penalty_in_the_reward_is_part_of_the_score() -> None:
    from verl.trainer.ppo.core_algos import FixedKLController

    given = collected(4, unscored=False)
    data = exported(given, per="segment")
    data.batch["old_log_probs"] = data.batch["rollout_log_probs"]
    data.batch["ref_log_prob"] = data.batch["rollout_log_probs"] - 0.5
    data, _ = apply_kl_penalty(data, FixedKLController(0.1))
    found = compute_advantage(data, "reward_kit_grpo", config=OmegaConf.create({}))
    ends = data.non_tensor_batch["ends_episode"]
    sampled = data.batch["response_mask"].sum(dim=1).numpy()
    penalised = {
        name: score - 0.05 * tokens
        for name, score, tokens, is_end in zip(
            data.non_tensor_batch["rollout_id"], data.non_tensor_batch["episode_rewards"], sampled, ends, strict=True
        )
        if is_end
    }
    scores = [penalised[episode.id_] for episode in given.episodes]
    credit = ESTIMATORS["grpo"](given.steps, scores, group_ids=given.group_ids)
    assert greatest_difference(found, given, with_credit(given.steps, credit)) < 1e-5


def test_gigpo_without_its_columns_reports_the_missing_ones() -> None:
    from verl.trainer.ppo.ray_trainer import compute_advantage as verls

    register_estimators()
    with pytest.raises(ConfigError, match="verl itself does not pass these columns to an estimator"):
        verls(exported(collected(1)), "reward_kit_gigpo", config=OmegaConf.create(ALGORITHM))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("seed", range(3))
def test_verl_loss_of_the_exported_batch_equals_the_loss_of_rows(seed: int, mode: Any) -> None:
    """Compare the masked loss and its gradient with GiGPO advantages; verl computes its own from the export."""
    given = collected(seed)
    options = {"omega": 0.3, "gamma": 0.9}
    credit = ESTIMATORS["gigpo"](given.steps, given.scores, group_ids=given.group_ids, **options)
    steps = with_credit(given.steps, credit)
    rows = build_rows(given.episodes, steps, scores=given.scores, pad_token_id=0, padding="outer")
    width = rows.batch["prompt_ids"].shape[1]
    arrays = to_tensors(rows, dtype=torch.float64)
    noise = 0.4 * torch.randn(arrays["logprobs"].shape, generator=torch.Generator().manual_seed(seed)).double()
    new = (arrays["logprobs"] + noise).requires_grad_()
    masked = (arrays["advantages"], arrays["loss_mask"])
    ours = ppo_clip_loss(new, arrays["logprobs"], *masked, dual_clip=3.0, aggregation=mode)
    (gradient,) = torch.autograd.grad(ours.loss, new)

    data = exported(given, unscored="mask")
    data = compute_advantage(data, "reward_kit_gigpo", config=OmegaConf.create(ALGORITHM))
    leaf = (data.batch["rollout_log_probs"] + noise[:, width:]).requires_grad_()
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=mode)
    theirs, _ = get_policy_loss_fn("vanilla")(
        old_log_prob=data.batch["rollout_log_probs"],
        log_prob=leaf,
        advantages=data.batch["advantages"],
        response_mask=data.batch["response_mask"],
        loss_agg_mode=mode,
        config=config,
    )
    (verls,) = torch.autograd.grad(theirs, leaf)
    assert theirs.item() == pytest.approx(ours.loss.item(), abs=1e-6) != 0.0
    assert torch.allclose(gradient[:, width:], verls, atol=1e-6) and not gradient[:, :width].any()
