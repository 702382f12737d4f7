"""Test by enumeration to which gradient each estimator converges.

From a group of n episodes the gradient is the mean over the episodes of sum_k grad log pi(a_k | s_k) A_k. Beside g, the
exact gradient of the expected score, with gamma = 1 and epsilon = 0, its expectation is:

| estimator | expected from groups of n | as n grows |
|---|---|---|
| rloo; grpo, gigpo ω=1 by leave_one_out | g | g |
| discounted_returns | g | g |
| turn_level_grpo | g | g |
| gae, λ=1, or any λ with the true values | g | g |
| vine, with the true values of all steps, or of steps chosen beforehand | g | g |
| vine, with the true values of the episodes that failed | at cosine 0.96 | at cosine 0.96 |
| grpo, gigpo ω=1 by mean; gpg on one group | g (n−1)/n | g |
| grpo, gigpo ω=1 by std | at cosine 0.96 | g/σ |
| reinforce_plus_plus_baseline on one group | at cosine 0.96 | g/σ |
| reinforce_plus_plus on one group | at cosine 0.97 | g/σ, of the returns |
| discounted_returns, baseline mean | at cosine 0.99 | g |
| opo | at cosine 0.94 | g |
| gigpo ω=1 by std, episode_statistics step | at cosine 0.84 | g/σ, of the scores by length |
| gigpo ω=0 by leave_one_out, no state twice | each state's part of g times its chance of company, 1 − (1−p)^(n−1) | g |
| gigpo ω=0 by mean, no state twice | each state's part times the expected (m−1)/m of its m visits | g |
| gigpo ω=0 by leave_one_out or mean, states come back | at cosine 0.97 | g |
| gigpo ω=0 by std | at cosine 0.88 | each state's part over its own σ |
| hgpo by leave_one_out, no state twice | as gigpo ω=0: each state's part times its chance of company | g |
| hgpo by leave_one_out or mean, states come back | at cosine 0.98 | g |
| hgpo by mean, no state twice | at cosine 0.96 | g |
| hgpo by std | at cosine 0.88 | each context's part over its own σ |
| gagpo by mean, no state twice | as gigpo ω=0 by mean, for any λ | g |
| gagpo by mean, states come back | at cosine 0.97 | g if λ=1, else at cosine 0.98 |
| gagpo by std | at cosine 0.90 | as by mean, over σ of the advantages |
| g2po by mean | at cosine 0.98 | 3 g, at cosine 0.99 if states come back |
| g2po by std | at cosine 0.93 | at cosine 0.97 |
| graphgpo by std, success from a score of 1 | at cosine 0.60 | at cosine 0.58 |
| grpo_passk | 1/n of the gradient of the expected best of n | – |

"At cosine": biased, and so far from the direction of g, at least, on both tasks with n = 2 and 3. Between ω = 0 and 1
gigpo is the mixture of its two rows. A baseline that leaves out the whole episode is exact, however long the others
are; one that contains its score shrinks; one that weighs it by its own length, or by its visits, tilts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations_with_replacement
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pytest

from reward_kit.agent.models import StepData
from reward_kit.checks.tabular import Floats, Path, TabularTask, cosine, error_of
from reward_kit.credit import vine_credit
from reward_kit.credit.step_credit import StepCredit
from reward_kit.rl_helpers import ESTIMATORS, gigpo_credit
from tests.credit.path_formulas import (
    Formula,
    centred_by_turn,
    centred_by_turn_of_others,
    deviation_of_returns,
    deviation_of_scores,
    deviation_of_scores_by_length,
    generalized_advantages,
    graph_distances,
    group_graph,
    less_the_mean,
    less_the_others,
    one,
    returns_by_context,
    returns_by_deviation,
    returns_by_state,
    returns_less_mean,
    returns_less_mean_of_reached_turns,
    returns_one_turn_late,
    score_by_length,
    scores_by_deviation,
    scores_by_deviation_of_turns,
    scores_less_mean_by_length,
)
from tests.credit.tabular import (
    LOOPS,
    TASKS,
    UNROLLED,
    batch_of,
    episode_steps,
    expected_gradient,
    formula_gradient,
    groups_of,
    limit_gradient,
    perfect_values,
    population,
    slopes_of,
    values_without_a_limit,
)

POPULATION = 256
GROUP_SIZES = (2, 3)
ACROSS_GROUPS = {"gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}
NOTE = FilePath(__file__).parents[2] / "development" / "notes" / "estimators.md"

EXACT = 1e-12
"""How far two enumerations of the same number may be apart."""

task_of_each_kind = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
group_sizes = pytest.mark.parametrize("size", GROUP_SIZES)


def gigpo(**options: Any) -> Callable[..., StepCredit]:
    return partial(gigpo_credit, **{"gamma": 1.0, "epsilon": 0.0, **options})


# The ground that the other tests stand on


@task_of_each_kind
def test_exact_gradient_is_the_slope_of_the_expected_score(task: TabularTask) -> None:
    def expected_score(logits_P: Floats) -> float:
        return math.fsum(path.probability * path.score for path in task.paths(logits_P))

    slopes_P = slopes_of(expected_score, task.logits_P)
    np.testing.assert_allclose(task.policy_gradient(), slopes_P, atol=1e-9, rtol=0)
    assert np.linalg.norm(task.policy_gradient()) > 0.1


@task_of_each_kind
@group_sizes
def test_enumerated_groups_have_total_probability_one(task: TabularTask, size: int) -> None:
    assert math.fsum(path.probability for path in task.paths()) == pytest.approx(1.0, abs=1e-15)
    assert math.fsum(weight for weight, _ in groups_of(task.paths(), size)) == pytest.approx(1.0, abs=1e-15)
    assert len({len(path.turns) for path in task.paths()}) == task.horizon


# What the equality of enumerated numbers finds

PLANTED = (
    centred_by_turn,
    centred_by_turn_of_others,
    returns_less_mean_of_reached_turns,
    score_by_length,
    returns_one_turn_late,
)


@task_of_each_kind
@pytest.mark.parametrize("formula", PLANTED)
def test_planted_fault_is_detected(task: TabularTask, formula: Formula) -> None:
    assert error_of(formula_gradient(task, formula, 3), task.policy_gradient()) > 0.05


@task_of_each_kind
def test_unbiased_formula_has_no_error(task: TabularTask) -> None:
    found = formula_gradient(task, lambda group: [path.returns for path in group], 3)
    assert error_of(found, task.policy_gradient()) < EXACT


# Exact at every size

Claim = tuple[str, dict[str, Any], Callable[[int], float]]


def whole(_size: int) -> float:
    return 1.0


def shrunk(size: int) -> float:
    """Return the factor (n - 1) / n of a score minus a mean that includes it."""
    return (size - 1) / size


EXACT_CLAIMS: list[Claim] = [
    ("rloo", {}, whole),
    ("grpo", {"normalization": "leave_one_out"}, whole),
    ("gigpo", {"omega": 1.0, "gamma": 1.0, "normalization": "leave_one_out"}, whole),
    ("gigpo", {"omega": 1.0, "gamma": 1.0, "normalization": "leave_one_out", "episode_statistics": "step"}, whole),
    ("discounted_returns", {"gamma": 1.0}, whole),
    ("turn_level_grpo", {"gamma": 1.0}, whole),
    ("grpo", {"normalization": "mean"}, shrunk),
    ("grpo", {"normalization": "constant", "normalization_constant": 4.0}, lambda size: shrunk(size) / 4.0),
    ("gpg", {}, shrunk),
]


def without_rewards(path: Path) -> list[StepData]:
    """Drop the rewards, so that only the score is known."""
    return [step.model_copy(update={"base_reward": None}) for step in episode_steps(path)]


@task_of_each_kind
@group_sizes
@pytest.mark.parametrize("as_steps", [episode_steps, without_rewards])
@pytest.mark.parametrize(("name", "options", "factor"), EXACT_CLAIMS)
def test_expected_gradient_is_exact(
    task: TabularTask,
    size: int,
    as_steps: Callable[[Path], list[StepData]],
    name: str,
    options: dict[str, Any],
    factor: Callable[[int], float],
) -> None:
    estimate = partial(ESTIMATORS[name], **options)
    found = expected_gradient(task, estimate, size, as_steps=as_steps, one_by_one=name in ACROSS_GROUPS)
    assert error_of(found, factor(size) * task.policy_gradient()) < EXACT


# Biased in small groups: the expectation of the formula, written once more, and how far it points away

STEP_STD = {"omega": 1.0, "gamma": 1.0, "epsilon": 0.0, "episode_statistics": "step"}
LEAVE_ONE_OUT = {"omega": 0.0, "gamma": 1.0, "normalization": "leave_one_out"}
FORMULAS: list[tuple[str, dict[str, Any], Formula, float]] = [
    ("grpo", {"epsilon": 0.0}, scores_by_deviation, 0.96),
    ("reinforce_plus_plus_baseline", {"epsilon": 0.0}, scores_by_deviation, 0.96),
    ("reinforce_plus_plus", {"gamma": 1.0, "epsilon": 0.0}, returns_by_deviation, 0.97),
    ("opo", {}, scores_less_mean_by_length, 0.94),
    ("discounted_returns", {"gamma": 1.0, "baseline": "mean"}, returns_less_mean, 0.99),
    ("gigpo", {"omega": 1.0, "gamma": 1.0, "epsilon": 0.0}, scores_by_deviation, 0.96),
    ("gigpo", STEP_STD, scores_by_deviation_of_turns, 0.84),
    ("gigpo", {"omega": 0.0, "gamma": 1.0, "epsilon": 0.0}, returns_by_state, 0.88),
    ("gigpo", LEAVE_ONE_OUT, partial(returns_by_state, measure=less_the_others), 0.96),
    ("gigpo", {**LEAVE_ONE_OUT, "normalization": "mean"}, partial(returns_by_state, measure=less_the_mean), 0.94),
    ("hgpo", {"gamma": 1.0, "epsilon": 0.0}, returns_by_context, 0.88),
    ("hgpo", {"gamma": 1.0, "normalization": "mean"}, partial(returns_by_context, measure=less_the_mean), 0.96),
    (
        "hgpo",
        {"gamma": 1.0, "normalization": "leave_one_out"},
        partial(returns_by_context, measure=less_the_others),
        0.96,
    ),
    *(
        ("gagpo", {"gamma": 1.0, "lam": lam, "epsilon": 0.0}, partial(generalized_advantages, lam=lam), 0.9)
        for lam in (0.0, 0.5, 1.0)
    ),
    *(
        (
            "gagpo",
            {"gamma": 1.0, "lam": lam, "normalization": "mean"},
            partial(generalized_advantages, lam=lam, measure=less_the_mean),
            0.96,
        )
        for lam in (0.0, 0.5, 1.0)
    ),
    ("g2po", {"gamma": 1.0, "epsilon": 0.0}, group_graph, 0.93),
    ("graphgpo", {"epsilon": 0.0}, graph_distances, 0.6),
    ("g2po", {"gamma": 1.0, "normalization": "mean"}, partial(group_graph, measure=less_the_mean), 0.98),
]


@task_of_each_kind
@group_sizes
@pytest.mark.parametrize(("name", "options", "formula", "least_cosine"), FORMULAS)
def test_expected_gradient_matches_its_formula(
    task: TabularTask, size: int, name: str, options: dict[str, Any], formula: Formula, least_cosine: float
) -> None:
    estimate = partial(ESTIMATORS[name], **options)
    found = expected_gradient(task, estimate, size, one_by_one=name in ACROSS_GROUPS)
    assert error_of(found, formula_gradient(task, formula, size)) < EXACT
    assert least_cosine < cosine(found, task.policy_gradient()) < 1.0 - 1e-4


@task_of_each_kind
def test_gpg_across_groups_scales_by_the_share_of_tied_groups(task: TabularTask) -> None:
    """If one of two groups is tied, gpg counts the other twice: it divides by the share of untied groups."""
    groups = list(groups_of(task.paths(), 2))
    tied = math.fsum(weight for weight, (a, b) in groups if a.score == b.score)
    found = np.zeros(len(task.logits_P))
    for (p, first), (q, second) in combinations_with_replacement(groups, 2):
        weight = p * q if first is second else 2 * p * q
        batch = batch_of(task, [(weight / 2, first), (weight / 2, second)], episode_steps)
        found += batch.gradient(ESTIMATORS["gpg"](batch.steps, batch.scores, group_ids=batch.group_ids).advantages_S)
    assert 0.05 < tied < 0.95
    assert error_of(found, 0.5 * (1.0 + tied) * task.policy_gradient()) < EXACT


# In the limit: one group in which every path is as frequent as it is probable


LIMITS: list[tuple[str, dict[str, Any], Callable[[Sequence[Path]], float]]] = [
    ("grpo", {"normalization": "mean"}, one),
    ("grpo", {"epsilon": 0.0}, deviation_of_scores),
    ("reinforce_plus_plus_baseline", {"epsilon": 0.0}, deviation_of_scores),
    ("reinforce_plus_plus", {"gamma": 1.0, "epsilon": 0.0}, deviation_of_returns),
    ("opo", {}, one),
    ("gpg", {}, one),
    ("discounted_returns", {"gamma": 1.0, "baseline": "mean"}, one),
    ("gigpo", STEP_STD, deviation_of_scores_by_length),
    ("gigpo", {"omega": 0.5, "gamma": 1.0, "normalization": "mean"}, one),
    ("hgpo", {"gamma": 1.0, "normalization": "mean"}, one),
    ("gagpo", {"gamma": 1.0, "lam": 1.0, "normalization": "mean"}, one),
]


@task_of_each_kind
@pytest.mark.parametrize(("name", "options", "unit_of"), LIMITS)
def test_limit_gradient_points_along_the_exact_gradient(
    task: TabularTask, name: str, options: dict[str, Any], unit_of: Callable[[Sequence[Path]], float]
) -> None:
    found = limit_gradient(task, partial(ESTIMATORS[name], **options), POPULATION)
    assert error_of(found * unit_of(population(task, POPULATION)), task.policy_gradient()) < EXACT


# GiGPO's second part: actions beside those taken in the same state


def visits(task: TabularTask) -> dict[str, float]:
    """Return the probability that an episode visits a state."""
    states = {turn.state for path in task.paths() for turn in path.turns}
    return {
        state: math.fsum(path.probability for path in task.paths() if any(turn.state == state for turn in path.turns))
        for state in states
    }


def by_state(task: TabularTask, factors: dict[str, float]) -> Floats:
    """Return the exact gradient with each state's part scaled by its factor."""
    gradient_P = np.zeros(len(task.logits_P))
    for state, factor in factors.items():
        gradient_P[task.rows(state)] = factor * task.policy_gradient()[task.rows(state)]
    return gradient_P


@group_sizes
@pytest.mark.parametrize(("name", "options"), [("gigpo", {"omega": 0.0}), ("hgpo", {}), ("hgpo", {"alpha": 3.0})])
def test_leave_one_out_anchors_weight_states_by_the_chance_of_peers(
    size: int, name: str, options: dict[str, Any]
) -> None:
    """The levels of hgpo do not change the expectation: whether they have peers does not depend on the action."""
    estimate = partial(ESTIMATORS[name], gamma=1.0, normalization="leave_one_out", **options)
    found = expected_gradient(UNROLLED, estimate, size)
    company = {state: 1.0 - (1.0 - chance) ** (size - 1) for state, chance in visits(UNROLLED).items()}
    assert error_of(found, by_state(UNROLLED, company)) < EXACT


@group_sizes
@pytest.mark.parametrize(
    ("name", "options"), [("gigpo", {"omega": 0.0}), ("gagpo", {"lam": 0.0}), ("gagpo", {"lam": 0.5})]
)
def test_mean_anchors_weight_states_by_the_expected_share_of_peers(
    size: int, name: str, options: dict[str, Any]
) -> None:
    def share(chance: float) -> float:
        others = range(size)
        weights = [math.comb(size - 1, m) * chance**m * (1 - chance) ** (size - 1 - m) for m in others]
        return math.fsum(weight * m / (m + 1) for m, weight in zip(others, weights, strict=True))

    found = expected_gradient(UNROLLED, partial(ESTIMATORS[name], gamma=1.0, normalization="mean", **options), size)
    assert error_of(found, by_state(UNROLLED, {state: share(p) for state, p in visits(UNROLLED).items()})) < EXACT


@group_sizes
@pytest.mark.parametrize("normalization", ["leave_one_out", "mean"])
def test_anchors_of_repeated_states_are_biased(size: int, normalization: str) -> None:
    """A second visit to a state is a peer of the first, and depends on the first action."""
    found = expected_gradient(LOOPS, gigpo(omega=0.0, normalization=normalization), size)
    assert 0.97 < cosine(found, LOOPS.policy_gradient()) < 0.999
    # Every episode begins in a: company is certain there, and yet its part is not whole.
    if normalization == "leave_one_out":
        assert error_of(found[LOOPS.rows("a")], LOOPS.policy_gradient()[LOOPS.rows("a")]) > 0.01


@pytest.mark.parametrize(
    ("name", "options", "factor"),
    [
        ("gagpo", {"lam": 0.0}, 1.0),
        ("gagpo", {"lam": 0.5}, 1.0),
        ("g2po", {}, 3.0),
        ("g2po", {"step_weight": 0.5}, 2.0),
    ],
)
def test_values_of_the_group_are_exact_in_the_limit_unless_states_come_back(
    name: str, options: dict[str, Any], factor: float
) -> None:
    """At the time limit, the value of a state depends on the turn."""
    estimate = partial(ESTIMATORS[name], gamma=1.0, normalization="mean", **options)
    assert error_of(limit_gradient(UNROLLED, estimate, POPULATION), factor * UNROLLED.policy_gradient()) < EXACT
    assert 0.98 < cosine(limit_gradient(LOOPS, estimate, POPULATION), LOOPS.policy_gradient()) < 0.999


@task_of_each_kind
def test_g2po_by_std_is_biased_in_the_limit(task: TabularTask) -> None:
    estimate = partial(ESTIMATORS["g2po"], gamma=1.0, epsilon=0.0)
    assert 0.97 < cosine(limit_gradient(task, estimate, POPULATION), task.policy_gradient()) < 0.99


@task_of_each_kind
def test_graphgpo_leads_towards_success_but_not_along_the_gradient(task: TabularTask) -> None:
    """A lucky transition counts as much as a likely one, and the rewards on the way do not count."""
    terms = [path.probability * task.score_functions(path).sum(axis=0) for path in task.paths() if path.score >= 1.0]
    success = np.sum(terms, axis=0)
    found = limit_gradient(task, partial(ESTIMATORS["graphgpo"], epsilon=0.0), POPULATION)
    assert 0.58 < cosine(found, task.policy_gradient()) < 0.72
    assert cosine(found, success) > 0.95


@task_of_each_kind
def test_anchors_are_exact_in_the_limit(task: TabularTask) -> None:
    found = limit_gradient(task, gigpo(omega=0.0, normalization="mean"), POPULATION)
    assert error_of(found, task.policy_gradient()) < EXACT


@task_of_each_kind
def test_std_anchors_scale_each_state_by_its_own_deviation(task: TabularTask) -> None:
    returns: dict[str, list[float]] = {}
    for path in population(task, POPULATION):
        for turn, value in zip(path.turns, path.returns, strict=True):
            returns.setdefault(turn.state, []).append(value)
    units = {state: 1.0 / float(np.std(values, ddof=1)) for state, values in returns.items()}
    assert error_of(limit_gradient(task, gigpo(omega=0.0), POPULATION), by_state(task, units)) < EXACT


# The critic


@task_of_each_kind
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_gae_is_exact_with_true_values(task: TabularTask, lam: float) -> None:
    found = expected_gradient(task, gae(lam), 1, as_steps=partial(episode_steps, values=perfect_values(task)))
    assert error_of(found, task.policy_gradient()) < EXACT


@task_of_each_kind
def test_gae_with_wrong_values_is_exact_only_for_lambda_one(task: TabularTask) -> None:
    def wrong(path: Path) -> list[StepData]:
        return episode_steps(path, {key: 0.3 + len(key[0]) for key in perfect_values(task)})

    assert error_of(expected_gradient(task, gae(1.0), 1, as_steps=wrong), task.policy_gradient()) < EXACT
    assert error_of(expected_gradient(task, gae(0.0), 1, as_steps=wrong), task.policy_gradient()) > 0.5


def gae(lam: float) -> Callable[..., StepCredit]:
    return partial(ESTIMATORS["gae"], gamma=1.0, lam=lam)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_gae_bootstraps_only_truncated_episodes(lam: float) -> None:
    """The turns before the limit get the gradient of the task without a limit."""
    values, worth = values_without_a_limit(LOOPS)
    exact = np.zeros(len(LOOPS.logits_P))
    for path in LOOPS.paths():
        weights_K = path.probability * np.array([worth[turn.state, turn.action] for turn in path.turns])
        exact += weights_K @ LOOPS.score_functions(path)

    def cut_off(path: Path) -> list[StepData]:
        ended = path.next_state is None
        # A terminated path carries one too, which must not be read.
        info = {"terminated": ended, "truncated": not ended, "bootstrap_value": values[path.next_state or "a"]}
        return episode_steps(path, {(turn.state, k): values[turn.state] for k, turn in enumerate(path.turns)}, info)

    assert error_of(expected_gradient(LOOPS, gae(lam), 1, as_steps=cut_off), exact) < EXACT
    assert error_of(exact, LOOPS.policy_gradient()) > 0.05


# Measured values


def vine(is_measured: Callable[[int, float], bool]) -> Callable[..., StepCredit]:
    """Measure the steps for which `is_measured(step, score)` is true, without error."""

    def estimate(batch: list[list[StepData]], scores: list[float], group_ids: Any) -> StepCredit:
        step_values = [
            [
                sum(step.base_reward for step in steps[:k]) + steps[k].policy_value_estimate
                if is_measured(k, score)
                else None
                for k in range(len(steps))
            ]
            for steps, score in zip(batch, scores, strict=True)
        ]
        return vine_credit(batch, scores, step_values, group_ids=group_ids)

    return estimate


CHOICES: dict[str, Callable[[int, float], bool]] = {
    "all": lambda k, score: True,
    "none": lambda k, score: False,
    "first": lambda k, score: k == 0,
    "even": lambda k, score: k % 2 == 0,
    "odd": lambda k, score: k % 2 == 1,
}


@task_of_each_kind
@group_sizes
@pytest.mark.parametrize("choice", CHOICES)
def test_vine_is_exact_if_the_outcome_does_not_choose_the_steps(task: TabularTask, size: int, choice: str) -> None:
    as_steps = partial(episode_steps, values=perfect_values(task))
    found = expected_gradient(task, vine(CHOICES[choice]), size, as_steps=as_steps)
    assert error_of(found, task.policy_gradient()) < EXACT


@task_of_each_kind
@group_sizes
def test_vine_is_biased_if_only_failed_episodes_are_measured(task: TabularTask, size: int) -> None:
    as_steps = partial(episode_steps, values=perfect_values(task))
    found = expected_gradient(task, vine(lambda k, score: score < 0.5), size, as_steps=as_steps)
    assert 0.96 < cosine(found, task.policy_gradient()) < 0.98


# The best of the group


@task_of_each_kind
@group_sizes
def test_pass_at_k_is_the_slope_of_the_expected_maximum(task: TabularTask, size: int) -> None:
    def expected_best(logits_P: Floats) -> float:
        groups = groups_of(task.paths(logits_P), size)
        return math.fsum(weight * max(path.score for path in group) for weight, group in groups)

    found = size * expected_gradient(task, ESTIMATORS["grpo_passk"], size)
    np.testing.assert_allclose(found, slopes_of(expected_best, task.logits_P), atol=1e-9, rtol=0)
    assert cosine(found, task.policy_gradient()) < 0.95


# The table


def test_every_estimator_has_a_row_in_the_table() -> None:
    proved = {claim[0] for claim in EXACT_CLAIMS} | {formula[0] for formula in FORMULAS} | {"gae", "grpo_passk", "vine"}
    rows = [line.split("|")[1] for line in (__doc__ or "").splitlines() if line.startswith("| ")]
    named = {name for name in ESTIMATORS if any(name in re.split(r"[ ,;]+", row) for row in rows)}
    assert proved == named == set(ESTIMATORS)


def test_estimators_note_has_the_same_table() -> None:
    table = [line for line in (__doc__ or "").splitlines() if line.startswith("|")]
    assert [line for line in NOTE.read_text(encoding="utf-8").splitlines() if line.startswith("|")] == table
