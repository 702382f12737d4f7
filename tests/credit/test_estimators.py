"""Test properties of every estimator: formula, masking, invariances and validation."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from reward_kit.credit.step_credit import StepCredit, with_credit
from reward_kit.errors import ConfigError, InvalidResultError
from reward_kit.rl_helpers import ESTIMATORS
from tests.credit import loops
from tests.credit.batches import ScoredBatch, batches, eighths, step, trajectories, trajectory
from tests.profiles import examples

RETURNS = {"gamma": 0.5, "default_step_reward": -0.125}
GIGPO = {"omega": 0.25, **RETURNS}


class Setting(NamedTuple):
    """An estimator with options, and its reference loop with the options that it supports."""

    name: str
    options: Mapping[str, Any] = {}
    loop_options: Mapping[str, Any] = {}

    def __str__(self) -> str:
        return "-".join([self.name, *map(str, self.loop_options.values())])

    def credit(self, rows: ScoredBatch) -> StepCredit:
        graph = {"step_weight": 0.75, **RETURNS}
        shared = {"gigpo": GIGPO, "g2po": graph, "graphgpo": {"distance_discount": 0.125, **graph}}.get(
            self.name, RETURNS
        )
        return ESTIMATORS[self.name](rows.batch, rows.scores, group_ids=rows.ids, **{**shared, **self.options})

    def loop(self, rows: ScoredBatch) -> list[list[float]]:
        return getattr(loops, self.name)(rows, **self.loop_options)  # type: ignore[no-any-return]


def measured(name: str, normalization: str) -> Setting:
    constant = {"normalization_constant": 4.0} if normalization == "constant" else {}
    option = {"normalization": normalization}
    return Setting(name, {**option, **constant}, option)


BY_SCORE = [
    *(measured("grpo", normalization) for normalization in ("std", "mean", "constant", "leave_one_out")),
    Setting("rloo"),
    Setting("reinforce_plus_plus_baseline"),
    Setting("opo"),
    Setting("opo", {"length": "steps"}, {"length": "steps"}),
    Setting("grpo_passk"),
    Setting("gpg"),
]
BY_STEP = [
    Setting("discounted_returns"),
    Setting("discounted_returns", {"baseline": "mean"}, {"baseline": "mean"}),
    Setting("reinforce_plus_plus"),
    Setting("gae", {"lam": 0.25}),
    Setting("turn_level_grpo"),
]
BY_BOTH = [
    *(measured("gigpo", normalization) for normalization in ("std", "mean", "constant", "leave_one_out")),
    Setting("gigpo", {"min_anchor_group_size": 3}, {"least": 3}),
    Setting("gigpo", {"episode_statistics": "step"}, {"by_step": True}),
    Setting("gigpo", {"invalid_action_penalty": 0.5}, {"penalty": 0.5}),
    Setting(
        "gigpo",
        {"episode_statistics": "step", "normalization": "leave_one_out"},
        {"by_step": True, "normalization": "leave_one_out"},
    ),
]
BY_STATE = [
    Setting("hgpo", {"history_length": 0}, {"history": 0}),
    Setting("hgpo", {"history_length": 1, "alpha": 2.0}, {"history": 1, "alpha": 2.0}),
    *(measured("hgpo", normalization) for normalization in ("std", "mean", "constant", "leave_one_out")),
    *(
        Setting("gagpo", {"lam": 0.25, **one.options}, one.loop_options)
        for one in (measured("gagpo", normalization) for normalization in ("std", "mean"))
    ),
]
GRAPH = [
    *(measured("g2po", normalization) for normalization in ("std", "mean", "constant", "leave_one_out")),
    Setting("g2po", {"episode_statistics": "step"}, {"by_step": True}),
    *(measured("graphgpo", normalization) for normalization in ("std", "mean", "leave_one_out")),
    Setting("graphgpo", {"success_score": 0.25}, {"success": 0.25}),
]
BY_BOTH += GRAPH
EVERY = [*BY_SCORE, *BY_STEP, *BY_BOTH, *BY_STATE]
# Their scale is the batch's, so groups see each other.
BATCH_WIDE = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg")
# Their zero is the critic's, or none.
NOT_RELATIVE = ("gae", "discounted_returns")

every_setting = pytest.mark.parametrize("setting", EVERY, ids=str)
fast = settings(max_examples=examples(30), deadline=None)


def noted(settings_: Iterable[Setting]) -> Iterator[Setting]:
    """Yield each item, and add it as a note to a failure."""
    for setting in settings_:
        note(str(setting))
        yield setting


def test_every_estimator_is_tested() -> None:
    assert {setting.name for setting in EVERY} | {"vine"} == set(ESTIMATORS)


# The formulas


@fast
@given(rows=batches())
def test_estimator_agrees_with_its_reference_loop(rows: ScoredBatch) -> None:
    for setting in noted(EVERY):
        expected = [
            row if rows.scores[b] is not None else [np.nan] * len(rows.batch[b])
            for b, row in enumerate(setting.loop(rows))
        ]
        found = setting.credit(rows).advantages_S
        np.testing.assert_allclose(found, [x for row in expected for x in row], rtol=1e-12, atol=1e-12)


@fast
@given(rows=batches())
def test_parts_add_up_and_are_float64(rows: ScoredBatch) -> None:
    for setting in noted(EVERY):
        credit = setting.credit(rows)
        weights = {"gigpo": (0.25, 0.75), "g2po": (1.0, 0.75), "graphgpo": (1.0, 0.75)}.get(setting.name, (1.0, 1.0))
        combined = weights[0] * credit.episode_advantages_S + weights[1] * credit.step_advantages_S
        np.testing.assert_array_equal(combined, credit.advantages_S)
        assert {part.dtype for part in credit[:4]} == {np.dtype(np.float64)}
        assert (credit.anchors_S >= 0).all() if setting in (*BY_BOTH, *BY_STATE) else (credit.anchors_S == -1).all()
        if setting in BY_SCORE:
            per_trajectory = np.split(credit.advantages_S, np.cumsum([len(row) for row in rows.batch])[:-1])
            assert all(len(set(part.tolist())) == 1 for part in per_trajectory if not np.isnan(part).any())


@fast
@given(rows=batches(scores=eighths))
def test_returns_are_discounted_rewards_for_every_estimator(rows: ScoredBatch) -> None:
    for setting in noted(EVERY):
        if "invalid_action_penalty" not in setting.options:
            expected = [x for b in range(len(rows.batch)) for x in loops.returns_of(rows, b)]
            np.testing.assert_array_equal(setting.credit(rows).returns_S, expected)


# What takes no part, and what changes nothing


@fast
@given(rows=batches(), unscored=trajectories)
def test_unscored_trajectory_gets_nan_and_does_not_affect_other_credit(rows: ScoredBatch, unscored: Any) -> None:
    for setting in noted(EVERY):
        more = ScoredBatch([unscored, *rows.batch], [None, *rows.scores], [rows.ids[0], *rows.ids])
        together, alone = setting.credit(more), setting.credit(rows)
        for part, expected in zip(together[:4], alone[:4], strict=True):
            assert np.isnan(part[: len(unscored)]).all()
            np.testing.assert_array_equal(part[len(unscored) :], expected)


@fast
@given(rows=batches(), seed=st.integers(0, 1000))
def test_permuting_trajectories_permutes_the_result(rows: ScoredBatch, seed: int) -> None:
    for setting in noted(EVERY):
        order = list(range(len(rows.batch)))
        random.Random(seed).shuffle(order)
        permuted, plain = setting.credit(rows.of(order)), setting.credit(rows)
        for part, expected in zip(permuted[:4], plain[:4], strict=True):
            np.testing.assert_allclose(part, expected[rows.positions(order)], rtol=1e-12, atol=1e-12)


@fast
@given(rows=batches())
def test_groups_are_independent(rows: ScoredBatch) -> None:
    for setting in noted([s for s in EVERY if s.name not in BATCH_WIDE]):
        together = setting.credit(rows).advantages_S
        for group in set(rows.ids):
            members = [b for b, other in enumerate(rows.ids) if other == group]
            alone = setting.credit(rows.of(members)).advantages_S
            np.testing.assert_array_equal(together[rows.positions(members)], alone)


@fast
@given(rows=batches())
def test_batch_wide_estimators_share_only_a_scale(rows: ScoredBatch) -> None:
    for setting in noted([s for s in BY_SCORE if s.name in BATCH_WIDE]):
        found, centred = setting.credit(rows).advantages_S, measured("grpo", "mean").credit(rows).advantages_S
        moved = ~np.isnan(centred) & (centred != 0.0)
        assert not found[~np.isnan(found) & ~moved].any()
        factors = found[moved] / centred[moved]
        np.testing.assert_allclose(factors, np.full(len(factors), factors[0] if len(factors) else 0.0), rtol=1e-12)


@fast
@given(rows=batches(), shift=eighths)
def test_shifting_the_scores_changes_nothing(rows: ScoredBatch, shift: float) -> None:
    for setting in noted(BY_SCORE):
        shifted = rows.with_scores([None if score is None else score + shift for score in rows.scores])
        np.testing.assert_array_equal(setting.credit(shifted).advantages_S, setting.credit(rows).advantages_S)


@fast
@given(rows=batches())
def test_inputs_are_not_modified(rows: ScoredBatch) -> None:
    for setting in noted(EVERY):
        before = [[item.model_copy(deep=True) for item in row] for row in rows.batch]
        with_credit(rows.batch, setting.credit(rows))
        assert rows.batch == before


# Exact zeros


@fast
@given(rows=batches(scores=st.just(0.1)), other=trajectories)
def test_constant_group_gives_exact_zeros(rows: ScoredBatch, other: Any) -> None:
    for setting in noted(BY_SCORE):
        # Beside a group that is not constant, for the estimators that measure by the batch.
        more = ScoredBatch([*rows.batch, other, other], [*rows.scores, 0.0, 1.0], [*rows.ids, 9, 9])
        assert not setting.credit(more).advantages_S[: -2 * len(other)].any()
        assert not setting.credit(rows).advantages_S.any()


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in (*NOT_RELATIVE, "vine")])
def test_equal_inexact_scores_give_exact_zeros(name: str) -> None:
    rows = ScoredBatch([[step("a", 0.1)] for _ in range(7)], [0.1] * 7, [0] * 7)
    assert not Setting(name, {"lam": 0.25} if name == "gagpo" else {}).credit(rows).advantages_S.any()


@fast
@given(trajectories, eighths, st.integers(1, 6))
def test_equal_trajectories_give_zero_at_every_turn(row: Any, score: float, size: int) -> None:
    rows = ScoredBatch([row] * size, [0.1 * score] * size, [0] * size)
    assert not Setting("turn_level_grpo").credit(rows).advantages_S.any()


@fast
@given(states=st.sampled_from(["a", "ab", "abc"]), reward=eighths, score=eighths)
def test_group_of_one_gives_zero(states: str, reward: float, score: float) -> None:
    # g2po compares the steps of an episode with one another.
    for setting in noted([s for s in EVERY if s.name not in (*NOT_RELATIVE, "reinforce_plus_plus", "g2po")]):
        row = [step(state, reward, value=0.0) for state in states]
        rows = ScoredBatch([row, [step("a", 1.0)], [step("a", 0.0)]], [score, 1.0, 0.0], [0, 1, 1])
        assert not setting.credit(rows).advantages_S[: len(row)].any()


def test_non_relative_estimators_are_listed() -> None:
    rows = ScoredBatch([[step("a", 1.0, value=0.25)]] * 3, [1.0] * 3, [0] * 3)
    assert Setting("discounted_returns").credit(rows).advantages_S.tolist() == [1.0] * 3
    assert Setting("gae", {"lam": 0.25}).credit(rows).advantages_S.tolist() == [0.75] * 3


# Edges


@every_setting
def test_empty_batch_and_empty_trajectory_are_valid(setting: Setting) -> None:
    assert all(len(part) == 0 for part in setting.credit(ScoredBatch([], [], [])))
    rows = ScoredBatch([[], [step("a", 1.0, value=0.0)], []], [4.0, 1.0, None], [0, 0, 0])
    assert np.isfinite(setting.credit(rows).advantages_S).tolist() == [True]
    assert all(len(part) == 0 for part in setting.credit(ScoredBatch([[], []], [1.0, 0.0], [0, 0])))


@every_setting
def test_unscored_batch_is_all_nan(setting: Setting) -> None:
    rows = ScoredBatch([trajectory("ab", [0.0, 1.0]), trajectory("a", [None])], [None, None], [0, 0])
    assert all(np.isnan(part).all() for part in setting.credit(rows)[:4])


BAD_OPTIONS = [
    *((setting, {"gamma": gamma}) for setting in EVERY for gamma in (1.1, -0.5, float("nan"), "0.5", None)),
    *((setting, {"default_step_reward": reward}) for setting in EVERY for reward in (float("nan"), None, "0")),
    *((Setting(name), {"epsilon": -1.0}) for name in ("gigpo", "grpo", "reinforce_plus_plus")),
    *((Setting(name), {"normalization": "median"}) for name in ("gigpo", "grpo")),
    *((Setting(name), {"normalization": "constant"}) for name in ("gigpo", "grpo")),
    *((Setting(name), {"normalization_constant": 2.0}) for name in ("gigpo", "grpo")),
    (Setting("grpo"), {"normalization": "constant", "normalization_constant": 0.0}),
    (Setting("gae"), {"lam": 1.5}),
    (Setting("opo"), {"length": "characters"}),
    (Setting("discounted_returns"), {"baseline": "median"}),
    (Setting("hgpo"), {"history_length": -1}),
    (Setting("hgpo"), {"history_length": True}),
    (Setting("hgpo"), {"alpha": -1.0}),
    (Setting("hgpo"), {"normalization_constant": 2.0}),
    (Setting("gagpo"), {"lam": -0.5}),
    (Setting("g2po"), {"step_weight": float("inf")}),
    (Setting("g2po"), {"episode_statistics": "episode"}),
    (Setting("graphgpo"), {"distance_discount": 1.5}),
    (Setting("graphgpo"), {"success_score": float("nan")}),
    (Setting("gigpo"), {"episode_statistics": "episode"}),
    (Setting("gigpo"), {"min_anchor_group_size": 0}),
    (Setting("gigpo"), {"min_anchor_group_size": 2.5}),
    (Setting("gigpo"), {"invalid_action_penalty": -0.1}),
]


@pytest.mark.parametrize(("setting", "bad"), BAD_OPTIONS, ids=str)
def test_invalid_options_are_rejected_with_an_empty_batch(setting: Setting, bad: Mapping[str, Any]) -> None:
    wrong = Setting(setting.name, {"lam": 0.5, **bad} if setting.name in ("gae", "gagpo") else bad)
    with pytest.raises(ConfigError, match=next(iter(bad))):
        wrong.credit(ScoredBatch([], [], []))


@every_setting
def test_scores_and_rewards_must_be_numbers(setting: Setting) -> None:
    row = [step("a", 1.0, value=0.0)]
    with pytest.raises(ConfigError, match="expected 2 scores, one for each trajectory"):
        setting.credit(ScoredBatch([row, row], [1.0], [0, 0]))
    with pytest.raises(ConfigError, match="expected 2 group ids, one for each trajectory"):
        setting.credit(ScoredBatch([row, row], [1.0, 1.0], [0]))
    for bad in (float("nan"), float("inf")):
        with pytest.raises(InvalidResultError, match="trajectory 1"):
            setting.credit(ScoredBatch([row, row], [1.0, bad], [0, 0]))
        with pytest.raises(InvalidResultError, match=r"trajectory 1, step \d+: a base reward"):
            setting.credit(ScoredBatch([row, [step("a", bad, value=0.0)]], [1.0, 1.0], [0, 0]))


# Numbers near the ends of what a float holds

any_size = st.floats(allow_nan=False, allow_infinity=False)


@every_setting
@settings(max_examples=examples(30))
@given(
    st.lists(st.tuples(any_size, any_size, any_size), min_size=1, max_size=4),
    st.lists(st.one_of(any_size, st.none()), min_size=4, max_size=4),
)
def test_scored_steps_are_finite_or_the_batch_is_rejected(
    setting: Setting, numbers: list[tuple[float, float, float]], scores: list[float | None]
) -> None:
    batch = [[step("a", reward, value=v), step("b", after, value=v)] for reward, after, v in numbers]
    rows = ScoredBatch(batch, scores[: len(batch)], [0] * len(batch))
    try:
        credit = setting.credit(rows)
    except InvalidResultError as error:
        assert "not finite" in str(error)
        return
    is_scored = [score is not None for score in rows.scores for _ in range(2)]
    assert np.isfinite(credit.advantages_S).tolist() == is_scored


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus_baseline", "reinforce_plus_plus"])
def test_huge_scores_are_not_treated_as_equal(name: str) -> None:
    batch = [[step("a", reward)] for reward in (1e200, -1e200, 0.0)]
    options = {"gamma": 1.0} if name == "reinforce_plus_plus" else {}
    found = ESTIMATORS[name](batch, [1e200, -1e200, 0.0], **options).advantages_S
    np.testing.assert_allclose(found, [1.0, -1.0, 0.0], rtol=1e-12)


def test_overflowing_advantage_is_rejected() -> None:
    batch = [[step("a", 0.0)], [step("a", 0.0)]]
    with pytest.raises(InvalidResultError, match="trajectory 0, step 0: an advantage is not finite"):
        ESTIMATORS["rloo"](batch, [1.7e308, -1.7e308])
    with pytest.raises(InvalidResultError, match="trajectory 1, step 0: an advantage is not finite"):
        ESTIMATORS["gigpo"](
            [[step("a", 1.0)], [step("b", 5.0)], [step("b", 0.0)]],
            [1.0, 1.0, 1.0],
            omega=None,
            gamma=1.0,
            combination="additive",
            step_weight=1e308,
            normalization="mean",
        )
