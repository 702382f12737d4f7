"""Test a complete training run: logs, evaluation, checkpoints, stop conditions and files."""

from __future__ import annotations

import gc
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError, StoreError, TrainingError
from reward_kit.rl.checkpoint import checkpoints
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.training.logs import MetricsFile
from reward_kit.rl.training.plan import load_plan, with_temperature
from reward_kit.runs.run_folder import RunHeader
from tests.full_disk import largest_file
from tests.rl.training.frozen_lake import lake_folder, metrics_of, train, trained

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"


async def test_metrics_have_a_line_per_update_and_an_initial_line(tmp_path: Path) -> None:
    outcome = await trained(lake_folder(tmp_path, updates=3), tmp_path / "run")
    lines = metrics_of(tmp_path / "run")
    assert [line["update"] for line in lines] == [0, 1, 2, 3]
    assert [("held_out/score" in line) for line in lines] == [True, False, True, True], "every 2, first and last"
    assert [line.get("progress/episodes") for line in lines] == [None, 4, 8, 12]
    assert [line.get("progress/version") for line in lines] == [None, 1, 2, 3]
    assert lines[-1]["progress/epoch"] == 2.0, "six of three samples"
    steps = [line["episode/steps_mean"] * line["episode/count"] for line in lines[1:]]
    assert sum(steps) == pytest.approx(lines[-1]["progress/env_steps"])
    assert outcome.status == "complete" and outcome.summary["updates"] == 3
    header = RunHeader.read(tmp_path / "run")
    assert (header.status, header.task_name) == ("complete", "tiny-lake")
    assert header.training is not None and header.training["updates"] == 3
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["totals"]["episodes"] == 12


def test_full_disk_leaves_no_part_of_a_line_in_the_metrics(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(file)
    metrics.write(0, {"score/mean": 0.5})
    with largest_file(metrics.size + 40), pytest.raises(StoreError, match=r"cannot write .*metrics\.jsonl"):
        metrics.write(1, {"score/mean": 0.125})
    metrics.write(2, {"score/mean": 0.25})
    metrics.close()
    assert [json.loads(line)["update"] for line in file.read_text().splitlines()] == [0, 2]


async def test_every_logged_metric_is_documented(tmp_path: Path) -> None:
    changes = {
        "pipeline": "both",
        "dynamic_sampling": {"max_collections": 2, "band": [0.0, 0.04]},
        "reward_manager": {"normalization_type": "length"},
        "ppo": {"lr": 0.01, "loss": "decoupled", "kl_coefficient": 0.01, "entropy_coefficient": 0.01},
        "rollout": {"samples_per_update": 2, "group_size": 3},
    }
    await trained(lake_folder(tmp_path, updates=3, **changes), tmp_path / "run")
    explained = set(re.findall(r"`([a-z_0-9]+/[a-zA-Z_0-9/<>]+)`", DOCS.read_text()))
    patterns = [re.sub(r"<\w+>", r"\\w+", name) for name in explained]
    logged = {name for line in metrics_of(tmp_path / "run") for name in line} - {"update", "at"}
    assert {"groups/kept", "learner/kl_loss", "held_out/score", "overlap/hidden_share"} <= logged
    unexplained = sorted(name for name in logged if not any(re.fullmatch(pattern, name) for pattern in patterns))
    assert unexplained == []


async def test_best_checkpoint_is_kept(tmp_path: Path) -> None:
    changes = {"evaluation": None, "checkpoints": {"every": 1, "keep": 1, "best_by": "score/max"}}
    outcome = await trained(lake_folder(tmp_path, updates=5, **changes), tmp_path / "run")
    values = {line["update"]: line["score/max"] for line in metrics_of(tmp_path / "run")}
    best = max(values, key=lambda update: (values[update], -update))
    assert (outcome.summary["best"], outcome.summary["best_update"]) == (values[best], best)
    kept = {int(path.name.removeprefix("step-")) for path in checkpoints(tmp_path / "run" / "checkpoints")}
    assert kept == {best, 5}


async def test_first_of_equally_good_updates_is_the_best(tmp_path: Path) -> None:
    path = lake_folder(tmp_path, updates=3, evaluation={"hold_out": 1, "every": 1}, ppo={"lr": 0.0})
    outcome = await trained(path, tmp_path / "run")
    figures = [line["held_out/score"] for line in metrics_of(tmp_path / "run")]
    assert len(set(figures)) == 1, "nothing is learned at a rate of 0"
    assert outcome.summary["best_update"] == 1, "the policy as it was given has no checkpoint"


async def test_training_stops_when_the_target_is_reached(tmp_path: Path) -> None:
    stop = {"metric": "score/mean", "at_least": 0.0, "times": 2}
    outcome = await trained(lake_folder(tmp_path, updates=9, early_stop=stop), tmp_path / "run")
    assert (outcome.status, outcome.summary["updates"]) == ("complete", 2)
    assert re.match(r"score/mean is 0\.\d+, at least 0$", outcome.summary["stopped"])
    again = await trained(tmp_path / "train.yaml", tmp_path / "run")
    assert again.summary["updates"] == 2 and "early_stop was reached at update 2" in again.summary["stopped"]
    stop["times"] = 3  # starts to count again
    raised = await trained(lake_folder(tmp_path, updates=9, early_stop=stop), tmp_path / "run")
    assert raised.summary["updates"] == 5


async def test_best_weights_that_could_not_be_written_are_written_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def save(folder: Path, policy: object) -> None:
        written.append(folder)
        if len(written) == 1:
            raise StoreError("the disk is full")

    monkeypatch.setattr("reward_kit.rl.training.session.save_weights", save)
    path = lake_folder(tmp_path, updates=1, evaluation=None)
    with pytest.raises(StoreError, match="the disk is full"):
        await trained(path, tmp_path / "run")
    assert (await trained(path, tmp_path / "run")).summary["best_update"] == 1
    assert written == [tmp_path / "run" / "model"] * 2


@pytest.mark.parametrize("pipeline", ["sync", "one_step_off"])
async def test_environment_steps_limit_training(tmp_path: Path, pipeline: str) -> None:
    """Every batch is trained on, the learning rate falls with the steps, and an evaluation follows every 20 steps."""
    evaluation = {"hold_out": 1, "every_env_steps": 20}
    ppo = {"lr": 0.01, "schedule": "linear"}
    path = lake_folder(tmp_path, updates=None, max_env_steps=50, pipeline=pipeline, ppo=ppo, evaluation=evaluation)
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    outcome = await trained(path, tmp_path / "run")
    lines = metrics_of(tmp_path / "run")
    assert outcome.status == "complete" and outcome.summary["stopped"] is None
    steps = [0, *(line["progress/env_steps"] for line in lines[1:])]
    assert steps[-1] >= 50 and outcome.summary["totals"]["env_steps"] == steps[-1]
    assert len(lines) - 1 == outcome.summary["totals"]["episodes"] / 4  # no batch is wasted
    assert [line["learner/lr"] for line in lines[1:]] == pytest.approx(
        [0.01 * max(1 - at / 50, 0) for at in steps[:-1]]
    )
    due = [now // 20 > before // 20 for before, now in pairwise(steps)]
    assert [("held_out/score" in line) for line in lines[1:]] == [*due[:-1], True]
    cpu = [line["time/cpu_s"] for line in lines[1:]]
    assert 0 < cpu[0] < cpu[-1] <= outcome.summary["cpu_s"] + 0.001

    assert gc.isenabled() and gc.get_threshold() == thresholds and gc.get_freeze_count() == frozen
    more = await trained(path, tmp_path / "run", max_env_steps=80)
    assert more.summary["totals"]["env_steps"] >= 80 and more.summary["cpu_s"] > outcome.summary["cpu_s"]
    fewer = await trained(path, tmp_path / "both", updates=1)
    assert fewer.summary["updates"] == 1


async def test_fully_unscored_batch_fails_the_run_with_the_reason(tmp_path: Path) -> None:
    path = lake_folder(tmp_path, evaluation=None)
    with pytest.raises(TrainingError, match=r"update 1: no episode in the batch could be scored \(4 crash\)"):
        await trained(path, tmp_path / "run", task__reward_function_path="reward.py:broken")
    assert RunHeader.read(tmp_path / "run").status == "failed"


async def test_reward_manager_determines_the_scores_for_credit(tmp_path: Path) -> None:
    async def credit_of(kind: str) -> tuple[float, float]:
        path = lake_folder(tmp_path, updates=1, credit={"estimator": "discounted_returns", "gamma": 1.0})
        run = tmp_path / kind
        await trained(path, run, reward_manager__normalization_type=kind)
        (line,) = [line for line in metrics_of(run) if line["update"] == 1]
        return line["score/mean"], line["learner/loss"]

    as_it_is, by_length = await credit_of("none"), await credit_of("length")
    assert as_it_is[0] == by_length[0] > 0, "what is logged is what the reward said"
    # On the first update all ratios are 1, so that the loss is the mean advantage: the score, and the score per step.
    assert by_length[1] == pytest.approx(-0.01, abs=1e-3) and as_it_is[1] < by_length[1]


async def test_episodes_are_kept_on_request(tmp_path: Path) -> None:
    path = lake_folder(tmp_path, updates=4, evaluation=None, logs={"episodes_every": 3})
    await trained(path, tmp_path / "run")
    (kept,) = (tmp_path / "run" / "episodes").iterdir()
    assert kept.name == "update-000003.jsonl"
    records = [json.loads(line) for line in kept.read_text().splitlines()]
    assert len(records) == 4 and all(record["tokens"] for record in records)


async def test_tensorboard_has_the_same_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    await trained(lake_folder(tmp_path, logs={"tensorboard": True}), tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("score/mean")]
    logged = [(line["update"], line["score/mean"]) for line in metrics_of(tmp_path / "run") if line["update"]]
    assert found == [(update, pytest.approx(value)) for update, value in logged]


async def test_evaluation_samples_are_reproducible_and_examples_are_shown(tmp_path: Path) -> None:
    changes = {"evaluation": {"hold_out": 1, "every": 1, "rollouts": 4}, "ppo": {"lr": 0.0}}
    await trained(lake_folder(tmp_path, updates=2, **changes), tmp_path / "run")
    held_out = [
        {name: value for name, value in line.items() if name.startswith("held_out/")}
        for line in metrics_of(tmp_path / "run")
    ]
    assert held_out[0] == held_out[1] == held_out[2], "the weights did not move, and the draws are the same"
    assert held_out[0]["held_out/count"] == 4


async def test_unsupported_evaluation_temperature_is_rejected(tmp_path: Path) -> None:
    path = lake_folder(tmp_path, evaluation={"hold_out": 1, "temperature": 0.0})
    with pytest.raises(ConfigError, match=r"evaluation\.temperature: TinyPolicy has no sampling temperature"):
        await train(load_plan(path), tmp_path / "run")


class Warm:
    """A policy that samples at temperature 0.5."""

    class sampling:
        temperature = 0.5


def test_the_loss_divides_logits_as_the_sampler_does() -> None:
    assert with_temperature(PPOConfig(), Warm()).temperature == 0.5
    assert with_temperature(PPOConfig(temperature=0.5), Warm()).temperature == 0.5
    with pytest.raises(ConfigError, match=r"ppo\.temperature is 0\.7, but the policy samples at a temperature of 0\.5"):
        with_temperature(PPOConfig(temperature=0.7), Warm())
