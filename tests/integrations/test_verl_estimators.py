"""Test that advantage estimators equal verl's if a step is a token; known differences are stated.

verl gives a trajectory that is alone in its group its raw score; ours are relative to a group, and give it zero.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from reward_kit.agent.models import StepData
from reward_kit.credit.step_credit import StepCredit
from reward_kit.rl_helpers import ESTIMATORS
from tests.integrations.peers import ROWS, TOKENS, Deviations, Peer, generator

pytestmark = pytest.mark.campaign

GROUPS = [0, 0, 0, 1, 1, 1, 1]
WITH_ONE_ALONE = [0, 0, 0, 1, 1, 1, 2]
SEEDS = range(4)


def random_batch(seed: int) -> tuple[Tensor, Tensor]:
    """Return (B,T) rewards on every action token, and the mask, with holes."""
    mask = (torch.rand((ROWS, TOKENS), generator=generator(seed)) < 0.7).double()
    mask[:, 0] = 1.0
    return torch.randn((ROWS, TOKENS), generator=generator(seed), dtype=torch.float64) * mask, mask


def ours(
    name: str, rewards: Tensor, mask: Tensor, groups: list[int], values: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return (B,T) advantages and returns of a reward-kit estimator whose steps are the action tokens."""
    batch = []
    for row in range(ROWS):
        at = mask[row].nonzero().flatten().tolist()
        batch.append([_step(rewards[row, t].item(), None if values is None else values[row, t].item()) for t in at])
    credit: StepCredit = ESTIMATORS[name](batch, rewards.sum(dim=1).tolist(), group_ids=groups, **options)
    return _laid(credit.advantages_S, mask), _laid(credit.returns_S, mask)


def _step(reward: float, value: float | None) -> StepData:
    return StepData(
        system_step_index=0, observation_data="", action_taken={}, base_reward=reward, policy_value_estimate=value
    )


def _laid(values_S: Any, mask: Tensor) -> Tensor:
    out = torch.zeros_like(mask)
    out[mask > 0] = torch.from_numpy(values_S)
    return out


def theirs(
    verl: Peer, name: str, rewards: Tensor, mask: Tensor, groups: list[int], config: Any = None, **more: Any
) -> dict[str, Any]:
    config = config or {}
    return verl.ask("advantages", name=name, rewards=rewards, mask=mask, groups=groups, config=config, **more)


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """Return values minus their mean, divided by their unbiased standard deviation, over the mask."""
    chosen = values[mask > 0]
    return (values - chosen.mean()) / chosen.std() * mask


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "verls", "options", "more"),
    [
        ("grpo", "grpo", {}, {}),
        ("grpo", "grpo", {"normalization": "mean"}, {"norm_adv_by_std_in_grpo": False}),
        ("rloo", "rloo", {}, {}),
        ("rloo", "rloo_vectorized", {}, {}),
        ("opo", "opo", {"length": "steps"}, {}),
        ("gpg", "gpg", {}, {}),  # no score is zero here, and no group constant
    ],
)
def test_group_relative_estimators_equal_verl(
    verl: Peer, deviations: Deviations, name: str, verls: str, options: Any, more: Any, seed: int
) -> None:
    rewards, mask = random_batch(seed)
    found, _ = ours(name, rewards, mask, GROUPS, **options)
    row = f"verl {verls}" + (", without std" if more else "")
    deviations.hold(row, found, theirs(verl, verls, rewards, mask, GROUPS, **more)["advantages"])


@pytest.mark.parametrize("spread", [1.0, 1e-4])
def test_grpo_equals_vectorized_verl_in_float32(verl: Peer, deviations: Deviations, spread: float) -> None:
    rewards, mask = random_batch(3)
    rewards = 0.5 / mask.sum(dim=1, keepdim=True) * mask + spread * rewards
    found, _ = ours("grpo", rewards, mask, GROUPS)
    scalar = theirs(verl, "grpo", rewards, mask, GROUPS)["advantages"]
    deviations.hold("verl grpo, scores that differ by 1e-4" if spread < 1.0 else "verl grpo", found, scalar)
    # Its statistics are in float32, whose steps near 0.5 are 3e-8 of a standard deviation of `spread`.
    vectorized = theirs(verl, "grpo_vectorized", rewards, mask, GROUPS)["advantages"]
    deviations.hold(f"verl grpo_vectorized, spread {spread:g} (float32)", found, vectorized, 1e-6 + 1e-7 / spread)


@pytest.mark.parametrize("seed", SEEDS)
def test_passk_without_standard_deviation_equals_verl(verl: Peer, deviations: Deviations, seed: int) -> None:
    rewards, mask = random_batch(seed)
    found, _ = ours("grpo_passk", rewards, mask, GROUPS)
    plain = theirs(verl, "grpo_passk", rewards, mask, GROUPS, {"norm_adv_by_std_in_grpo": False})
    deviations.hold("verl grpo_passk, without std", found, plain["advantages"])
    scores, groups = rewards.sum(dim=1), torch.tensor(GROUPS)
    scales = torch.stack([scores[groups == group].std() + 1e-6 for group in GROUPS]).unsqueeze(1)
    scaled = theirs(verl, "grpo_passk", rewards, mask, GROUPS, {"norm_adv_by_std_in_grpo": True})
    deviations.hold("verl grpo_passk, ours divided by std", found / scales, scaled["advantages"])
    alone = theirs(verl, "grpo_passk", rewards, mask, WITH_ONE_ALONE)["refused"]
    assert "at least 2 samples" in alone and not ours("grpo_passk", rewards, mask, WITH_ONE_ALONE)[0][-1].any()


@pytest.mark.parametrize(
    ("name", "verls"), [("grpo", "grpo"), ("rloo", "rloo"), ("opo", "opo"), ("gpg", "gpg"), ("rloo", "rloo_vectorized")]
)
def test_single_rollout_group_has_zero_advantage_unlike_in_verl(verl: Peer, name: str, verls: str) -> None:
    rewards, mask = random_batch(5)
    options = {"length": "steps"} if name == "opo" else {}
    found, _ = ours(name, rewards, mask, WITH_ONE_ALONE, **options)
    given = theirs(verl, verls, rewards, mask, WITH_ONE_ALONE)["advantages"]
    assert not found[-1].any()
    raw = 0.0 if verls == "rloo_vectorized" else rewards[-1].sum() / (1 + 1e-6 * (name == "grpo"))
    assert torch.allclose(given[-1], raw * mask[-1])
    # The batch has seven scores, and ours counts the six that can give a gradient.
    assert torch.allclose(found[:-1], given[:-1] * (7 / 6 if name == "gpg" else 1.0))


def test_gpg_counts_mixed_groups_where_verl_counts_nonzero_scores(verl: Peer) -> None:
    rewards, mask = torch.zeros((ROWS, TOKENS)).double(), random_batch(6)[1]
    rewards[:, 0] = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    found, _ = ours("gpg", rewards, mask, GROUPS)
    given = theirs(verl, "gpg", rewards, mask, GROUPS)["advantages"]
    # Three of seven are in a group that differs; five of seven scores are not zero.
    assert torch.allclose(found * 3 / 7, given * 5 / 7) and found.any()


@pytest.mark.parametrize("seed", SEEDS)
def test_rf_baseline_scales_over_trajectories_where_verl_whitens_over_tokens(
    verl: Peer, deviations: Deviations, seed: int
) -> None:
    rewards, mask = random_batch(seed)
    options = {"epsilon": 0.0}
    centred, _ = ours("grpo", rewards, mask, GROUPS, normalization="mean")
    given = theirs(verl, "reinforce_plus_plus_baseline", rewards, mask, GROUPS)["advantages"]
    deviations.hold("verl reinforce_plus_plus_baseline, from centred scores", whitened(centred, mask), given)
    # With one token each, tokens are trajectories.
    first = torch.zeros_like(mask)
    first[:, 0] = 1.0
    found, _ = ours("reinforce_plus_plus_baseline", rewards * first, first, GROUPS, **options)
    given = theirs(verl, "reinforce_plus_plus_baseline", rewards * first, first, GROUPS)["advantages"]
    deviations.hold("verl reinforce_plus_plus_baseline, one token each", found, given)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_plus_plus_and_returns_equal_verl(
    verl: Peer, deviations: Deviations, seed: int, gamma: float
) -> None:
    rewards, mask = random_batch(seed)
    found, returns = ours("reinforce_plus_plus", rewards, mask, GROUPS, gamma=gamma, epsilon=0.0)
    given = theirs(verl, "reinforce_plus_plus", rewards, mask, GROUPS, {"gamma": gamma})
    deviations.hold("verl reinforce_plus_plus", found, given["advantages"])
    deviations.hold("verl reinforce_plus_plus: returns", returns, given["returns"])
    plain, _ = ours("discounted_returns", rewards, mask, GROUPS, gamma=gamma)
    deviations.hold("verl reinforce_plus_plus: returns", plain, given["returns"])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 0.0), (0.99, 1.0)])
@pytest.mark.parametrize("seed", SEEDS)
def test_gae_equals_verl_before_whitening(
    verl: Peer, deviations: Deviations, seed: int, gamma: float, lam: float
) -> None:
    rewards, mask = random_batch(seed)
    values = torch.randn((ROWS, TOKENS), generator=generator(seed + 100), dtype=torch.float64)
    found, _ = ours("gae", rewards, mask, GROUPS, values, gamma=gamma, lam=lam)
    given = theirs(verl, "gae", rewards, mask, GROUPS, values=values, gamma=gamma, lam=lam)
    deviations.hold("verl gae, ours whitened", whitened(found, mask), given["advantages"] * mask)
    deviations.hold("verl gae: returns", (found + values) * mask, given["returns"] * mask)
