"""Test that `check_trainer` names historical defects of trainers, which are re-created here, and no fixed trainer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reward_kit.checks.trainer import TrainerReport, check_trainer
from reward_kit.checks.trainer_batches import SCENARIOS, Enumeration
from reward_kit.errors import ConfigError
from reward_kit.integrations.verl.estimators import row_credit

Batch = dict[str, Any]
Loss = Callable[[Batch], Tensor]


# A trainer, with a switch for each defect


def episode_scores(batch: Batch, *, masked_rewards: bool = False, default: float | None = None) -> Tensor:
    """Return the score of each row's episode: the sum of the rewards in its last row, NaN if unscored."""
    rewards_BT, mask_BT = batch["token_level_rewards"], batch["response_mask"]
    summed_B = (rewards_BT if masked_rewards else rewards_BT * mask_BT).sum(dim=1)
    if default is not None:
        summed_B = summed_B.nan_to_num(nan=default)
    last = {episode: row for row, episode in enumerate(batch["traj_uid"])}
    return torch.stack([summed_B[last[episode]] for episode in batch["traj_uid"]])


def advantages(
    batch: Batch,
    scores_B: Tensor,
    *,
    per_row: bool = False,
    whole_batch: bool = False,
    by_position: bool = False,
    own: bool = False,
    raw_singles: bool = False,
) -> Tensor:
    """Return the score minus the mean of the other episodes of the group, 0 for unscored episodes."""
    uid, episodes = batch["uid"], batch["traj_uid"]
    result_B = torch.zeros_like(scores_B)
    for row in range(len(scores_B)):
        if scores_B[row].isnan():
            continue
        peers = {}
        for other in range(len(scores_B)):
            is_peer = uid[other] == uid[row]
            if by_position:
                is_peer = other // 2 == row // 2
            if (is_peer or whole_batch) and not scores_B[other].isnan():
                peers[other if per_row else episodes[other]] = scores_B[other]
        if not own:
            peers.pop(row if per_row else episodes[row], None)
        if peers:
            result_B[row] = scores_B[row] - torch.stack([*peers.values()]).mean()
        elif raw_singles:
            result_B[row] = scores_B[row]
    return result_B


def per_token(batch: Batch, advantages_BT: Tensor) -> Tensor:
    return -advantages_BT * torch.exp(batch["log_probs"] - batch["old_log_probs"])


def over_episodes(batch: Batch, losses_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
    mask_BT = batch["response_mask"] if mask_BT is None else mask_BT
    return (losses_BT * mask_BT).sum() / len(set(batch["traj_uid"]))


def right(batch: Batch, **options: Any) -> Tensor:
    advantages_B = advantages(batch, episode_scores(batch), **options)
    return over_episodes(batch, per_token(batch, advantages_B[:, None]))


# Historical defects: (broken, fixed)


def rewards_of_rejected_tokens(batch: Batch, *, fixed: bool) -> Tensor:
    """Sum the rewards of a row without its mask, as outcome estimators did before verl pull request 6362."""
    advantages_B = advantages(batch, episode_scores(batch, masked_rewards=not fixed))
    return over_episodes(batch, per_token(batch, advantages_B[:, None]))


def unrewarded_rollout_is_zero(batch: Batch, *, fixed: bool) -> Tensor:
    """Give a rollout without a reward 0.0, as before TRL pull requests 6427 and 5902."""
    advantages_B = advantages(batch, episode_scores(batch, default=None if fixed else 0.0))
    return over_episodes(batch, per_token(batch, advantages_B[:, None]))


def last_steps_mask(batch: Batch, *, fixed: bool) -> Tensor:
    """Copy the masked advantages of the last step to all rows of an episode, as before SkyRL pull request 1507."""
    advantages_BT = advantages(batch, episode_scores(batch))[:, None] * batch["response_mask"]
    last = {episode: row for row, episode in enumerate(batch["traj_uid"])}
    if not fixed:
        advantages_BT = torch.stack([advantages_BT[last[episode]] for episode in batch["traj_uid"]])
    return over_episodes(batch, per_token(batch, advantages_BT))


def return_stops_at_observations(batch: Batch, *, fixed: bool) -> Tensor:
    """Reset the return at each token with mask 0, as REINFORCE++ did before verl pull request 7300."""
    if len(set(batch["traj_uid"])) < len(batch["uid"]) or np.isnan(batch["episode_rewards"].numpy()).any():
        raise NotImplementedError
    rewards_BT, mask_BT = batch["token_level_rewards"], batch["response_mask"]
    returns_BT, running_B = torch.zeros_like(rewards_BT), torch.zeros(len(rewards_BT), dtype=torch.float64)
    for t in reversed(range(rewards_BT.shape[1])):
        following_B = rewards_BT[:, t] + running_B
        returns_BT[:, t] = following_B * mask_BT[:, t]
        running_B = following_B * mask_BT[:, t] + (running_B * (1 - mask_BT[:, t]) if fixed else 0.0)
    return over_episodes(batch, per_token(batch, returns_BT))


def mean_per_micro_batch(batch: Batch, *, fixed: bool) -> Tensor:
    """Average the micro-batches' means over tokens, as before open-instruct pull request 1161."""
    losses_BT = per_token(batch, advantages(batch, episode_scores(batch))[:, None]) * batch["response_mask"]
    total, parts = batch["response_mask"].sum(), batch["micro_batches"]
    if fixed:
        return sum((losses_BT[rows].sum() / total for rows in parts), torch.zeros(()))
    return torch.stack([losses_BT[rows].sum() / batch["response_mask"][rows].sum() for rows in parts]).mean()


def divided_by_accumulation_steps(batch: Batch, *, fixed: bool) -> Tensor:
    """Divide parts of the batch's mean by the number of parts, as before ms-swift pull request 10116."""
    loss = mean_per_micro_batch(batch, fixed=True)
    return loss if fixed else loss / len(batch["micro_batches"])


def padding_in_the_mean(batch: Batch, *, fixed: bool) -> Tensor:
    """Average over all positions, as before SkyRL pull request 462."""
    mask_BT = batch["response_mask"]
    losses_BT = per_token(batch, advantages(batch, episode_scores(batch))[:, None]) * mask_BT
    return losses_BT.sum() / (mask_BT.sum() if fixed else mask_BT.numel())


def padding_in_the_mask(batch: Batch, *, fixed: bool) -> Tensor:
    """Set the mask on padding if there is no end-of-sequence token, as in verl issue 3805."""
    losses_BT = per_token(batch, advantages(batch, episode_scores(batch))[:, None])
    mask_BT = batch["response_mask"]
    return over_episodes(batch, losses_BT, mask_BT if fixed else mask_BT + (1 - batch["attention_mask"]))


def observations_in_the_mask(batch: Batch, *, fixed: bool) -> Tensor:
    """Train on the observations, as without `env_mask` in OpenEnv issue 941."""
    losses_BT = per_token(batch, advantages(batch, episode_scores(batch))[:, None])
    return over_episodes(batch, losses_BT, batch["response_mask"] if fixed else batch["attention_mask"])


def turns_in_the_baseline(batch: Batch, *, fixed: bool) -> Tensor:
    """Count an episode once per turn in the mean, as before agent-lightning pull request 444."""
    return right(batch, own=True, per_row=not fixed)


def statistics_of_the_batch(batch: Batch, *, fixed: bool) -> Tensor:
    """Subtract the mean of the batch, as before the fix of grpo-flat issue 2."""
    return right(batch, own=True, whole_batch=not fixed)


def groups_by_position(batch: Batch, *, fixed: bool) -> Tensor:
    """Take consecutive rows for a group, as trainers with `view(-1, n)` do if rows are reordered."""
    if len(batch["uid"]) != 4 or len(set(batch["traj_uid"])) < len(batch["uid"]):
        raise NotImplementedError
    return right(batch, by_position=not fixed)


DEFECTS: list[tuple[Callable[..., Tensor], set[str]]] = [
    (rewards_of_rejected_tokens, {"masked-rewards"}),
    (unrewarded_rollout_is_zero, {"unscored-as-zero"}),
    (last_steps_mask, {"last-step-only"}),
    (return_stops_at_observations, {"last-step-only", "immediate-reward"}),
    (mean_per_micro_batch, {"micro-batch-mean"}),
    (divided_by_accumulation_steps, {"micro-batch-scale"}),
    (padding_in_the_mean, {"padding-counted"}),
    (padding_in_the_mask, {"padding-trained"}),
    (observations_in_the_mask, {"observation-trained"}),
    (turns_in_the_baseline, {"episode-per-row"}),
    (statistics_of_the_batch, {"batch-statistics"}),
    (groups_by_position, {"grouped-by-position"}),
]


def serious(report: TrainerReport) -> set[str]:
    """Return the kinds of errors and warnings."""
    return {finding.kind for finding in report.report.findings if finding.level != "info"}


@pytest.mark.parametrize(("defect", "kinds"), DEFECTS, ids=[defect.__name__ for defect, _ in DEFECTS])
def test_historical_defect_is_found_and_its_fix_is_silent(defect: Callable[..., Tensor], kinds: set[str]) -> None:
    assert serious(check_trainer(partial(defect, fixed=False))) == kinds
    assert serious(check_trainer(partial(defect, fixed=True))) == set()


# Formulas


def normalized(batch: Batch, epsilon: float, correction: int) -> Tensor:
    """Divide by the standard deviation of the group."""
    scores_B, uid = episode_scores(batch), batch["uid"]
    result_B = torch.zeros_like(scores_B)
    for group in set(uid):
        rows = [row for row in np.flatnonzero(uid == group) if not scores_B[row].isnan()]
        if len(rows) > 1:
            own = scores_B[rows]
            result_B[rows] = (own - own.mean()) / (own.std(correction=correction) + epsilon)
    return over_episodes(batch, per_token(batch, result_B[:, None]))


@pytest.mark.parametrize(("epsilon", "correction"), [(1e-6, 1), (1e-4, 1), (1e-8, 0)])
def test_division_by_standard_deviation_is_named(epsilon: float, correction: int) -> None:
    names = ["groups of 2", "group of 3", "unscored episode"]
    report = check_trainer(partial(normalized, epsilon=epsilon, correction=correction), scenarios=names)
    assert serious(report) == {"divides-by-std"}
    for result in report.results:
        assert result.formula is not None and "standard deviation" in result.formula.text
        assert 0.5 < result.cosine < 0.99


@pytest.mark.parametrize(("name", "size"), [("groups of 2", 2), ("group of 3", 3)])
def test_mean_with_the_own_score_shrinks_the_gradient(name: str, size: int) -> None:
    (result,) = check_trainer(partial(right, own=True), scenarios=[name]).results
    assert result.causes == ("mean-includes-own",)
    assert result.scale == pytest.approx((size - 1) / size, abs=1e-12)
    assert result.error < 1e-9


@pytest.mark.parametrize(("raw", "kind"), [(True, "group-of-one-raw"), (False, "group-of-one-skipped")])
def test_group_of_one_is_raw_or_skipped(raw: bool, kind: str) -> None:
    (result,) = check_trainer(partial(right, raw_singles=raw), scenarios=["group of 1"]).results
    assert result.causes == (kind,)
    assert result.error < 1e-9


def test_rows_divided_by_their_lengths_are_named() -> None:
    def loss(batch: Batch) -> Tensor:
        mask_BT = batch["response_mask"]
        losses_BT = per_token(batch, advantages(batch, episode_scores(batch))[:, None]) * mask_BT
        return (losses_BT.sum(dim=1) / mask_BT.sum(dim=1)).mean()

    report = check_trainer(loss, scenarios=["groups of 2", "lengths"])
    assert serious(report) == {"length-weighted"}
    assert report.results[0].causes == ()  # equal lengths


def test_two_deviations_at_once_are_both_named() -> None:
    def loss(batch: Batch) -> Tensor:
        advantages_B = advantages(batch, episode_scores(batch, default=0.0), own=True)
        return over_episodes(batch, per_token(batch, advantages_B[:, None]))

    (result,) = check_trainer(loss, scenarios=["unscored episode"]).results
    assert set(result.causes) == {"unscored-as-zero", "mean-includes-own"}


# Symptoms without a formula


def unclear(batch: Batch) -> Tensor:
    return over_episodes(batch, per_token(batch, (episode_scores(batch) ** 3)[:, None]))


def upside_down(batch: Batch) -> Tensor:
    return -right(batch)


def constant(batch: Batch) -> Tensor:
    return torch.zeros(())


def not_finite(batch: Batch) -> Tensor:
    return right(batch) * math.nan


@pytest.mark.parametrize(
    ("loss", "kind"),
    [(unclear, "unknown-bias"), (upside_down, "inverted"), (constant, "no-gradient"), (not_finite, "not-finite")],
)
def test_fault_without_a_formula_is_an_error(loss: Loss, kind: str) -> None:
    assert serious(check_trainer(loss, scenarios=["groups of 2"])) == {kind}


# Own estimators on rows of an episode or of a step


@pytest.mark.parametrize(
    ("estimator", "options", "kinds"),
    [
        ("rloo", {}, set()),
        ("turn_level_grpo", {"gamma": 1.0}, set()),
        ("discounted_returns", {"gamma": 1.0}, set()),
        ("grpo", {"normalization": "mean"}, set()),
        ("grpo", {}, {"divides-by-std"}),
    ],
)
def test_row_credit_has_no_defects(estimator: str, options: dict[str, Any], kinds: set[str]) -> None:
    def loss(batch: Batch) -> Tensor:
        columns = {"uid": batch["uid"], "traj_uid": batch["traj_uid"], "ends_episode": batch["is_last_step"].numpy()}
        rewards_BT = batch["token_level_rewards"] * batch["response_mask"]
        advantages_BT, _ = row_credit(estimator, rewards_BT, batch["response_mask"], columns, options)
        return over_episodes(batch, per_token(batch, advantages_BT))

    report = check_trainer(loss)
    assert serious(report) == kinds
    assert report.report.checked == len(SCENARIOS)


@pytest.mark.parametrize(("omega", "kinds"), [(1.0, set()), (0.0, {"unknown-bias"})])
def test_gigpo_on_rows_of_verl_agent(omega: float, kinds: set[str]) -> None:
    """Its advantages among equal states weigh each state by the chance of company."""

    def loss(batch: Batch) -> Tensor:
        columns = {key: batch[key] for key in ("uid", "traj_uid", "anchor_obs")}
        columns |= {key: batch[key].numpy() for key in ("episode_rewards", "rewards")}
        options = {"gamma": 1.0, "omega": omega, "normalization": "leave_one_out"}
        rewards_BT, mask_BT = batch["token_level_rewards"], batch["response_mask"]
        return over_episodes(batch, per_token(batch, row_credit("gigpo", rewards_BT, mask_BT, columns, options)[0]))

    report = check_trainer(loss, scenarios=["rows per step"])
    assert serious(report) == kinds
    assert report.results[0].cosine > 0.9


# The contract


def test_unbiased_trainer_has_no_findings_but_notes() -> None:
    report = check_trainer(right)
    assert serious(report) == set()
    assert report.report.checked == len(SCENARIOS)
    assert all(result.error < 1e-9 for result in report.results)
    assert any("mean of the others; mean over episodes" in line for line in report.lines())


def test_function_may_return_the_gradient_by_token() -> None:
    def gradient(batch: Batch) -> Any:
        advantages_B = advantages(batch, episode_scores(batch))
        return (-advantages_B[:, None] * batch["response_mask"] / len(set(batch["traj_uid"]))).numpy()

    assert [one.scale for one in check_trainer(gradient).results] == pytest.approx(
        [one.scale for one in check_trainer(right).results]
    )


def test_unsupported_scenario_is_not_counted() -> None:
    report = check_trainer(partial(groups_by_position, fixed=True), scenarios=["groups of 2", "group of 3"])
    assert [result.is_supported for result in report.results] == [True, False]
    assert report.report.checked == 1


def test_unknown_scenario_and_wrong_shape_are_rejected() -> None:
    with pytest.raises(ConfigError, match="did you mean 'lengths'"):
        check_trainer(right, scenarios=["length"])
    with pytest.raises(ConfigError, match="must return a scalar"):
        check_trainer(lambda batch: batch["log_probs"].sum(dim=1), scenarios=["lengths"])


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.name for scenario in SCENARIOS])
def test_raw_scores_give_the_exact_gradient_in_expectation(scenario: Any) -> None:
    batches = Enumeration(scenario)
    assert math.fsum(batches.probabilities_N) == pytest.approx(1.0, abs=1e-12)
    scores_NB1 = np.nan_to_num(batches.scores_NB)[..., None]
    sampled_NBT = batches.kinds_NBT == 0
    found_P = batches.expected_P(scores_NB1 * sampled_NBT / sum(scenario.sizes))
    share = (sum(scenario.sizes) - scenario.unscored) / sum(scenario.sizes)
    np.testing.assert_allclose(found_P, share * batches.exact_P, atol=1e-12)
