"""What is compared: which runs and policies, under which names, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError, StoreError
from reward_kit.runs.comparison import read_sides
from tests.runs.comparison.made import make_run

ONE = {"a": [1.0, 0.0], "b": [1.0, None], "c": [None, None]}


def labels(*runs: Path, policies: tuple[str, ...] = ()) -> list[str]:
    return [side.label for side in read_sides(runs, policies)]


def test_a_side_has_the_scores_of_each_sample(tmp_path: Path) -> None:
    side, _ = read_sides([make_run(tmp_path / "one", ONE), make_run(tmp_path / "two", ONE)])
    assert side.samples == {"a": (0.5, 2, 1), "b": (1.0, 1, 1)}
    assert side.unscored == {"c"}
    assert (side.summary.episodes, side.summary.scored) == (6, 3)
    assert side.summary.score is not None and side.summary.score.mean == pytest.approx(2 / 3)
    assert side.scorers == {"reward.py:right abcdef012345…"} and side.is_unit and side.unfinished == 0


def test_half_of_the_episodes_is_no_pass(tmp_path: Path) -> None:
    side, _ = read_sides([make_run(tmp_path / "one", ONE), make_run(tmp_path / "two", ONE)])
    assert not side.samples["a"].passes and side.samples["b"].passes


def test_the_latest_attempt_counts_and_what_a_limit_cut_off_does_not(tmp_path: Path) -> None:
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
    def test_policies_where_they_differ(self, tmp_path: Path) -> None:
        runs = [make_run(tmp_path / f"t-{name}", ONE, policy=name) for name in ("small", "large")]
        assert labels(*runs) == ["small", "large"]

    def test_else_runs_without_what_their_names_have_in_common(self, tmp_path: Path) -> None:
        names = ["clock-face-20260101T120000Z-ab12cd", "clock-face-20260102T120000Z-ef34ab"]
        assert labels(*(make_run(tmp_path / name, ONE) for name in names)) == [
            "20260101T120000Z-ab12cd",
            "20260102T120000Z-ef34ab",
        ]

    def test_else_both(self, tmp_path: Path) -> None:
        runs = [make_run(tmp_path / name, ONE) for name in ("before", "after")]
        for run in runs:
            make_run(run, ONE, policy="q", append=True)
        assert labels(*runs, policies=("p", "q")) == ["p of before", "q of before", "p of after", "q of after"]

    def test_else_folders(self, tmp_path: Path) -> None:
        runs = [tmp_path / name / "run" for name in ("before", "after")]
        assert labels(*(make_run(run, ONE) for run in runs)) == [f"p of {run}" for run in runs]


class TestPolicies:
    @pytest.fixture
    def both(self, tmp_path: Path) -> Path:
        return make_run(make_run(tmp_path / "both", ONE, policy="zebra"), ONE, policy="ape", append=True)

    def test_one_run_is_compared_by_its_policies(self, both: Path) -> None:
        assert labels(both) == ["ape", "zebra"]
        assert labels(both, policies=("zebra", "ape", "zebra")) == ["zebra", "ape"], "the first is the baseline"

    def test_a_run_with_one_policy_is_taken_as_it_is(self, both: Path, tmp_path: Path) -> None:
        assert labels(both, make_run(tmp_path / "other", ONE), policies=("ape",)) == ["ape", "p"]

    def test_several_without_a_choice_are_refused_by_name(self, both: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="both has several policies: ape, zebra; choose one with --policy"):
            read_sides([both, make_run(tmp_path / "other", ONE)])

    def test_typo_is_reported(self, both: Path) -> None:
        with pytest.raises(ConfigError, match="--policy zebre: no run has this policy; did you mean 'zebra'"):
            read_sides([both], ["zebre"])

    def test_one_of_one_is_nothing_to_compare(self, both: Path, tmp_path: Path) -> None:
        for run, policies in ((both, ["ape"]), (make_run(tmp_path / "one", ONE), [])):
            with pytest.raises(ConfigError, match="one run of one policy; name another run"):
                read_sides([run], policies)


class TestRefused:
    def test_folder_without_run_suggests_the_nearest(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "clock-1", ONE)
        with pytest.raises(ConfigError, match=r"clok-1 is not a run directory.*did you mean '.*clock-1'"):
            read_sides([run, tmp_path / "clok-1"])
        with pytest.raises(ConfigError, match="`reward-kit runs list` lists the runs"):
            read_sides([run, tmp_path / "nowhere" / "x"])

    def test_a_run_named_twice(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "one", ONE)
        with pytest.raises(ConfigError, match="named twice"):
            read_sides([run, tmp_path / "." / "one"])

    def test_a_training_run_with_what_to_do_instead(self, tmp_path: Path) -> None:
        runs = [make_run(tmp_path / "one", ONE), make_run(tmp_path / "two", ONE, training={"config": {}})]
        with pytest.raises(ConfigError, match=r"two is a training run.*run the trained model with `reward-kit run`"):
            read_sides(runs)

    def test_a_run_without_episodes(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="empty has no episodes yet"):
            read_sides([make_run(tmp_path / "empty", {}), make_run(tmp_path / "two", ONE)])

    @pytest.mark.parametrize("value", ['"1.0"', "NaN", "Infinity", "true", f"1{'0' * 400}"])
    def test_a_score_that_is_no_number_names_the_file_and_the_episode(self, tmp_path: Path, value: str) -> None:
        run = make_run(tmp_path / "one", {"a": [0.5]})
        text = (run / "scores.jsonl").read_text().replace('"score": 0.5', f'"score": {value}', 1)
        (run / "scores.jsonl").write_text(text)
        with pytest.raises(StoreError, match=r"scores\.jsonl:\d+: the score of a-p-0 must be a finite number or null"):
            read_sides([run, make_run(tmp_path / "two", ONE)])

    def test_a_score_beyond_all_measure(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="beyond 1e99"):
            read_sides([make_run(tmp_path / "one", {"a": [1e300]}), make_run(tmp_path / "two", ONE)])

    def test_a_damaged_line_of_an_episode(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "one", ONE)
        text = (run / "episodes.jsonl").read_text().replace('"policy": "p", ', "", 1)
        (run / "episodes.jsonl").write_text(text)
        with pytest.raises(StoreError, match=r"one: episode a-p-0 cannot be read"):
            read_sides([run, make_run(tmp_path / "two", ONE)])
