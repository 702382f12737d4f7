"""Test that losses and gradients equal verl's on the same numbers; known differences are stated.

`make integrations` installs verl into `.integrations/learners`. `pytest -s` shows the greatest difference of each.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reward_kit.rl.kl import AdaptiveKLCoefficient, kl_estimate, kl_loss, penalized_rewards
from reward_kit.rl.loss_terms import Aggregation
from reward_kit.rl.losses import (
    cispo_loss,
    decoupled_ppo_loss,
    dppo_loss,
    entropy_loss,
    gmpo_loss,
    gspo_loss,
    ppo_clip_loss,
    sapo_loss,
    token_entropies,
    token_logprobs,
    truncated_importance_weights,
    value_loss,
)
from tests.integrations.peers import (
    LONGEST,
    MODES,
    ROWS,
    TOKENS,
    Case,
    Deviations,
    Peer,
    differentiated,
    generator,
    random_case,
    said,
    with_gradient,
)

pytestmark = pytest.mark.campaign

SEEDS = range(4)
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}
VERL_CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}


def of_verl(verl: Peer, name: str, case: Case, mode: str, clips: dict[str, Any], **more: Any) -> dict[str, Any]:
    config = {"global_batch_info": {"loss_scale_factor": LONGEST}, **clips}
    others = [case.old, case.advantages, case.mask]
    return verl.ask("policy_loss", name=name, logprobs=case.logprobs, others=others, mode=mode, config=config, **more)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_clip_loss_equals_verl(verl: Peer, deviations: Deviations, seed: int, mode: Aggregation) -> None:
    case = random_case(seed)
    weights = torch.rand(case.mask.shape, generator=generator(seed), dtype=torch.float64)
    for dual_clip, given in ((3.0, None), (1.5, weights)):
        ours, gradient = with_gradient(
            ppo_clip_loss,
            case,
            **CLIPS,
            dual_clip=dual_clip,
            weights_BT=given,
            aggregation=mode,
            global_batch=case.whole,
        )
        theirs = of_verl(verl, "vanilla", case, mode, {**VERL_CLIPS, "clip_ratio_c": dual_clip}, weights=given)
        deviations.hold(f"verl PPO with dual clip, {mode}: loss", ours.loss, theirs["loss"])
        deviations.hold(f"verl PPO with dual clip, {mode}: gradient", gradient, theirs["gradient"])
        for name, metric in (
            ("clip_fraction", "pg_clipfrac"),
            ("clip_fraction_dual", "pg_clipfrac_lower"),
            ("approx_kl_k1", "ppo_kl"),
        ):
            metric_value = torch.tensor(theirs["metrics"][f"actor/{metric}"], dtype=torch.float64)
            deviations.hold("verl PPO: clip fractions and approximate KL", said(ours, name), metric_value)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo"])
def test_micro_batches_sum_as_in_verl_with_global_counts(
    verl: Peer, deviations: Deviations, name: str, mode: Aggregation
) -> None:
    case = random_case(11)
    loss, more = {
        "vanilla": (ppo_clip_loss, {"dual_clip": 3.0}),
        "gspo": (gspo_loss, {}),
        "cispo": (cispo_loss, {}),
    }[name]
    counts = {"batch_num_tokens": case.whole.tokens, "global_batch_size": case.whole.sequences}
    clips = {**VERL_CLIPS, "global_batch_info": {"loss_scale_factor": LONGEST, **counts}}
    total = torch.zeros((), dtype=torch.float64)
    for rows in (slice(0, 2), slice(2, 3), slice(3, 7)):
        part = Case(*(values[rows] for values in case))
        ours, gradient = with_gradient(loss, part, **CLIPS, **more, aggregation=mode, global_batch=case.whole)
        theirs = of_verl(verl, name, part, mode, clips)
        deviations.hold(f"verl {name}, micro-batches", ours.loss, theirs["loss"])
        deviations.hold(f"verl {name}, micro-batches", gradient, theirs["gradient"])
        total += ours.loss.detach()
    whole, _ = with_gradient(loss, case, **CLIPS, **more, aggregation=mode, global_batch=case.whole)
    assert total.item() == pytest.approx(whole.loss.item(), abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_and_cispo_losses_equal_verl(verl: Peer, deviations: Deviations, seed: int, mode: Aggregation) -> None:
    case = random_case(seed)
    for name, loss in (("gspo", gspo_loss), ("cispo", cispo_loss)):
        ours, gradient = with_gradient(loss, case, **CLIPS, aggregation=mode, global_batch=case.whole)
        theirs = of_verl(verl, name, case, mode, VERL_CLIPS)
        deviations.hold(f"verl {name}: loss", ours.loss, theirs["loss"])
        deviations.hold(f"verl {name}: gradient", gradient, theirs["gradient"])


@pytest.mark.parametrize("seed", SEEDS)
def test_sapo_and_gmpo_losses_equal_verl(verl: Peer, deviations: Deviations, seed: int) -> None:
    case = random_case(seed)
    theirs = of_verl(verl, "sapo", case, "seq-mean-token-mean", {"tau_pos": 0.9, "tau_neg": 1.3})
    ours, gradient = with_gradient(sapo_loss, case, temperature_positive=0.9, temperature_negative=1.3)
    deviations.hold("verl SAPO: loss", ours.loss, theirs["loss"])
    deviations.hold("verl SAPO: gradient", gradient, theirs["gradient"])
    # verl uses the mean advantage of a sequence, and counts rows without tokens.
    case = Case(case.logprobs, case.old, case.advantages[:, :1].expand_as(case.old), case.mask)
    theirs = of_verl(verl, "geo_mean", case, "seq-mean-token-mean", {**VERL_CLIPS, "clip_ratio": 0.2})
    ours, gradient = with_gradient(gmpo_loss, case, **CLIPS)
    deviations.hold("verl GMPO: loss", ours.loss * (ROWS - 1) / ROWS, theirs["loss"])
    deviations.hold("verl GMPO: gradient", gradient * (ROWS - 1) / ROWS, theirs["gradient"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("divergence", "bounds"), [("tv", (0.02, 0.05)), ("kl", (0.002, 0.01))])
def test_dppo_gradient_equals_verl(
    verl: Peer, deviations: Deviations, divergence: Any, bounds: tuple[float, float], seed: int, mode: Aggregation
) -> None:
    case = random_case(seed)
    low, high = bounds
    options = {"clip_low": low, "clip_high": high, "cap": 1.5, "global_batch": case.whole}
    ours, gradient = with_gradient(dppo_loss, case, divergence=divergence, **options, aggregation=mode)
    clips = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": 1.5}
    theirs = of_verl(verl, f"dppo_{divergence}", case, mode, clips)
    deviations.hold("verl DPPO: gradient", gradient, theirs["gradient"])
    fraction = torch.tensor(theirs["metrics"]["actor/pg_clipfrac"], dtype=torch.float64)
    deviations.hold("verl DPPO: clip fraction", said(ours, "clip_fraction"), fraction)


def test_extreme_ratio_is_clamped_as_in_verl(verl: Peer, deviations: Deviations) -> None:
    case = random_case(5)
    case.logprobs[0, 0], case.logprobs[1, 0] = case.old[0, 0] + 900.0, case.old[1, 0] - 900.0
    for name, loss, more in (("vanilla", ppo_clip_loss, {"dual_clip": 3.0}), ("cispo", cispo_loss, {})):
        ours, gradient = with_gradient(loss, case, **CLIPS, **more)
        theirs = of_verl(verl, name, case, "token-mean", VERL_CLIPS)
        deviations.hold("verl PPO and CISPO, log-ratios of ±900", ours.loss, theirs["loss"])
        deviations.hold("verl PPO and CISPO, log-ratios of ±900", gradient, theirs["gradient"])


def test_sequence_ratio_is_clamped_at_20_where_verl_uses_10(verl: Peer) -> None:
    case = random_case(6)
    case.logprobs[0], case.advantages[0] = case.old[0] + 15.0, -1.0
    ours, gradient = with_gradient(gspo_loss, case, **CLIPS)
    theirs = of_verl(verl, "gspo", case, "seq-mean-token-mean", VERL_CLIPS)
    excess = torch.tensor([15.0, 10.0]).double().exp()
    assert (ours.loss - theirs["loss"]).item() == pytest.approx((excess[0] - excess[1]).item() / (ROWS - 1), rel=1e-9)
    # Beyond its bound verl has no gradient; ours still pushes such a sequence down.
    assert not theirs["gradient"][0].any() and (gradient[0][case.mask[0] > 0] > 0).all()
    assert torch.allclose(gradient[1:], theirs["gradient"][1:], atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_fully_masked_batch_is_zero_and_nan_in_verl(verl: Peer, mode: Aggregation) -> None:
    case = random_case(7)
    case.mask.zero_()
    ours, gradient = with_gradient(ppo_clip_loss, case, **CLIPS, aggregation=mode, global_batch=case.whole)
    assert ours.loss.item() == 0.0 and not gradient.any()
    assert of_verl(verl, "vanilla", case, mode, VERL_CLIPS)["loss"].isnan()


@pytest.mark.parametrize("mode", MODES)
def test_nan_at_masked_token_is_ignored_but_propagates_in_verl(verl: Peer, mode: Aggregation) -> None:
    case = random_case(8)
    clean = with_gradient(ppo_clip_loss, case, **CLIPS, aggregation=mode, global_batch=case.whole)
    case.logprobs[0, int(case.mask[0].argmin())] = torch.nan
    ours = with_gradient(ppo_clip_loss, case, **CLIPS, aggregation=mode, global_batch=case.whole)
    assert torch.equal(ours[0].loss, clean[0].loss) and torch.equal(ours[1], clean[1])
    assert of_verl(verl, "vanilla", case, mode, VERL_CLIPS)["loss"].isnan() == (mode != "token-mean")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_decoupled_ppo_equals_verl_rollout_correction(
    verl: Peer, deviations: Deviations, level: str, seed: int
) -> None:
    case = random_case(seed)
    behaviour = case.old + 0.4 * torch.randn(case.old.shape, generator=generator(seed), dtype=torch.float64)
    theirs_BT = verl.ask("importance_weights", log_ratio=case.old - behaviour, mask=case.mask, level=level, cap=2.0)
    ours_BT = truncated_importance_weights(case.old, behaviour, case.mask, level=level, cap=2.0).weights_BT
    deviations.hold(f"verl truncated importance weights, {level}", ours_BT, theirs_BT["weights"])
    theirs = of_verl(verl, "vanilla", case, "token-mean", VERL_CLIPS, weights=theirs_BT["weights"])
    ours = with_gradient(ppo_clip_loss, case, **CLIPS, dual_clip=3.0, weights_BT=ours_BT)
    deviations.hold(f"verl PPO with its rollout correction, {level}", ours[0].loss, theirs["loss"])
    deviations.hold(f"verl PPO with its rollout correction, {level}", ours[1], theirs["gradient"])
    if level == "token":
        _, old, advantages, mask = case
        options = {**CLIPS, "dual_clip": 3.0, "cap": 2.0, "beyond_cap": "truncate"}
        decoupled = differentiated(
            lambda leaf: decoupled_ppo_loss(leaf, old, behaviour, advantages, mask, **options), case.logprobs
        )
        deviations.hold("verl PPO with its rollout correction, as decoupled PPO", decoupled[0].loss, theirs["loss"])
        deviations.hold("verl PPO with its rollout correction, as decoupled PPO", decoupled[1], theirs["gradient"])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k1+", "k3+", "abs"])
@pytest.mark.parametrize("seed", SEEDS)
def test_kl_penalties_equal_verl(verl: Peer, deviations: Deviations, seed: int, estimator: Any) -> None:
    case = random_case(seed)
    for mode in MODES[:3]:
        theirs = verl.ask(
            "kl_loss", logprobs=case.logprobs, reference=case.old, mask=case.mask, estimator=estimator, mode=mode
        )
        ours, gradient = differentiated(
            lambda leaf, mode=mode: kl_loss(leaf, case.old, case.mask, estimator=estimator, aggregation=mode),
            case.logprobs,
        )
        deviations.hold(f"verl KL {estimator}", kl_estimate(case.logprobs, case.old, estimator), theirs["each"])
        deviations.hold(f"verl KL {estimator}", ours.loss, theirs["loss"])
        deviations.hold(f"verl KL {estimator}", gradient, theirs["gradient"])


def test_k3_is_unbounded_where_verl_clamps_at_10(verl: Peer) -> None:
    logprobs = torch.tensor([[-5.0, -1.0, -40.0]], dtype=torch.float64)
    reference = torch.tensor([[-1.0, -2.0, -1.0]], dtype=torch.float64)
    theirs = verl.ask(
        "kl_loss",
        logprobs=logprobs,
        reference=reference,
        mask=torch.ones_like(logprobs),
        estimator="k3",
        mode="token-mean",
    )
    ours = kl_estimate(logprobs, reference, "k3")
    assert torch.allclose(ours.clamp(max=10.0), theirs["each"]) and (ours > 10.0).tolist() == [[True, False, True]]
    _, gradient = differentiated(lambda leaf: kl_loss(leaf, reference, torch.ones_like(leaf), estimator="k3"), logprobs)
    assert (theirs["gradient"] != 0).tolist() == [[False, True, False]]
    assert (gradient != 0).tolist() == [[True, True, False]]  # both cut the log-ratio at ±20


def test_reward_penalty_and_coefficient_equal_verl(verl: Peer, deviations: Deviations) -> None:
    case = random_case(3)
    theirs = verl.ask(
        "penalized_rewards", scores=case.advantages, logprobs=case.logprobs, reference=case.old, coefficient=0.1
    )
    ours = penalized_rewards(case.advantages, case.logprobs, case.old, case.mask, coefficient=0.1).rewards_BT
    deviations.hold("verl KL in rewards", ours * case.mask, theirs["rewards"] * case.mask)
    # On masked tokens verl takes the penalty of whatever stands there.
    assert torch.equal(ours[case.mask == 0], case.advantages[case.mask == 0])
    measured = [[0.3, 64.0], [0.01, 256.0], [0.11, 10.0], [7.0, 1000.0], [0.0, 1000.0]]
    adaptive = AdaptiveKLCoefficient(0.2, target=0.1, horizon=1000.0)
    found = verl.ask("coefficients", coefficient=0.2, target=0.1, horizon=1000.0, measured=measured)["coefficients"]
    coefficients = torch.tensor([adaptive.update(*each) for each in measured], dtype=torch.float64)
    deviations.hold("verl adaptive KL coefficient", coefficients, torch.tensor(found, dtype=torch.float64))


def test_coefficient_stays_positive_where_verl_turns_negative(verl: Peer) -> None:
    found = verl.ask("coefficients", coefficient=0.2, target=0.1, horizon=100.0, measured=[[0.0, 700.0]])
    assert found["coefficients"] == [pytest.approx(0.2 * (1.0 - 0.2 * 7))]
    assert AdaptiveKLCoefficient(0.2, target=0.1, horizon=100.0).update(0.0, 700.0) == pytest.approx(0.2 * 0.8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss_equals_verl(verl: Peer, deviations: Deviations, seed: int, mode: Aggregation) -> None:
    case = random_case(seed)
    values, old, returns, mask = case
    batch = {"loss_scale_factor": LONGEST}
    theirs = verl.ask(
        "value_loss", values=values, old_values=old, returns=returns, mask=mask, clip=0.5, mode=mode, batch=batch
    )
    ours, gradient = differentiated(
        lambda leaf: value_loss(leaf, old, returns, mask, aggregation=mode, global_batch=case.whole), values
    )
    deviations.hold("verl value loss", ours.loss, theirs["loss"])
    deviations.hold("verl value loss", gradient, theirs["gradient"])
    deviations.hold("verl value loss", said(ours, "value_clip_fraction"), theirs["fraction"])


def test_entropies_and_logprobs_equal_verl(verl: Peer, deviations: Deviations) -> None:
    logits = 3.0 * torch.randn((ROWS, TOKENS + 1, 9), generator=generator(2), dtype=torch.float64)
    ids = torch.randint(9, (ROWS, TOKENS + 1), generator=generator(2))
    mask = random_case(2).mask
    # verl is given the logits that stand before a token; ours are of whole rows, whose first token nothing predicts.
    theirs = verl.ask("entropy_loss", logits=logits[:, :-1], mask=mask, mode="token-mean")
    deviations.hold("verl entropy", token_entropies(logits)[:, 1:], theirs["each"])
    ours, gradient = differentiated(lambda leaf: entropy_loss(token_entropies(leaf)[:, 1:], mask), logits)
    deviations.hold("verl entropy", -ours.loss, theirs["loss"])
    deviations.hold("verl entropy", -gradient[:, :-1], theirs["gradient"])
    found = verl.ask("logprobs", logits=logits[:, :-1], ids=ids[:, 1:])["logprobs"]
    deviations.hold("verl log-probabilities", token_logprobs(logits, ids)[:, 1:], found)
