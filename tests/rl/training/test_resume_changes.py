"""Detection of changed inputs when a training run is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reward_kit.errors import ConfigError
from reward_kit.integrations.ray.training import train_loop
from reward_kit.rl.training.plan import load_plan
from reward_kit.rl.training.resume import Changes, changes_since, new_run_header
from reward_kit.runs.run_folder import RunFolder
from tests.rl.training.frozen_lake import TRAIN, lake_folder


def changes_by(folder: Path, **changes: Any) -> Changes:
    """Return the reported changes of a run started with `TRAIN` when its train file is replaced."""
    header = new_run_header("run", load_plan(lake_folder(folder)))
    return changes_since(header, load_plan(lake_folder(folder, **changes)), folder / "run")


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"ppo": {**TRAIN["ppo"], "lr": 0.02}}, "train file (ppo.lr was 0.01, is 0.02)"),
        (
            {"seed": 3, "rollout": None},
            "(rollout.group_size was 2, is 8; rollout.samples_per_update was 2, is 8; seed was 0, is 3)",
        ),
        ({"policy": {"type": "policy.py:TinyPolicy"}}, "train file (policy.seed was 1, is absent)"),
        ({"credit": {"estimator": "gigpo", "omega": 0.25}}, "credit.omega was 0.5, is 0.25"),
        ({"task": {**TRAIN["task"], "max_episode_steps": 6}}, "train file (task.max_episode_steps was 5, is 6)"),
    ],
)
def test_changed_key_that_affects_updates_is_rejected(tmp_path: Path, changes: dict[str, Any], refused: str) -> None:
    found = changes_by(tmp_path, **changes)
    assert refused in "; ".join(found.refused)
    assert found.allowed == []


def test_allowed_changes_are_reported(tmp_path: Path) -> None:
    found = changes_by(tmp_path, updates=5, logs={"episodes_every": 2})
    assert found.refused == []
    assert found.allowed == ["logs.episodes_every was absent, is 2", "updates was 2, is 5"]


def test_engine_may_change_on_resume(tmp_path: Path) -> None:
    found = changes_by(tmp_path, engine="ray")
    assert found.refused == []
    assert found.allowed == ['engine.type was "local", is "ray"']


def test_changed_comment_is_ignored(tmp_path: Path) -> None:
    path = lake_folder(tmp_path)
    header = new_run_header("run", load_plan(path))
    path.write_text("# a word\n" + path.read_text())
    assert load_plan(path).digests != header.digests
    assert changes_since(header, load_plan(path), tmp_path) == Changes([], [])


def test_changed_referenced_files_are_named(tmp_path: Path) -> None:
    path = lake_folder(tmp_path)
    header = new_run_header("run", load_plan(path))
    (tmp_path / "reward.py").write_text((tmp_path / "reward.py").read_text() + "\n# another\n")
    assert changes_since(header, load_plan(path), tmp_path).refused == ["evaluation's reward", "reward"]


def test_changed_files_of_the_policy_are_named(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for name, content in {
        "helper.py": "SIZE = 1\n",
        "text/chat.jinja": "{{ messages }}",
        "rules.py": "a = 1\n",
    }.items():
        (tmp_path / name).write_text(content)
    policy = {"type": "policy.py:TinyPolicy", "chat_template": "text/chat.jinja", "rules": "rules.py:a"}
    path = lake_folder(tmp_path, policy=policy)
    (tmp_path / "policy.py").write_text("from helper import SIZE\n" + (tmp_path / "policy.py").read_text())
    header = new_run_header("run", load_plan(path))
    for name in ("helper.py", "policy.py", "rules.py", "text/chat.jinja"):
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(before + "\n# another\n")
        assert changes_since(header, load_plan(path), tmp_path).refused == [f"policy {name}"]
        (tmp_path / name).write_text(before)
    assert changes_since(header, load_plan(path), tmp_path) == Changes([], [])


def test_ray_train_rejects_a_directory_with_a_run_of_other_inputs(tmp_path: Path) -> None:
    plan, run = load_plan(lake_folder(tmp_path)), tmp_path / "run"
    with RunFolder.create(run, new_run_header("run", plan), plan.redaction):
        pass
    lake_folder(tmp_path, ppo={**TRAIN["ppo"], "lr": 0.02})
    with pytest.raises(ConfigError) as caught:
        train_loop({"train_file": str(plan.path), "run": str(run)})
    assert str(caught.value) == (
        f"{run} cannot be resumed, because its inputs changed:\ntrain file (ppo.lr was 0.01, is 0.02)\n"
        "Undo the changes, or start again in a new directory"
    )
