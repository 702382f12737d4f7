"""Units of scoring: single episodes or complete groups, and validity of stored scores."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from reward_kit.reward_agent import ScoringRequest
from reward_kit.runs.scoring_units import ScoringUnits, StoppedEpisode


def stopped(index: int, attempt: int = 0, *, broke: bool = False, score: Any = None) -> StoppedEpisode:
    name = f"r{index}"
    return StoppedEpisode(name, attempt, index, None if broke else lambda: ScoringRequest(name, []), score)


def ids(unit: Any) -> list[str]:
    return [request.rollout_id for request in unit.requests()]


def test_pointwise_units_are_single_episodes_without_failures() -> None:
    units = ScoringUnits("pointwise", 2)
    (unit,) = units.add("g", stopped(0))
    assert (ids(unit), unit.group, unit.is_scored) == (["r0"], None, False)
    assert units.add("g", stopped(1, broke=True)) == []
    (unit,) = units.add("g", stopped(1, score={"score": 0.0}))
    assert unit.is_scored
    (unit,) = units.add("g", stopped(1, score={"score": 0.0, "scored_group": "x"}))
    assert not unit.is_scored, "a batch reward gave it"


@given(st.permutations(range(5)), st.sets(st.integers(0, 4)))
def test_batch_unit_is_complete_with_its_last_episode_and_omits_failures(order: list[int], broken: set[int]) -> None:
    units = ScoringUnits("batch", 5)
    found = [units.add("g", stopped(index, broke=index in broken)) for index in order]
    assert found[:-1] == [[]] * 4
    (unit,) = found[-1]
    assert ids(unit) == [f"r{index}" for index in range(5) if index not in broken]
    assert unit.is_scored == (len(broken) == 5), "where all broke there is nothing to score"


def test_unknown_group_size_is_complete_at_the_end() -> None:
    units = ScoringUnits("batch", None)
    assert units.add("a", stopped(1)) == units.add("b", stopped(0)) == units.add("a", stopped(0)) == []
    assert [ids(unit) for unit in units.remaining()] == [["r0", "r1"], ["r0"]]
    assert units.remaining() == []


def of_two(*episodes: StoppedEpisode) -> Any:
    units = ScoringUnits("batch", 2)
    (unit,) = [unit for episode in episodes for unit in units.add("g", episode)]
    return unit


def test_scores_are_valid_only_for_the_same_group_members() -> None:
    name = of_two(stopped(0), stopped(1)).group
    line = {"score": 1.0, "scored_group": name}
    assert of_two(stopped(0, score=line), stopped(1, score=line)).is_scored
    assert not of_two(stopped(0, score=line), stopped(1)).is_scored, "one was lost"
    assert not of_two(stopped(0, score=line), stopped(1, 1, score=line)).is_scored, "one ran again"
    assert not of_two(stopped(0, score=line), stopped(1, broke=True)).is_scored, "one broke since"
    assert not of_two(stopped(0, score=line), stopped(1, score={"score": 1.0})).is_scored, "it was scored alone"
    alone = {"score": 1.0, "scored_group": of_two(stopped(0), stopped(1, broke=True)).group}
    assert of_two(stopped(0, score=alone), stopped(1, broke=True)).is_scored
