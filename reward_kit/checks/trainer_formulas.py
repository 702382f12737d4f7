"""Known formulas of advantages and losses, and the search for the formula that a trainer computes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from reward_kit.checks.findings import Level
from reward_kit.checks.tabular import Floats
from reward_kit.checks.trainer_batches import OBSERVATION, SAMPLED, Enumeration

CAUSES: dict[str, tuple[Level, str]] = {
    "mean-includes-own": (
        "info",
        "the group mean includes the episode itself: the gradient shrinks by a factor of (n-1)/n",
    ),
    "no-baseline": ("info", "no baseline is subtracted: the gradient is unbiased but has a higher variance"),
    "token-mean": (
        "info",
        "the loss is divided by the number of tokens in the batch: biased, but exact as batches grow",
    ),
    "row-mean": ("info", "the loss is divided by the number of rows in the batch, which varies: exact as batches grow"),
    "group-of-one-skipped": ("info", "the only episode of a group gets an advantage of 0"),
    "group-of-one-raw": ("warning", "the only episode of a group gets its raw score, without a baseline"),
    "divides-by-std": (
        "warning",
        "advantages are divided by the standard deviation of the group: groups with similar scores weigh more",
    ),
    "divides-by-batch-std": ("warning", "advantages are divided by the standard deviation of the batch"),
    "batch-statistics": ("warning", "the baseline is computed over the batch instead of the group"),
    "whitened-tokens": (
        "warning",
        "advantages are normalized over the tokens of the batch: long episodes shift the baseline",
    ),
    "length-weighted-baseline": ("warning", "the baseline weighs each episode by its number of tokens"),
    "length-weighted": ("warning", "each row's loss is divided by the row's length: tokens in long rows weigh less"),
    "micro-batch-mean": ("warning", "the mean over tokens is taken per micro-batch: the result depends on the split"),
    "masked-rewards": ("warning", "rewards on tokens with mask 0 are counted"),
    "observations-counted": ("error", "the loss is divided by a number of tokens that includes observations"),
    "padding-counted": ("error", "the loss is divided by a number of tokens that includes padding"),
    "unscored-as-zero": ("error", "a missing score is counted as 0: biased unless scores are missing at random"),
    "last-reward-only": ("error", "only the reward of the last token is read; the rewards of earlier steps are lost"),
    "immediate-reward": ("error", "a step gets only its own reward, without the rewards of later steps"),
    "episode-per-row": ("error", "an episode is counted once per row, so long episodes move the baseline"),
    "grouped-by-position": ("error", "groups are formed from consecutive rows, regardless of uid"),
    "last-step-only": ("error", "only the last step of an episode has a gradient"),
    "micro-batch-scale": ("error", "the gradient is scaled by the number of micro-batches"),
    "padding-trained": ("error", "padding tokens have a gradient"),
    "observation-trained": ("error", "observation tokens have a gradient"),
    "unscored-trained": ("error", "an unscored episode has a gradient"),
    "not-finite": ("error", "the gradient is NaN or infinite"),
    "no-gradient": ("error", "the gradient is 0"),
    "inverted": ("error", "the gradient points away from the exact one"),
    "unknown-bias": ("error", "the gradient differs from the exact one, and no known formula explains it"),
}
"""The level and the effect of each kind of finding."""
_EPSILONS = (0.0, 1e-8, 1e-6, 1e-5, 1e-4)


def rank(level: Level) -> int:
    """Return the weight of a finding with this level."""
    return {"info": 1, "warning": 10, "error": 100}[level]


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula for the coefficient of each token's score function. A trainer matches the formula up to its scale.

    Attributes:
        text: a description.
        causes: the kinds of its deviations from an unbiased estimate.
        scales: the factors between the trainer's coefficients and the formula's. There is more than one if aggregations
            differ only by a factor.
    """

    text: str
    causes: tuple[str, ...]
    scales: tuple[float, ...] = (1.0,)

    @property
    def rank(self) -> int:
        """Return the total weight of the formula's deviations."""
        return sum(rank(CAUSES[cause][0]) for cause in self.causes)


@dataclass(frozen=True, slots=True)
class _Term:
    text: str
    causes: tuple[str, ...]
    values: Floats


def find_formulas(batches: Enumeration, coefficients_NBT: Floats, tolerance: float) -> list[Formula]:
    """Return the formulas that give these coefficients on every batch, up to a scale."""
    sampled_NBT = batches.kinds_NBT == SAMPLED
    found = coefficients_NBT[sampled_NBT]
    norm = float(np.linalg.norm(found))
    weights: list[tuple[_Term, list[float]]] = []
    for weight in _weights(batches):
        flat = weight.values[sampled_NBT]
        for kept, factors in weights:
            if np.ptp(flat / kept.values) <= 1e-12 * float(np.max(flat / kept.values)):
                factors.append(float(flat[0] / kept.values[0]))  # the same in this scenario, up to a factor
                break
        else:
            weights.append((_Term(weight.text, weight.causes, flat), [1.0]))
    matching = []
    for advantage in _advantages(batches):
        values = advantage.values[sampled_NBT]
        for weight, factors in weights:
            formula = values * weight.values
            square = float(formula @ formula)
            scale = float(formula @ found) / square if square else 0.0
            if scale and np.linalg.norm(found - scale * formula) <= tolerance * norm:
                causes = tuple(dict.fromkeys(advantage.causes + weight.causes))
                scales = tuple(scale / factor for factor in factors)
                matching.append(Formula(f"{advantage.text}; {weight.text}", causes, scales))
    return matching


def choose_formulas(matching: Sequence[Sequence[Formula]], tolerance: float) -> list[Formula | None]:
    """Return, for each scenario, the formula that has the fewest deviations.

    If possible, all scenarios get formulas with the same scale.
    """
    scales = [1.0, *(scale for formulas in matching for one in formulas if one.rank < 10 for scale in one.scales)]

    def is_near(formula: Formula, common: float) -> bool:
        return any(abs(scale / common - 1.0) <= 10 * tolerance for scale in formula.scales)

    # The first of the most frequent scales. A mean that includes the own score gives the advantage of a mean over the
    # others, multiplied by (n-1)/n.
    common = max(scales, key=lambda scale: sum(any(is_near(f, scale) for f in formulas) for formulas in matching))
    return [
        min(formulas, key=lambda one: one.rank + 2 * (not is_near(one, common)), default=None) for formulas in matching
    ]


def _replace(part: _Term, values: Floats) -> _Term:
    return _Term(part.text, part.causes, values)


def _distinct(parts: Iterator[_Term]) -> list[_Term]:
    """Drop parts with the same values as an earlier part in this scenario."""
    kept: list[_Term] = []
    for part in parts:
        if not any(np.array_equal(part.values, other.values, equal_nan=True) for other in kept):
            kept.append(part)
    return kept


def _weights(batches: Enumeration) -> Iterator[_Term]:
    """Yield (N, B, T) arrays of the tokens' weights in the loss."""
    kinds_NBT = batches.kinds_NBT
    is_row_NB = batches.groups_NB >= 0
    tokens_NB = (kinds_NBT == SAMPLED).sum(axis=2)
    own_N, one = (slice(None), None, None), np.ones(kinds_NBT.shape)
    tokens_N, rows_N = tokens_NB.sum(axis=1)[own_N], is_row_NB.sum(axis=1)[own_N]
    yield _Term("mean over episodes", (), one / sum(batches.scenario.sizes))
    yield _Term("mean over rows", ("row-mean",), one / rows_N)
    yield _Term("mean over tokens", ("token-mean",), one / tokens_N)
    yield _Term(
        "mean over rows of the mean over tokens", ("length-weighted",), one / rows_N / np.fmax(tokens_NB, 1)[..., None]
    )
    parts = range(batches.scenario.micro_batches)
    of_part_NB = sum(
        (batches.parts_NB == p) * ((batches.parts_NB == p) * tokens_NB).sum(axis=1, keepdims=True) for p in parts
    )
    mean_NBT = one / len(parts) / np.fmax(of_part_NB, 1)[..., None]
    yield _Term("mean over tokens per micro-batch", ("micro-batch-mean",), mean_NBT)
    seen_N = np.isin(kinds_NBT, (SAMPLED, OBSERVATION)).sum(axis=(1, 2))[own_N]
    yield _Term("mean over tokens and observations", ("observations-counted",), one / seen_N)
    width_N = (kinds_NBT[:, :1] != 3).sum(axis=2, keepdims=True)
    yield _Term("mean over tokens and padding", ("padding-counted",), one / rows_N / width_N)


def _advantages(batches: Enumeration) -> Iterator[_Term]:
    """Yield (N, B, T) arrays of the tokens' advantages."""
    sampled_NBT = batches.kinds_NBT == SAMPLED
    is_row_NB = batches.groups_NB >= 0
    rewards_NBT = np.nan_to_num(batches.rewards_NBT)
    last_N1 = np.where(is_row_NB, batches.episodes_NB, 0)
    ends_NB = np.zeros(is_row_NB.shape, np.int64)
    for episode in range(sum(batches.scenario.sizes)):
        own_NB = (last_N1 == episode) & is_row_NB
        ends_NB += own_NB * (batches.steps_NBT * own_NB[..., None]).max(axis=(1, 2), initial=0)[:, None]
    last_NBT = sampled_NBT & (batches.steps_NBT == ends_NB[..., None])
    for part in _distinct(_episode_advantages(batches)):
        yield from _spread(part, sampled_NBT, last_NBT)
    if batches.scenario.step_rewards:
        masked_NBT = rewards_NBT * sampled_NBT
        to_go_NBT = np.cumsum(masked_NBT[..., ::-1], axis=2)[..., ::-1]
        steps = range(int(ends_NB.max()) + 1)
        of_step_NBT = sum(
            (batches.steps_NBT == k) * ((batches.steps_NBT == k) * masked_NBT).sum(axis=2, keepdims=True) for k in steps
        )
        yield from _spread(_Term("return", ("no-baseline",), to_go_NBT), sampled_NBT, None)
        yield _Term("reward of the step", ("immediate-reward",), np.asarray(of_step_NBT * sampled_NBT))


def _spread(part: _Term, sampled_NBT: Floats, last_NBT: Floats | None) -> Iterator[_Term]:
    """Yield the advantages on all tokens, and the variants that result from common faults and normalizations."""
    values_NBT = part.values * sampled_NBT
    yield _replace(part, values_NBT)
    if last_NBT is not None and not np.array_equal(last_NBT, sampled_NBT):
        yield _Term(f"{part.text}, on the last step", (*part.causes, "last-step-only"), part.values * last_NBT)
    if "standard deviation" not in part.text:
        count_N11 = sampled_NBT.sum(axis=(1, 2), keepdims=True)
        mean_N11 = values_NBT.sum(axis=(1, 2), keepdims=True) / count_N11
        centered_NBT = (values_NBT - mean_N11) * sampled_NBT
        deviation_N11 = np.sqrt((centered_NBT**2).sum(axis=(1, 2), keepdims=True) / (count_N11 - 1) + 1e-8)
        causes = tuple(cause for cause in part.causes if cause != "no-baseline")
        yield _Term(f"{part.text}, normalized over tokens", (*causes, "whitened-tokens"), centered_NBT / deviation_N11)


def _episode_advantages(batches: Enumeration) -> Iterator[_Term]:
    """Yield (N, B, 1) arrays of the rows' advantages. All tokens of a row have the same advantage."""
    for score, population in itertools.product(_distinct(_scores(batches)), _distinct(_populations(batches))):
        is_scored_NB = ~np.isnan(score.values)
        scores_NB = np.nan_to_num(score.values) * is_scored_NB
        yield _Term(score.text, (*score.causes, "no-baseline"), scores_NB[..., None])
        members_NBB = population.values * is_scored_NB[:, None, :]
        counts_NB = members_NBB.sum(axis=2)
        own_NB = np.diagonal(population.values, axis1=1, axis2=2)
        own_NB = np.where(own_NB > 0, own_NB, 1.0) * is_scored_NB
        is_single_NB = is_scored_NB & (counts_NB <= own_NB)
        singles: list[tuple[str, tuple[str, ...], Floats]] = [("", (), np.zeros_like(scores_NB))]
        if is_single_NB.any():
            singles = [("", ("group-of-one-skipped",), singles[0][2])]
            singles.append((", raw in a group of one", ("group-of-one-raw",), scores_NB))
        for centered, (text, causes, single_NB) in itertools.product(
            _centered(scores_NB, members_NBB, own_NB), singles
        ):
            values_NB = np.where(is_single_NB, single_NB, centered.values) * is_scored_NB
            label = f"{score.text} - {centered.text.replace('mean', 'mean' + population.text, 1)}{text}"
            yield _Term(label, score.causes + population.causes + centered.causes + causes, values_NB[..., None])


def _centered(scores_NB: Floats, members_NBB: Floats, own_NB: Floats) -> Iterator[_Term]:
    """Yield (N, B) arrays of the scores minus a mean over the members, which include the row itself `own_NB` times."""
    counts_NB = members_NBB.sum(axis=2)
    total_NB = (members_NBB @ scores_NB[..., None])[..., 0]
    others_NB = np.where(counts_NB > own_NB, counts_NB - own_NB, 1.0)
    yield _Term("mean of the others", (), scores_NB - (total_NB - own_NB * scores_NB) / others_NB)
    mean_NB = total_NB / np.where(counts_NB > 0, counts_NB, 1.0)
    yield _Term("mean", ("mean-includes-own",), scores_NB - mean_NB)
    square_NB = (members_NBB * (scores_NB[:, None, :] - mean_NB[..., None]) ** 2).sum(axis=2)
    is_scored_NB = own_NB > 0
    batch_N1 = np.nanstd(np.where(is_scored_NB, scores_NB, np.nan), axis=1, ddof=1, keepdims=True)
    for epsilon, ddof in itertools.product(_EPSILONS, (1, 0)):
        deviation_NB = np.sqrt(square_NB / np.where(counts_NB > ddof, counts_NB - ddof, 1.0))
        values_NB = (scores_NB - mean_NB) / np.where(deviation_NB > 1e-9, deviation_NB + epsilon, 1.0)
        yield _Term("mean, by standard deviation", ("divides-by-std",), values_NB)
        values_NB = (scores_NB - mean_NB) / np.where(batch_N1 > 1e-9, batch_N1 + epsilon, 1.0)
        yield _Term("mean, by standard deviation of the batch", ("divides-by-batch-std",), values_NB)


def _scores(batches: Enumeration) -> Iterator[_Term]:
    """Yield (N, B) arrays of the rows' scores. A score is NaN if the row is absent or unscored."""
    is_row_NB = batches.groups_NB >= 0
    rewards_NBT = batches.rewards_NBT
    yield _Term("score", (), batches.scores_NB)
    yield _Term("score", ("unscored-as-zero",), np.where(is_row_NB, np.nan_to_num(batches.scores_NB), np.nan))
    if batches.scenario.masked_rewards:
        yield _Term("score", ("masked-rewards",), rewards_NBT.sum(axis=2))
    if batches.scenario.step_rewards:
        last_NB1 = (batches.kinds_NBT == SAMPLED).cumsum(axis=2).argmax(axis=2)[..., None]
        yield _Term("last reward", ("last-reward-only",), np.take_along_axis(rewards_NBT, last_NB1, axis=2)[..., 0])


def _populations(batches: Enumeration) -> Iterator[_Term]:
    """Yield (N, B, B) arrays whose entry [n, i, j] is the weight of row j in the statistics for row i."""
    is_row_NB = batches.groups_NB >= 0
    present_NBB = is_row_NB[:, :, None] & is_row_NB[:, None, :]
    group_NBB = present_NBB & (batches.groups_NB[:, :, None] == batches.groups_NB[:, None, :])
    first_N1B = batches.is_first_NB[:, None, :]
    tokens_N1B = (batches.kinds_NBT == SAMPLED).sum(axis=2)[:, None, :]
    yield _Term("", (), (group_NBB * first_N1B).astype(np.float64))
    yield _Term(" of rows", ("episode-per-row",), group_NBB.astype(np.float64))
    yield _Term(" of the batch", ("batch-statistics",), (present_NBB * first_N1B).astype(np.float64))
    yield _Term(" of the rows of the batch", ("batch-statistics", "episode-per-row"), present_NBB.astype(np.float64))
    yield _Term(" weighted by tokens", ("length-weighted-baseline",), (group_NBB * tokens_N1B).astype(np.float64))
    block_B = np.arange(is_row_NB.shape[1]) // max(batches.scenario.sizes)
    block_NBB = present_NBB & (block_B[:, None] == block_B[None, :])
    yield _Term(" of consecutive rows", ("grouped-by-position",), block_NBB.astype(np.float64))
