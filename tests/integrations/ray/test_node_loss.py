"""Test a run of two thousand episodes on four nodes, one of which is killed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.ray.counting_task import CountingTask, carried_out, without_the_clock
from tests.integrations.ray.fault_injection import AfterEpisodes, engine_for

pytestmark = pytest.mark.campaign


async def test_two_thousand_episodes_complete_once_despite_a_killed_node(cluster: Any, folder: Path) -> None:
    counting = CountingTask(folder / "task", samples=500, policy={"type": "mine.py:Adds", "wait_s": 0.02})
    plan = counting.plan(max_concurrency=64)
    victim = cluster.list_all_nodes()[-1]
    kill = AfterEpisodes(700, lambda: cluster.remove_node(victim, allow_graceful=False))
    run = await carried_out(plan, folder / "ray_run", engine_for(counting, workers=4), kill)
    assert run.count_incomplete() == 0
    assert len(cluster.list_all_nodes()) == 3
    here = await carried_out(counting.plan(64), folder / "local_run")
    episodes, scores = without_the_clock(folder / "ray_run")
    assert len(episodes) == len(scores) == 2000
    assert (episodes, scores) == without_the_clock(folder / "local_run")
    attempts = Counter(row.attempt for row in run.rows.values())
    assert 0 < attempts[1] + attempts[2] <= 64, attempts
    assert {row.attempt for row in here.rows.values()} == {0}
