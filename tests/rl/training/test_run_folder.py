"""Test that no file of a training run contains a secret, and that a resume asks for redacted ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reward_kit.errors import ConfigError
from reward_kit.rl.training.plan import load_plan
from reward_kit.rl.training.resume import Changes, changes_since, new_run_header, stored_config
from reward_kit.runs.run_folder import RunFolder, RunHeader
from tests import command_line
from tests.rl.training.frozen_lake import TRAIN, lake_folder

PASSWORD = "p4ssword-of-somebody"
URL = f"http://me:{PASSWORD}@models.example/v1"
HIDDEN_URL = "http://me:(hidden)@models.example/v1"


def lake_with_user(folder: Path, **user: Any) -> Path:
    """Return a train file whose task has a simulated user at an endpoint."""
    return lake_folder(folder, task={**TRAIN["task"], "user": {"type": "openai", "model": "some", **user}})


@pytest.mark.parametrize("is_override", [True, False], ids=["by -T", "in the file"])
def test_password_in_a_url_is_written_to_no_file(tmp_path: Path, is_override: bool) -> None:
    path = lake_with_user(tmp_path, **({} if is_override else {"base_url": URL}))
    plan = load_plan(path, {"task.user.base_url": URL} if is_override else {})
    run = tmp_path / "run"
    with RunFolder.create(run, new_run_header("run", plan), plan.redaction) as folder:
        folder.update_status(status="failed", worked_s=1.0, training={"updates": 1})
        folder.write_summary({"stopped": f"{URL} does not answer"})
    assert not [file.name for file in run.iterdir() if PASSWORD.encode() in file.read_bytes()]
    assert json.loads((run / "summary.json").read_bytes())["stopped"] == f"{HIDDEN_URL} does not answer"
    assert PASSWORD not in json.dumps(stored_config(plan)), "what Weights & Biases gets"


def test_resume_compares_redacted_configurations(tmp_path: Path) -> None:
    plan = load_plan(lake_with_user(tmp_path, base_url=URL))
    run = tmp_path / "run"
    RunFolder.create(run, new_run_header("run", plan), plan.redaction)
    again = load_plan(lake_with_user(tmp_path, base_url=URL.replace(PASSWORD, "an0ther-password")))
    assert changes_since(RunHeader.read(run), again, run) == Changes([], [])


def test_secrets_of_the_evaluation_task_are_redacted(tmp_path: Path) -> None:
    path = lake_folder(tmp_path, evaluation={"task": "other.yaml"})
    user = {"type": "openai", "model": "some", "base_url": URL}
    (tmp_path / "other.yaml").write_text(json.dumps({**TRAIN["task"], "user": user}))
    assert load_plan(path).redaction.redact_text(URL) == HIDDEN_URL


def test_unloadable_hook_is_rejected_with_its_location(tmp_path: Path) -> None:
    path = lake_folder(tmp_path, task={**TRAIN["task"], "redact": "privacy.py:blot"})
    with pytest.raises(ConfigError, match=r"train\.yaml:\d+: (task\.)?redact: .*privacy\.py"):
        load_plan(path)


def test_resume_requires_redacted_overrides_again(tmp_path: Path) -> None:
    lake_folder(tmp_path)
    policy = tmp_path / "policy.py"
    policy.write_text(policy.read_text().replace("seed: int = 0", "seed: int = 0, api_key: str = ''"))
    secret = ("-T", "policy.api_key=sk-a-long-secret")
    done = command_line.call("train", "train.yaml", *secret, "-T", "updates=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert not [file for file in run.rglob("*.*") if file.is_file() and b"sk-a-long-secret" in file.read_bytes()]
    refused = command_line.call("train", "--resume", cwd=tmp_path)
    assert refused.returncode == 2 and "-T policy.api_key=… is or contains a secret" in refused.stderr
    again = command_line.call("train", "--resume", *secret, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
