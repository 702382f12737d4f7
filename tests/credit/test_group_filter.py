"""Test dynamic sampling: which groups are dropped and why, and which are collected again."""

from __future__ import annotations

import numpy as np
import pytest

from reward_kit.credit.group_filter import DropReason, FilteredGroups, GroupRefill, filter_groups
from reward_kit.errors import ConfigError, InvalidResultError


def test_groups_with_equal_scores_are_dropped():
    found = filter_groups([1.0, 0.0, 1.0, 1.0], ["a", "a", "b", "b"])
    assert found.kept == ["a"]
    assert found.dropped == {"b": DropReason.TIED}
    assert found.kept_B == [0, 1]


def test_members_need_not_be_adjacent():
    found = filter_groups([1.0, 0.5, 0.0, 0.5], ["a", "b", "a", "b"])
    assert found.kept == ["a"]
    assert found.kept_B == [0, 2]


def test_scores_that_differ_below_float32_are_not_tied():
    low, high = 0.5, 0.5 + 1e-12
    assert np.float32(low) == np.float32(high)
    assert filter_groups([low, high], ["a", "a"]).kept == ["a"]


def test_group_of_one_is_dropped_as_no_signal():
    found = filter_groups([1.0, 1.0, 0.0], ["alone", "a", "a"])
    assert found.kept == ["a"]
    assert found.dropped == {"alone": DropReason.NO_SIGNAL}


def test_tied_group_with_step_signal_can_be_kept():
    scores, ids = [1.0, 1.0, 0.0, 0.0], ["a", "a", "b", "b"]
    steps = [[0.0, 0.7], [-0.7], [0.0], [0.0, 0.0]]
    assert filter_groups(scores, ids, keep_step_signal=True, step_advantages=steps).kept == ["a"]
    assert filter_groups(scores, ids).kept == []


def test_step_signal_of_an_unscored_member_is_ignored():
    steps = [[0.0], [0.0], [0.3], [None], [float("nan")]]
    found = filter_groups([1.0, 1.0, None, 1.0, 1.0], ["a"] * 5, keep_step_signal=True, step_advantages=steps)
    assert found.dropped == {"a": DropReason.TIED}


def test_band_keeps_groups_by_mean_score():
    scores, ids = [0.0, 0.2, 0.0, 1.0, 0.8, 1.0], ["hard", "hard", "fair", "fair", "easy", "easy"]
    found = filter_groups(scores, ids, band=(0.2, 0.8))
    assert found.kept == ["fair"]
    assert found.dropped == {"hard": DropReason.BELOW_BAND, "easy": DropReason.ABOVE_BAND}
    assert filter_groups(scores, ids, band=(0.1, 0.9)).kept == ["hard", "fair", "easy"]


def test_unscored_members_are_ignored_or_drop_their_group():
    scores, ids = [1.0, 0.0, None, 1.0, None], ["a", "a", "a", "b", "b"]
    assert filter_groups(scores, ids).dropped == {"b": DropReason.NO_SIGNAL}
    found = filter_groups(scores, ids, unscored="drop")
    assert found.dropped == {"a": DropReason.UNSCORED_MEMBER, "b": DropReason.UNSCORED_MEMBER}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group_ids": ["a"]}, "expected 2 group ids, one for each score, got 1"),
        ({"band": (0.8, 0.2)}, "band must be two numbers"),
        ({"band": 5}, "band must be two numbers"),
        ({"band": ("0", "1")}, "band must be two numbers"),
        ({"unscored": "dropp"}, "did you mean 'drop'"),
        ({"keep_step_signal": True}, "keep_step_signal needs step_advantages for 2 trajectories, got none"),
        ({"keep_step_signal": True, "step_advantages": [[0.0]]}, "for 2 trajectories, got 1"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message):
    with pytest.raises(ConfigError, match=message):
        filter_groups([1.0, 0.0], **{"group_ids": ["a", "a"], **arguments})


def test_non_numeric_score_is_rejected():
    with pytest.raises(ConfigError, match=r"the score of trajectory 1 must be a number, .* got '1'"):
        filter_groups([1.0, "1"], ["a", "a"])


def test_infinite_score_is_rejected():
    with pytest.raises(InvalidResultError, match="the score of trajectory 1 is inf"):
        filter_groups([1.0, float("inf")], ["a", "a"])


@pytest.mark.parametrize("missing", [float("nan"), np.float32("nan"), np.float64("nan")])
def test_nan_is_unscored(missing):
    ids = ["a", "a", "a", "b", "b"]
    assert filter_groups([1.0, missing, 0.0, 1.0, missing], ids).dropped == {"b": DropReason.NO_SIGNAL}
    dropped = filter_groups([1.0, missing, 0.0, 1.0, missing], ids, unscored="drop").dropped
    assert dropped == {"a": DropReason.UNSCORED_MEMBER, "b": DropReason.UNSCORED_MEMBER}


def test_trajectory_of_several_rows_counts_once():
    # Three rows of "x" and one of "y" in "a", and two rows of one trajectory in "b".
    scores, groups, trajectories = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0], [*"aaaabb"], ["x", "x", "x", "y", "z", "z"]
    found = filter_groups(scores, groups, trajectory_ids=trajectories, band=(0.5, 1.0))
    assert found.dropped == {"b": DropReason.NO_SIGNAL} and found.kept_B == [0, 1, 2, 3]
    assert filter_groups(scores, groups, band=(0.5, 1.0)).dropped["a"] == DropReason.BELOW_BAND  # as single rows
    with pytest.raises(ConfigError, match="expected 6 trajectory ids, one for each score, got 1"):
        filter_groups(scores, groups, trajectory_ids=["x"])


# Refilling


def verdict(**is_kept: bool) -> FilteredGroups:
    scores = [score for kept in is_kept.values() for score in ((0.0, 1.0) if kept else (1.0, 1.0))]
    return filter_groups(scores, [name for name in is_kept for _ in range(2)])


def episodes(verdict: FilteredGroups) -> dict[object, str]:
    return {group: f"episodes of {group}" for group in verdict.members}


def test_only_missing_groups_are_collected_again():
    refill = GroupRefill(wanted=3, max_tries=3)
    first = verdict(a=True, b=False, c=True)
    refill.add(episodes(first), first)
    assert refill.missing == 1
    second = verdict(d=True)
    refill.add(episodes(second), second)
    outcome = refill.outcome()
    assert outcome.groups == ["episodes of a", "episodes of c", "episodes of d"]
    assert outcome.is_complete and outcome.tries == 2 and not outcome.surplus


def test_surplus_groups_are_kept_in_order_and_used_first():
    refill = GroupRefill(wanted=1, max_tries=1)
    found = verdict(a=True, b=True, c=True)
    refill.add(episodes(found), found)
    outcome = refill.outcome()
    assert (outcome.groups, outcome.surplus) == (["episodes of a"], ["episodes of b", "episodes of c"])
    again = GroupRefill(wanted=3, max_tries=1, surplus=outcome.surplus)
    assert again.missing == 1


def test_outcome_after_the_last_try_reports_missing_groups():
    refill = GroupRefill(wanted=2, max_tries=2)
    for found in (verdict(a=True, b=False), verdict(c=False)):
        refill.add(episodes(found), found)
    outcome = refill.outcome()
    assert refill.is_exhausted and not outcome.is_complete
    assert (outcome.groups, outcome.missing) == (["episodes of a"], 1)
    assert outcome.dropped == {DropReason.TIED: 2}
    assert outcome.describe() == "1 of 2 groups after 2 collections; dropped: 2 tied"
    with pytest.raises(ConfigError, match="all 2 collections have been used"):
        refill.add(episodes(found), found)


def test_group_id_may_repeat_in_a_later_collection():
    refill = GroupRefill(wanted=2, max_tries=2)
    for text in ("first", "second"):
        refill.add({"a": text}, verdict(a=True))
    assert refill.outcome().groups == ["first", "second"]


def test_filter_result_for_other_groups_is_rejected():
    refill = GroupRefill(wanted=2, max_tries=2)
    with pytest.raises(ConfigError, match=r"groups in only one of them: \['a', 'b'\]"):
        refill.add({"a": ""}, verdict(b=True))


@pytest.mark.parametrize("options", [{"wanted": 0, "max_tries": 1}, {"wanted": 1, "max_tries": True}])
def test_refill_of_zero_groups_is_rejected(options):
    with pytest.raises(ConfigError, match="must be a positive integer"):
        GroupRefill(**options)
