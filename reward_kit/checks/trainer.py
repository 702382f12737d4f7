"""Enumerate batches to compare the gradient of a trainer's advantages and loss with the exact policy gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from reward_kit.checks.findings import Finding, Report
from reward_kit.checks.tabular import Floats, cosine
from reward_kit.checks.trainer_batches import OBSERVATION, PADDING, SAMPLED, SCENARIOS, Enumeration, Scenario
from reward_kit.checks.trainer_formulas import CAUSES, Formula, choose_formulas, find_formulas, rank
from reward_kit.errors import ConfigError, did_you_mean, requires_extra

with requires_extra("train", "check_trainer"):
    import torch

Loss = Callable[[dict[str, Any]], Any]
_TENSORS = ("response_mask", "attention_mask", "token_level_rewards", "episode_rewards", "is_last_step", "rewards")


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """A trainer's expected gradient in one scenario.

    Attributes:
        scenario: the name of the scenario.
        cosine: the cosine of the angle to the exact gradient. NaN if the gradient is 0 or not finite.
        scale: the factor by which the exact gradient must be multiplied to be closest to the trainer's gradient. NaN if
            the trainer's gradient is not finite.
        error: the norm of the remaining difference, relative to the norm of the gradient. It is 0 if the direction is
            exact.
        formula: the formula that the trainer computes on every batch, or None if no known formula matches.
        causes: the kinds of the findings.
        is_supported: False if the trainer raised `NotImplementedError`.
    """

    scenario: str
    cosine: float = float("nan")
    scale: float = float("nan")
    error: float = float("nan")
    formula: Formula | None = None
    causes: tuple[str, ...] = ()
    is_supported: bool = True

    def line(self) -> str:
        """Return the result as one line of the report."""
        if not self.is_supported:
            return f"{self.scenario:20} not supported by the trainer"
        formula = self.formula.text if self.formula else "no known formula"
        return f"{self.scenario:20} cosine {self.cosine:7.4f}  scale {self.scale:7.4f}  {formula}"


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """The result of `check_trainer`.

    Attributes:
        results: the result of each scenario.
        report: the findings. Each scenario counts as one unit.
    """

    results: tuple[ScenarioResult, ...]
    report: Report

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report for a terminal."""
        yield from (result.line() for result in self.results)
        yield from self.report.lines()


def check_trainer(
    loss: Loss, *, target: str = "trainer", scenarios: Sequence[str] | None = None, tolerance: float = 1e-9
) -> TrainerReport:
    """Run a trainer's advantages and loss on enumerated batches, and compare its gradient with the exact one.

    Nothing is sampled. In each scenario, `loss` is called once on every possible batch, and the gradients are summed,
    weighted by the probabilities of the batches. The policy that generated the batches is also the policy that is
    trained, so no ratio is clipped. Every token of a batch has a separate gradient. If a known formula gives the same
    gradient on all batches, the findings name its deviations from an unbiased estimate.

    Args:
        loss: a function of a batch. The batch is a dict with float64 tensors for B rows and T tokens: `log_probs` (a
            leaf, B×T), `old_log_probs` (B×T), `response_mask` (B×T, 1 for tokens of actions), `attention_mask` (B×T, 0
            for padding), `token_level_rewards` (B×T, NaN on the last token of an unscored episode), `episode_rewards`
            (B, NaN if unscored), `rewards` (B, the sum of the row's step rewards) and `is_last_step` (B, bool). The
            dict also contains the NumPy arrays `uid`, `traj_uid` and `anchor_obs` (B, the group, the episode, and the
            state before the row's first step), and `micro_batches`, a list of tensors with the row indices of each
            micro-batch. The function returns the loss of the optimizer step, or the gradient of the loss with respect
            to `log_probs` (B×T). It raises `NotImplementedError` for a batch that the trainer never gets.
        target: the name of the trainer in the report.
        scenarios: the names of the scenarios to run. None runs all scenarios in `SCENARIOS`.
        tolerance: the maximum difference, relative to the gradient, at which a gradient still counts as equal to a
            formula. Trainers that compute in float32 need about 1e-4.

    Returns:
        A result for each scenario, and the findings.

    Raises:
        ConfigError: If the name of a scenario is unknown, or if `loss` returned neither a loss nor its gradient.
    """
    known = {scenario.name: scenario for scenario in SCENARIOS}
    chosen = list(known) if scenarios is None else list(scenarios)
    for name in chosen:
        if name not in known:
            raise ConfigError(f"unknown scenario {name!r}{did_you_mean(name, known)}")
    measured = [_measure(loss, known[name], tolerance) for name in chosen]
    formulas = choose_formulas([one.formulas for one in measured], tolerance)
    results = [_judge(one, formula, tolerance) for one, formula in zip(measured, formulas, strict=True)]
    report = Report(target, unit="scenario", checked=sum(result.is_supported for result in results))
    for cause in dict.fromkeys(cause for result in results for cause in result.causes):
        affected = [result for result in results if cause in result.causes]
        level, effect = CAUSES[cause]
        places = ", ".join(result.scenario for result in affected) if len(affected) < len(results) else "all scenarios"
        # A more serious cause in the same scenario would determine the cosine of that scenario.
        cosines = [one.cosine for one in affected if all(rank(level) >= rank(CAUSES[c][0]) for c in one.causes)]
        lowest = f"; lowest cosine {min(cosines):.3f}" if np.isfinite(cosines).any() else ""
        lines = tuple(result.line() for result in affected)
        report.add([Finding(level, cause, f"{effect} (in: {places}{lowest})", evidence=lines)])
    return TrainerReport(tuple(results), report)


@dataclass(frozen=True, slots=True)
class _Measurement:
    """A trainer's expected gradient.

    The gradient is `None` if it is 0 or not finite, or if the scenario is not supported.
    """

    batches: Enumeration
    formulas: list[Formula]
    causes: tuple[str, ...] = ()
    found_P: Floats | None = None


def _measure(loss: Loss, scenario: Scenario, tolerance: float) -> _Measurement:
    batches = _enumerate(scenario)
    try:
        coefficients_NBT = _coefficients(loss, batches)
        whole_NBT = coefficients_NBT
        if scenario.micro_batches > 1:
            whole_NBT = _coefficients(loss, _enumerate(replace(scenario, micro_batches=1)))
    except NotImplementedError:
        return _Measurement(batches, [])
    if not np.isfinite(coefficients_NBT).all():
        return _Measurement(batches, [], ("not-finite",))
    found_P, norm = batches.expected_P(coefficients_NBT), float(np.linalg.norm(coefficients_NBT))
    if np.linalg.norm(found_P) <= tolerance:
        return _Measurement(batches, [], ("no-gradient",))
    causes = tuple(_symptoms(batches, coefficients_NBT, tolerance))
    ratio = norm / max(float(np.linalg.norm(whole_NBT)), 1e-300)
    if np.linalg.norm(coefficients_NBT - ratio * whole_NBT) > tolerance * norm:
        whole_NBT = coefficients_NBT
    elif abs(ratio - 1.0) > max(tolerance, 1e-9):
        causes += ("micro-batch-scale",)
    return _Measurement(batches, find_formulas(batches, whole_NBT, tolerance), causes, found_P)


def _judge(measured: _Measurement, formula: Formula | None, tolerance: float) -> ScenarioResult:
    name, found_P, exact_P = measured.batches.scenario.name, measured.found_P, measured.batches.exact_P
    if found_P is None:
        return ScenarioResult(name, causes=measured.causes, is_supported=bool(measured.causes))
    causes = measured.causes
    if formula is not None and "group-of-one-skipped" in formula.causes:
        exact_P = exact_P * measured.batches.first_group_P
    scale = float(found_P @ exact_P / (exact_P @ exact_P))
    error = float(np.linalg.norm(found_P - scale * exact_P) / np.linalg.norm(found_P))
    if formula is not None:
        is_zero = "unscored-as-zero" in formula.causes
        causes = tuple(one for one in causes if not (is_zero and one == "unscored-trained")) + formula.causes
    elif error > tolerance and not causes:
        causes = ("unknown-bias",)
    if scale < 0:
        causes += ("inverted",)
    return ScenarioResult(name, cosine(found_P, exact_P), scale, error, formula, tuple(dict.fromkeys(causes)))


@cache
def _enumerate(scenario: Scenario) -> Enumeration:
    return Enumeration(scenario)


def _coefficients(loss: Loss, batches: Enumeration) -> Floats:
    """Return an (N, B, T) array with the coefficient of each token's score function in the ascent direction."""
    coefficients_NBT = np.zeros(batches.kinds_NBT.shape)
    for i, batch in enumerate(batches.batches()):
        gradient_BT = _gradient(loss, batch)
        coefficients_NBT[i, : len(gradient_BT), : gradient_BT.shape[1]] = -gradient_BT
    return coefficients_NBT


def _gradient(loss: Loss, arrays: dict[str, Any]) -> Floats:
    """Return the gradient of the loss with respect to the log-probabilities as a (B, T) array."""
    log_probs = torch.tensor(arrays["log_probs"], dtype=torch.float64, requires_grad=True)
    batch = {
        **arrays,
        **{name: torch.from_numpy(arrays[name].copy()) for name in _TENSORS},
        "log_probs": log_probs,
        "old_log_probs": log_probs.detach().clone(),
        "micro_batches": [torch.from_numpy(rows) for rows in arrays["micro_batches"]],
    }
    result = torch.as_tensor(loss(batch), dtype=torch.float64)
    if result.shape == log_probs.shape:
        return np.asarray(result.detach().cpu().numpy())
    if result.dim():
        shapes = f"{tuple(result.shape)}, but the batch has {tuple(log_probs.shape)} tokens"
        raise ConfigError(
            f"loss must return a scalar, or its gradient with respect to log_probs; it returned an array of "
            f"shape {shapes}"
        )
    if not result.requires_grad:
        return np.zeros(tuple(log_probs.shape))
    (gradient,) = torch.autograd.grad(result, log_probs, allow_unused=True)
    return np.zeros(tuple(log_probs.shape)) if gradient is None else np.asarray(gradient.numpy())


def _symptoms(batches: Enumeration, coefficients_NBT: Floats, tolerance: float) -> Iterator[str]:
    """Yield the kinds of tokens that should have no gradient but have one."""
    is_unscored_NB1 = (np.isnan(batches.scores_NB) & (batches.groups_NB >= 0))[..., None]
    for cause, tokens_NBT in (
        ("padding-trained", batches.kinds_NBT == PADDING),
        ("observation-trained", batches.kinds_NBT == OBSERVATION),
        ("unscored-trained", is_unscored_NB1 & (batches.kinds_NBT == SAMPLED)),
    ):
        if np.abs(coefficients_NBT * tokens_NBT).max() > tolerance * np.abs(coefficients_NBT).max():
            yield cause
