"""Test the default state hash of tool-calling episodes: the state key and the set of tool results seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.agent.models import SeenResults, StepData, episode_steps
from reward_kit.agent.policies.simple_policies import RandomPolicy, ScriptedPolicy
from reward_kit.agent.policy_interface import AgentPolicy, EpisodeContext, PolicyOutput
from reward_kit.agent.rl_rollout_worker import EpisodeGroup, RLRolloutWorker
from reward_kit.credit.state_hashes import STATE_HASHES, describe_state_hash, hash_steps, readable_keys
from reward_kit.environments import PythonStateResource
from reward_kit.environments.base import ForkableResource
from reward_kit.environments.config import BUILT_IN, resource_class
from reward_kit.episodes.record import episode_from_record, episode_to_record
from reward_kit.models import Message, TaskDefinitionModel
from reward_kit.reward_agent.scoring import Scored
from reward_kit.rl_helpers import gigpo_credit
from reward_kit.rl_processing import CreditAssigner
from reward_kit.runs.credit import assign_credit
from reward_kit.runs.run_folder import read_credit
from reward_kit.task_parts import CreditModel
from tests.agent.resources import call, calls, text, worker_of
from tests.runs.stored_run import make_run, score

SHOP = """
CREATE TABLE orders (id TEXT, status TEXT, days INTEGER);
INSERT INTO orders VALUES ('O7', 'delivered', 90);
CREATE TRIGGER late BEFORE UPDATE ON orders WHEN OLD.days > 30 BEGIN SELECT RAISE(ABORT, 'older than 30 days'); END;
"""
LOOK_UP = call("execute_sql", query="SELECT * FROM orders WHERE id = 'O7'")
REFUND = call("execute_sql", query="UPDATE orders SET status = 'refunded' WHERE id = 'O7'")
OTHER = call("execute_sql", query="UPDATE orders SET status = 'refunded' WHERE id = 'O1'")
LIE, TRUTH = text("Your refund is on its way."), text("Orders older than 30 days cannot be refunded.")
# The reward checks whether the order was looked up, and does not read the last message.
SUPPORT = [([LOOK_UP, REFUND, LIE], 1.0), ([LOOK_UP, REFUND, TRUTH], 1.0)] + [([OTHER, OTHER, LIE], 0.0)] * 2


class PerRollout(AgentPolicy):
    """Plays one script per rollout of a group."""

    def __init__(self, scripts: Sequence[Sequence[dict[str, Any]]]) -> None:
        self.scripts = scripts

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        return await ScriptedPolicy(list(self.scripts[context.rollout_index])).open(context)

    async def get_action(self, observation: Any, available_tools_specs: Any = None) -> Any:
        raise NotImplementedError


def collect(scripts: Sequence[Sequence[dict[str, Any]]], resource: str = "sqlite", **config: Any) -> EpisodeGroup:
    config = config or {"seed_sql": SHOP}
    task = TaskDefinitionModel(name="t", resource_type=resource, base_resource_config=config, on_text="end")
    return anyio.run(RLRolloutWorker(task, PerRollout(scripts)).run_group, len(scripts))


@pytest.fixture(scope="module")
def group() -> EpisodeGroup:
    return collect([script for script, _ in SUPPORT])


SCORES = [value for _, value in SUPPORT]


def peers(group: EpisodeGroup, state_hash: Any) -> list[int]:
    credit = gigpo_credit(group, SCORES, omega=0.5, gamma=0.95, state_hash=state_hash)
    _, codes, counts = np.unique(credit.anchors_S, return_inverse=True, return_counts=True)
    return (counts[codes] - 1).tolist()


def best_steps(group: EpisodeGroup, state_hash: Any) -> set[tuple[int, int]]:
    advantages = gigpo_credit(group, SCORES, omega=0.5, gamma=0.95, state_hash=state_hash).advantages_S.reshape(4, 3)
    return {(int(i), int(t)) for i, t in np.argwhere(np.isclose(advantages, advantages.max()))}


class TestSupportEpisode:
    def test_state_key_alone_compares_all_steps_and_ranks_the_lie_best(self, group: EpisodeGroup) -> None:
        assert peers(group, "state_key") == [11] * 12
        assert best_steps(group, "state_key") == {(0, 2), (1, 2)}

    def test_default_compares_alternatives_and_ranks_the_look_up_best(self, group: EpisodeGroup) -> None:
        # After an update without a match, the same update teaches nothing, so those steps share a state with the lie.
        assert peers(group, None) == [3, 1, 1] * 2 + [3, 3, 3] * 2
        assert best_steps(group, None) == {(0, 0), (1, 0)}
        lie_and_truth = gigpo_credit(group, SCORES, omega=0.5, gamma=0.95).step_advantages_S[[2, 5]]
        assert lie_and_truth == pytest.approx([0.0, 0.0])


class TestSources:
    def test_live_stored_and_manual_steps_have_equal_keys(self, group: EpisodeGroup, tmp_path: Path) -> None:
        live = [episode_steps(episode) for episode in group.episodes]
        records = [json.loads(json.dumps(episode_to_record(episode))) for episode in group.episodes]
        stored = [episode_steps(episode_from_record(record)) for record in records]
        expected = readable_keys(group)
        assert readable_keys(live) == readable_keys(stored) == expected
        scored = [score(episode.id_, value) for episode, value in zip(group.episodes, SCORES, strict=True)]
        run = make_run(tmp_path, group.episodes, scored)
        for state_hash in (None, "state_and_results"):
            section = assign_credit(run, CreditModel.model_validate({"state_hash": state_hash})).section
            assert [row["state_key"] for row in read_credit(run)] == expected
            assert section["state_hash"] == "state_and_results"

    @pytest.mark.parametrize("shares_messages", [True, False])
    def test_key_from_the_conversation_equals_the_recorded_key(
        self, group: EpisodeGroup, shares_messages: bool
    ) -> None:
        unrecorded = [[without_key(step, shares_messages) for step in steps] for steps in group]
        assert hash_steps(unrecorded, "state_and_results") == hash_steps(group, "state_and_results")
        assert hash_steps(unrecorded) == hash_steps(group, "state_key")

    def test_record_of_an_earlier_run_keeps_its_anchors(self, group: EpisodeGroup, tmp_path: Path) -> None:
        episodes = [episode_from_record(earlier(episode_to_record(episode))) for episode in group.episodes]
        scored = [score(episode.id_, value) for episode, value in zip(episodes, SCORES, strict=True)]
        run = make_run(tmp_path, episodes, scored)
        credit = assign_credit(run, CreditModel())
        assert {row["peers"] for row in read_credit(run)} == {11} and credit.section["state_hash"] == "state_key"
        assign_credit(run, CreditModel.model_validate({"state_hash": "state_and_results"}))
        assert [row["peers"] for row in read_credit(run)] == peers(group, None)

    @pytest.mark.parametrize("is_stored", [False, True])
    def test_continued_episode_has_the_keys_of_the_recorded_one(self, is_stored: bool) -> None:
        worker = RLRolloutWorker(
            TaskDefinitionModel(
                name="t", resource_type="sqlite", base_resource_config={"seed_sql": SHOP}, on_text="end"
            ),
            ScriptedPolicy([LOOK_UP, REFUND, LIE]),
        )
        episode = anyio.run(worker.collect_episode)
        known = episode_from_record(json.loads(json.dumps(episode_to_record(episode)))) if is_stored else episode
        (continued,) = anyio.run(worker.continue_from, known, 2)
        keys = [[step.step_info["state_and_results"] for step in episode_steps(one)] for one in (episode, continued)]
        assert keys[0] == keys[1] and len(set(keys[0])) == 3

    def test_results_of_calls_by_the_policy_itself_count(self) -> None:
        class Caller(AgentPolicy):
            async def open(self, context: EpisodeContext) -> AgentPolicy:
                self.context = context
                return self

            async def get_action(self, observation: Any, available_tools_specs: Any = None) -> Any:
                await self.context.call_tool("get_state", {})
                return PolicyOutput(text("more"))

        worker = worker_of(Caller(), resource_type="python_state", on_text="continue", max_episode_steps=3)
        steps, *_ = anyio.run(worker.run_episode)
        keys = [step.step_info["state_and_results"] for step in steps]
        assert keys[0] != keys[1] == keys[2]


def without_key(step: StepData, shares_messages: bool) -> StepData:
    info = {key: value for key, value in step.step_info.items() if key != "state_and_results"}
    history = step.resulting_messages_history
    return step.model_copy(
        update={"step_info": info, "resulting_messages_history": history if shares_messages else list(history)}
    )


def earlier(record: dict[str, Any]) -> dict[str, Any]:
    steps = [{key: value for key, value in step.items() if key != "state_and_results"} for step in record["steps"]]
    return {**record, "steps": steps}


# The set of results


def key_of(*results: str | list[str]) -> str:
    seen = SeenResults()
    for result in results:
        seen.add([Message(role="tool", content=result)])
    return seen.key_with("s")


@given(st.lists(st.text(max_size=3)), st.randoms(use_true_random=False))
def test_order_and_repetition_of_results_do_not_matter(results: list[str], random: Any) -> None:
    mixed = results + random.choices(results, k=3) if results else []
    random.shuffle(mixed)
    assert key_of(*mixed) == key_of(*results)


@given(st.sets(st.text(max_size=3)), st.sets(st.text(max_size=3)))
def test_different_sets_of_results_have_different_keys(one: set[str], other: set[str]) -> None:
    assert (key_of(*one) == key_of(*other)) == (one == other)


def test_messages_of_users_and_agents_are_not_results() -> None:
    seen = SeenResults()
    seen.add([Message(role="user", content="a"), Message(role="assistant", content="b")])
    assert seen.key_with("s") == key_of() != key_of("a")


def test_parallel_and_successive_calls_give_equal_keys() -> None:
    first, second = call("get_state", path="a"), call("get_state", path="b")
    both = calls(("get_state", {"path": "b"}), ("get_state", {"path": "a"}))
    made = collect([[first, second, text("x")], [both, text("x")]], "python_state", initial_state={"a": 1, "b": 2})
    assert made[0][2].step_info["state_and_results"] == made[1][1].step_info["state_and_results"]


# Resources


GAMES = {"gymnasium", "sokoban", "webshop", "textworld", "alfworld", "alfworld_real", "openenv"}


def test_games_declare_that_the_state_key_covers_the_results() -> None:
    declared = {name: resource_class(name).state_key_covers_results for name in BUILT_IN}
    # `http` and `composite` decide for each instance.
    data = {"sqlite", "filesystem", "python_state", "mcp"}
    assert declared == {name: name not in data for name in [*GAMES, *data, "harbor", "http", "composite"]}


@pytest.mark.parametrize(
    ("resource", "config"),
    [("gymnasium", {"env_id": "FrozenLake-v1"}), ("sokoban", {}), ("alfworld", {}), ("webshop", {})],
)
def test_games_keep_the_state_as_their_anchor(resource: str, config: dict[str, Any]) -> None:
    task = TaskDefinitionModel(
        name="t", resource_type=resource, base_resource_config=config, max_episode_steps=12, on_text="end"
    )
    steps = anyio.run(RLRolloutWorker(task, RandomPolicy()).run_group, 3)
    assert all(step.step_info["state_and_results"] is None for episode in steps for step in episode)
    recorded = [step.step_info["state_key"] for episode in steps for step in episode]
    assert hash_steps(steps) == hash_steps(steps, "state_key") == recorded


class Room(PythonStateResource):
    async def state_key(self) -> str:
        return "room"


class Diary(ForkableResource):
    state_key_covers_results = False

    async def state_key(self) -> str:
        return "diary"


def test_resource_with_its_own_state_key_is_compared_by_it_unless_declared() -> None:
    assert not PythonStateResource.state_key_covers_results and Room.state_key_covers_results
    assert not Diary.state_key_covers_results


@pytest.mark.parametrize("parts", [["gymnasium", "sqlite"], ["gymnasium"]])
def test_composite_covers_the_results_if_all_its_parts_do(parts: list[str]) -> None:
    configs = {"gymnasium": {"env_id": "FrozenLake-v1"}, "sqlite": {"seed_sql": SHOP}}
    resources = [{"name": name, "type": name, "config": configs[name]} for name in parts]
    made = collect([[text("x")]], "composite", resources=resources)
    assert (made[0][0].step_info["state_and_results"] is None) == ("sqlite" not in parts)


# Warnings


@pytest.mark.parametrize("state_hash", ["state_key", {"name": "last_match", "pattern": "nothing"}])
def test_hash_that_merges_states_of_an_episode_warns_with_the_fix(
    group: EpisodeGroup, tmp_path: Path, state_hash: Any
) -> None:
    scored = [score(episode.id_, value) for episode, value in zip(group.episodes, SCORES, strict=True)]
    run = make_run(tmp_path, group.episodes, scored)
    (warning,) = assign_credit(run, CreditModel.model_validate({"state_hash": state_hash})).warnings
    assert warning.startswith("12 of 12 steps share their state") and warning.endswith("set it to state_and_results")
    for separating in ("state_and_results", None, ["state_key", "state_and_results"]):
        assert assign_credit(run, CreditModel.model_validate({"state_hash": separating})).warnings == []


@pytest.mark.parametrize(
    ("state_hash", "infos", "name"),
    [
        (None, [{"state_key": "s", "state_and_results": "k"}], "state_and_results"),
        (None, [{"state_key": "s", "state_and_results": None}], "state_key"),
        (None, [{}], "observation_text"),
        ("state_key", [{"state_and_results": "k"}], "state_key"),
        ({"name": "last_messages", "count": 2}, [], "last_messages (count 2)"),
        (
            ["observation_text", {"name": "last_match", "pattern": "a+"}],
            [],
            "observation_text, last_match (pattern a+)",
        ),
        ("/home/user/hash.py:key", [], "hash.py:key"),
        (key_of, [], "key_of"),
    ],
)
def test_name_of_the_hash_in_use(state_hash: Any, infos: list[dict[str, Any]], name: str) -> None:
    assert describe_state_hash(state_hash, infos) == name


def test_estimator_without_states_has_no_state_hash(group: EpisodeGroup, tmp_path: Path) -> None:
    scored = [score(episode.id_, value) for episode, value in zip(group.episodes, SCORES, strict=True)]
    credit = assign_credit(make_run(tmp_path, group.episodes, scored), CreditModel(estimator="rloo"))
    assert credit.section["state_hash"] is None and credit.warnings == []


def test_rows_for_trainers_name_the_default_state(group: EpisodeGroup) -> None:
    assert "state_and_results" in STATE_HASHES
    assigner = CreditAssigner("gigpo")
    batch = assigner.assign(group.episodes, [Scored(episode.id_) for episode in group.episodes])
    assert [row["state_key"] for row in batch.rows()] == readable_keys(group)
