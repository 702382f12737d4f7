"""Test `reward-kit train`, its resume and its errors."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import get_args

import pytest
import yaml

from reward_kit.rl.learner.config import LossName
from reward_kit.runs.run_folder import RunHeader
from tests import command_line
from tests.rl.training.frozen_lake import TRAIN, lake_folder, metrics_of


def run_path(folder: Path) -> Path:
    (path,) = (folder / "runs").iterdir()
    return path


def test_train_file_becomes_a_run_that_is_listed_and_resumed(tmp_path: Path) -> None:
    lake_folder(tmp_path)
    done = command_line.call("train", "train.yaml", "--json", "--display", "plain", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["status"], summary["updates"]) == ("complete", 2)
    assert Path(summary["run"]) == run_path(tmp_path).relative_to(tmp_path)
    assert "update 2/2  score 0.0" in done.stderr and "held-out 0.0" in done.stderr
    listed = json.loads(command_line.call("runs", "list", "--json", cwd=tmp_path).stdout)
    assert [(one["task"], one["status"]) for one in listed] == [("tiny-lake", "complete")]
    assert listed[0]["scores"] == {"best": summary["best"], "last": summary["last"]}
    check_rejects_its_episodes(tmp_path)
    check_resume_of_a_finished_run(tmp_path)
    check_moved_folder_resumes_with_its_file(tmp_path)
    check_changed_resume_needs_force(tmp_path)


def check_resume_of_a_finished_run(folder: Path) -> None:
    run = run_path(folder).relative_to(folder)
    done = command_line.call("train", "--resume", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert f"{run} finished after 2 updates and " in done.stderr
    assert "To continue training, increase the limit:" in done.stderr
    assert f"reward-kit train --resume {run} -T updates=4" in done.stderr
    assert [line["update"] for line in metrics_of(folder / run)] == [0, 1, 2]
    for steps, raised in ((100_000, "-T updates=4"), (1, r"-T updates=4 -T max_env_steps=\d+")):
        more = command_line.call("train", "--resume", "-T", f"max_env_steps={steps}", "--dry-run", cwd=folder)
        suggested = re.search(rf"reward-kit train --resume {re.escape(str(run))} {raised}$", more.stderr, re.M)
        assert suggested, more.stderr
        options = suggested[0].split()[4:]
        continued = command_line.call("train", "--resume", *options, "--dry-run", cwd=folder)
        assert continued.returncode == 0 and "finished after" not in continued.stderr


def check_rejects_its_episodes(folder: Path) -> None:
    run = run_path(folder).relative_to(folder)
    done = command_line.call("check", str(run), cwd=folder)
    assert done.returncode == 2 and f"{run} is a run of `reward-kit train`" in done.stderr
    assert f"-T policy.model={run}/model" in done.stderr


def check_changed_resume_needs_force(folder: Path) -> None:
    changed = command_line.call("train", "--resume", "-T", "ppo.lr=1", cwd=folder)
    assert changed.returncode == 2 and "-T ppo.lr cannot be changed by --resume" in changed.stderr
    (folder / "reward.py").write_text((folder / "reward.py").read_text() + "\n# another\n")
    # With a train file, --resume takes the latest run of its name.
    refused = command_line.call("train", "train.yaml", "--resume", cwd=folder)
    run = run_path(folder).relative_to(folder)
    problem = f"{run} cannot be resumed, because its inputs changed:\n"
    fixes = "Undo the changes, start again in a new directory, or continue anyway with --force"
    assert refused.returncode == 2 and f"{problem}evaluation's reward\nreward\n{fixes}\n" in refused.stderr
    lake_folder(folder, ppo={**TRAIN["ppo"], "lr": 0.02})
    refused = command_line.call("train", "--resume", cwd=folder)
    assert refused.returncode == 2 and f"{problem}train file (ppo.lr was 0.01, is 0.02)\n{fixes}" in refused.stderr
    forced = command_line.call("train", "--resume", "--force", "-T", "updates=3", cwd=folder)
    assert forced.returncode == 0 and metrics_of(run_path(folder))[-1]["update"] == 3
    assert f"--force: {run} is resumed although its inputs changed:\ntrain file (ppo.lr was" in forced.stderr
    check_changed_limit_is_stored(folder)


def check_changed_limit_is_stored(folder: Path) -> None:
    """Overrides of a resume apply to the next one. Changes that need --force do not become the new settings."""
    training = RunHeader.read(run_path(folder)).require_training(run_path(folder))
    assert training.overrides == {"updates": 3} and training.config["updates"] == 3
    assert training.config["ppo"]["lr"] == TRAIN["ppo"]["lr"]
    resumed = command_line.call("train", "--resume", "--force", cwd=folder)
    assert resumed.returncode == 0 and "finished after 3 updates" in resumed.stderr


def check_moved_folder_resumes_with_its_file(folder: Path) -> None:
    moved = folder.rename(folder.with_name("moved"))
    lost = command_line.call("train", "--resume", "--dry-run", cwd=moved)
    assert lost.returncode == 2 and f"cannot read {folder / 'train.yaml'}" in lost.stderr
    done = command_line.call("train", "train.yaml", "--resume", "--dry-run", cwd=moved)
    assert done.returncode == 0, done.stderr
    moved.rename(folder)


def test_updates_with_nothing_to_learn_from_are_reported_once_and_counted(tmp_path: Path) -> None:
    task = {**TRAIN["task"], "reward_function_path": "flat.py:flat"}
    lake_folder(tmp_path, task=task, credit="grpo", evaluation=None, updates=3)
    (tmp_path / "flat.py").write_text("def flat(messages):\n    return 0.5\n")
    reasons = {
        "null": "all advantages are zero, for example because the scores of each group are equal",
        "{max_collections: 1}": "dynamic_sampling dropped all groups, see groups/dropped in metrics.jsonl",
    }
    for dynamic, reason in reasons.items():
        options = ("--display", "plain", "-T", f"dynamic_sampling={dynamic}")
        done = command_line.call("train", "train.yaml", *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert [line for line in done.stderr.splitlines() if "nothing to learn from" in line] == [
            f"update 1: nothing to learn from: {reason}",
            "3 updates had nothing to learn from",
        ]


def test_first_warning_of_each_kind_is_shown(tmp_path: Path) -> None:
    lake_folder(tmp_path, evaluation=None)
    options = ("-T", "ppo.attention=flash_attention_2", "-T", "ppo.limits={approx_kl: 0, ratio_max: 0}")
    done = command_line.call("train", "train.yaml", "--display", "plain", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert warnings[0] == "warning: ppo.attention: TinyModel is not a language model of transformers"
    # The line of each update names the other alarm.
    assert [one.partition(" is ")[0] for one in warnings[1:]] == ["warning: off-policy: approx_kl"]
    assert done.stderr.count("ALARM approx_kl, ratio_max") == 2
    log = (run_path(tmp_path) / "run.log").read_text()
    assert log.count("off-policy: approx_kl is ") == 2, "in both updates"
    assert "warning: " not in command_line.call("train", "train.yaml", "-v", *options, cwd=tmp_path).stderr


def test_dry_run_describes_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    lake_folder(tmp_path)
    done = command_line.call("train", "train.yaml", "--dry-run", "-T", "ppo.loss=gspo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "gspo: L_t = max(-A s, -A clip(s, 0.9997, 1.0004))" in done.stdout
    assert "Nothing was written." in done.stderr and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("loss", get_args(LossName))
def test_dry_run_describes_every_loss(loss: str, tmp_path: Path) -> None:
    lake_folder(tmp_path)
    done = command_line.call("train", "train.yaml", "--dry-run", "-T", f"ppo.loss={loss}", cwd=tmp_path)
    assert f"{loss}: L_t = " in done.stdout, done.stderr


def test_invalid_train_file_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    lake_folder(tmp_path, ppo={"clip_hi": 1})
    for flags in ([], ["--dry-run"]):
        done = command_line.call("train", "train.yaml", *flags, cwd=tmp_path)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith("error: train.yaml:") and "did you mean 'clip_high'?" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_dry_run_rejects_what_training_rejects(tmp_path: Path) -> None:
    lake_folder(tmp_path, policy="random")
    for flags in ([], ["--dry-run"]):
        done = command_line.call("train", "train.yaml", *flags, cwd=tmp_path)
        assert done.returncode == 2 and "RandomPolicy is not a TrainablePolicy" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_run_rejected_after_loading_weights_leaves_no_folder_to_resume(tmp_path: Path) -> None:
    """A custom policy without a value head is detected only after it is made."""
    lake_folder(tmp_path)
    assert command_line.call("train", "train.yaml", cwd=tmp_path).returncode == 0
    first = run_path(tmp_path)
    refused = command_line.call("train", "train.yaml", "-T", "ppo.value_clip=0.2", cwd=tmp_path)
    assert refused.returncode == 2 and "value_clip: the module has no value head" in refused.stderr
    assert run_path(tmp_path) == first
    # A run that has figures stays, whatever refuses to go on with it.
    policy = tmp_path / "policy.py"
    policy.write_text(policy.read_text().replace("width: int = 24", "width: int = 8"))
    other = command_line.call("train", "--resume", "--force", "-T", "updates=3", cwd=tmp_path)
    assert other.returncode == 2 and run_path(tmp_path) == first


def test_task_file_and_train_file_are_not_interchangeable(tmp_path: Path) -> None:
    lake_folder(tmp_path)
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(TRAIN["task"]))
    done = command_line.call("train", "task.yaml", cwd=tmp_path)
    assert done.returncode == 2 and "task.yaml is a task file for `reward-kit run`" in done.stderr
    assert "task: task.yaml" in done.stderr and len(done.stderr.splitlines()) == 1
    for verb in ("run", "check"):
        done = command_line.call(verb, "train.yaml", cwd=tmp_path)
        assert done.returncode == 2 and "train.yaml is a train file; use `reward-kit train`" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_dry_run_notes_batch_estimators_on_minibatches(tmp_path: Path) -> None:
    lake_folder(tmp_path, pipeline="both", credit="reinforce_plus_plus")
    done = command_line.call("train", "train.yaml", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0
    assert "note: reinforce_plus_plus measures its mean and its scale over the batch, and pipeline both" in done.stderr
    assert "passes it 1 of 2 groups at a time" in done.stderr
    for fine in ("rollout.samples_per_minibatch=2", "credit=gigpo", "pipeline=one_step_off"):
        done = command_line.call("train", "train.yaml", "--dry-run", "-T", fine, cwd=tmp_path)
        assert "note:" not in done.stderr


@pytest.mark.campaign
def test_ctrl_c_finishes_the_update_and_resume_may_extend_the_run(tmp_path: Path) -> None:
    lake_folder(tmp_path, updates=500)
    # In a group of its own: a terminal sends Ctrl-C to all that runs in it.
    training = subprocess.Popen(
        command_line.command("train", "train.yaml", "--display", "none"),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("runs/*/checkpoints/step-*/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    training.send_signal(signal.SIGINT)
    _, told = training.communicate(timeout=60)
    assert training.returncode == 130, told
    run = run_path(tmp_path)
    assert RunHeader.read(run).status == "interrupted" and f"reward-kit train --resume runs/{run.name}" in told
    updates = metrics_of(run)[-1]["update"]
    assert 0 < updates < 500
    done = command_line.call("train", "--resume", "-T", f"updates={updates + 2}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line["update"] for line in metrics_of(run)] == list(range(updates + 3))


def test_resume_without_a_training_run_is_rejected(tmp_path: Path) -> None:
    done = command_line.call("train", "--resume", cwd=tmp_path)
    assert done.returncode == 2 and "no training run in runs" in done.stderr


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ["A = 0.5 A_E + 0.5 A_S", "G_k = r_k + 0.95 G_k+1", "L_t = max(-A r, -A clip(r, 0.8, 1.2))"]),
        ({"ppo": {"lr": 1e-4, "lr_by_name": {"*hidden*": 0.03}}}, ["lr 0.0001, betas", "lr 0.03 for *hidden*"]),
        (
            {
                "credit": {
                    "estimator": "gigpo",
                    "state_hash": ["observation_text", {"name": "last_match", "pattern": "x"}],
                }
            },
            ["state_hash ['observation_text', {'name': 'last_match', 'pattern': 'x'}]"],
        ),
        ({"credit": "grpo"}, ["grpo: A = (score - mean) / std over the episodes of a group"]),
        (
            {"credit": {"estimator": "gigpo", "combination": "additive", "step_weight": 2.0}},
            ["gigpo: A = A_E + 2 A_S"],
        ),
        (
            {"ppo": {"loss": "decoupled", "clip_high": 0.28, "kl_coefficient": 0.02, "entropy_coefficient": 0.003}},
            ["L_t = w max(-A r, -A clip(r, 0.8, 1.28))", "at most 5", "+ 0.02 KL(", "- 0.003 entropy"],
        ),
        (
            {"pipeline": "both", "dynamic_sampling": {"max_collections": 3}},
            ["one version older", "1 groups at a time", "at most 3 collections"],
        ),
        ({"reward_manager": {"normalization_type": "variance"}}, ["(score - mean) / (std + 1e-8), running over"]),
        (
            {"engine": {"type": "ray", "address": "auto", "workers": 2, "gpus": 0.5, "reward_workers": 3}},
            ["in 2 processes of the cluster auto, each with 1 CPUs, 0.5 GPUs", "rewards are called in 3 processes"],
        ),
        ({"early_stop": {"at_least": 0.9, "times": 2}}, ["once held_out/score is at least 0.9 2 times in a row"]),
    ],
)
def test_plan_description_includes_its_values(tmp_path: Path, changes: dict[str, object], told: list[str]) -> None:
    from reward_kit.rl.training.description import describe_plan
    from reward_kit.rl.training.plan import load_plan

    text = " ".join(describe_plan(load_plan(lake_folder(tmp_path, **changes))).split())
    for part in told:
        assert part in text
    assert f"{TRAIN['updates']} updates of 2 samples × 2 episodes = 4 episodes" in text
