"""Test the diagnostics of a batch's credit: counts and warnings."""

from __future__ import annotations

import numpy as np
import pytest

from reward_kit.credit.diagnostics import CreditDiagnostics, credit_diagnostics
from reward_kit.credit.step_credit import StepCredit

NAN = float("nan")


def credit(advantages: list[float], anchors: list[int], returns: list[float] | None = None) -> StepCredit:
    advantages_S = np.array(advantages)
    returns_S = np.array(returns if returns is not None else advantages)
    return StepCredit(advantages_S, advantages_S, advantages_S, returns_S, np.array(anchors, dtype=np.int64))


def healthy() -> CreditDiagnostics:
    return credit_diagnostics(credit([1.0, 0.0, -1.0, 0.5], [4, 5, 4, 6]), [2, 2], [1.0, 0.0])


def test_peers_anchors_and_zeros_are_counted():
    found = healthy()
    assert found.anchor_sizes == {1: 2, 2: 1}
    assert (found.steps_with_peer, found.steps_with_other_peer, found.zero_advantages) == (2, 2, 1)
    assert found.summary() == {
        "credit/trajectories": 2,
        "credit/unscored": 0,
        "credit/steps": 4,
        "credit/groups": 1,
        "credit/tied_groups_share": 0.0,
        "credit/single_groups_share": 0.0,
        "credit/zero_advantage_share": 0.25,
        "credit/anchors": 3,
        "credit/anchor_size_mean": 4 / 3,
        "credit/anchor_size_max": 2,
        "credit/peer_share": 0.5,
        "credit/other_peer_share": 0.5,
    }
    assert found.warnings() == []


def test_peers_within_one_trajectory_are_counted_separately():
    found = credit_diagnostics(credit([1.0, 0.0, -1.0, 0.5], [4, 4, 5, 5]), [2, 2], [1.0, 0.0])
    assert (found.steps_with_peer, found.steps_with_other_peer) == (4, 0)
    assert "no two trajectories in a group share a state" in found.warnings()[0]


def test_unscored_trajectories_are_left_out():
    found = credit_diagnostics(credit([1.0, NAN, NAN, NAN], [4, 4, 4, 4]), [1, 2, 1], [1.0, None, None])
    assert (found.trajectories, found.unscored, found.steps) == (1, 2, 1)
    assert (found.anchor_sizes, found.steps_with_peer, found.zero_advantages) == ({1: 1}, 0, 0)
    assert found.warnings()[0] == "2 of 3 trajectories are unscored and excluded; inspect the failed scores"


def test_shares_are_left_out_without_scores():
    found = credit_diagnostics(credit([NAN], [0]), [1], [None], ["g"])
    assert found.summary() == {
        "credit/trajectories": 0,
        "credit/unscored": 1,
        "credit/steps": 0,
        "credit/groups": 0,
    }
    assert found.warnings() == ["no trajectory is scored, so credit cannot be computed; inspect the failed scores"]


def test_estimator_without_states_warns_of_no_peers():
    found = credit_diagnostics(credit([1.0, -1.0], [-1, -1]), [1, 1], [1.0, 0.0])
    assert not found.uses_states
    assert "credit/peer_share" not in found.summary()
    assert found.warnings() == []


@pytest.mark.parametrize(("shared", "warned"), [(4, True), (5, False)])
def test_few_steps_with_a_peer_give_a_warning(shared, warned):
    anchors = [0] * shared + list(range(1, 101 - shared))
    found = credit_diagnostics(credit([1.0] * 100, anchors), [1] * 100, [1.0, 0.0] * 50)
    assert [warning.startswith("only 4.0% of the steps share") for warning in found.warnings()] == [True] * warned


def test_tied_and_single_groups_are_reported():
    one = credit([0.0] * 4, [0, 0, 1, 1])
    tied = credit_diagnostics(one, [1] * 4, [1.0, 1.0, 0.0, 0.0], ["a", "a", "b", "b"])
    assert (tied.tied_groups, tied.single_groups) == (2, 0)
    assert tied.warnings()[0].startswith("all scores are equal within every group")
    single = credit_diagnostics(one, [1] * 4, [1.0, None, 0.0, None], ["a", "a", "b", "b"])
    assert (single.tied_groups, single.single_groups) == (0, 2)
    assert single.warnings()[0].startswith("every group has only one scored trajectory")
    mixed = credit_diagnostics(one, [1] * 4, [1.0, 1.0, 0.0, 0.5], ["a", "a", "b", "b"])
    assert mixed.summary()["credit/tied_groups_share"] == 0.5
    assert mixed.warnings() == []


@pytest.mark.parametrize("group_ids", [["a", "b", "c", "d"], ["a", "a", "b", "b"]])
def test_batch_wide_estimator_needs_no_groups(group_ids):
    scores = [1.0, 1.0, 0.0, 0.0]
    over_the_batch = credit([0.5, 0.5, -0.5, -0.5], [-1] * 4)
    assert credit_diagnostics(over_the_batch, [1] * 4, scores, group_ids).warnings() == []
    within_groups = credit([0.0] * 4, [-1] * 4)
    assert len(credit_diagnostics(within_groups, [1] * 4, scores, group_ids).warnings()) == 1


def test_nearly_equal_scores_are_not_a_tie():
    found = credit_diagnostics(credit([0.0, 0.0], [0, 0]), [1, 1], [0.1, 0.1 + 1e-12])
    assert found.tied_groups == 0


def test_empty_batch_has_diagnostics():
    found = credit_diagnostics(credit([], []), [], [])
    assert found.summary()["credit/steps"] == 0
