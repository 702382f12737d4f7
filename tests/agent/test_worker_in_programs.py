"""Test `RLRolloutWorker` in user programs: groups, given environments and tool methods."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import pytest

from reward_kit import Task
from reward_kit.agent import AgentPolicy, PolicyOutput, RLRolloutWorker, ScriptedPolicy
from reward_kit.environments import ForkableResource, StepOutcome, tool
from reward_kit.errors import ConfigError, EnvironmentFailure, PolicyError, ProviderError
from reward_kit.models import TaskDefinitionModel
from reward_kit.rl_helpers import system_apply_gigpo_to_batch_steps
from reward_kit.tokens import build_rows

GUESS = {"type": "tool_call", "name": "guess", "arguments": {"number": "1"}}
END = {"type": "terminate"}


class Dice(ForkableResource):
    """A number from 1 to 6 to be guessed; `made` counts the instances, `closed` those closed."""

    fork_kind = "native"
    made = closed = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.number, self.guesses = 0, 0

    async def setup(self, config: Any) -> None: ...

    async def reset(self, seed: int | None = None) -> None:
        self.number, self.guesses = random.Random(seed).randint(1, 6), 0

    async def fork(self) -> ForkableResource:
        twin = type(self)()
        vars(twin).update(vars(self))
        return twin

    async def state_key(self) -> str:
        return f"{self.number} after {self.guesses}"

    async def get_observation(self) -> Any:
        return "Guess a number from 1 to 6."

    async def close(self) -> None:
        type(self).closed += 1

    @tool
    async def guess(self, number: int, comment: str = "") -> StepOutcome:
        """Guess the number.

        Args:
            number: from 1 to 6.
            comment: anything.
        """
        assert type(number) is int
        self.guesses += 1
        return StepOutcome("right" if number == self.number else "wrong", terminated=number == self.number)

    @tool
    def peek(self) -> str:
        """Look at the number."""
        return f"it is {self.number}"


class SoleDice(Dice):
    fork_kind = "none"


class SeededPolicy(AgentPolicy):
    """A policy that guesses once, at random with the episode's seed."""

    def __init__(self, seeds: list[int]) -> None:
        self.seeds = seeds

    async def open(self, context: Any) -> AgentPolicy:
        self.seeds.append(context.seed)
        return _Guesser(random.Random(context.seed))

    async def get_action(self, observation: Any, available_tools_specs: Any = None) -> PolicyOutput:
        raise NotImplementedError


class _Guesser(SeededPolicy):
    def __init__(self, chances: random.Random) -> None:
        self.chances = chances

    async def get_action(self, observation: Any, available_tools_specs: Any = None) -> PolicyOutput:
        done = any(message.role == "tool" for message in observation)
        number = self.chances.randint(1, 6)
        guess = {"type": "tool_call", "name": "guess", "arguments": {"number": number}}
        return PolicyOutput({"type": "terminate"} if done else guess)


class Unreachable(AgentPolicy):
    """A policy that fails before its first action in every episode except the listed ones."""

    def __init__(self, works: tuple[int, ...] = ()) -> None:
        self.works = works

    async def open(self, context: Any) -> AgentPolicy:
        if context.rollout_index in self.works:
            return ScriptedPolicy([END])
        raise ProviderError("the endpoint does not answer")

    async def get_action(self, observation: Any, available_tools_specs: Any = None) -> PolicyOutput:
        raise NotImplementedError


def group_ids(batch: Any) -> list[str]:
    return [steps[0].step_info["group_id"] for steps in batch]


def advantages(batch: Any) -> list[float]:
    scores = [float("right" in str(steps[0].resulting_messages_history[-1].text)) for steps in batch]
    assert 0 < sum(scores) < len(scores), "the seeds of this test give both outcomes"
    credited = system_apply_gigpo_to_batch_steps(batch, scores, 0.5, 1.0, lambda history: "start")
    return [steps[0].advantage for steps in credited]


class TestGroups:
    async def test_repeated_episodes_are_one_group_with_different_policy_seeds(self):
        seeds: list[int] = []
        worker = RLRolloutWorker(Dice, SeededPolicy(seeds))
        batch = [(await worker.run_episode())[0] for _ in range(12)]
        assert len(set(group_ids(batch))) == 1
        assert len(set(seeds)) == 12
        assert len({steps[0].step_info["state_key"] for steps in batch}) == 1
        found = advantages(batch)
        assert max(found) > 0 > min(found)

    async def test_concurrent_episodes_are_one_group(self):
        seeds: list[int] = []
        worker = RLRolloutWorker(Dice, SeededPolicy(seeds))
        results = await asyncio.gather(*(worker.run_episode() for _ in range(8)))
        assert len(set(group_ids([steps for steps, _, _ in results]))) == 1
        assert len(set(seeds)) == 8

    async def test_each_seed_is_its_own_group(self):
        worker = RLRolloutWorker(Dice, SeededPolicy([]))
        batch = [(await worker.run_episode(seed=seed))[0] for seed in (0, 1, 0, 1)]
        ids = group_ids(batch)
        assert ids[0] == ids[2] != ids[1] == ids[3]

    async def test_run_group_returns_batches_for_the_estimators(self):
        Dice.made = Dice.closed = 0
        group = await RLRolloutWorker(Dice, SeededPolicy([])).run_group(12)
        assert Dice.made == Dice.closed == 13, "one start and its forks"
        assert group.failures == [None] * 12
        assert group.messages == [list(steps[-1].resulting_messages_history) for steps in group]
        found = advantages(group)
        assert max(found) > 0 > min(found)
        assert [len(episode) for episode in group.episodes] == [len(steps) for steps in group]
        with pytest.raises(ConfigError, match=r"such as the episodes of the group that run_group returns"):
            build_rows(group, pad_token_id=0)  # type: ignore[arg-type]

    async def test_consecutive_run_group_calls_use_different_seeds(self):
        seeds: list[int] = []
        worker = RLRolloutWorker(Dice, SeededPolicy(seeds))
        batch = [*await worker.run_group(3), *await worker.run_group(2)]
        assert len(set(group_ids(batch))) == 1
        assert len(set(seeds)) == 5

    async def test_new_worker_repeats_the_same_episodes(self):
        first, second = [
            [steps[0].action_taken for steps in await RLRolloutWorker(Dice, SeededPolicy([])).run_group(6)]
            for _ in range(2)
        ]
        assert first == second

    async def test_episode_with_another_start_state_gets_another_group(self, caplog):
        class Drifting(Dice):
            async def reset(self, seed: int | None = None) -> None:
                self.number, self.guesses = type(self).made, 0

        worker = RLRolloutWorker(Drifting, ScriptedPolicy([GUESS, END]))
        with caplog.at_level(logging.WARNING):
            batch = [(await worker.run_episode())[0] for _ in range(2)]
        assert len(set(group_ids(batch))) == 2
        assert "run_group(n) starts all episodes of a group in the same state" in caplog.text
        assert len(set(group_ids(await worker.run_group(3)))) == 1

    async def test_worker_runs_in_several_event_loops(self):
        worker = RLRolloutWorker(Dice, SeededPolicy([]))

        def run() -> Any:
            return asyncio.run(worker.run_episode())[0]

        batch = [await asyncio.to_thread(run) for _ in range(2)]
        assert len(set(group_ids(batch))) == 1


class TestFailures:
    async def test_failure_before_the_first_step_raises(self):
        with pytest.raises(ProviderError, match="the endpoint does not answer"):
            await RLRolloutWorker(Dice, Unreachable()).run_episode()

    async def test_failure_after_the_first_step_is_on_the_last_step(self):
        class Stumbling(ScriptedPolicy):
            async def get_action(self, observation: Any, available_tools_specs: Any = None) -> PolicyOutput:
                if any(message.role == "tool" for message in observation):
                    raise KeyError("no such plan")
                return PolicyOutput(GUESS)

        steps, _, _ = await RLRolloutWorker(Dice, Stumbling([])).run_episode()
        assert "no such plan" in steps[-1].step_info["failure"]["message"]

    async def test_group_keeps_the_successful_episodes(self):
        group = await RLRolloutWorker(Dice, Unreachable(works=(1, 2))).run_group(3)
        assert list(map(len, group)) == [0, 1, 1]
        assert group.failures[0] is not None and group.failures[0].failure_class == "provider_error"
        assert group.failures[1:] == [None, None]
        credited = system_apply_gigpo_to_batch_steps(group, [None, 1.0, 0.0], 0.5, 1.0, lambda history: "start")
        assert credited[0] == [] and credited[1][0].advantage > 0 > credited[2][0].advantage

    async def test_group_without_any_step_raises(self):
        with pytest.raises(ProviderError):
            await RLRolloutWorker(Dice, Unreachable()).run_group(3)

    async def test_bug_in_a_policy_is_a_policy_error(self):
        class Buggy(AgentPolicy):
            async def get_action(self, observation: Any, available_tools_specs: Any = None) -> PolicyOutput:
                return self.missing  # type: ignore[attr-defined]

        with pytest.raises(PolicyError, match="missing"):
            await RLRolloutWorker(Dice, Buggy()).run_episode()


@pytest.mark.parametrize(
    "output",
    [
        PolicyOutput({"type": "text", "content": "FINAL 7"}, raw_policy_output="<think>…</think>"),
        PolicyOutput({"type": "text", "content": "seven"}, raw_policy_output="FINAL 7"),
    ],
    ids=["content", "raw"],
)
async def test_termination_regex_searches_raw_output_and_text(output):
    class Fixed(AgentPolicy):
        async def get_action(self, observation: Any, available_tools_specs: Any = None) -> PolicyOutput:
            return output

    task = TaskDefinitionModel(name="t", termination_regex=r"FINAL \d", on_text="continue", max_episode_steps=3)
    steps, _, _ = await RLRolloutWorker(task, Fixed()).run_episode()
    assert len(steps) == 1 and steps[0].step_info["stop_reason"] == "termination_regex"


class TestGivenEnvironment:
    async def test_episodes_fork_the_current_state(self):
        dice = Dice()
        await dice.reset(0)
        dice.number, dice.guesses = 1, 4
        steps, _, _ = await RLRolloutWorker(_task(), ScriptedPolicy([GUESS]), environment=dice).run_episode()
        assert steps[0].step_info["state_key"] == "1 after 4"
        assert steps[0].step_info["terminated"]
        assert dice.guesses == 4

    async def test_changed_environment_begins_another_group(self):
        dice = Dice()
        await dice.reset(0)
        worker = RLRolloutWorker(_task(), ScriptedPolicy([GUESS, END]), environment=dice)
        batch = [(await worker.run_episode())[0]]
        dice.guesses = 2
        batch += await worker.run_group(2)
        ids = group_ids(batch)
        assert ids[0] != ids[1] == ids[2]

    async def test_environment_without_forks_runs_one_episode_at_a_time(self):
        SoleDice.closed = 0
        dice = SoleDice()
        await dice.reset(0)
        dice.guesses = 3
        worker = RLRolloutWorker(_task(), ScriptedPolicy([GUESS, END]), environment=dice)
        first, _, _ = await worker.run_episode()
        assert first[0].step_info["state_key"].endswith("after 3"), "the present state"
        results = await asyncio.gather(*(worker.run_episode() for _ in range(3)))
        assert {steps[0].step_info["state_key"][1:] for steps, _, _ in results} == {" after 0"}
        assert SoleDice.closed == 0, "its owner closes it"

    async def test_environment_without_forks_is_released_after_a_failure(self):
        class Broken(SoleDice):
            async def reset(self, seed: int | None = None) -> None:
                raise OSError("gone")

        worker = RLRolloutWorker(_task(), ScriptedPolicy([GUESS, END]), environment=Broken())
        await worker.run_episode()
        for _ in range(2):
            with pytest.raises(EnvironmentFailure, match="gone"):
                await worker.run_episode()

    async def test_task_provides_its_samples_and_tools(self):
        task = Task("dice", resource=Dice, dataset=[{"name": "Ada"}], initial_user_prompt="Hello {{ name }}")
        _, messages, _ = await RLRolloutWorker(task, ScriptedPolicy([END])).run_episode()
        assert messages[0].text == "Hello Ada"

    def test_invalid_task_argument_is_rejected(self):
        with pytest.raises(ConfigError, match=r"must be a Task, a TaskDefinitionModel or a subclass"):
            RLRolloutWorker("task.yaml", ScriptedPolicy([END]))  # type: ignore[arg-type]

    @pytest.mark.parametrize("arguments", [{"environment": Dice}, {"agent_policy": ScriptedPolicy}])
    def test_class_instead_of_an_instance_is_rejected(self, arguments):
        with pytest.raises(ConfigError, match=r"is the class .*; pass an instance"):
            RLRolloutWorker(_task(), **{"agent_policy": ScriptedPolicy([END]), **arguments})

    async def test_final_state_must_be_a_state_snapshot(self):
        class Careless(Dice):
            async def final_state(self) -> Any:
                return {"number": self.number}

        steps, _, _ = await RLRolloutWorker(Careless, ScriptedPolicy([END])).run_episode()
        assert "must return a StateSnapshot" in steps[-1].step_info["failure"]["message"]


class TestToolMethods:
    def test_unknown_fork_kind_is_rejected(self):
        with pytest.raises(ConfigError, match=r"Broken\.fork_kind must be one of .*got 'nativ'"):

            class Broken(Dice):
                fork_kind = "nativ"  # type: ignore[assignment]

    def test_tool_decorator_takes_no_arguments(self):
        with pytest.raises(ConfigError, match="@tool takes no arguments"):
            tool("guess")  # type: ignore[arg-type]

    async def test_unresolvable_annotation_names_the_tool(self):
        class Broken(Dice):
            @tool
            def odd(self, size: Sise) -> str:  # type: ignore[name-defined]  # noqa: F821
                """Take a size."""
                return "odd"

        with pytest.raises(ConfigError, match=r"tool Broken\.odd: NameError"):
            await Broken().get_tools_spec()

    async def test_signature_defines_the_schema(self):
        specs = {spec["function"]["name"]: spec["function"] for spec in await Dice().get_tools_spec()}
        assert list(specs) == ["guess", "peek"]
        assert specs["guess"]["description"] == "Guess the number."
        assert specs["guess"]["parameters"]["required"] == ["number"]
        assert specs["guess"]["parameters"]["properties"]["number"] == {
            "type": "integer",
            "description": "from 1 to 6.",
        }

    async def test_arguments_are_converted_and_invalid_ones_rejected(self):
        dice = Dice()
        await dice.reset(0)
        assert (await dice.step("guess", {"number": str(dice.number)})).terminated
        assert (await dice.step("peek", {})).observation == f"it is {dice.number}"
        for arguments in ({"number": "three"}, {}, {"number": 1, "colour": "red"}):
            steps, messages, _ = await RLRolloutWorker(
                Dice, ScriptedPolicy([{**GUESS, "arguments": arguments}, END])
            ).run_episode()
            assert messages[2].text.startswith("Error: tool 'guess': "), messages[2].text
            assert steps[0].step_info["is_action_valid"] is False

    async def test_unknown_tool_is_an_error_message_to_the_agent(self):
        _, messages, _ = await RLRolloutWorker(Dice, ScriptedPolicy([{**GUESS, "name": "ges"}, END])).run_episode()
        assert messages[2].text == "Error: unknown tool 'ges'; did you mean 'guess'?"

    async def test_subclass_inherits_and_overrides_tools(self):
        class Loaded(Dice):
            @tool
            def peek(self) -> str:
                """Peek."""
                return "six, I swear"

            @tool
            def roll(self) -> str:
                """Roll again."""
                return "rolled"

        names = [spec["function"]["name"] for spec in await Loaded().get_tools_spec()]
        assert names == ["guess", "peek", "roll"]
        assert (await Loaded().step("peek", {})).observation == "six, I swear"

    def test_resource_must_define_get_tools_spec(self):
        class Bare(ForkableResource):
            async def setup(self, config: Any) -> None: ...
            async def reset(self, seed: int | None = None) -> None: ...
            async def state_key(self) -> str:
                return ""

        with pytest.raises(
            TypeError,
            match="Bare is abstract: it does not define get_tools_spec, step; declare its tools as methods with @tool",
        ):
            Bare()  # type: ignore[abstract]

    def test_superfluous_arguments_are_python_s_own_error(self):
        with pytest.raises(TypeError, match="argument"):
            Switch(1)  # type: ignore[call-arg]


def _task() -> TaskDefinitionModel:
    return TaskDefinitionModel(name="dice")


class Switch(ForkableResource):
    """A resource without options, so that it needs no `setup`."""

    async def reset(self, seed: int | None = None) -> None:
        self.on = False

    async def get_observation(self) -> Any:
        return "on" if self.on else "off"

    async def state_key(self) -> str:
        return str(self.on)

    @tool
    async def flip(self) -> str:
        """Flip it."""
        self.on = not self.on
        return await self.get_observation()


class TestResourceWithoutOptions:
    async def test_resource_runs_without_a_setup_method(self):
        flip = {"type": "tool_call", "name": "flip", "arguments": {}}
        steps, messages, _ = await RLRolloutWorker(Switch, ScriptedPolicy([flip, END])).run_episode()
        assert (len(steps), messages[-2].text) == (2, "on")

    async def test_options_are_rejected_if_setup_is_missing(self):
        with pytest.raises(ConfigError, match="Switch has no options; got colour"):
            await Switch().setup({"colour": "red"})


class TestPolicyCalls:
    """Tools that a policy calls while it acts."""

    class Peeking(AgentPolicy):
        """A policy that calls tools, then returns an action that does not report them."""

        def __init__(self, action: dict[str, Any]) -> None:
            self.action = action

        async def open(self, context: Any) -> AgentPolicy:
            session = type(self)(self.action)
            session.context = context  # type: ignore[attr-defined]
            return session

        async def get_action(self, observation: Any, available_tools_specs: Any = None) -> PolicyOutput:
            await self.context.call_tool("peek", {})  # type: ignore[attr-defined]
            await self.context.call_tool("no_such_tool", {})  # type: ignore[attr-defined]
            return PolicyOutput(self.action)

    @pytest.mark.parametrize("action", [{"type": "text", "content": "six"}, END, GUESS], ids=["text", "end", "call"])
    async def test_policy_calls_are_recorded_for_every_kind_of_action(self, action):
        task = TaskDefinitionModel(name="dice", resource_type=f"{__name__}:Dice", on_text="end", max_episode_steps=1)
        worker = RLRolloutWorker(task, self.Peeking(action))
        steps, messages, _ = await worker.run_episode()
        info = steps[0].step_info
        assert [call["name"] for call in info["own_calls"]] == ["peek", "no_such_tool"]
        assert [call["name"] for call in info["tools"]][:2] == ["peek", "no_such_tool"]
        assert "unknown tool" in info["tools"][1]["error"]
        calls = 1 if action is GUESS else 0
        assert sum(message.role == "tool" for message in messages) == calls
