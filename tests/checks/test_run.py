"""Test `reward-kit check RUN` with intact runs, damaged runs and rollouts of other trainers."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from reward_kit.checks.run import check_run
from reward_kit.cli.main import program
from reward_kit.errors import ConfigError, StoreError
from tests.runs.stored_run import episode, make_run, score

TASK = """
name: lake
resource_type: gymnasium
base_resource_config: {env_id: FrozenLake-v1, env_kwargs: {is_slippery: false}}
num_rollouts: 3
max_episode_steps: 4
policy: {type: random}
"""


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(program, list(arguments))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run of three episodes."""
    folder = tmp_path_factory.mktemp("lake")
    (folder / "task.yaml").write_text(TASK, encoding="utf-8")
    return run(folder, "task.yaml")


def run(folder: Path, *arguments: str) -> Path:
    command = [sys.executable, "-m", "reward_kit.cli.main", "run", *arguments, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / json.loads(done.stdout)["run"]


def copied(recorded: Path, folder: Path, change: Callable[[list[dict[str, Any]]], None] = lambda lines: None) -> Path:
    """Copy the run with changed episodes."""
    copy = folder / recorded.name
    copy.mkdir()
    lines = [json.loads(line) for line in (recorded / "episodes.jsonl").read_text(encoding="utf-8").splitlines()]
    change(lines)
    (copy / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if (recorded / "states").is_dir():
        (copy / "states").symlink_to(recorded / "states")
    return copy


def test_intact_run_has_no_findings(recorded: Path) -> None:
    done = invoke("check", str(recorded))
    assert (done.exit_code, done.output) == (0, f"{recorded}: 0 errors, 0 warnings in 3 episodes\n")


def start_elsewhere(lines: list[dict[str, Any]]) -> None:
    lines[2]["start"]["state_key"] = lines[2]["steps"][0]["state_key"] = "elsewhere"


def lose_the_end(lines: list[dict[str, Any]]) -> None:
    del lines[0]["final"]


def change_a_reward(lines: list[dict[str, Any]]) -> None:
    lines[0]["steps"][0]["reward"] = 1.0


def lose_a_key(lines: list[dict[str, Any]]) -> None:
    del lines[0]["messages"]


def end_twice(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        line["terminated"] = line["truncated"] = True


def repeat(lines: list[dict[str, Any]]) -> None:
    lines.append(lines[0])


def garble(*keys: str | int) -> Callable[[list[dict[str, Any]]], None]:
    """Replace a number or an object by a text."""

    def change(lines: list[dict[str, Any]]) -> None:
        place: Any = lines[0]
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = "x"

    return change


@pytest.mark.parametrize(
    ("change", "kind", "count"),
    [
        (start_elsewhere, "mixed-starts", 1),
        (lose_the_end, "track-lengths", 1),
        (change_a_reward, "environment-reward", 1),
        (lose_a_key, "unreadable", 1),
        (end_twice, "terminated-and-truncated", 3),
        (repeat, "duplicate-rollout", 1),
        (garble("steps", 0, "reward"), "unreadable", 1),
        (garble("attempt"), "unreadable", 1),
        (garble("environment_return"), "unreadable", 1),
        (garble("final_state"), "unreadable", 1),
    ],
)
def test_planted_fault_is_found_in_the_file(
    recorded: Path, tmp_path: Path, change: Callable[[list[dict[str, Any]]], None], kind: str, count: int
) -> None:
    done = invoke("check", str(copied(recorded, tmp_path, change)), "--json")
    report = json.loads(done.stdout)
    assert [(found["kind"], found["count"]) for found in report["findings"]] == [(kind, count)]
    assert (done.exit_code, report["counts"]) == (1, {"error": count, "warning": 0})
    assert len(report["findings"][0]["examples"]) == min(count, 3)


def test_findings_are_grouped_with_examples(recorded: Path, tmp_path: Path) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        lines += [{**lines[0], "rollout_id": f"more-{n}", "group_id": f"g{n}"} for n in range(4)]
        end_twice(lines)

    done = invoke("check", str(copied(recorded, tmp_path, change)))
    lines = done.stdout.splitlines()
    assert lines[0] == "error:   terminated-and-truncated: 7 findings"
    assert lines[1].lstrip().startswith("episode lake-") and lines[4] == "           … and 4 more"
    assert lines[-1].endswith(": 7 errors, 0 warnings in 7 episodes")
    assert invoke("check", str(tmp_path / lines[-1].split(":")[0]), "--fail-on", "never").exit_code == 0


def test_missing_final_state_is_reported(recorded: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (recorded / "episodes.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[0]["final_state"]
    copy = copied(recorded, tmp_path)
    (copy / "states").unlink()
    done = invoke("check", str(copy))
    assert done.exit_code == 1 and "final-state: 3 findings" in done.stdout


def credit_line(line: dict[str, Any], step: int, **values: Any) -> dict[str, Any]:
    said = {"return_to_go": 0.0, "A_E": 0.5, "A_S": 0.0, "A": 0.25, "group_id": line["group_id"]}
    return {"schema_version": 1, "rollout_id": line["rollout_id"], "step": step, **said, **values}


@pytest.mark.parametrize(
    ("score", "first", "kinds"),
    [
        (1.0, {}, []),
        (None, {}, ["advantage-unscored"]),
        (None, dict.fromkeys(("A", "A_E", "return_to_go")), []),
        (1.0, {"A": None, "return_to_go": None}, ["credit-missing"]),
        (1.0, {"A_E": 0.75}, ["episode-advantage-varies"]),
        (1.0, {"step": 7}, ["credit-steps"]),
    ],
)
def test_scores_and_credit_are_joined_with_episodes(
    recorded: Path, tmp_path: Path, score: float | None, first: dict[str, Any], kinds: list[str]
) -> None:
    kept: list[dict[str, Any]] = []
    copy = copied(recorded, tmp_path, kept.extend)
    old = {**kept[0], "attempt": 0}
    kept[0] = {**kept[0], "attempt": 1}
    (copy / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (old, *kept)), encoding="utf-8")
    scored = {"rollout_id": kept[0]["rollout_id"], "attempt": 1, "score": score}
    (copy / "scores.jsonl").write_text(json.dumps(scored) + "\n", encoding="utf-8")
    everywhere = first if None in first.values() and score is None else {}
    lines = [credit_line(kept[0], step, **everywhere) for step in range(kept[0]["num_steps"])]
    assert len(lines) >= 2
    lines[0] |= first
    (copy / "credit.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    report = json.loads(invoke("check", str(copy), "--json").stdout)
    assert [found["kind"] for found in report["findings"]] == kinds


def test_credit_of_a_missing_episode_is_reported(recorded: Path, tmp_path: Path) -> None:
    kept: list[dict[str, Any]] = []
    copy = copied(recorded, tmp_path, kept.extend)
    lines = [credit_line({**kept[0], "rollout_id": "gone"}, step) for step in range(2)]
    (copy / "credit.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    done = invoke("check", str(copy))
    assert done.exit_code == 1
    assert (
        "credit.jsonl: there is credit for episode gone, but episodes.jsonl does not contain this episode"
        in done.stdout
    )
    assert done.stdout.splitlines()[-1].endswith(": 1 error, 0 warnings in 3 episodes")
    # The episode of an unreadable line is unknown.
    with (copy / "episodes.jsonl").open("a", encoding="utf-8") as episodes:
        episodes.write("{}\n")
    assert "credit-steps" not in invoke("check", str(copy)).stdout


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        (
            "scores.jsonl",
            {"rollout_id": "r", "score": "good"},
            "the score of r must be a finite number or null",
        ),
        ("scores.jsonl", {"score": 1.0}, "scores.jsonl:1: expected an object with a string rollout_id"),
        ("scores.jsonl", [], "scores.jsonl:1: expected an object with a string rollout_id"),
        (
            "scores.jsonl",
            {"rollout_id": "r", "attempt": "x"},
            "scores.jsonl:1: attempt must be an integer",
        ),
        ("scores.jsonl", {"rollout_id": "r", "failure": {"class": "crush"}}, "scores.jsonl:1: unknown failure class"),
        ("scores.jsonl", {"rollout_id": "r", "failure": "x"}, "scores.jsonl:1: the failure cannot be read"),
        ("credit.jsonl", {"rollout_id": "r", "A": "much"}, "credit.jsonl:1: A must be a number, or null if unscored"),
        ("credit.jsonl", [], "credit.jsonl:1: not the credit of a step"),
    ],
)
def test_damaged_line_in_another_file_is_named(recorded: Path, tmp_path: Path, file: str, line: Any, said: str) -> None:
    copy = copied(recorded, tmp_path)
    (copy / file).write_text(json.dumps(line) + "\n", encoding="utf-8")
    done = invoke("check", str(copy))
    assert isinstance(done.exception, ConfigError | StoreError) and said in str(done.exception)


def test_torn_last_line_is_ignored_and_damaged_line_reported(recorded: Path, tmp_path: Path) -> None:
    copy = copied(recorded, tmp_path)
    with (copy / "episodes.jsonl").open("a", encoding="utf-8") as lines:
        lines.write('{"rollout_id": "torn')
    assert invoke("check", str(copy)).exit_code == 0
    with (copy / "episodes.jsonl").open("a", encoding="utf-8") as lines:
        lines.write("\n")
    done = invoke("check", str(copy))
    assert done.exit_code == 1 and "episodes.jsonl:4: cannot be read as an episode" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("runs/lakf-1",), "no run runs/lakf-1; did you mean 'lake-1'?"),
        (("lake-1",), "no run lake-1; did you mean 'runs/lake-1'?"),
        (
            ("runs",),
            "runs is not a run, because it has no episodes.jsonl; pass one of the runs in this directory, such as "
            "runs/lake-1",
        ),
        (("rollouts.jsonl",), "unknown format; pass --format trl or --format verifiers"),
        (("runs/lake-1/episodes.jsonl",), "to check a run, pass the directory runs/lake-1"),
        (("rolouts.jsonl", "--format", "trl"), "did you mean 'rollouts.jsonl'?"),
        (("runs/lake-1", "--seed", "1"), "--seed applies to a reward or a task file or a resource"),
        (("runs/lake-1", "--format", "trl"), "--format applies to a file of rollouts"),
        (("rollouts.jsonl", "--steps", "1"), "--steps applies to a resource"),
    ],
)
def test_invalid_usage_is_rejected(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "lake-1").symlink_to(recorded)
    (tmp_path / "rollouts.jsonl").write_text("{}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    done = invoke("check", *arguments)
    if isinstance(done.exception, ConfigError):  # of which `main` makes the exit code 2
        assert said in str(done.exception)
    else:
        assert done.exit_code == 2 and said in done.output.replace("\n", " ")


def test_rollouts_of_other_trainers_are_checked(tmp_path: Path) -> None:
    rollout = {"prompt_ids": [[1, 2]], "completion_ids": [[3, 4]], "logprobs": [[-1.0, 0.5]], "env_mask": [[1, 1]]}
    (tmp_path / "r.jsonl").write_text(json.dumps(rollout) + "\n", encoding="utf-8")
    done = invoke("check", str(tmp_path / "r.jsonl"), "--format", "trl")
    assert done.exit_code == 1 and "logprob-positive: 1 finding\n" in done.stdout
    assert done.stdout.endswith("1 error, 0 warnings in 1 record\n")


def test_memory_does_not_grow_with_the_run(recorded: Path, tmp_path: Path) -> None:
    def peak(episodes: int) -> int:
        def repeated(lines: list[dict[str, Any]]) -> None:
            first = {**lines[0], "sample": {"text": "x" * 20_000}}
            lines[:] = [{**first, "rollout_id": f"r{n}", "group_id": f"g{n}"} for n in range(episodes)]

        (tmp_path / str(episodes)).mkdir()
        run = copied(recorded, tmp_path / str(episodes), repeated)
        tracemalloc.start()
        assert check_run(run).findings == []
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    small, large = peak(20), peak(200)
    assert large - small < 180 * 2_000  # a tenth of what the episodes themselves take


def credited(folder: Path, *options: str) -> Path:
    """Write a run of two episodes in one group, with credit."""
    episodes = [episode("a", ["s0", "s1"]), episode("b", ["s0", "s2"], index=1)]
    made = make_run(folder, episodes, [score("a", 1.0), score("b", 0.0)])
    done = invoke("credit", str(made), *options)
    assert done.exit_code == 0, done.output
    return made


def kinds_found(run: Path) -> list[str]:
    return [found["kind"] for found in json.loads(invoke("check", str(run), "--json").stdout)["findings"]]


def rewrite(path: Path, change: Callable[[list[Any]], None]) -> None:
    """Change a file of JSON lines, or of one JSON object."""
    text = path.read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else [json.loads(text)]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


@pytest.mark.parametrize(
    "options",
    [
        ("-O", "omega=0.3"),
        ("-O", "combination=additive", "-O", "step_weight=0.5"),
        ("--estimator", "g2po", "-O", "step_weight=0.5"),
        *(
            ("--estimator", name)
            for name in ("grpo", "rloo", "discounted_returns", "turn_level_grpo", "hgpo", "g2po", "graphgpo")
        ),
    ],
)
def test_advantage_must_match_the_credit_options(tmp_path: Path, options: tuple[str, ...]) -> None:
    run = credited(tmp_path, *options)
    assert kinds_found(run) == []
    rewrite(run / "credit.jsonl", lambda rows: rows[1].update(A=rows[1]["A"] + 0.01))
    assert kinds_found(run) == ["credit-combination"]


def test_credit_of_older_scores_is_reported(tmp_path: Path) -> None:
    run = credited(tmp_path)
    rewrite(run / "scores.jsonl", lambda lines: lines[1].update(score=1.0, result={"score": 1.0}))
    done = invoke("check", str(run))
    assert done.exit_code == 1
    text = "the credit was not computed from the run's current scores; assign credit again with"
    assert f"{text} `reward-kit credit {run}`" in done.stdout
    invoke("credit", str(run))
    assert kinds_found(run) == []


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (lambda summary: summary.pop("credit"), ["credit-scores"]),
        (lambda summary: summary.update(credit={}), ["unreadable"]),
        (lambda summary: summary["credit"]["options"].update(gamma="x"), ["credit-scores"]),
    ],
)
def test_summary_that_contradicts_the_credit_is_reported(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], kinds: list[str]
) -> None:
    run = credited(tmp_path)
    rewrite(run / "summary.json", lambda whole: change(whole[0]))
    assert kinds_found(run) == kinds


def test_lost_credit_file_is_reported(tmp_path: Path) -> None:
    run = credited(tmp_path)
    (run / "credit.jsonl").unlink()
    assert kinds_found(run) == ["credit-steps"]
    (run / "summary.json").write_text("{", encoding="utf-8")
    assert kinds_found(run) == ["unreadable"]


def test_episode_count_must_match_the_run_header(tmp_path: Path) -> None:
    run = credited(tmp_path)
    rewrite(run / "run.json", lambda whole: whole[0].update(status="complete", total=2))
    assert kinds_found(run) == []
    rewrite(run / "run.json", lambda whole: whole[0].update(total=3))
    assert "run.json: the run is marked complete with 3 episodes, but only 2" in invoke(
        "check", str(run)
    ).output.replace("\n", " ")
    rewrite(run / "run.json", lambda whole: whole[0].update(status="interrupted"))
    assert kinds_found(run) == []
    (run / "run.json").write_text("{", encoding="utf-8")
    assert kinds_found(run) == ["unreadable"]


def test_record_of_another_format_does_not_hide_other_findings(tmp_path: Path) -> None:
    wrong = {"prompt_ids": [[1, 2]], "completion_ids": [[3, 4]], "logprobs": [[-1.0, 0.5]], "env_mask": [[1, 1]]}
    lines = [json.dumps({"prompt_ids": [[1]]}), "[]", "{", json.dumps(wrong)]
    (tmp_path / "r.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    report = json.loads(invoke("check", str(tmp_path / "r.jsonl"), "--format", "trl", "--json").stdout)
    assert [(found["kind"], found["count"]) for found in report["findings"]] == [
        ("unreadable", 3),
        ("logprob-positive", 1),
    ]
    assert report["checked"] == {"records": 4}
    # A file without one record of the form is another file.
    (tmp_path / "r.jsonl").write_text("".join(f"{line}\n" for line in lines[:3]), encoding="utf-8")
    done = invoke("check", str(tmp_path / "r.jsonl"), "--format", "trl")
    assert isinstance(done.exception, ConfigError) and "r.jsonl:1" in str(done.exception)
