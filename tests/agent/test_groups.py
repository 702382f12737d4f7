"""Test groups: episodes of one sample from one start state, isolated from each other."""

import asyncio
import sys

import pytest

from reward_kit.agent.rl_rollout_worker import collect_group
from reward_kit.agent.samples import Sample
from tests.agent.resources import COUNTER, Counter, call, failure, reason, worker_of

END = [{"type": "terminate"}]
HERE = sys.modules[__name__]


def register(monkeypatch, world):
    """Return the resource type under which a task finds a class defined by a test."""
    monkeypatch.setattr(HERE, world.__name__, world, raising=False)
    return f"{__name__}:{world.__name__}"


async def group_of(size, actions=END, run_seed=0, sample="s", **fields):
    fields = {"resource_type": COUNTER, **fields}
    return await collect_group(worker_of(actions, **fields), Sample(sample), size, run_seed=run_seed)


def seeds(episodes, name):
    return [episode.custom_data["seeds"][name] for episode in episodes]


async def test_group_shares_its_start_state_but_not_its_ids():
    episodes = await group_of(4)
    starts = [episode.custom_data["start"] for episode in episodes]
    assert starts == [{"fork": "native", "state_key": "count 0", "verified": True}] * 4
    assert len({episode.id_ for episode in episodes}) == 4
    assert len({episode.custom_data["group_id"] for episode in episodes}) == 1
    assert [episode.custom_data["rollout_index"] for episode in episodes] == [0, 1, 2, 3]


async def test_episodes_of_a_group_are_isolated():
    turn = iter(range(3))

    async def act(observation, _):
        if any(m.role == "assistant" for m in observation):
            return {"type": "terminate"}
        await asyncio.sleep(0)
        return call(by=10 ** next(turn))

    episodes = await group_of(3, act)
    assert sorted(episode.get_return() for episode in episodes) == [1.0, 10.0, 100.0]


async def test_resource_is_set_up_once_and_forked_per_episode():
    await group_of(3)
    assert len(Counter.made) == 4


class TestSeeds:
    async def test_environment_seed_is_shared_and_policy_seeds_differ(self):
        episodes = await group_of(3)
        assert len(set(seeds(episodes, "environment"))) == 1
        assert len(set(seeds(episodes, "policy"))) == 3

    async def test_other_samples_and_runs_get_other_seeds(self):
        groups = [await group_of(1), await group_of(1, sample="t"), await group_of(1, run_seed=1)]
        assert len({seeds(group, "environment")[0] for group in groups}) == 3
        assert len({group[0].custom_data["group_id"] for group in groups}) == 3

    async def test_resource_is_reset_with_the_environment_seed(self):
        (episode,) = await group_of(1)
        assert {world.seed for world in Counter.made} == set(seeds([episode], "environment"))

    @pytest.mark.parametrize(("noise", "different"), [("independent", 3), ("shared", 1)])
    async def test_noise_option_decides_the_seeds_after_the_fork(self, noise, different):
        episodes = await group_of(3, noise=noise)
        drawn = {world.noise for world in Counter.made} - {None}
        assert drawn == set(seeds(episodes, "noise"))
        assert len(drawn) == different

    async def test_episode_does_not_depend_on_the_group_size(self):
        alone, company = (await group_of(1))[0], (await group_of(5))[0]
        assert (alone.id_, alone.custom_data["seeds"]) == (company.id_, company.custom_data["seeds"])


class TestForks:
    async def test_fork_in_another_state_is_a_recorded_failure(self, monkeypatch):
        class Forgetful(Counter):
            async def fork(self):
                twin = await super().fork()
                twin.total = 99
                return twin

        episodes = await group_of(2, resource_type=register(monkeypatch, Forgetful))
        for episode in episodes:
            assert failure(episode)["where"] == "EnvironmentFailure"
            assert "the state key of a fork is count 99, but the original's is count 0" in failure(episode)["message"]

    async def test_resources_without_forks_start_fresh_and_unverified(self, monkeypatch):
        class Outside(Counter):
            fork_kind = "none"

            async def state_key(self):
                return f"world {Counter.made.index(self)}"

        episodes = await group_of(2, resource_type=register(monkeypatch, Outside))
        starts = [episode.custom_data["start"] for episode in episodes]
        assert {(start["fork"], start["verified"]) for start in starts} == {("none", False)}
        # The recorded key is the one of the world that was used, and none is made beside those.
        assert sorted(start["state_key"] for start in starts) == ["world 0", "world 1"]
        assert len(Counter.made) == 2

    async def test_failing_start_fails_every_episode_with_the_same_message(self, monkeypatch):
        class Keyless(Counter):
            async def state_key(self):
                raise RuntimeError("no key")

        episodes = await group_of(3, resource_type=register(monkeypatch, Keyless))
        assert {failure(episode)["message"] for episode in episodes} == {"state_key of Keyless: RuntimeError: no key"}


class TestSiblings:
    async def test_failed_episode_does_not_stop_its_group(self):
        turn = iter(range(3))

        def act(observation, _):
            if any(m.role == "assistant" for m in observation):
                return {"type": "terminate"}
            return call("crash") if next(turn) == 1 else call()

        episodes = await group_of(3, act)
        assert sorted(reason(episode) for episode in episodes) == ["error", "terminate_action", "terminate_action"]

    async def test_cancellation_closes_all_resources(self):
        acting = 0
        all_act = asyncio.Event()

        async def act(*_):
            nonlocal acting
            acting += 1
            if acting == 3:
                all_act.set()
            await asyncio.sleep(30)

        running = asyncio.create_task(group_of(3, act))
        await all_act.wait()
        assert len(Counter.open_instances) == 4
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not Counter.open_instances

    async def test_cancellation_during_setup_leaves_no_resources(self, monkeypatch):
        making = asyncio.Event()

        class Slow(Counter):
            async def setup(self, config):
                making.set()
                await asyncio.sleep(30)

        running = asyncio.create_task(group_of(2, resource_type=register(monkeypatch, Slow)))
        await making.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(Counter.made) == 1
