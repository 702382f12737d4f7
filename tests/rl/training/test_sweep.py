"""Test sweeps: their files, their runs in processes, and their resume."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from reward_kit import sweep
from reward_kit.errors import ConfigError, TrainingError
from reward_kit.rl.training.sweep_file import SweepFile
from reward_kit.rl.training.sweep_session import (
    SweepHeader,
    changed_inputs,
    create_sweep,
    differences,
    latest_sweep,
    load_sweep,
    sweep_into,
)
from reward_kit.runs.run_folder import RunHeader
from tests.rl.training.frozen_lake import metrics_of
from tests.rl.training.lake_sweep import SWEEP, sweep_folder, without_clock

BROKEN_POLICY = """
import os
from tests.tiny_policy import TinyPolicy as Tiny

class TinyPolicy(Tiny):
    async def publish(self, version):
        if os.path.exists({flag!r}):
            raise ValueError("no more memory")
        await super().publish(version)
"""


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]


def key(line: dict[str, Any]) -> tuple[str, int]:
    return line["arm"], line["seed"]


def test_sweep_trains_and_evaluates_each_arm_with_each_seed(tmp_path: Path) -> None:
    path = sweep_folder(tmp_path, evaluation={"rollouts": 2, "by": "side"})
    outcome = sweep(path, log_dir=tmp_path / "runs")
    assert outcome.status == "complete"
    lines = lines_of(outcome.path)
    assert sorted(map(key, lines)) == [("gigpo", 0), ("gigpo", 1), ("grpo", 0), ("grpo", 1), ("start", 0)]
    assert {(line["episodes"], line["scored"], line["samples"]) for line in lines} == {(6, 6, 3)}
    assert {side: one["episodes"] for side, one in lines[0]["categories"].items()} == {"left": 4, "right": 2}
    for arm, seed in (("gigpo", 0), ("gigpo", 1), ("grpo", 0), ("grpo", 1)):
        run = outcome.path / f"{arm}-{seed}"
        header = RunHeader.read(run)
        assert (header.status, header.seed) == ("complete", seed)
        assert header.require_training(run).config["credit"]["estimator"] == arm
        assert metrics_of(run)[-1]["update"] == 2
    arms = outcome.summary["arms"]
    mean = sum(line["score"] for line in lines if line["arm"] == "grpo") / 2
    assert arms["grpo"]["scores"]["score"]["mean"] == pytest.approx(mean)
    difference = arms["grpo"]["differences"]["score"]
    assert difference["mean"] == pytest.approx(mean - arms["gigpo"]["scores"]["score"]["mean"])
    assert "p_corrected" in difference and arms["gigpo"]["differences"] == {}
    assert set(outcome.summary["categories"]["score"]["left"]) == {"gigpo", "grpo", "start"}
    check_finished_sweep_is_not_repeated(path, outcome.path, outcome.summary)
    check_damaged_files_do_not_hide_results(outcome.path)
    check_changed_inputs_are_listed(path, outcome.path)


def check_finished_sweep_is_not_repeated(path: Path, folder: Path, summary: dict[str, Any]) -> None:
    reports: list[str] = []
    again = sweep_into(folder, load_sweep(SweepFile.read(path)), lambda name, report: reports.append(name))
    assert again.summary == summary and not reports
    (folder / "evaluations.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines_of(folder)[:-1]) + '{"a'
    )
    again = sweep_into(folder, load_sweep(SweepFile.read(path)), lambda name, report: reports.append(name))
    assert without_clock(again.summary) == without_clock(summary) and len(set(reports)) == 1
    assert len(lines_of(folder)) == 5


def check_damaged_files_do_not_hide_results(folder: Path) -> None:
    sweeps = folder.parent
    (sweeps / "damaged").mkdir()
    (sweeps / "damaged" / "sweep.json").write_text("{")
    assert latest_sweep(sweeps) == folder
    metrics = folder / "grpo-1" / "metrics.jsonl"
    before = metrics.read_bytes()
    metrics.write_text("damaged\n" * 2)
    reports: list[str] = []
    plan = load_sweep(SweepFile.read(folder.parents[1] / "sweep.yaml"))
    outcome = sweep_into(folder, plan, lambda name, report: reports.append(str(report)))
    assert outcome.status == "complete" and len(reports) == 1 and "report.html was not written: " in reports[0]
    metrics.write_bytes(before)


def check_changed_inputs_are_listed(path: Path, folder: Path) -> None:
    header = SweepHeader.read(folder)

    def changes() -> list[str]:
        return changed_inputs(header, load_sweep(SweepFile.read(path)), folder)

    assert not changes()
    sweep_folder(path.parent, processes=1, evaluation={"rollouts": 2, "by": "side"})
    assert not changes()
    sweep_folder(path.parent, {"ppo": {"lr": 0.5}}, seeds=3)
    found = changes()
    assert "seeds was 2, is 3" in found and 'evaluation.by was "side", is absent' in found
    assert any(re.match(r"grpo: train file \(.*ppo\.lr was 0\.01, is 0\.5", text) for text in found)


def test_failed_run_does_not_end_the_others_and_is_retried_on_resume(tmp_path: Path) -> None:
    # The flag file breaks the arm after its first weights are published.
    path = sweep_folder(tmp_path, seeds=1, arms={"gigpo": {}, "broken": {"policy": {"type": "broken.py:TinyPolicy"}}})
    flag = tmp_path / "flag"
    flag.touch()
    (tmp_path / "broken.py").write_text(BROKEN_POLICY.format(flag=str(flag)))
    plan = load_sweep(SweepFile.read(path))
    folder = create_sweep(plan, tmp_path / "runs")
    outcome = sweep_into(folder, plan)
    assert outcome.status == SweepHeader.read(folder).status == "failed"
    run = outcome.summary["arms"]["broken"]["runs"]["0"]
    assert run["status"] == "failed" and "no more memory" in run["error"] and "\n" not in run["error"]
    assert outcome.summary["arms"]["gigpo"]["runs"]["0"]["status"] == "complete"
    assert outcome.summary["arms"]["broken"]["scores"]["score"] is None
    assert "| broken | 0 of 1, 1 failed |" in outcome.summary["markdown"]
    assert any("One seed" in note for note in outcome.summary["notes"])
    flag.unlink()
    assert sweep_into(folder, load_sweep(SweepFile.read(path))).status == "complete"


def test_untrained_policy_that_cannot_be_evaluated_ends_the_sweep(tmp_path: Path) -> None:
    path = sweep_folder(tmp_path, evaluation={"temperatures": [0.5]})
    with pytest.raises(
        TrainingError, match=r"cannot be evaluated: evaluation\.temperature: TinyPolicy has no sampling"
    ):
        sweep(path, log_dir=tmp_path / "runs")


def test_temperature_of_the_train_file_applies_to_other_samples_too(tmp_path: Path) -> None:
    samples = {"dataset_path": "held_out.jsonl", "every": 2, "temperature": 0.5}
    path = sweep_folder(tmp_path, {"evaluation": samples}, evaluation={"dataset_path": "held_out.jsonl"})
    assert load_sweep(SweepFile.read(path)).temperatures == [0.5]


def test_start_is_evaluated_per_seed_if_the_samples_are_drawn_with_the_seed(tmp_path: Path) -> None:
    plan = load_sweep(SweepFile.read(sweep_folder(tmp_path, {"evaluation": {"hold_out": 1}})))
    assert plan.starts == [0, 1]
    assert load_sweep(SweepFile.read(sweep_folder(tmp_path))).starts == [0]


def test_evaluation_may_have_other_samples_than_the_train_file(tmp_path: Path) -> None:
    path = sweep_folder(
        tmp_path,
        {"evaluation": None},
        seeds=1,
        arms={"gigpo": {}},
        evaluation={"dataset_path": "held_out.jsonl", "by": "far"},
    )
    outcome = sweep(path, log_dir=tmp_path / "runs")
    assert outcome.status == "complete"
    assert set(outcome.summary["categories"]["score"]) == {"far", "not far"}
    assert "held_out/score" not in metrics_of(outcome.path / "gigpo-0")[-1]


def test_keys_of_an_arm_replace_those_of_all_arms(tmp_path: Path) -> None:
    file = SweepFile.read(
        sweep_folder(tmp_path, overrides={"ppo.lr": 1.0, "updates": 3}, arms={"a": {}, "b": {"ppo": {"lr": 0.5}}})
    )
    assert file.overrides("a") == {"ppo.lr": 1.0, "updates": 3}
    assert file.overrides("b") == {"ppo": {"lr": 0.5}, "updates": 3}
    assert differences(load_sweep(file)) == {
        "b": ["ppo.epochs: 1, not 2", "ppo.lr: 0.5, not 1.0", "ppo.minibatches: absent, not 2"]
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arm": {}}, r"sweep\.yaml:\d+: arm: unknown key; did you mean 'arms'\?"),
        ({"arms": {"grpo": {"credit.estimator": "grop"}}}, r"sweep\.yaml:5: arms\.grpo: .*unknown estimator 'grop'"),
        ({"arms": {"a": {"ppo.lrr": 1}}}, r"sweep\.yaml:5: arms\.a: ppo\.lrr: unknown key; did you mean 'lr'\?"),
        ({"arms": {"a": {"seed": 1}}}, r"sweep\.yaml:6: arms\.a\.seed: each arm has all `seeds`"),
        ({"arms": {"start": {}}}, r"sweep\.yaml:5: arms\.start: 'start' is the name of the untrained policy"),
        ({"arms": {"a/b": {}}}, r"sweep\.yaml:5: arms\.a/b"),
        ({"baseline": "gipgo"}, r"sweep\.yaml:\d+: baseline: unknown arm 'gipgo'; did you mean 'gigpo'\?"),
        ({"seeds": [1, 1]}, r"sweep\.yaml:3: seeds: a value occurs twice"),
        ({"seeds": 0}, r"sweep\.yaml:3: seeds: must be a number of 1 or more, or a list of seeds"),
        (
            {"evaluation": {"by": "sid"}},
            r"sweep\.yaml:\d+: evaluation\.by: no held-out sample .*; did you mean 'side'\?",
        ),
    ],
)
def test_invalid_sweep_is_rejected_with_its_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = sweep_folder(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        load_sweep(SweepFile.read(path))


def test_missing_train_file_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    path = sweep_folder(tmp_path)
    path.write_text(path.read_text().replace("train: train.yaml", "train: trian.yaml"))
    with pytest.raises(ConfigError, match=r"yaml:2: train: the file trian\.yaml does not exist; did you mean 'train\."):
        SweepFile.read(path)


def test_estimator_of_an_arm_names_the_options_of_the_train_file_that_do_not_apply(tmp_path: Path) -> None:
    credit = {"estimator": "gigpo", "omega": 0.3}
    path = sweep_folder(tmp_path, {"credit": credit}, arms={"a": {"credit.estimator": "grpo"}})
    message = r"sweep\.yaml:5: arms\.a: .*train\.yaml:\d+: credit\.omega: .* block with credit: \{estimator: grpo\}"
    with pytest.raises(ConfigError, match=message):
        load_sweep(SweepFile.read(path))


def test_sweep_without_held_out_samples_is_rejected(tmp_path: Path) -> None:
    path = sweep_folder(tmp_path, {"evaluation": None})
    with pytest.raises(ConfigError, match=r"sweep\.yaml: no held-out samples .*set evaluation\.dataset_path"):
        load_sweep(SweepFile.read(path))


def test_sweep_groups_its_runs_at_weights_and_biases(tmp_path: Path) -> None:
    path = sweep_folder(tmp_path, {"logs": {"wandb": {"project": "lakes"}}})
    plan = load_sweep(SweepFile.read(path))
    request = plan.request("grpo", 1, tmp_path / "runs" / "lakes-1", {})
    assert request.overrides["logs.wandb.group"] == "lakes-1"
    path = sweep_folder(tmp_path, {"logs": {"wandb": {"project": "lakes", "group": "mine"}}}, arms=SWEEP["arms"])
    assert "logs.wandb.group" not in load_sweep(SweepFile.read(path)).request("grpo", 1, tmp_path, {}).overrides
