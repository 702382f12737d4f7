"""Test the hooks of a train file, and own estimators that read what the hooks write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reward_kit.errors import ConfigError
from reward_kit.rl.training.plan import load_plan
from reward_kit.rl.training.resume import Changes, changes_since
from reward_kit.runs.run_folder import RunHeader
from tests.rl.training.frozen_lake import interrupted_after, lake_folder, metrics_of, train, trained

HOOKS = """
import asyncio

async def mark(episodes):
    await asyncio.sleep(0)
    for episode in episodes:
        episode.custom_data["length"] = len(episode)
    return {"steps_mean": sum(map(len, episodes)) / len(episodes), "steps_max": max(map(len, episodes))}

def annotate(step, episode):
    return {"left": episode.custom_data["length"] - step.system_step_index}

def remaining(batch, *, scale: float = 1.0):
    assert [step.step_info["annotations"]["left"] for step in batch.steps][-1] == 1
    return [scale * step.step_info["annotations"]["left"] for step in batch.steps]

def nothing(*arguments):
    return None

def words(episodes):
    return {"note": "long"}

def broken(*arguments):
    raise ValueError("no luck")

async def late(step, episode):
    return {}
"""
CHANGES: dict[str, Any] = {
    "hooks": {"after_collect": "hooks.py:mark", "annotate_step": "hooks.py:annotate"},
    "credit": {"estimator": "hooks.py:remaining", "scale": 0.5},
}


def folder_with_hooks(folder: Path, **changes: Any) -> Path:
    (folder / "hooks.py").write_text(HOOKS)
    return lake_folder(folder, **{**CHANGES, **changes})


async def test_hooks_add_metrics_and_annotations_for_an_own_estimator(tmp_path: Path) -> None:
    path = folder_with_hooks(tmp_path, logs={"episodes_every": 1})
    await trained(path, tmp_path / "run")
    before, *updates = metrics_of(tmp_path / "run")
    assert len(updates) == 2 and "hook/steps_mean" not in before, "evaluations do not call hooks"
    for figures in updates:
        assert figures["hook/steps_mean"] == pytest.approx(figures["episode/steps_mean"])
        assert figures["hook/steps_max"] >= figures["hook/steps_mean"]
        assert figures["credit/zero_advantage_share"] == 0
    assert load_plan(path).credit.options == {"scale": 0.5}


async def test_hooks_run_in_overlapping_pipelines_and_their_data_survives_a_resume(tmp_path: Path) -> None:
    path = folder_with_hooks(tmp_path, pipeline="one_step_off", dynamic_sampling={"keep_step_signal": True})
    plan = load_plan(path, {"updates": 3})
    stopped = await train(plan, tmp_path / "run", interrupted_after(1))
    assert stopped.status == "interrupted"
    assert (await train(plan, tmp_path / "run")).summary["updates"] == 3
    assert all("hook/steps_mean" in figures for figures in metrics_of(tmp_path / "run")[1:2])


async def test_changed_hook_or_estimator_prevents_a_resume(tmp_path: Path) -> None:
    path = folder_with_hooks(tmp_path, updates=1, evaluation=None)
    await trained(path, tmp_path / "run")
    header, longer = RunHeader.read(tmp_path / "run"), {"updates": 2}
    assert changes_since(header, load_plan(path, longer), tmp_path / "run") == Changes([], ["updates was 1, is 2"])
    (tmp_path / "hooks.py").write_text(HOOKS + "# changed\n")
    refused = changes_since(header, load_plan(path, longer), tmp_path / "run").refused
    assert refused == ["estimator hooks.py", "hook after_collect hooks.py", "hook annotate_step hooks.py"]


async def test_missing_hooks_in_an_older_run_do_not_prevent_a_resume(tmp_path: Path) -> None:
    path = lake_folder(tmp_path, updates=1, evaluation=None)
    await trained(path, tmp_path / "run")
    header = RunHeader.read(tmp_path / "run")
    assert header.training is not None and header.training["config"].pop("hooks", "") is None
    changes = changes_since(header, load_plan(path, {"updates": 2}), tmp_path / "run")
    assert changes == Changes([], ["updates was 1, is 2"])


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("after_collect", "broken", r"^hook after_collect 'broken': ValueError: no luck \(.*hooks.py:\d+ in broken\)$"),
        ("after_collect", "words", "^hook after_collect 'words' must return None or a dict of finite numbers, got {'n"),
        ("annotate_step", "broken", r"^hook annotate_step 'broken', rollout .*, step 0: ValueError: no luck \("),
        ("annotate_step", "nothing", "^hook annotate_step 'nothing', rollout .* must return a mapping, got None"),
        ("annotate_step", "late", "^hook annotate_step 'late', rollout .* returned a coroutine; define it with `def`"),
    ],
)
async def test_error_in_a_hook_names_the_hook(tmp_path: Path, name: str, function: str, message: str) -> None:
    path = folder_with_hooks(tmp_path, credit=None, hooks={name: f"hooks.py:{function}"}, evaluation=None)
    with pytest.raises((ConfigError, ExceptionGroup)) as caught:
        await trained(path, tmp_path / "run")
    error: Any = caught.value
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    with pytest.raises(ConfigError, match=message):
        raise error
    assert not metrics_of(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hooks": {"after_collect": "hooks.py:marks"}}, r"train.yaml:\d+: hooks.after_collect: hook 'hooks.py:marks'"),
        ({"hooks": {"after_colect": "hooks.py:mark"}}, r"hooks.after_colect.*did you mean 'after_collect'"),
        (
            {"credit": {"estimator": "hooks.py:remaining", "scales": 2}},
            r"train.yaml:\d+: credit.scales: remaining has no option 'scales'; did you mean 'scale'",
        ),
    ],
)
def test_wrong_key_or_function_names_the_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_plan(folder_with_hooks(tmp_path, **changes))
