"""Episodes that continue a recorded episode from one of its steps."""

from __future__ import annotations

import itertools
import random

import anyio
import pytest

from reward_kit.agent.policies.simple_policies import ExpertPolicy, RandomPolicy, ScriptedPolicy
from reward_kit.agent.policy_interface import AgentPolicy, PolicyOutput
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker, collect_group
from reward_kit.agent.samples import Sample
from reward_kit.agent.simulated_user import ScriptedUser
from reward_kit.checks.episode import check_episode
from reward_kit.environments import ReplayForkResource, StepOutcome, tool_spec
from reward_kit.episodes.record import episode_from_record, episode_to_record, get_facts
from reward_kit.errors import ConfigError, EnvironmentFailure, PolicyError
from reward_kit.rl.training.rollouts import LockstepBarrier
from tests.agent.resources import COUNTER, Counter, call, calls, failure, reason, task_of, text, worker_of

LIFETIMES = itertools.count()


class Dice(ReplayForkResource):
    """Throws dice, and forks by repeating the throws. With `flaky`, the first throw differs in each world."""

    async def _setup(self, config):
        self.flaky, self.rng, self.throws = config.get("flaky", False), random.Random(0), []

    async def _reset(self, seed):
        self.rng, self.throws = random.Random(seed), []

    def _reseed(self, seed):
        self.rng = random.Random(seed)

    async def _step(self, action_name, action_params):
        value = self.rng.randint(1, 6) if not self.flaky else 100 + next(LIFETIMES)
        self.throws.append(value)
        return StepOutcome({"throws": list(self.throws)}, reward=float(value), terminated=len(self.throws) == 6)

    async def get_tools_spec(self):
        return [tool_spec("throw", "Throw.")]

    async def state_key(self):
        return str(self.throws)


class Loose(Counter):
    """A counter that cannot be forked."""

    fork_kind = "none"


class Narrow(Counter):
    """A counter whose state key does not cover what the results told the agent."""

    state_key_covers_results = False


def plain(episode):
    """Return the record of an episode without its identity and times, and with neither start nor seeds."""
    record = episode_to_record(episode)
    for key in ("rollout_id", "group_id", "rollout_index", "policy", "seeds", "start", "usage", "timing"):
        record.pop(key)
    record.pop("custom_data", None)
    return record


def recorded_actions(episode):
    return ScriptedPolicy([episode.get_actions(t) for t in range(len(episode))])


DICE = f"{__name__}:Dice"
SIX = [call("throw")] * 6
COUNTS = [call(by=1), call("unknown"), calls(("add", {"by": 2}), ("add", {"by": 3})), call(by=4), text("done")]
LAKE = {
    "resource_type": "gymnasium",
    "base_resource_config": {"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": True}},
    "max_episode_steps": 12,
    "noise": "shared",
}


@pytest.mark.parametrize(
    ("actions", "fields"),
    [
        (COUNTS, {"resource_type": COUNTER, "on_text": "end"}),
        (COUNTS, {"resource_type": f"{__name__}:Loose", "on_text": "end"}),
        (COUNTS, {"resource_type": f"{__name__}:Narrow", "on_text": "end"}),
        (SIX, {"resource_type": DICE, "noise": "shared"}),
        (RandomPolicy(), LAKE),
        (RandomPolicy(), {"resource_type": "sokoban", "max_episode_steps": 12}),
        (RandomPolicy(), {"resource_type": "alfworld", "max_episode_steps": 12}),
        (RandomPolicy(), {"resource_type": "webshop", "max_episode_steps": 12}),
    ],
    ids=["native", "no fork", "results outside the key", "replay", "lake", "sokoban", "household", "webshop"],
)
async def test_repeating_the_recorded_actions_gives_the_recorded_episode(actions, fields):
    worker = worker_of(actions, **fields)
    episode = await worker.collect_episode(seed=3)
    assert failure(episode) is None and len(episode) >= 4
    for step in range(len(episode)):
        (again,) = await worker.continue_from(episode, step, policy=recorded_actions(episode))
        assert plain(again) == plain(episode)
        assert again.environment_rewards() == episode.environment_rewards()
        continues = get_facts(again)["start"]["continues"]
        assert (continues["rollout_id"], continues["step"]) == (episode.id_, step)
        assert [one for one in check_episode(again) if one.level == "error"] == []


async def test_continuations_have_own_seeds_and_one_group():
    worker = worker_of(RandomPolicy(), **{**LAKE, "noise": "independent"})
    episode = await worker.collect_episode(seed=3)
    six = await worker.continue_from(episode, 1, 6)
    assert len({one.id_ for one in six}) == 6 and {get_facts(one)["group_id"] for one in six} != {episode.id_}
    assert len({get_facts(one)["group_id"] for one in six}) == 1
    for seed in ("policy", "noise"):
        assert len({get_facts(one)["seeds"][seed] for one in [episode, *six]}) == 7
    assert {get_facts(one)["seeds"]["environment"] for one in six} == {get_facts(episode)["seeds"]["environment"]}
    assert len({str([one.get_actions(t) for t in range(len(one))]) for one in six}) > 1
    again, other = await worker.continue_from(episode, 1, 6), await worker.continue_from(episode, 1, 6, seed=1)
    assert [plain(one) for one in again] == [plain(one) for one in six]
    assert [plain(one) for one in other] != [plain(one) for one in six]
    assert not {one.id_ for one in other} & {one.id_ for one in six}


@pytest.mark.parametrize("noise", ["independent", "shared"])
async def test_continuation_of_a_continuation_draws_the_same_noise(noise):
    worker = worker_of(RandomPolicy(), **{**LAKE, "noise": noise, "max_episode_steps": 25})
    for seed in range(6):
        episode = await worker.collect_episode(seed=seed)
        (first,) = await worker.continue_from(episode, len(episode) // 2)
        (second,) = await worker.continue_from(first, len(first) - 1)
        for step in {0, len(second) // 3, len(second) - 1}:
            (again,) = await worker.continue_from(second, step, policy=recorded_actions(second))
            assert again.messages[: 2 * step] == second.messages[: 2 * step]


async def test_failed_first_action_is_recorded_and_not_raised():
    class Failing(AgentPolicy):
        is_free = True

        async def get_action(self, observation, available_tools_specs=None):
            raise PolicyError("429")

    worker = worker_of(COUNTS, resource_type=COUNTER, on_text="end")
    episode = await worker.collect_episode()
    (continued,) = await worker.continue_from(episode, 2, policy=Failing())
    assert failure(continued)["message"].endswith("429") and len(continued) == 2


async def test_failed_start_is_repeated_only_once():
    worker = worker_of(SIX, resource_type=DICE, base_resource_config={"flaky": True})
    episode = await worker.collect_episode()
    before = next(LIFETIMES)
    with pytest.raises(EnvironmentFailure, match="the result differs"):
        await worker.continue_from(episode, 3, 16)
    assert next(LIFETIMES) - before == 2  # one throw, and this call


async def test_limit_on_steps_includes_the_repeated_ones():
    worker = worker_of(ScriptedPolicy(lambda *_: call(by=1)), resource_type=COUNTER, max_episode_steps=5)
    episode = await worker.collect_episode()
    (continued,) = await worker.continue_from(episode, 3)
    assert (len(continued), reason(continued)) == (5, "max_steps")


async def test_tokens_and_cost_of_repeated_steps_count_towards_the_limits_only():
    def act(*_):
        usage = {"prompt_tokens": 8, "completion_tokens": 2, "cost": 0.5}
        return PolicyOutput(call(by=1), None, {"usage": usage})

    worker = worker_of(ScriptedPolicy(act), resource_type=COUNTER, limits={"cost": 2.0, "total_tokens": 1000})
    episode = await worker.collect_episode()
    (continued,) = await worker.continue_from(episode, 3)
    assert (reason(episode), reason(continued)) == ("cost_limit", "cost_limit") and len(continued) == len(episode) == 4
    assert get_facts(continued)["usage"]["cost"] == 0.5


async def test_record_on_disk_can_be_continued():
    worker = worker_of(COUNTS, resource_type=COUNTER, on_text="end")
    episode = episode_from_record(episode_to_record(await worker.collect_episode()))
    assert episode.get_infos(-1)["state_key"] == "count 10"  # the state after the last step
    (again,) = await worker_of(COUNTS, resource_type=COUNTER, on_text="end").continue_from(episode, 2)
    assert plain(again) == plain(episode)


async def test_branch_at_a_later_step_forks_an_open_one():
    worker = worker_of(COUNTS, resource_type=COUNTER, on_text="end")
    episode = await worker.collect_episode()
    async with worker.branch(episode, 2) as first:
        await worker.collect_episode(first, 0)
        made = len(Counter.made)
        async with worker.branch(episode, 4, before=first) as second:
            again = await worker.collect_episode(second, 0)
        assert len(Counter.made) == made + 2  # a fork of the first branch, and one for the episode
    assert plain(again) == plain(episode)


async def test_episode_in_a_given_environment_can_be_continued():
    environment = Counter()
    await environment.step("add", {"by": 7})
    worker = worker_of(COUNTS, environment=environment, on_text="end")
    episode = await worker.collect_episode()
    (again,) = await worker.continue_from(episode, 3)
    assert plain(again) == plain(episode) and again.get_infos(3)["state_key"] == "count 13"
    await environment.step("add", {"by": 1})
    with pytest.raises(EnvironmentFailure, match=r"in the repeated step 0: the state key differs: 'count 7' became"):
        await worker.continue_from(episode, 3)
    await environment.close()


async def test_task_with_only_tools_can_be_continued():
    worker = worker_of([text("one"), text("two"), text("three")], on_text="continue", max_episode_steps=3)
    episode = await worker.collect_episode()
    (again,) = await worker.continue_from(episode, 1)
    assert plain(again) == plain(episode)


@pytest.mark.parametrize("step", [-1, 5, 99, 1.5])
async def test_missing_step_is_rejected(step):
    worker = worker_of(COUNTS, resource_type=COUNTER, on_text="end")
    episode = await worker.collect_episode()
    with pytest.raises(ConfigError, match=f"step must be an integer between 0 and 4 .* which has 5 steps; got {step}"):
        await worker.continue_from(episode, step)


async def test_episode_of_an_unknown_sample_or_without_seeds_is_rejected():
    worker = worker_of(COUNTS, resource_type=COUNTER, on_text="end")
    (episode,) = await collect_group(worker, Sample("other"), 1)
    with pytest.raises(ConfigError, match=r"belongs to sample 'other', which task 'task' does not contain; pass"):
        await worker.continue_from(episode, 1)
    (again,) = await worker.continue_from(episode, 1, sample=Sample("other"))
    assert plain(again) == plain(episode)
    del episode.custom_data["seeds"]
    with pytest.raises(ConfigError, match="only episodes that a worker has collected can be continued"):
        await worker.continue_from(episode, 1, sample=Sample("other"))


async def test_different_result_of_a_repeated_action_is_an_error():
    worker = worker_of(SIX, resource_type=DICE, base_resource_config={"flaky": True})
    episode = await worker.collect_episode()
    with pytest.raises(EnvironmentFailure, match=r"continued from step 3: in the repeated step 0: the result differs"):
        await worker.continue_from(episode, 3)


async def test_failed_start_in_lockstep_is_an_error():
    policy = LockstepBarrier(ScriptedPolicy(SIX))
    worker = RLRolloutWorker(task_of(resource_type=DICE, base_resource_config={"flaky": True}), policy)
    policy.expect(1)
    episode = await worker.collect_episode()
    with anyio.fail_after(20), pytest.raises(EnvironmentFailure, match="the result differs"):
        await worker.continue_from(episode, 3, 4)


async def test_different_reward_and_early_end_are_errors():
    worker = worker_of([*COUNTS[:3], call("win")], resource_type=COUNTER)
    episode = await worker.collect_episode()
    rewards = episode.environment_rewards()
    episode.set_rewards(new_data=rewards[2] + 0.5, at_indices=2)
    with pytest.raises(EnvironmentFailure, match=r"in the repeated step 2: the reward differs: 5.5 became 5.0"):
        await worker.continue_from(episode, 3)
    await worker.continue_from(episode, 2)


class Stateful(AgentPolicy):
    """A policy that counts in its sessions, and may add a random number."""

    is_free = True

    def __init__(self, is_random=False):
        self.count, self.is_random = 0, is_random

    async def open(self, context):
        return type(self)(self.is_random)

    async def get_action(self, observation, available_tools_specs=None):
        self.count += 1
        return PolicyOutput(call(by=self.count + (random.random() if self.is_random else 0)))


async def test_session_with_state_repeats_its_actions():
    worker = worker_of(Stateful(), resource_type=COUNTER, max_episode_steps=4)
    episode = await worker.collect_episode()
    (again,) = await worker.continue_from(episode, 2)
    assert plain(again) == plain(episode)


async def test_session_that_cannot_repeat_its_actions_is_an_error():
    worker = worker_of(Stateful(is_random=True), resource_type=COUNTER, max_episode_steps=4)
    episode = await worker.collect_episode()
    with pytest.raises(PolicyError, match=r"Stateful cannot .* repeat .* at action 0.arguments.by: .* define resume"):
        await worker.continue_from(episode, 2)


async def test_different_policy_continues():
    worker = worker_of(COUNTS[:1], resource_type=COUNTER, max_episode_steps=9)
    episode = await worker_of([call(by=-1), call(by=-1)], resource_type=COUNTER).collect_episode()
    (continued,) = await worker.continue_from(episode, 2, policy=ExpertPolicy())
    assert [continued.get_actions(t)["type"] for t in range(len(continued))] == ["tool_call"] * 6 + ["terminate"]
    assert get_facts(continued)["policy"] == "ExpertPolicy"


@pytest.mark.parametrize("opens", [True, False])
async def test_simulated_user_continues(opens):
    replies = ["one", "two", "three"] if not opens else ["zero", "one", "two", "three"]
    fields = {"on_text": "continue", "messages": [{"role": "system", "content": "s"}]}
    if not opens:
        fields["messages"].append({"role": "user", "content": "begin"})
    actions = [text("a"), text("b"), text("c"), text("d"), text("e")]
    worker = RLRolloutWorker(task_of(**fields), ScriptedPolicy(actions), user=ScriptedUser(replies))
    episode = await worker.collect_episode()
    assert reason(episode) == "user_stopped"
    for step in range(len(episode)):
        (again,) = await worker.continue_from(episode, step)
        assert plain(again) == plain(episode)
