"""GiGPO credit: values, unscored trajectories and invariances."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.agent.models import StepData
from reward_kit.credit.state_hashes import hash_steps
from reward_kit.errors import ConfigError, InvalidResultError
from reward_kit.rl_helpers import gigpo_credit, system_apply_gigpo_to_batch_steps
from tests.credit.batches import Trajectory, eighths, step, trajectory

NOTE = Path(__file__).parent.parent / "development" / "notes" / "gigpo_breakdown.md"


def advantages(batch: list[Trajectory]) -> list[list[float | None]]:
    return [[item.advantage for item in steps] for steps in batch]


def sign(number: float | None) -> int:
    assert number is not None
    return int(number > 0) - int(number < 0)


def apply(batch: list[Trajectory], scores: Sequence[float | None], **options: object) -> list[Trajectory]:
    given_options = {"omega": 0.5, "gamma": 0.5, "state_hashing_function": None, "epsilon": 0.0, **options}
    return system_apply_gigpo_to_batch_steps(batch, scores, **given_options)  # type: ignore[arg-type]


# Data for the property tests: numbers with few digits, so that equal values are equal and differences are not noise.

rewards = eighths
trajectories = st.lists(st.tuples(st.sampled_from("abc"), rewards), min_size=1, max_size=5).map(
    lambda pairs: trajectory("".join(state for state, _ in pairs), [reward for _, reward in pairs])
)
groups = st.lists(st.tuples(trajectories, rewards, st.integers(0, 2)), min_size=1, max_size=8)


def columns(group: list[tuple[Trajectory, float, int]]) -> tuple[list[Trajectory], list[float], list[int]]:
    batch, scores, ids = zip(*group, strict=True)
    return list(batch), list(scores), list(ids)


def credit_of(batch: list[Trajectory], scores: Sequence[float | None], ids: Sequence[int]) -> np.ndarray:
    options = {"omega": 0.3, "gamma": 0.9, "epsilon": 1e-6}
    return np.array(gigpo_credit(batch, scores, group_ids=ids, **options)[:4])  # type: ignore[arg-type]


# The formulas


def test_worked_example_matches_the_documentation() -> None:
    lines = [line for line in NOTE.read_text().splitlines() if line.startswith("| ") and line[2].isdigit()]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(rows) == 6
    batch = [
        trajectory("".join(r[3] for r in rows if r[0] == e), [float(r[4]) for r in rows if r[0] == e]) for e in "123"
    ]
    scores = [next(float(r[1]) for r in rows if r[0] == e) for e in "123"]
    expected = np.array([[float(cell) for cell in row[5:]] for row in rows])
    convex = gigpo_credit(batch, scores, omega=0.5, gamma=0.5, epsilon=0.0)
    additive = gigpo_credit(batch, scores, omega=None, gamma=0.5, combination="additive", step_weight=1.0, epsilon=0.0)
    found = [
        convex.returns_S,
        convex.episode_advantages_S,
        convex.step_advantages_S,
        convex.advantages_S,
        additive.advantages_S,
    ]
    np.testing.assert_allclose(np.array(found).T, expected, atol=1e-6)


def ten_line_loop(batch: list[Trajectory], scores: Sequence[float], ids: Sequence[int]) -> list[float]:
    """Return A = 0.3 A_E + 0.7 A_S with gamma 0.9, written as the formulas are."""

    def normal(x: float, among: list[float]) -> float:
        mean = math.fsum(among) / len(among)
        std = math.sqrt(math.fsum((y - mean) ** 2 for y in among) / max(len(among) - 1, 1))
        return (x - mean) / (std + 1e-6)

    steps = []
    for b, trajectory_b in enumerate(batch):
        for k, item in enumerate(trajectory_b):
            discounted = math.fsum(0.9 ** (j - k) * trajectory_b[j].base_reward for j in range(k, len(trajectory_b)))
            steps.append((b, ids[b], item.observation_data, discounted))
    episode = [normal(scores[b], [scores[c] for c in range(len(batch)) if ids[c] == ids[b]]) for b in range(len(batch))]
    return [
        0.3 * episode[b] + 0.7 * normal(g, [other for _, i, s, other in steps if (i, s) == (group, state)])
        for b, group, state, g in steps
    ]


@given(groups)
def test_credit_agrees_with_a_reference_loop(group: list[tuple[Trajectory, float, int]]) -> None:
    batch, scores, ids = columns(group)
    # Where a state's returns differ by rounding alone, 1e-6 in the denominator leaves 1e-9 of it.
    expected = ten_line_loop(batch, scores, ids)
    np.testing.assert_allclose(credit_of(batch, scores, ids)[2], expected, rtol=1e-12, atol=1e-9)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-20, 20)), min_size=1, max_size=40))
def test_credit_agrees_with_a_reference_loop_to_1e_12_for_exact_returns(pairs: list[tuple[int, int]]) -> None:
    batch = [[step("s", float(score))] for _, score in pairs]
    scores, ids = [float(score) for _, score in pairs], [group for group, _ in pairs]
    expected = ten_line_loop(batch, scores, ids)
    np.testing.assert_allclose(credit_of(batch, scores, ids)[2], expected, rtol=1e-12, atol=1e-12)


def test_missing_step_rewards_use_the_default_and_the_score_is_added_last() -> None:
    batch = [trajectory("ab", [None, None]), trajectory("ab", [0.25, 0.5]), trajectory("ab", [0.25, None])]
    done = apply(batch, [1.0, 7.0, 1.0], default_step_reward=-0.1)
    found = [[item.return_to_go for item in steps] for steps in done]
    np.testing.assert_allclose(found, [[0.35, 0.9], [0.5, 0.5], [0.25 + 0.5 * 0.9, 0.9]])


def test_return_to_go_is_advantage_plus_value_with_a_critic_else_the_return() -> None:
    batch = [[step("a", 1.0, value=3.0), step("b", 2.0, value=math.nan)], [step("a", 0.0, value=math.inf)]]
    (first, last), (alone,) = apply(batch, [1.0, 0.0])
    assert first.return_to_go == first.advantage + 3.0
    assert (last.return_to_go, alone.return_to_go) == (2.0, 0.0)
    # The credit itself keeps the returns.
    assert gigpo_credit(batch, [1.0, 0.0], omega=0.5, gamma=0.5).returns_S.tolist() == [2.0, 2.0, 0.0]


def test_convex_and_additive_combinations_differ_by_a_factor() -> None:
    batch = [trajectory("ab", [0.0, 1.0]), trajectory("ab", [0.0, 0.5]), trajectory("ac", [0.0, 0.0])]
    convex = apply(batch, [1.0, 0.5, 0.0], omega=0.25)
    additive = apply(batch, [1.0, 0.5, 0.0], omega=None, combination="additive", step_weight=3.0)
    np.testing.assert_allclose(np.array(advantages(convex)), 0.25 * np.array(advantages(additive)))


# The options


def test_invalid_action_penalty_reaches_preceding_steps() -> None:
    batch = [[step("a"), step("b", is_action_valid=False)], [step("a"), step("b", is_action_valid=True)]]
    done = apply(batch, [1.0, 1.0], invalid_action_penalty=0.5)
    assert [[item.return_to_go for item in steps] for steps in done] == [[-0.25, -0.5], [0.0, 0.0]]
    assert [sign(item.advantage) for steps in done for item in steps] == [-1, -1, 1, 1]


def test_invalid_action_penalty_keeps_episode_advantage_constant() -> None:
    batch = [[step("a", is_action_valid=False), step("b"), step("c", is_action_valid=False)], [step("a")]]
    credit = gigpo_credit(batch, [1.0, 1.0], omega=1.0, gamma=1.0, normalization="mean", invalid_action_penalty=0.5)
    assert credit.episode_advantages_S.tolist() == [-0.5, -0.5, -0.5, 0.5]


def test_invalid_action_penalty_is_not_counted_twice() -> None:
    batch = [[step("a", None, is_action_valid=False), step("b", None)]]
    credit = gigpo_credit(batch, [1.0], omega=1.0, gamma=1.0, invalid_action_penalty=0.25)
    assert credit.returns_S.tolist() == [0.75, 1.0]


def test_statistics_over_steps_weight_long_trajectories_more() -> None:
    batch, scores = [trajectory("abc", [0.0] * 3), trajectory("a", [0.0])], [1.0, 0.0]
    options = {"omega": 1.0, "gamma": 1.0, "normalization": "mean"}
    by_trajectory = gigpo_credit(batch, scores, **options)  # type: ignore[arg-type]
    by_step = gigpo_credit(batch, scores, episode_statistics="step", **options)  # type: ignore[arg-type]
    assert by_trajectory.episode_advantages_S.tolist() == [0.5, 0.5, 0.5, -0.5]
    assert by_step.episode_advantages_S.tolist() == [0.25, 0.25, 0.25, -0.75]


@pytest.mark.parametrize(
    ("normalization", "constant", "expected"),
    [
        ("std", None, [0.5 / math.sqrt(0.5), -0.5 / math.sqrt(0.5)]),
        ("mean", None, [0.5, -0.5]),
        ("constant", 4.0, [0.125, -0.125]),
        ("leave_one_out", None, [1.0, -1.0]),
    ],
)
def test_normalization_applies_to_both_advantages(normalization: str, constant: float | None, expected: list) -> None:
    batch = [[step("a", 1.0)], [step("a", 0.0)]]
    done = apply(batch, [1.0, 0.0], normalization=normalization, normalization_constant=constant)
    assert [steps[0].advantage for steps in done] == pytest.approx(expected, rel=1e-12)


def test_small_anchor_groups_can_be_left_out() -> None:
    batch = [[step("a", float(k)), step("b", float(k))] for k in range(3)] + [[step("a", 9.0)]]
    credit = gigpo_credit(batch, [0.0] * 4, omega=0.0, gamma=0.0, min_anchor_group_size=4)
    assert [bool(x) for x in credit.step_advantages_S] == [True, False, True, False, True, False, True]


def test_anchors_identify_pairs_of_group_and_state() -> None:
    batch = [trajectory("aba", [0.0] * 3), trajectory("ab", [0.0] * 2), trajectory("ab", [0.0] * 2)]
    anchors = gigpo_credit(batch, [0.0] * 3, group_ids=[0, 0, 1], omega=0.5, gamma=1.0).anchors_S.tolist()
    assert [anchors.index(code) for code in anchors] == [0, 1, 0, 0, 1, 5, 6]


# Exact zeros


@given(trajectories, rewards, st.integers(2, 9))
def test_constant_group_has_exactly_zero_advantages(steps: Trajectory, score: float, size: int) -> None:
    states = {item.observation_data for item in steps}
    credit = credit_of([steps] * size, [score * 0.1] * size, [0] * size)
    assert not credit[0].any()
    if len(states) == len(steps):
        assert not credit[:3].any()


def test_equal_scores_without_exact_binary_form_give_zero_advantages() -> None:
    batch = [[step("a", 0.1)] for _ in range(7)]
    assert advantages(apply(batch, [0.1] * 7, epsilon=1e-6)) == [[0.0]] * 7


@given(trajectories, rewards)
def test_single_trajectory_has_zero_advantages(steps: Trajectory, score: float) -> None:
    alone = [item.model_copy(update={"observation_data": f"state {k}"}) for k, item in enumerate(steps)]
    assert not credit_of([alone], [score], [0])[:3].any()


# Invariances


@given(groups, rewards)
def test_shifting_scores_does_not_change_credit(group: list[tuple[Trajectory, float, int]], shift: float) -> None:
    batch, scores, ids = columns(group)
    shifted = credit_of(batch, [score + shift for score in scores], ids)
    np.testing.assert_array_equal(shifted, credit_of(batch, scores, ids))


@given(st.lists(rewards, min_size=2, max_size=8), st.integers(-1000, 1000))
def test_shifting_rewards_does_not_change_advantages(values: list[float], shift: int) -> None:
    batch = [[step("a", value)] for value in values]
    moved = [[step("a", value + shift)] for value in values]
    ids = [0] * len(values)
    np.testing.assert_array_equal(credit_of(moved, values, ids)[:3], credit_of(batch, values, ids)[:3])


@given(groups, st.randoms(use_true_random=False))
def test_permuting_a_group_permutes_its_credit(group: list[tuple[Trajectory, float, int]], random: object) -> None:
    batch, scores, ids = columns(group)
    order = list(range(len(batch)))
    random.shuffle(order)  # type: ignore[attr-defined]
    ends = np.cumsum([len(steps) for steps in batch])
    flat = np.concatenate([np.arange(ends[b] - len(batch[b]), ends[b]) for b in order])
    permuted = credit_of([batch[b] for b in order], [scores[b] for b in order], [ids[b] for b in order])
    np.testing.assert_allclose(permuted, credit_of(batch, scores, ids)[:, flat], rtol=1e-9, atol=1e-9)


@given(st.lists(rewards, min_size=2, max_size=8), st.sampled_from([0.25, 2.0, 1024.0]))
def test_scaling_rewards_does_not_change_normalized_advantages(values: list[float], scale: float) -> None:
    batch = [[step("a", value)] for value in values]
    scaled = [[step("a", value * scale)] for value in values]
    found = apply(scaled, [value * scale for value in values])
    np.testing.assert_allclose(np.array(advantages(found)), np.array(advantages(apply(batch, values))), rtol=1e-12)


# Unscored


@given(groups, trajectories)
def test_unscored_trajectory_has_no_credit_and_does_not_affect_others(
    group: list[tuple[Trajectory, float, int]], unscored: Trajectory
) -> None:
    batch, scores, ids = columns(group)
    credit = credit_of([unscored, *batch], [None, *scores], [ids[0], *ids])
    assert np.isnan(credit[:, : len(unscored)]).all()
    np.testing.assert_array_equal(credit[:, len(unscored) :], credit_of(batch, scores, ids))


def test_steps_of_unscored_trajectories_have_no_advantage() -> None:
    done = apply([[step("a", 1.0, value=2.0)], [step("a", 0.0)]], [None, 1.0])
    assert (done[0][0].advantage, done[0][0].return_to_go) == (None, None)
    assert done[1][0].advantage == 0.0


# Groups and states


def test_groups_are_credited_separately() -> None:
    batch = [[step("a", reward)] for reward in (0.0, 1.0, 10.0, 30.0)]
    together = apply(batch, [0.0, 1.0, 10.0, 30.0], group_ids=["x", "x", "y", "y"])
    expected = [*apply(batch[:2], [0.0, 1.0]), *apply(batch[2:], [10.0, 30.0])]
    assert advantages(together) == advantages(expected)


def test_recorded_group_ids_are_used_by_default() -> None:
    batch = [[step("a", reward, group_id=group)] for reward, group in ((0.0, "x"), (1.0, "x"), (5.0, "y"))]
    assert advantages(apply(batch, [0.0, 1.0, 5.0]))[2] == [0.0]
    without = [[step("a", reward)] for reward in (0.0, 1.0, 5.0)]
    assert advantages(apply(without, [0.0, 1.0, 5.0]))[2] != [0.0]
    with pytest.raises(ConfigError, match="trajectory 1 has no group_id"):
        apply([batch[0], without[0]], [0.0, 1.0])


def test_state_key_takes_precedence_over_the_observation() -> None:
    keyed = [step("text one", state_key="k"), step("text two", state_key="k")]
    assert len(set(hash_steps([keyed]))) == 1
    assert len(set(hash_steps([keyed], "observation_text"))) == 2
    assert len(set(hash_steps([[step("k"), step("other", state_key="k")]]))) == 2


def test_state_hashing_function_receives_the_observation() -> None:
    batch = [[step("Room A, turn 1", 1.0)], [step("Room A, turn 2", 0.0)]]
    done = apply(batch, [1.0, 0.0], state_hashing_function=lambda text: text.split(",")[0], omega=0.0)
    assert done[0][0].advantage > 0 > done[1][0].advantage
    assert advantages(apply(batch, [1.0, 0.0], omega=0.0)) == [[0.0], [0.0]]


# What is refused, and what is left alone


@pytest.mark.parametrize(
    "options",
    [
        {"omega": None},
        {"omega": 1.5},
        {"omega": "0.5"},
        {"combination": "additive", "omega": None, "step_weight": "1.0"},
        {"step_weight": 1.0},
        {"combination": "additive", "omega": None},
        {"combination": "additive", "step_weight": 1.0},
        {"combination": "averaged"},
        {"gamma": 1.1},
        {"epsilon": -1.0},
        {"state_hashing_function": "state_keys"},
        {"group_ids": ["x"]},
        {"normalization": "constant"},
        {"normalization_constant": 2.0},
        {"episode_statistics": "episode"},
        {"min_anchor_group_size": 0},
        {"invalid_action_penalty": -0.1},
    ],
)
def test_contradicting_options_are_rejected(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        apply([[step()], [step()]], [0.0, 1.0], **options)


def test_scores_must_fit_the_batch_and_be_finite() -> None:
    with pytest.raises(ConfigError, match="expected 2 scores, one for each trajectory"):
        apply([[step()], [step()]], [0.0])
    with pytest.raises(InvalidResultError, match="trajectory 1"):
        apply([[step()], [step()]], [0.0, math.nan])
    with pytest.raises(InvalidResultError, match="trajectory 1"):
        apply([[step()], [step("a", math.inf)]], [0.0, 1.0])


def test_steps_are_copied_and_input_steps_unchanged() -> None:
    batch = [trajectory("ab", [0.0, 1.0]), trajectory("ab", [0.0, 0.0])]
    before = [[item.model_copy(deep=True) for item in steps] for steps in batch]
    done = apply(batch, [1.0, 0.0])
    assert batch == before
    assert done[0][0] == batch[0][0].model_copy(
        update={"advantage": done[0][0].advantage, "return_to_go": done[0][0].return_to_go}
    )
    assert StepData.model_validate(done[0][0].model_dump()) == done[0][0]
    done[0][0].note, done[0][0].raw_policy_output = "mine", "mine"
    assert not hasattr(batch[0][0], "note")
    assert batch == before
    assert "raw_policy_output" not in batch[0][0].model_fields_set | done[0][1].model_fields_set


def test_copied_steps_keep_their_class_and_extra_fields() -> None:
    class Noted(StepData):
        note: str = ""

    given_step = Noted(system_step_index=0, observation_data="a", action_taken={}, note="kept", extra=[1])
    ((copy,),) = apply([[given_step]], [1.0])
    assert type(copy) is Noted
    assert copy == given_step.model_copy(update={"advantage": 0.0, "return_to_go": 1.0})
    assert copy.model_fields_set == given_step.model_fields_set | {"advantage", "return_to_go"}


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_collector_state_is_restored(collects: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        apply([[step("a", 1.0)]], [1.0])
        assert gc.isenabled() == collects
    finally:
        (gc.enable if was else gc.disable)()


def test_empty_batch_and_empty_trajectory_are_accepted() -> None:
    assert apply([], []) == []
    done = apply([[], [step("a", 1.0)], [step("a", 0.0)]], [4.0, 1.0, 1.0], omega=1.0)
    # The trajectory without steps still counts in the group's mean of scores.
    assert done[0] == []
    assert done[1][0].advantage == pytest.approx(-1 / math.sqrt(3))
