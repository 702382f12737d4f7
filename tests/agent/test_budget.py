"""Test the budget that all episodes of a run share."""

from __future__ import annotations

import pytest

from reward_kit.agent.limits import ActionUsage, RunBudget
from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.policy_interface import AgentPolicy, PolicyOutput
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.task_parts import RunLimitsModel
from tests.agent.resources import COUNTER, call, failure, reason, task_of, text


def test_budget_without_limits_is_never_exhausted() -> None:
    budget = RunBudget()
    budget.spend(ActionUsage(10**9, 10.0**6), steps=10**6)
    assert budget.exhausted() is None


@pytest.mark.parametrize(
    ("limits", "used", "steps"),
    [
        ({"cost": 1.0}, ActionUsage(0, 1.0), 0),
        ({"total_tokens": 5}, ActionUsage(5), 0),
        ({"steps": 2}, ActionUsage(), 2),
    ],
)
def test_budget_is_exhausted_at_a_limit(limits: dict[str, float], used: ActionUsage, steps: int) -> None:
    budget = RunBudget(RunLimitsModel(**limits))
    assert budget.exhausted() is None
    budget.spend(used, steps)
    exhausted = budget.exhausted()
    assert exhausted is not None and [exhausted.key] == list(limits)


async def test_finished_episode_counts_although_the_budget_is_exhausted() -> None:
    budget = RunBudget(RunLimitsModel(steps=1))
    for action, expected in ((text("done"), "answered"), (call(), "run_limit")):
        worker = RLRolloutWorker(
            task_of(resource_type=COUNTER, on_text="end"), ScriptedPolicy([action, action]), budget=budget
        )
        episode = await worker.collect_episode()
        assert (reason(episode), len(episode)) == (expected, 1)


class UnmeteredModel(AgentPolicy):
    """A model whose endpoint does not report its usage."""

    async def get_action(self, observation: object, available_tools_specs: object = None) -> PolicyOutput:
        return PolicyOutput(text("hello"), None, {"usage": {"prompt_tokens": 5, "completion_tokens": 1}})


@pytest.mark.parametrize("of_the_run", [False, True])
async def test_unknown_cost_with_a_cost_limit_is_an_error(of_the_run: bool) -> None:
    limits = {"run_limits" if of_the_run else "limits": {"cost": 1.0}}
    task = task_of(**limits, initial_user_prompt="x")
    episode = await RLRolloutWorker(task, UnmeteredModel(), budget=RunBudget(task.run_limits)).collect_episode()
    assert reason(episode) == "error" and "cost limit cannot be enforced" in failure(episode)["message"]
    assert (
        reason(await RLRolloutWorker(task_of(initial_user_prompt="x"), UnmeteredModel()).collect_episode())
        == "answered"
    )
