"""Selection and labels of the runs and policies to compare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError, StoreError
from reward_kit.runs.comparison import read_sides
from tests.runs.comparison.run_pairs import make_run

ONE = {"a": [1.0, 0.0], "b": [1.0, None], "c": [None, None]}


def labels(*runs: Path, policies: tuple[str, ...] = ()) -> list[str]:
    return [side.label for side in read_sides(runs, policies)]


def test_side_has_the_scores_of_each_sample(tmp_path: Path) -> None:
    side, _ = read_sides([make_run(tmp_path / "one", ONE), make_run(tmp_path / "two", ONE)])
    assert side.samples == {"a": (0.5, 2, 1), "b": (1.0, 1, 1)}
    assert side.unscored == {"c"}
    assert (side.summary.episodes, side.summary.scored) == (6, 3)
    assert side.summary.score is not None and side.summary.score.mean == pytest.approx(2 / 3)
    assert side.scorers == {"reward.py:right abcdef012345…"} and side.is_unit and side.unfinished == 0


def test_sample_with_half_of_its_episodes_passing_does_not_pass(tmp_path: Path) -> None:
    side, _ = read_sides([make_run(tmp_path / "one", ONE), make_run(tmp_path / "two", ONE)])
    assert not side.samples["a"].passes and side.samples["b"].passes


def test_latest_attempts_count_and_episodes_cut_off_by_a_limit_do_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", {"a": [0.0], "b": [1.0]}, total=3)
    with (run / "episodes.jsonl").open("a") as episodes, (run / "scores.jsonl").open("a") as scores:
        lines = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
        episodes.write(json.dumps({**lines[0], "attempt": 1}) + "\n")
        episodes.write(json.dumps({**lines[0], "rollout_id": "cut", "stop_reason": "run_limit"}) + "\n")
        line = json.loads((run / "scores.jsonl").read_text().splitlines()[0])
        scores.write(json.dumps({**line, "attempt": 1, "score": 1.0}) + "\n")
    side, _ = read_sides([run, make_run(tmp_path / "two", ONE)])
    assert side.samples == {"a": (1.0, 1, 1), "b": (1.0, 1, 1)}
    assert side.unfinished == 1


class TestNames:
    def test_differing_policies_are_labels(self, tmp_path: Path) -> None:
        runs = [make_run(tmp_path / f"t-{name}", ONE, policy=name) for name in ("small", "large")]
        assert labels(*runs) == ["small", "large"]

    def test_run_names_without_their_common_prefix_are_labels(self, tmp_path: Path) -> None:
        names = ["clock-face-20260101T120000Z-ab12cd", "clock-face-20260102T120000Z-ef34ab"]
        assert labels(*(make_run(tmp_path / name, ONE) for name in names)) == [
            "20260101T120000Z-ab12cd",
            "20260102T120000Z-ef34ab",
        ]

    def test_policy_and_run_are_labels_if_both_are_needed(self, tmp_path: Path) -> None:
        runs = [make_run(tmp_path / name, ONE) for name in ("before", "after")]
        for run in runs:
            make_run(run, ONE, policy="q", append=True)
        assert labels(*runs, policies=("p", "q")) == ["p of before", "q of before", "p of after", "q of after"]

    def test_folders_are_labels_of_runs_with_equal_names(self, tmp_path: Path) -> None:
        runs = [tmp_path / name / "run" for name in ("before", "after")]
        assert labels(*(make_run(run, ONE) for run in runs)) == [f"p of {run}" for run in runs]


class TestPolicies:
    @pytest.fixture
    def both(self, tmp_path: Path) -> Path:
        return make_run(make_run(tmp_path / "both", ONE, policy="zebra"), ONE, policy="ape", append=True)

    def test_policies_of_a_single_run_are_compared(self, both: Path) -> None:
        assert labels(both) == ["ape", "zebra"]
        assert labels(both, policies=("zebra", "ape", "zebra")) == ["zebra", "ape"], "the first is the baseline"

    def test_policy_option_is_ignored_for_runs_with_a_single_policy(self, both: Path, tmp_path: Path) -> None:
        assert labels(both, make_run(tmp_path / "other", ONE), policies=("ape",)) == ["ape", "p"]

    def test_several_policies_without_a_choice_are_rejected(self, both: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="both has multiple policies: ape, zebra; choose one with --policy"):
            read_sides([both, make_run(tmp_path / "other", ONE)])

    def test_misspelled_policy_suggests_the_nearest(self, both: Path) -> None:
        with pytest.raises(ConfigError, match="--policy zebre: no run has this policy; did you mean 'zebra'"):
            read_sides([both], ["zebre"])

    def test_single_policy_of_a_single_run_is_rejected(self, both: Path, tmp_path: Path) -> None:
        for run, policies in ((both, ["ape"]), (make_run(tmp_path / "one", ONE), [])):
            with pytest.raises(ConfigError, match="a run with only one policy; pass another run"):
                read_sides([run], policies)


class TestRefused:
    def test_folder_without_run_suggests_the_nearest(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "clock-1", ONE)
        with pytest.raises(ConfigError, match=r"clok-1 is not a run directory.*did you mean '.*clock-1'"):
            read_sides([run, tmp_path / "clok-1"])
        with pytest.raises(ConfigError, match="`reward-kit runs list` lists the runs"):
            read_sides([run, tmp_path / "nowhere" / "x"])

    def test_run_named_twice_is_rejected(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "one", ONE)
        with pytest.raises(ConfigError, match="passed twice"):
            read_sides([run, tmp_path / "." / "one"])

    def test_training_run_is_rejected_with_a_hint(self, tmp_path: Path) -> None:
        runs = [make_run(tmp_path / "one", ONE), make_run(tmp_path / "two", ONE, training={"config": {}})]
        with pytest.raises(ConfigError, match=r"two is a training run.*run the trained model with `reward-kit run`"):
            read_sides(runs)

    def test_run_without_episodes_is_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="empty has no episodes yet"):
            read_sides([make_run(tmp_path / "empty", {}), make_run(tmp_path / "two", ONE)])

    @pytest.mark.parametrize("value", ['"1.0"', "NaN", "Infinity", "true", f"1{'0' * 400}"])
    def test_invalid_score_names_the_file_and_the_episode(self, tmp_path: Path, value: str) -> None:
        run = make_run(tmp_path / "one", {"a": [0.5]})
        text = (run / "scores.jsonl").read_text().replace('"score": 0.5', f'"score": {value}', 1)
        (run / "scores.jsonl").write_text(text)
        with pytest.raises(StoreError, match=r"scores\.jsonl:\d+: the score of a-p-0 must be a finite number or null"):
            read_sides([run, make_run(tmp_path / "two", ONE)])

    def test_score_of_excessive_magnitude_is_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="beyond 1e99"):
            read_sides([make_run(tmp_path / "one", {"a": [1e300]}), make_run(tmp_path / "two", ONE)])

    def test_damaged_episode_line_is_rejected(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "one", ONE)
        text = (run / "episodes.jsonl").read_text().replace('"policy": "p", ', "", 1)
        (run / "episodes.jsonl").write_text(text)
        with pytest.raises(StoreError, match=r"one: episode a-p-0 cannot be read"):
            read_sides([run, make_run(tmp_path / "two", ONE)])
