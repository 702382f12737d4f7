"""Test the summary and tables of a sweep against values computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reward_kit.errors import StoreError
from reward_kit.rl.training.sweep_results import (
    START,
    SweepEvaluation,
    SweepFacts,
    append_evaluation,
    read_evaluations,
    summarize_sweep,
    sweep_tables,
)
from tests.full_disk import largest_file

SCORES = {"base": [0.1, 0.3, 0.2, 0.4], "better": [0.5, 0.72, 0.6, 0.81], "noisy": [0.4, 0.1, 0.5, 0.2]}
DONE = {"status": "complete", "updates": 5, "env_steps": 100, "cpu_s": 2.0}


def evaluation(
    arm: str, seed: int, score: float | None, temperature: float | None = 1.0, **more: Any
) -> SweepEvaluation:
    scored = 0 if score is None else 10
    return SweepEvaluation(arm=arm, seed=seed, temperature=temperature, episodes=10, scored=scored, score=score, **more)


def facts(evaluations: list[SweepEvaluation], **changes: Any) -> SweepFacts:
    arms = list(dict.fromkeys(one.arm for one in evaluations if one.arm != START))
    seeds = sorted({one.seed for one in evaluations})
    given: dict[str, Any] = {
        "name": "sweep",
        "status": "complete",
        "baseline": arms[0],
        "seeds": seeds,
        "temperatures": list(dict.fromkeys(one.temperature for one in evaluations)),
        "by": None,
        "runs": {arm: dict.fromkeys(seeds, DONE) for arm in arms},
        "evaluations": {(one.arm, one.seed, one.temperature): one for one in evaluations},
    }
    return SweepFacts(**given | changes)


def all_arms() -> list[SweepEvaluation]:
    return [evaluation(arm, seed, score) for arm, scores in SCORES.items() for seed, score in enumerate(scores)]


def test_differences_are_paired_by_seed_and_corrected_with_holm() -> None:
    arms = summarize_sweep(facts([evaluation(START, 0, 0.05), *all_arms()]))["arms"]
    # differences of better: 0.40, 0.42, 0.40, 0.41; mean 0.4075, s = 0.0095743, t(3, 0.975) = 3.18245
    better = arms["better"]["differences"]["T=1"]
    assert better["mean"] == pytest.approx(0.4075)
    assert (better["low"], better["high"]) == pytest.approx((0.392265, 0.422735), abs=1e-5)
    # t = 85.12 with 3 degrees of freedom: p = 3.58e-6 (R: 2 * pt(-85.12, 3))
    assert better["p"] == pytest.approx(3.58e-6, rel=0.01)
    assert better["p_corrected"] == pytest.approx(2 * better["p"]) and better["shown"]
    noisy = arms["noisy"]["differences"]["T=1"]
    assert noisy["p_corrected"] == pytest.approx(noisy["p"]) and not noisy["shown"]
    # mean 0.25, s = 0.129099
    base = arms["base"]["scores"]["T=1"]
    assert (base["mean"], base["low"], base["high"]) == pytest.approx((0.25, 0.044574, 0.455426), abs=1e-5)


def test_seed_that_is_missing_in_one_arm_is_not_compared() -> None:
    evaluations = [one for one in all_arms() if (one.arm, one.seed) != ("better", 3)]
    summary = summarize_sweep(facts(evaluations))
    assert summary["arms"]["better"]["differences"]["T=1"]["seeds"] == 3
    assert summary["arms"]["better"]["scores"]["T=1"]["mean"] == pytest.approx((0.5 + 0.72 + 0.6) / 3)


def test_equal_differences_have_no_t_test_but_the_smallest_p_of_the_sign_flips() -> None:
    scores = {"base": [0.0] * 5, "other": [1.0] * 5}
    evaluations = [evaluation(arm, seed, score) for arm, of in scores.items() for seed, score in enumerate(of)]
    difference = summarize_sweep(facts(evaluations))["arms"]["other"]["differences"]["T=1"]
    assert difference["p"] == pytest.approx(2 / 2**5) and not difference["shown"]
    assert difference["low"] < 1.0


def test_one_seed_has_neither_intervals_nor_tests() -> None:
    evaluations = [evaluation("base", 7, 0.5), evaluation("other", 7, 0.9)]
    summary = summarize_sweep(facts(evaluations))
    assert summary["arms"]["other"]["differences"]["T=1"].keys() == {"mean", "low", "high", "seeds"}
    assert summary["notes"] == [
        "One seed does not show the spread between seeds, so there are no intervals or tests.",
        f"Each score is the mean of {evaluations[0].episodes} episodes.",
    ]
    tables = sweep_tables(summary)
    assert tables[0].rows[1:] == [
        ["base (baseline)", "1", "5", "100", "2", "0.500"],
        ["other", "1", "5", "100", "2", "0.900"],
    ]
    assert tables[1].rows == [["other", "+0.400", "1", "", "", "not tested"]]


def test_start_is_shown_at_each_and_at_its_best_temperature() -> None:
    evaluations = [evaluation(START, 0, score, at) for at, score in ((1.0, 0.2), (0.5, 0.6), (0.0, 0.4))]
    evaluations += [evaluation("base", 0, 0.7, at) for at in (1.0, 0.5, 0.0)]
    summary = summarize_sweep(facts(evaluations))
    assert summary["start"]["best"] == "T=0.5"
    (table,) = sweep_tables(summary)
    assert table.columns[-3:] == ["T=1", "T=0.5", "greedy"]
    assert table.rows[0] == ["start (untrained)", "", "", "", "", "0.200", "0.600 (best)", "0.400"]


def test_categories_are_shown_at_the_first_and_the_greedy_temperature() -> None:
    def categories(near: float, far: float) -> dict[str, Any]:
        return {"categories": {"near": _scores(near), "far": _scores(far)}}

    evaluations = [evaluation(START, 0, 0.2, at, **categories(0.1 if at else 0.3, 0.2)) for at in (1.0, 0.5, 0.0)]
    evaluations += [
        evaluation("base", seed, 0.5, at, **categories(at, 0.5)) for seed in (0, 1) for at in (1.0, 0.5, 0.0)
    ]
    *_, first, greedy = sweep_tables(summarize_sweep(facts(evaluations, by="where")))
    assert [first.title, greedy.title] == ["By where, T=1", "By where, greedy"]
    assert first.columns == ["category", "base", "start, T=1"]
    assert [row[0] for row in first.rows] == ["far", "near"]
    assert first.rows[1][1].startswith("1.000") and greedy.rows[1][1].startswith("0.000")


def _scores(score: float) -> dict[str, Any]:
    return {"episodes": 5, "scored": 5, "score": score}


def test_failed_and_missing_runs_are_marked() -> None:
    runs = {"base": {0: DONE, 1: {"status": "failed", "error": "out of memory"}}, "other": {0: DONE, 1: DONE}}
    evaluations = [evaluation("base", 0, 0.5), *(evaluation("other", seed, 0.5) for seed in (0, 1))]
    summary = summarize_sweep(facts(evaluations, runs=runs))
    assert "base-1 is failed: out of memory" in summary["notes"]
    assert sweep_tables(summary)[0].rows[1][:2] == ["base (baseline)", "1 of 2, 1 failed"]
    absent = {"base": {seed: {"status": "missing", "error": None} for seed in range(7)}}
    notes = summarize_sweep(replace(facts(evaluations, runs=runs), runs=absent, seeds=range(7)))["notes"]
    assert notes[-1] == "7 runs missing: base-0, base-1, base-2, base-3, base-4 and 2 more"


def test_unscored_episodes_are_excluded_and_counted() -> None:
    summary = summarize_sweep(facts([evaluation("base", 0, 0.5), evaluation("base", 1, None)]))
    assert summary["arms"]["base"]["scores"]["T=1"]["by_seed"] == {"0": 0.5}
    assert any("10 episodes of the evaluations are unscored" in note for note in summary["notes"])


def test_evaluations_are_read_as_written_without_a_torn_line(tmp_path: Path) -> None:
    one = evaluation("base", 0, 0.5, None)
    append_evaluation(tmp_path, one.model_dump(mode="json"))
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"arm": "base", "se')
    assert read_evaluations(tmp_path) == {("base", 0, None): one}
    other = evaluation("base", 1, 0.5, None)
    append_evaluation(tmp_path, other.model_dump(mode="json"))
    assert read_evaluations(tmp_path) == {("base", 0, None): one, ("base", 1, None): other}


def test_full_disk_leaves_no_part_of_an_evaluation(tmp_path: Path) -> None:
    file, one = tmp_path / "evaluations.jsonl", evaluation("base", 0, 0.5, None)
    append_evaluation(tmp_path, one.model_dump(mode="json"))
    before = file.read_bytes()
    with largest_file(len(before) + 40), pytest.raises(StoreError, match=r"cannot write .*evaluations\.jsonl"):
        append_evaluation(tmp_path, evaluation("base", 1, 0.5, None).model_dump(mode="json"))
    assert file.read_bytes() == before


def test_edited_evaluation_is_rejected_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "evaluations.jsonl").write_text('{"arm": "base"}\n')
    with pytest.raises(StoreError, match=r"evaluations\.jsonl:1: .*seed: missing"):
        read_evaluations(tmp_path)
