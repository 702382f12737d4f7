"""Test training with `engine: ray`: equal episodes, and a lost worker loses only its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

pytest.importorskip("ray", reason="runs in .integrations/ray")

from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.integrations.ray.training import ClusterWorker, on_cluster
from reward_kit.rl.training.plan import TrainingPlan, load_plan
from reward_kit.rl.training.setup import Factories, Workers
from tests.rl.training.frozen_lake import metrics_of, train, weights_of
from tests.rl.training.frozen_lake_text import CLOCK, language_lake

pytestmark = pytest.mark.campaign

REWARD = """
from reward_kit import EvaluateResult, Message, reward_function

@reward_function
def goes_right(messages: list[Message]) -> EvaluateResult:
    moves = [message.text for message in messages if message.role == "assistant"]
    calls = [call.function.arguments for message in messages for call in message.tool_calls or ()]
    return EvaluateResult(score=sum("right" in call for call in calls) / len(calls))
"""


def right_lake(folder: Path, **changes: Any) -> Path:
    """Return a lake where only moves to the right count, which takes a few updates to learn."""
    path = language_lake(
        folder,
        **{
            "policy": {"lockstep": False},
            "rollout": {"samples_per_update": 3, "group_size": 6},
            "credit": {"estimator": "grpo"},
            "ppo": {"lr": 0.02, "epochs": 2},
            "logs": {"episodes_every": 1},
            **changes,
        },
    )
    (folder / "reward.py").write_text(REWARD)
    return path


def plan_of(path: Path, **overrides: Any) -> TrainingPlan:
    return load_plan(path, {"task.reward_function_path": "reward.py:goes_right", **overrides})


def episodes_of(run: Path, update: int) -> list[dict[str, Any]]:
    lines = (run / f"episodes/update-{update:06d}.jsonl").read_text().splitlines()
    return sorted(map(json.loads, lines), key=lambda line: str(line["rollout_id"]))


def assert_same_tokens(ours: Any, theirs: Any) -> None:
    """Assert equal ids, and log-probabilities equal to float32 precision."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_same_tokens(ours[key], theirs[key])
    elif isinstance(ours, list) and any(isinstance(one, list | dict) for one in ours):
        for one, other in zip(ours, theirs, strict=True):
            assert_same_tokens(one, other)
    else:
        assert ours == (pytest.approx(theirs, abs=1e-5) if isinstance(ours, list | float) else theirs)


def assert_same_course(ours: Path, theirs: Path) -> None:
    """Assert that all metrics except times are equal to float32 precision, and so the weights."""
    for one, other in zip(metrics_of(ours), metrics_of(theirs), strict=True):
        names = {name for name in one if not name.startswith(CLOCK)}
        assert names == {name for name in other if not name.startswith(CLOCK)}
        for name in names:
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4), name
    for name, weights in weights_of(ours).items():
        assert torch.allclose(weights, weights_of(theirs)[name], atol=1e-4), name


async def test_cluster_training_matches_a_single_process_and_improves(folder: Path, cluster: Any) -> None:
    path = right_lake(folder, updates=6)
    await train(plan_of(path), folder / "alone")
    engine = {"engine.type": "ray", "engine.workers": 2, "engine.reward_workers": 1}
    plan = plan_of(path, **engine)
    outcome = await train(plan, folder / "cluster", factories=on_cluster(plan, Factories()))
    assert outcome.status == "complete"
    for one, other in zip(episodes_of(folder / "cluster", 1), episodes_of(folder / "alone", 1), strict=True):
        assert [one[key] for key in ("rollout_id", "messages")] == [other[key] for key in ("rollout_id", "messages")]
        assert_same_tokens(one["tokens"], other["tokens"])
    assert_same_course(folder / "cluster", folder / "alone")
    scores = [line["score/mean"] for line in metrics_of(folder / "cluster") if line["update"]]
    assert scores[-1] > scores[0] + 0.3, scores
    assert [line["learner/lag_max"] for line in metrics_of(folder / "cluster") if line["update"]] == [0.0] * 6


class Killer:
    """A listener that kills a process while it collects for the update after the named one."""

    def __init__(self, factories: Factories, after: int) -> None:
        self._makers, self._after, self.killed = factories, after, 0

    @property
    def factories(self) -> Factories:
        return replace(self._makers, actors=self.actors)

    @asynccontextmanager
    async def actors(self, plan: TrainingPlan, policy: AgentPolicy) -> AsyncIterator[Workers]:
        async with self._makers.actors(plan, policy) as actors, anyio.create_task_group() as tasks:
            assert isinstance(actors.worker, ClusterWorker)
            tasks.start_soon(self._kill, actors.worker)
            yield actors
            tasks.cancel_scope.cancel()

    async def _kill(self, worker: ClusterWorker) -> None:
        import ray

        pool = worker._pool._pool
        while worker.agent_policy.version < self._after or not any(one.load for one in pool.members):  # noqa: ASYNC110
            await anyio.sleep(0.001)
        busiest = max(pool.members, key=lambda one: one.load)
        self.killed = busiest.load
        ray.kill(busiest.handle)


async def test_killed_worker_in_training_loses_only_its_episodes(folder: Path, cluster: Any) -> None:
    path = right_lake(folder, updates=5, evaluation=None)
    await train(plan_of(path), folder / "alone")
    plan = plan_of(path, **{"engine.type": "ray", "engine.workers": 2})
    killer = Killer(on_cluster(plan, Factories()), after=2)
    assert (await train(plan, folder / "cluster", factories=killer.factories)).status == "complete"
    assert killer.killed > 0, "it had episodes in flight"
    again = [
        episode for update in range(1, 6) for episode in episodes_of(folder / "cluster", update) if episode["attempt"]
    ]
    assert again, "which were collected once more"
    assert_same_course(folder / "cluster", folder / "alone")
    lags = [line["learner/lag_max"] for line in metrics_of(folder / "cluster") if line["update"]]
    assert lags == [0.0] * 5, "the replacement had the newest weights"


async def test_evaluation_temperature_and_one_step_off_pipeline_work_on_a_cluster(folder: Path, cluster: Any) -> None:
    changes = {"evaluation": {"hold_out": 1, "every": 1, "temperature": 0.0}, "pipeline": "one_step_off"}
    path = right_lake(folder, updates=3, **changes)
    plan = plan_of(path, **{"engine.type": "ray", "engine.workers": 2})
    await train(plan, folder / "cluster", factories=on_cluster(plan, Factories()))
    await train(plan_of(path), folder / "alone")
    ours, theirs = metrics_of(folder / "cluster"), metrics_of(folder / "alone")
    assert [line["held_out/score"] for line in ours] == pytest.approx([line["held_out/score"] for line in theirs])
    assert [line.get("learner/lag_max") for line in ours] == [None, 0.0, 1.0, 1.0]


async def test_worker_setup_error_is_reported(folder: Path, cluster: Any) -> None:
    plan = plan_of(right_lake(folder, updates=1), **{"engine.type": "ray"})
    factories = on_cluster(plan, Factories())

    @asynccontextmanager
    async def without_a_model(plan: TrainingPlan, policy: AgentPolicy) -> AsyncIterator[Workers]:
        (folder / "model").rename(folder / "moved")  # as on a machine that it was not copied to
        async with factories.actors(plan, policy) as actors:
            yield actors

    with pytest.raises(ExceptionGroup) as failed:
        await train(plan, folder / "cluster", factories=replace(factories, actors=without_a_model))
    (told,) = {str(error) for error in leaves_of(failed.value)}
    assert "model" in told and "neither a directory nor a model" in told


def leaves_of(error: BaseException) -> list[BaseException]:
    return (
        [leaf for one in error.exceptions for leaf in leaves_of(one)]
        if isinstance(error, BaseExceptionGroup)
        else [error]
    )


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ray_train_starts_and_restarts_learner_processes(folder: Path, cluster: Any) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    path = right_lake(folder, updates=3, policy={"lockstep": True})
    anyio.run(train, plan_of(path), folder / "alone")
    asked = {"train_file": str(path), "run": str(folder / "together")}
    trainer = TorchTrainer(
        dies_once,
        train_loop_config={**asked, "overrides": {"task.reward_function_path": "reward.py:goes_right"}},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder / "storage"), failure_config=FailureConfig(max_failures=2)),
    )
    trainer.fit()
    assert (folder / "together" / "died").exists()
    assert (folder / "together" / "report.html").is_file()
    assert_same_course(folder / "together", folder / "alone")


def dies_once(config: dict[str, Any]) -> None:
    """Run `train_loop`, but kill the second process after the first checkpoint."""
    import os
    import signal
    import threading
    import time

    from reward_kit.integrations.ray.training import train_loop

    run = Path(config["run"])

    def die() -> None:
        while not (run / "checkpoints/step-000001/manifest.json").exists():
            time.sleep(0.002)
        (run / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == "1" and not (run / "died").exists():
        threading.Thread(target=die, daemon=True).start()
    train_loop(config)
