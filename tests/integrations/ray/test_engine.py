"""Test `--engine ray` on four nodes: results equal the local engine's, also after lost workers."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from reward_kit.errors import ConfigError
from reward_kit.integrations.ray.cluster import workers_that_fit, workers_to_start
from reward_kit.integrations.ray.options import RayOptions
from reward_kit.runs.run_folder import read_episodes
from tests.integrations.ray.counting_task import CountingTask, carried_out, without_the_clock
from tests.integrations.ray.fault_injection import AfterEpisodes, ListenerGroup, engine_for, killed

pytestmark = pytest.mark.campaign


def files_in(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]


def first_of(group: BaseException) -> BaseException:
    """Return the first error in nested groups."""
    return first_of(group.exceptions[0]) if isinstance(group, BaseExceptionGroup) else group


class TestLostWorkers:
    async def test_killed_worker_is_replaced_and_its_episodes_are_restarted(
        self, cluster: Any, home: Path, folder: Path
    ) -> None:
        counting = CountingTask(folder / "task", samples=60, policy={"type": "mine.py:Adds", "wait_s": 0.06})
        there: list[int] = []
        kills = [AfterEpisodes(count, lambda: there.append(killed("ray::RolloutActor", home))) for count in (40, 160)]
        run = await carried_out(
            counting.plan(), folder / "ray_run", engine_for(counting, workers=2), ListenerGroup(kills)
        )
        assert there == [2, 2], "the first one killed was replaced before the second"
        await carried_out(counting.plan(), folder / "local_run")
        assert without_the_clock(folder / "ray_run") == without_the_clock(folder / "local_run")
        assert sum(row.attempt for row in run.rows.values()) > 0

    async def test_episode_that_kills_its_process_once_succeeds_on_retry(self, cluster: Any, folder: Path) -> None:
        marker = folder / "marker"
        policy = {"type": "mine.py:Adds", "dies_in": "s1", "marker": str(marker)}
        counting = CountingTask(folder / "task", samples=3, policy=policy)
        run = await carried_out(counting.plan(), folder / "run", engine_for(counting, workers=2))
        assert run.count_incomplete() == 0
        assert {row.error_class for row in run.rows.values()} == {None}
        assert {row.attempt for row in run.rows.values() if row.sample_id == "s1"} == {1}

    async def test_episode_that_always_kills_its_process_is_recorded_as_failed(
        self, cluster: Any, folder: Path
    ) -> None:
        counting = CountingTask(
            folder / "task", samples=3, num_rollouts_per_sample=1, policy={"type": "mine.py:Adds", "dies_in": "s1"}
        )
        run = await carried_out(counting.plan(1), folder / "run", engine_for(counting, workers=2))
        broken = {row.sample_id: row for row in run.rows.values() if row.error_class is not None}
        assert list(broken) == ["s1"]
        assert (broken["s1"].error_class, broken["s1"].attempt) == ("crash", 3)
        (failure,) = [record["failure"] for record in read_episodes(folder / "run") if record["failure"]]
        assert "its process was lost 4 times" in failure["message"]
        assert len(run.rows) == 3

    async def test_episodes_sharing_a_killed_process_are_not_failed(self, cluster: Any, folder: Path) -> None:
        policy = {"type": "mine.py:Adds", "dies_in": "s1", "wait_s": 0.02}
        counting = CountingTask(folder / "task", samples=4, num_rollouts_per_sample=2, policy=policy)
        run = await carried_out(counting.plan(), folder / "run", engine_for(counting, workers=1))
        broken = [row.sample_id for row in run.rows.values() if row.error_class is not None]
        assert (broken, len(run.rows)) == (["s1", "s1"], 8)

    async def test_run_without_available_workers_ends_after_the_wait(self, cluster: Any, folder: Path) -> None:
        counting = CountingTask(folder / "task", samples=1)
        engine = engine_for(counting, workers=2, cpus=16, worker_wait_s=1)
        with pytest.raises(ExceptionGroup) as caught:
            await carried_out(counting.plan(), folder / "run", engine)
        message = str(first_of(caught.value))
        assert "no rollout worker for 1 s (2 requested; the cluster has" in message and "of 4 CPU free" in message


class TestEarlyErrors:
    async def test_worker_too_large_for_the_cluster_is_rejected(self, cluster: Any, folder: Path) -> None:
        counting = CountingTask(folder / "task", samples=1)
        with pytest.raises(ExceptionGroup) as caught:
            await carried_out(counting.plan(), folder / "run", engine_for(counting, cpus=16))
        assert "no worker with 16 CPUs and 0 GPUs fits on the cluster" in str(first_of(caught.value))

    async def test_file_differing_on_the_node_is_reported(self, cluster: Any, folder: Path) -> None:
        counting = CountingTask(folder / "task", samples=1)
        engine = engine_for(counting, workers=1)
        plan = counting.plan()
        (counting.folder / "mine.py").write_text((counting.folder / "mine.py").read_text() + "\n")
        with pytest.raises(ExceptionGroup) as caught:
            await carried_out(plan, folder / "run", engine)
        assert "differs from the one on the driver" in str(first_of(caught.value))
        assert "the policy" in str(first_of(caught.value))


class TestLimits:
    async def test_run_limit_stops_all_workers(self, cluster: Any, folder: Path) -> None:
        policy = {"type": "mine.py:Adds", "wait_s": 0.05, "usage": {"prompt_tokens": 10, "completion_tokens": 0}}
        counting = CountingTask(folder / "task", samples=200, policy=policy, run_limits={"total_tokens": 2000})
        run = await carried_out(counting.plan(), folder / "run", engine_for(counting, workers=4))
        assert run.count_incomplete() > 0
        used = sum(10 * record["num_steps"] for record in read_episodes(folder / "run"))
        # 16 episodes take 20 steps a second each at the most, and are told twice a second.
        assert 2000 <= used <= 2000 + 16 * 10 * 20
        reasons = Counter(record["stop_reason"] for record in read_episodes(folder / "run"))
        assert 0 < reasons["run_limit"] <= 16

    async def test_wall_time_limit_applies_to_workers(self, cluster: Any, folder: Path) -> None:
        policy = {"type": "mine.py:Adds", "wait_s": 0.1}
        counting = CountingTask(folder / "task", samples=200, policy=policy, run_limits={"wall_time_s": 6})
        run = await carried_out(counting.plan(), folder / "run", engine_for(counting, workers=2))
        assert run.count_incomplete() > 0
        assert Counter(record["stop_reason"] for record in read_episodes(folder / "run"))["run_limit"] > 0


async def test_several_policies_without_a_resource_match_the_local_engine(cluster: Any, folder: Path) -> None:
    counting = CountingTask(
        folder / "task",
        samples=6,
        policies=("mine.py:Adds", "mine.py:Tells"),
        resource_type=None,
        tools_module_path=None,
    )
    run = await carried_out(counting.plan(), folder / "ray_run", engine_for(counting, workers=3))
    assert {row.policy for row in run.rows.values()} == {"mine.py:Adds", "mine.py:Tells"}
    await carried_out(counting.plan(), folder / "local_run")
    assert without_the_clock(folder / "ray_run") == without_the_clock(folder / "local_run")


def test_default_workers_leave_room_for_reward_workers(cluster: Any) -> None:
    assert (workers_that_fit(1, 0), workers_that_fit(1, 0, 1), workers_that_fit(0.5, 0)) == (4, 3, 8)
    assert (workers_that_fit(0.5, 1), workers_that_fit(1, 0, 4)) == (4, 0)


def test_impossible_workers_are_rejected_and_possible_ones_awaited(cluster: Any) -> None:
    asked = RayOptions(workers=1, reward_workers=4)
    with pytest.raises(ConfigError, match=r"in addition to 4 that call the reward .*; request less with -E cpus"):
        workers_to_start(asked, is_own=True, option="-E {}")
    assert workers_to_start(asked, is_own=False, option="-E {}") == 1
    with pytest.raises(ConfigError, match="or wait for nodes with -E workers"):
        workers_to_start(RayOptions(reward_workers=4), is_own=False, option="-E {}")


async def test_worker_sees_its_reserved_gpus(cluster: Any, folder: Path) -> None:
    counting = CountingTask(
        folder / "task", samples=2, policy={"type": "mine.py:Tells", "variable": "CUDA_VISIBLE_DEVICES"}
    )
    await carried_out(counting.plan(), folder / "run", engine_for(counting, workers=2, gpus=1))
    said = {record["messages"][-1]["content"] for record in read_episodes(folder / "run")}
    assert said == {"it has 1 letters"}


async def test_batch_reward_in_reward_workers_scores_whole_groups(cluster: Any, folder: Path) -> None:
    counting = CountingTask(folder / "task", samples=6, reward_function_path="reward.py:ranked", sandbox=None)
    await carried_out(counting.plan(), folder / "ray_run", engine_for(counting, workers=2, reward_workers=1))
    await carried_out(counting.plan(), folder / "local_run")
    there, here = without_the_clock(folder / "ray_run"), without_the_clock(folder / "local_run")
    assert there[0] == here[0]
    assert there[1] == here[1]
    assert {score["sandbox"]["level"] for score in there[1].values()} == {"warm"}


async def test_api_key_reaches_the_workers_but_no_file(
    cluster: Any, home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = f"sk-{os.urandom(12).hex()}"
    monkeypatch.setenv("A_KEY_OF_MINE", secret)
    policy = {"type": "mine.py:Tells", "variable": "A_KEY_OF_MINE"}
    counting = CountingTask(folder / "task", samples=2, policy=policy)
    run = await carried_out(counting.plan(), folder / "run", engine_for(counting, workers=2, env=["A_KEY_OF_MINE"]))
    assert run.count_incomplete() == 0
    said = {record["messages"][-1]["content"] for record in read_episodes(folder / "run")}
    assert said == {f"it has {len(secret)} letters"}
    assert len(files_in(home)) > 10
    assert not [file for file in files_in(home) + files_in(folder) if secret.encode() in file.read_bytes()]
    with pytest.raises(ConfigError, match="-E env: the variable NOT_SET_HERE is not set here"):
        engine_for(counting, env=["NOT_SET_HERE"])
