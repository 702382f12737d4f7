"""Compare the native engine with the real one in a hundred new episodes.

Run by `make text-games-campaign`, which installs the engine's packages; not by `make test`.
"""

from __future__ import annotations

import importlib.util
from collections import Counter

import pytest

from reward_kit import RLRolloutWorker, TaskDefinitionModel
from reward_kit.agent.policies.simple_policies import ExpertPolicy, RandomPolicy
from reward_kit.agent.rl_rollout_worker import collect_group
from reward_kit.agent.samples import Sample
from reward_kit.environments.household_problems import TaskType

INSTALLED = all(importlib.util.find_spec(name) for name in ("textworld", "alfworld"))


@pytest.mark.campaign
@pytest.mark.skipif(not INSTALLED, reason="needs pip install 'reward-kit[text-games]'")
@pytest.mark.parametrize(("policy", "steps"), [(RandomPolicy(), 25), (ExpertPolicy(), 25)])
async def test_native_and_real_engine_agree_in_new_episodes(policy: RandomPolicy | ExpertPolicy, steps: int) -> None:
    task = TaskDefinitionModel(name="fresh", resource_type="alfworld_real", max_episode_steps=steps, on_text="end")
    worker = RLRolloutWorker(task, policy)
    ends: Counter[str] = Counter()
    for number in range(25):
        kind = list(TaskType)[number % 6].value
        # A seed that no recorded trace has.
        config = {"seed": 4_711 + number, "index": number, "task_types": [kind], "split": "train"}
        episodes = await collect_group(worker, Sample(f"{kind}-{number}", resource_config=config), 2)
        assert [episode.custom_data["failure"] for episode in episodes] == [None, None]
        assert all(episode.custom_data["start"]["verified"] for episode in episodes)
        ends.update(episode.custom_data["stop_reason"] for episode in episodes)
    if isinstance(policy, ExpertPolicy):
        assert ends == {"environment_terminated": 50}
