"""Comparison of runs: pairing of samples, verdicts and mismatches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reward_kit.errors import ConfigError
from reward_kit.runs.comparison import Difference, to_json
from reward_kit.runs.comparison_table import comparison_notes
from reward_kit.runs.statistics import holm, paired_figures
from tests.runs.comparison.run_pairs import Scores, compared, make_run

BEFORE: Scores = {"a": [1.0, 0.0], "b": [0.0, 0.0], "c": [1.0, 1.0], "d": [1.0], "e": [None], "f": [1.0], "only": [1.0]}
AFTER: Scores = {"a": [1.0, 1.0], "b": [1.0, None], "c": [0.0, 0.5], "d": [1.0], "e": [0.0], "f": [None], "new": [0.0]}


@pytest.fixture
def difference(tmp_path: Path) -> Difference:
    comparison = compared(make_run(tmp_path / "before", BEFORE), make_run(tmp_path / "after", AFTER))
    (found,) = comparison.differences
    return found


def test_samples_scored_in_both_runs_are_compared(difference: Difference) -> None:
    assert [pair.sample_id for pair in difference.pairs] == ["a", "b", "c", "d"]
    assert [pair.difference for pair in difference.pairs] == [0.5, 1.0, -0.75, 0.0]
    assert difference.figures == paired_figures([0.5, 1.0, -0.75, 0.0], reach=1.0)
    assert (difference.baseline_mean, difference.run_mean) == (0.625, 0.8125)


def test_left_out_samples_are_counted(difference: Difference) -> None:
    assert difference.left_out._asdict() == {
        "unscored_in_baseline": 1,
        "unscored_in_run": 1,
        "only_in_baseline": 1,
        "only_in_run": 1,
        "no_rollout_in_both": 0,
    }


def test_flipped_samples_are_named(difference: Difference) -> None:
    # a passed in half of its rollouts before, which is no pass.
    assert [pair.sample_id for pair in difference.flipped("won")] == ["b", "a"]
    assert [pair.sample_id for pair in difference.flipped("lost")] == ["c"]
    assert difference.p_mcnemar == 1.0


def test_sample_counts_once_regardless_of_its_rollouts(tmp_path: Path) -> None:
    before = make_run(tmp_path / "before", {"a": [0.0] * 50, "b": [0.0]})
    after = make_run(tmp_path / "after", {"a": [0.0] * 50, "b": [1.0]})
    (found,) = compared(before, after).differences
    assert found.figures.interval.mean == 0.5 and found.figures.interval.n == 2


SOME: Scores = {"a": [1.0, 0.0], "b": [0.0, 1.0], "c": [1.0, None]}
OTHERS: Scores = {"a": [None, 1.0], "b": [1.0, None], "c": [None, 1.0]}


class TestRollouts:
    def found(self, tmp_path: Path, before: Scores, after: Scores, **header: Any) -> Difference:
        runs = make_run(tmp_path / "before", before), make_run(tmp_path / "after", after, **header)
        return compared(*runs).differences[0]

    def test_rollouts_of_equal_name_scored_in_both_runs_are_paired(self, tmp_path: Path) -> None:
        found = self.found(tmp_path, SOME, OTHERS)
        assert {pair.sample_id: pair.difference for pair in found.pairs} == {"a": 1.0, "b": 1.0}
        assert (found.pairing.by, found.pairing.rollouts, found.pairing.single_rollouts) == ("rollout", 2, 4)
        assert found.left_out.no_rollout_in_both == 1, "c is scored in both, by other rollouts"

    def test_samples_are_paired_if_rollouts_have_different_names(self, tmp_path: Path) -> None:
        found = self.found(tmp_path, SOME, {**OTHERS, "a": [None, 1.0, 1.0]})
        assert {pair.sample_id: pair.difference for pair in found.pairs} == {"a": 0.5, "b": 0.5, "c": 0.0}
        assert (found.pairing.by, found.pairing.rollouts, found.left_out.no_rollout_in_both) == ("sample", 0, 0)

    @pytest.mark.parametrize("one", [None, {"run_id": "first"}])
    def test_rescored_run_is_paired_by_rollout_after_the_run_continued(
        self, tmp_path: Path, one: dict[str, str] | None
    ) -> None:
        before = make_run(tmp_path / "before", {**SOME, "a": [1.0, 0.0, 0.0]}, rescored_from=one)
        after = make_run(tmp_path / "after", OTHERS, rescored_from=one or {"run_id": "before"})
        comparison = compared(before, after)
        assert [pair.difference for pair in comparison.differences[0].pairs] == [1.0, 1.0]
        expected = "after: the same episodes are scored in both, so they are paired by rollout: 2 have a score in both"
        assert comparison_notes(comparison)[0].startswith(expected)

    def test_runs_without_a_common_scored_rollout_are_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="each rollout of the 1 common samples is unscored in one of them"):
            self.found(tmp_path, {"c": [1.0, None]}, {"c": [None, 1.0]})


def scores(values: str) -> Scores:
    """`scores("110")`: three samples, of which the last fails."""
    return {f"s{place:02d}": [float(value)] for place, value in enumerate(values)}


class TestVerdict:
    @pytest.mark.parametrize(
        ("before", "after", "verdict"),
        [
            ("0" * 10 + "1" * 10, "1" * 20, "better"),
            ("1" * 20, "0" * 10 + "1" * 10, "worse"),
            ("1" * 20, "1" * 20, "not shown"),
            ("10" * 10, "01" * 10, "not shown"),
            ("1" * 4, "0" * 4, "doubtful"),  # the interval leaves 0 out, and p is 2/16
            ("1", "0", "not shown"),
        ],
    )
    def test_verdict_requires_interval_and_p_value(self, tmp_path: Path, before: str, after: str, verdict: str) -> None:
        runs = make_run(tmp_path / "b", scores(before)), make_run(tmp_path / "a", scores(after))
        assert compared(*runs).differences[0].verdict == verdict

    def test_comparing_many_runs_corrects_p_values(self, tmp_path: Path) -> None:
        """p = 2/64 alone; Holm's correction of three such comparisons rejects none."""
        runs = [make_run(tmp_path / name, scores("1" * 6), policy=name) for name in "xyz"]
        alone = compared(make_run(tmp_path / "b", scores("0" * 6)), runs[0]).differences[0]
        assert (alone.p_holm, alone.verdict) == (2 / 64, "better")
        several = compared(tmp_path / "b", *runs).differences
        assert [each.p_holm for each in several] == holm([2 / 64] * 3)
        assert [each.p_bh for each in several] == [2 / 64] * 3
        assert {each.verdict for each in several} == {"doubtful"}


class TestNothingInCommon:
    def test_runs_with_different_samples_are_rejected(self, tmp_path: Path) -> None:
        runs = make_run(tmp_path / "b", {"q1": [1.0]}), make_run(tmp_path / "a", {f"x{n}": [1.0] for n in range(9)})
        with pytest.raises(ConfigError, match=r"scored in both.*'x0', 'x1', 'x2' and 6 more, the second 'q1'"):
            compared(*runs)

    def test_runs_without_common_scored_samples_are_rejected(self, tmp_path: Path) -> None:
        runs = make_run(tmp_path / "b", {"a": [1.0], "b": [None]}), make_run(tmp_path / "a", {"a": [None], "b": [1.0]})
        with pytest.raises(ConfigError, match="each of the 2 common samples is unscored in one of them"):
            compared(*runs)


def began(run: Path, states: dict[str, str]) -> None:
    """Set the start states of the episodes of these samples."""
    lines = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    for line in lines:
        line["start"] = {"fork": "native", "state_key": states.get(line["sample_id"]), "verified": True}
    (run / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


class TestMismatches:
    def told(self, tmp_path: Path, one: dict[str, Any], other: dict[str, Any]) -> dict[str, str]:
        runs = make_run(tmp_path / "b", {"a": [1.0]}, **one), make_run(tmp_path / "a", {"a": [1.0]}, **other)
        (found,) = compared(*runs).differences
        return {mismatch.what: mismatch.message for mismatch in found.mismatches}

    def test_irrelevant_differences_are_not_mismatches(self, tmp_path: Path) -> None:
        assert self.told(tmp_path, {}, {"task": {"policy": {"type": "random"}, "run_limits": {"cost": 1}}}) == {}

    @pytest.mark.parametrize(
        ("change", "what", "word"),
        [
            (
                {"digests": {"dataset": "ffff" * 16}},
                "dataset",
                r"ffffffffffff…\): samples with the same id may be different",
            ),
            ({"task": {"pass_threshold": 0.5}}, "pass_threshold", r"differs \(1 and 0.5\)"),
            ({"task_name": "u"}, "task", r"\(t and u\)"),
            ({"task": {"max_episode_steps": 3}}, "task_keys", "differ in max_episode_steps"),
            ({"digests": {"dataset": "00", "tools": "11"}}, "files", "files of the tasks differ: tools"),
            (
                {"seed": 7},
                "seed",
                r"\(0 and 7\).*where environments .* samples with the same id are different problems",
            ),
            ({"versions": {"reward_kit": "0.1"}}, "version", "and 0.1"),
        ],
        ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
    )
    def test_each_mismatch_is_named(self, tmp_path: Path, change: dict[str, Any], what: str, word: str) -> None:
        import re

        message = self.told(tmp_path, {"digests": {"dataset": "00"}}, {"digests": {"dataset": "00"}, **change})
        assert list(message) == [what]
        assert re.search(word, message[what])

    def test_samples_with_different_start_states_are_counted(self, tmp_path: Path) -> None:
        samples: Scores = {"a": [1.0, 0.0], "b": [1.0, 1.0], "c": [1.0]}
        before, after = make_run(tmp_path / "b", samples), make_run(tmp_path / "a", samples)
        began(before, {"a": "one", "b": "two"})
        began(after, {"a": "one", "b": "other", "c": "three"})
        (found,) = compared(before, after).differences
        (starts,) = found.mismatches
        assert (starts.what, starts.baseline, starts.run) == ("starts", {"b": ["two"]}, {"b": ["other"]})
        assert starts.message.startswith("1 of 2 samples started in a different state than in the baseline, such as b")

    def test_different_reward_is_a_mismatch(self, tmp_path: Path) -> None:
        runs = [make_run(tmp_path / name, {"a": [1.0]}) for name in ("b", "a")]
        (runs[1] / "scores.jsonl").write_text((runs[1] / "scores.jsonl").read_text().replace("abcdef", "fedcba"))
        (found,) = compared(*runs).differences
        assert [mismatch.what for mismatch in found.mismatches] == ["reward"]

    def test_scoring_run_is_not_compared_on_missing_facts(self, tmp_path: Path) -> None:
        message = self.told(tmp_path, {"digests": {"dataset": "00"}, "seed": 3}, {"task_path": None, "data": "x.jsonl"})
        assert message == {}


def test_comparison_to_json_is_complete(tmp_path: Path) -> None:
    comparison = compared(make_run(tmp_path / "before", BEFORE), make_run(tmp_path / "after", AFTER))
    document = json.loads(json.dumps(to_json(comparison), allow_nan=False))
    assert [run["label"] for run in document["runs"]] == ["before", "after"]
    assert document["runs"][0]["tokens"] == 15 * 10 and document["runs"][0]["cost"] == pytest.approx(0.01)
    (found,) = document["comparisons"]
    assert found["common_samples"] == 4 and found["difference"] == pytest.approx(0.1875)
    assert found["low"] < found["bootstrap_low"] < found["difference"] < found["high"]
    assert found["won"][1] == {
        "sample": "a",
        "difference": 0.5,
        "baseline": {"mean": 0.5, "scored": 2, "passed": 1},
        "run": {"mean": 1.0, "scored": 2, "passed": 2},
    }
    assert found["left_out"]["unscored_in_run"] == 1 and found["mismatches"] == []


def test_scores_beyond_1_have_unbounded_intervals(tmp_path: Path) -> None:
    """Means between 0 and 1 do not imply scores between 0 and 1."""
    runs = make_run(tmp_path / "b", {"a": [-5.0, 5.5], "b": [0.5]}), make_run(tmp_path / "a", {"a": [9.0], "b": [0.0]})
    (found,) = compared(*runs).differences
    assert found.figures.interval.high is not None and found.figures.interval.high > 50
