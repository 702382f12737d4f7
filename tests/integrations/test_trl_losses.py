"""Test that losses and gradients equal those of TRL's `GRPOTrainer`; known differences are stated.

The trainer itself runs, around a tiny Qwen2: its log-probabilities are of real logits. `make integrations` installs TRL
into `.integrations/learners`. `pytest -s` shows the greatest difference of each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from reward_kit.rl.kl import kl_loss
from reward_kit.rl.loss_terms import Aggregation, GlobalBatch, Loss
from reward_kit.rl.losses import cispo_loss, entropy_loss, gspo_loss, ppo_clip_loss, token_entropies, token_logprobs
from tests.integrations.peers import LONGEST, Case, Deviations, Peer, differentiated, generator, said, with_gradient

pytestmark = pytest.mark.campaign

ROWS, PROMPT, TOKENS = 6, 3, 10
SEEDS = range(3)
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}
TRL_CLIPS = {"epsilon": 0.2, "epsilon_high": 0.28, "max_completion_length": LONGEST}
AGGREGATIONS: dict[str, Aggregation] = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "dapo": "token-mean",
    "luspo": "seq-mean-token-sum",
}
"""TRL's names of what it divides by, and ours."""


class Rows(NamedTuple):
    """Rows as the trainer makes them: completions of different lengths, with holes that are not trained."""

    ids: Tensor
    completion_mask: Tensor
    tool_mask: Tensor
    advantages: Tensor
    noise: Tensor

    @property
    def mask(self) -> Tensor:
        return self.completion_mask * self.tool_mask

    def inputs(self, **more: Any) -> dict[str, Any]:
        return {
            "completion_ids": self.ids[:, PROMPT:],
            "completion_mask": self.completion_mask,
            "tool_mask": self.tool_mask,
            "advantages": self.advantages,
            "num_items_in_batch": self.mask.sum(),
            **more,
        }


def random_rows(seed: int, masked_row: bool = False) -> Rows:
    """Return rows with advantages per token, as a subclass of the trainer may give them."""
    draw = generator(seed)
    lengths = torch.randint(4, TOKENS + 1, (ROWS, 1), generator=draw)
    completion_mask = (torch.arange(TOKENS) < lengths).long()
    tool_mask = (torch.rand((ROWS, TOKENS), generator=draw) < 0.8).long()
    tool_mask[:, 0] = 1
    tool_mask[2] *= 0 if masked_row else 1
    ids = torch.randint(2, 13, (ROWS, PROMPT + TOKENS), generator=draw)
    advantages, noise = torch.randn((2, ROWS, TOKENS), generator=draw, dtype=torch.float64)
    return Rows(ids, completion_mask, tool_mask, advantages, noise)


def both(
    trl: Peer, rows: Rows, options: dict[str, Any], spread: float = 0.6, **more: Any
) -> tuple[Case, dict[str, Any]]:
    """Return the batch for reward-kit's losses, and the trainer's result for it."""
    logprobs = _ask(trl, rows, {}, {})["logprobs"]
    old = logprobs + spread * rows.noise
    case = Case(logprobs, old, rows.advantages.expand_as(logprobs), rows.mask.double())
    return case, _ask(trl, rows, {"old_per_token_logps": old, **more}, {**TRL_CLIPS, **options})


def _ask(trl: Peer, rows: Rows, inputs: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return trl.ask(
        "loss",
        prompt_ids=rows.ids[:, :PROMPT],
        inputs=rows.inputs(**inputs),
        options=options,
        with_weights="importance_sampling_ratio" in inputs,
    )


def held(deviations: Deviations, name: str, ours: tuple[Loss, Tensor], theirs: dict[str, Any]) -> None:
    deviations.hold(f"TRL {name}: loss", ours[0].loss, theirs["loss"])
    deviations.hold(f"TRL {name}: gradient", ours[1], theirs["gradient"])


@pytest.mark.parametrize("loss_type", AGGREGATIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_clipped_surrogate_equals_trl(trl: Peer, deviations: Deviations, seed: int, loss_type: str) -> None:
    case, theirs = both(trl, random_rows(seed), {"loss_type": loss_type})
    ours = with_gradient(ppo_clip_loss, case, **CLIPS, aggregation=AGGREGATIONS[loss_type], global_batch=case.whole)
    held(deviations, loss_type, ours, theirs)
    for name, metric in (("clip_fraction_low", "low_mean"), ("clip_fraction_high", "high_mean")):
        metric_value = torch.tensor(theirs["metrics"][f"clip_ratio/{metric}"], dtype=torch.float64)
        deviations.hold("TRL clip fractions", said(ours[0], name), metric_value)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_kl_term_equals_trl_with_k3(trl: Peer, deviations: Deviations, loss_type: str) -> None:
    rows = random_rows(5)
    reference = _ask(trl, rows, {}, {})["logprobs"] + 0.5 * rows.noise.flip(0)
    options = {"loss_type": loss_type, "beta": 0.1, "use_bias_correction_kl": False}
    case, theirs = both(trl, rows, options, ref_per_token_logps=reference)
    shared: dict[str, Any] = {"aggregation": AGGREGATIONS[loss_type], "global_batch": case.whole}
    surrogate = with_gradient(ppo_clip_loss, case, **CLIPS, **shared)
    kl, kl_gradient = differentiated(
        lambda leaf: kl_loss(leaf, reference, case.mask, estimator="k3", **shared), case.logprobs
    )
    deviations.hold("TRL with KL (beta): loss", surrogate[0].loss + 0.1 * kl.loss, theirs["loss"])
    deviations.hold("TRL with KL (beta): gradient", surrogate[1] + 0.1 * kl_gradient, theirs["gradient"])
    deviations.hold("TRL KL", said(kl, "kl"), torch.tensor(theirs["metrics"]["kl"]))


@pytest.mark.parametrize("spread", [0.0, 0.6])
def test_trl_default_kl_term_is_k3_plus_times_the_ratio(trl: Peer, deviations: Deviations, spread: float) -> None:
    rows = random_rows(6)
    reference = _ask(trl, rows, {}, {})["logprobs"] + 0.5 * rows.noise.flip(0)
    options = {"loss_type": "dapo", "beta": 0.1}
    case, theirs = both(trl, rows, options, spread, ref_per_token_logps=reference)
    surrogate, gradient = with_gradient(ppo_clip_loss, case, **CLIPS)
    ratio = (case.logprobs - case.old).exp()
    kl, kl_gradient = differentiated(lambda leaf: kl_loss(leaf, reference, case.mask, weights_BT=ratio), case.logprobs)
    # On the samples of the policy itself every ratio is 1, and our default is TRL's.
    unweighted = kl_loss(case.logprobs, reference, case.mask).loss.item()
    assert spread > 0.0 or kl.loss.item() == pytest.approx(unweighted, abs=1e-12)
    deviations.hold("TRL with its default KL: loss", surrogate.loss + 0.1 * kl.loss, theirs["loss"])
    deviations.hold("TRL with its default KL: gradient", gradient + 0.1 * kl_gradient, theirs["gradient"])


@pytest.mark.parametrize("seed", SEEDS)
def test_trl_two_sided_clipping_equals_dual_clip(trl: Peer, deviations: Deviations, seed: int) -> None:
    case, theirs = both(trl, random_rows(seed), {"loss_type": "dapo", "delta": 1.5}, spread=1.0)
    held(deviations, "delta, as dual clip", with_gradient(ppo_clip_loss, case, **CLIPS, dual_clip=1.5), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_trl_cispo_bound_is_the_weight(trl: Peer, deviations: Deviations, seed: int) -> None:
    case, theirs = both(trl, random_rows(seed), {"loss_type": "cispo", "epsilon_high": 1.6})
    held(deviations, "cispo", with_gradient(cispo_loss, case, clip_low=1.0, clip_high=0.6), theirs)


@pytest.mark.parametrize("loss_type", AGGREGATIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_sequence_level_importance_is_gspo(trl: Peer, deviations: Deviations, seed: int, loss_type: str) -> None:
    rows = random_rows(seed)._replace(advantages=random_rows(seed).advantages[:, :1])
    options = {"loss_type": loss_type, "importance_sampling_level": "sequence"}
    case, theirs = both(trl, rows, options, spread=1.0)
    ours = with_gradient(gspo_loss, case, **CLIPS, aggregation=AGGREGATIONS[loss_type], global_batch=case.whole)
    held(deviations, f"{loss_type}, sequence level", ours, theirs)


def test_gspo_keeps_token_credit_that_trl_averages_over_the_sequence(trl: Peer) -> None:
    rows = random_rows(4)
    options = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    case, theirs = both(trl, rows, options, spread=0.1)
    ours, gradient = with_gradient(gspo_loss, case, **CLIPS)
    assert ours.loss.item() == pytest.approx(theirs["loss"].item(), abs=1e-12)
    means = (gradient.sum(dim=1) / case.mask.sum(dim=1)).unsqueeze(1) * case.mask
    assert torch.allclose(means, theirs["gradient"], atol=1e-12)
    assert not torch.allclose(gradient, theirs["gradient"], atol=1e-3)


def test_importance_weights_equal_trl(trl: Peer, deviations: Deviations) -> None:
    rows = random_rows(6)
    weights = rows.noise.abs()
    case, theirs = both(trl, rows, {"loss_type": "dapo"}, importance_sampling_ratio=weights)
    held(deviations, "importance weights", with_gradient(ppo_clip_loss, case, **CLIPS, weights_BT=weights), theirs)


def test_entropy_bonus_equals_trl(trl: Peer, deviations: Deviations) -> None:
    rows = random_rows(7)
    case, theirs = both(trl, rows, {"loss_type": "dapo", "entropy_coef": 0.05})
    surrogate, _ = with_gradient(ppo_clip_loss, case, **CLIPS)
    bonus, gradient = differentiated(lambda leaf: entropy_loss(leaf, case.mask), theirs["entropies"])
    deviations.hold("TRL with an entropy bonus", surrogate.loss + 0.05 * bonus.loss, theirs["loss"])
    deviations.hold("TRL with an entropy bonus", 0.05 * gradient, theirs["entropy_gradient"])


def test_logprobs_and_entropies_equal_trl(trl: Peer, deviations: Deviations) -> None:
    rows = random_rows(8)
    rows.completion_mask.fill_(1)
    theirs = _ask(trl, rows, {}, {})
    logits = trl.ask("logits", ids=rows.ids)["logits"]
    # Both in float32, from sums in another order: about ten units in the last place.
    logprobs, entropies = token_logprobs(logits, rows.ids)[:, PROMPT:], token_entropies(logits)[:, PROMPT:]
    deviations.hold("TRL log-probabilities of a model (float32)", logprobs, theirs["logprobs"], 5e-6)
    deviations.hold("TRL entropies of a model (float32)", entropies, theirs["entropies"], 5e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "luspo"])
def test_fully_masked_row_counts_in_the_trl_mean_only(trl: Peer, deviations: Deviations, loss_type: str) -> None:
    case, theirs = both(trl, random_rows(9, masked_row=True), {"loss_type": loss_type})
    as_theirs = GlobalBatch(case.mask.sum().item(), ROWS, LONGEST)
    shared: dict[str, Any] = {**CLIPS, "aggregation": AGGREGATIONS[loss_type]}
    counted = with_gradient(ppo_clip_loss, case, **shared, global_batch=as_theirs)
    held(deviations, f"{loss_type}, masked row counted", counted, theirs)
    ours, _ = with_gradient(ppo_clip_loss, case, **shared, global_batch=case.whole)
    assert ours.loss.item() == pytest.approx(theirs["loss"].item() * ROWS / (ROWS - 1), rel=1e-9)


def test_extreme_ratio_is_finite_but_infinite_in_trl(trl: Peer) -> None:
    rows = random_rows(10)
    rows.noise[0, 0], rows.advantages[0, 0] = -900.0, -1.0
    case, theirs = both(trl, rows, {"loss_type": "dapo"}, spread=1.0)
    ours, gradient = with_gradient(ppo_clip_loss, case, **CLIPS)
    assert ours.loss.isfinite() and gradient.isfinite().all()
    assert theirs["loss"].isinf() and not theirs["gradient"].isfinite().all()
