"""Counterfactual values: located mistakes, coverage of intervals, repeated episodes, and the cost of continuations.

    .venv/bin/python benchmarks/counterfactual.py [--episodes 300] [--lakes 400] [--replays 200]

1. Planted mistakes: an expert plays household and Sokoban problems, and one random step is replaced by an action after
   which the expert can no longer finish in time (verified by letting it try). `why` should name this step, and no step
   of untouched episodes.
2. Coverage: on FrozenLake, the true success probability of a random policy before each step is computed by dynamic
   programming, and compared with the measured intervals.
3. Repeated episodes: continued from each step with the recorded actions, an episode must have the recorded return.
4. Cost: continuations per second by resource, with the policy session, and the time of `why` for an episode of 20
   steps, with a scripted policy and with a model behind an HTTP server that answers at once.

Prints one JSON line per part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from instant_server import running_server  # noqa: E402

from reward_kit import (  # noqa: E402  # noqa: E402
    AgentPolicy,
    EvaluateResult,
    Message,
    PolicyOutput,
    RLRolloutWorker,
    TaskDefinitionModel,
    reward_function,
)
from reward_kit.agent import (  # noqa: E402
    EpisodeContext,
    ExpertPolicy,
    OpenAIAgentPolicy,
    RandomPolicy,
    ScriptedPolicy,
)
from reward_kit.environments import ReplayForkResource, StepOutcome, tool_spec  # noqa: E402
from reward_kit.environments.base import ForkableResource, ToolSpec  # noqa: E402
from reward_kit.episodes import SingleAgentEpisode  # noqa: E402
from reward_kit.reward_agent import AsyncRewardAgent  # noqa: E402
from reward_kit.runs.counterfactual import CounterfactualWorker  # noqa: E402
from reward_kit.runs.statistics import wilson_bounds  # noqa: E402

SLACK = {"alfworld": 0, "sokoban": 2}
"""The number of steps that an episode may take beyond the expert's. A household episode has
none, because there every mistake can be undone."""
SIDE = 4
LAKE = "SFFFFHFHFFFHHFFG"
TOWARDS_GOAL = 0.55


@reward_function
def solved(messages: list[Message], environment_return: float | None = None, **_: Any) -> EvaluateResult:
    """Score 1 if the environment rewarded the end of the episode."""
    return EvaluateResult(score=float((environment_return or 0.0) > 0.5), reason="environment")


def task(kind: str, config: dict[str, Any], steps: int, **fields: Any) -> TaskDefinitionModel:
    return TaskDefinitionModel(
        name=kind, resource_type=kind, base_resource_config=config, max_episode_steps=steps, **fields
    )


# Planted mistakes


async def expert_solves(resource: ForkableResource, steps: int) -> bool:
    """Return whether the expert finishes from here within some steps."""
    for _ in range(steps):
        action = await resource.expert_action()
        if action is None:
            return False
        outcome = await resource.step(action["name"], action["arguments"])
        if outcome.terminated or outcome.truncated:
            return (outcome.reward or 0.0) > 0.5
    return False


class Planted(AgentPolicy):
    """An expert that makes a mistake in step `at`, if some action there is a mistake."""

    is_free = True

    def __init__(self, at: int | None, steps: int, seed: int, resource: ForkableResource | None = None) -> None:
        self.at, self.steps, self.seed, self.resource = at, steps, seed, resource
        self.planted: list[int] = []
        self.step = 0

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        session = Planted(self.at, self.steps, self.seed, context.resource)
        session.planted = self.planted
        return session

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        assert self.resource is not None
        step, self.step = self.step, self.step + 1
        if step == self.at:
            actions = list(await self.resource.admissible_actions() or ())
            random.Random(self.seed).shuffle(actions)
            for action in actions:
                fork = await self.resource.fork()
                outcome = await fork.step(action["name"], action["arguments"])
                is_fatal = not outcome.terminated and not await expert_solves(fork, self.steps - step - 1)
                await fork.close()
                if is_fatal:
                    self.planted.append(step)
                    return PolicyOutput({"type": "tool_call", **action})
        action = await self.resource.expert_action()
        return PolicyOutput({"type": "tool_call", **action} if action else {"type": "terminate"})


async def planted_mistakes(kind: str, count: int, continuations: int) -> dict[str, Any]:
    """Measure episodes with a planted mistake, and the same number of untouched ones."""
    named = untouched_named = planted_episodes = untouched_episodes = tried = 0
    used: list[int] = []
    began = time.process_time()
    async with AsyncRewardAgent(solved) as rewards:
        seed = 0
        while planted_episodes < count or untouched_episodes < count:
            seed += 1
            config = {"index": seed % 1000} if kind == "alfworld" else {}
            plain = RLRolloutWorker(task(kind, config, 60), ExpertPolicy())
            expert = await plain.collect_episode(seed=seed)
            if expert.get_return() <= 0.5 or len(expert) < 3:
                continue
            steps = len(expert) + SLACK[kind]
            definition = task(kind, config, steps)
            if untouched_episodes < count:
                worker = RLRolloutWorker(definition, ExpertPolicy())
                episode = await worker.collect_episode(seed=seed)
                result = await CounterfactualWorker(worker, rewards, seed=seed).measure(episode, 1.0, continuations)
                untouched_episodes += 1
                untouched_named += bool(result.search.changes())
            if planted_episodes == count:
                continue
            tried += 1
            policy = Planted(random.Random(seed).randrange(len(expert)), steps, seed)
            episode = await RLRolloutWorker(definition, policy).collect_episode(seed=seed)
            if not policy.planted or episode.get_return() > 0.5:
                continue  # no action of this step is a mistake
            worker = RLRolloutWorker(definition, ExpertPolicy())
            result = await CounterfactualWorker(worker, rewards, seed=seed).measure(episode, 0.0, continuations)
            changes = result.search.changes()
            planted_episodes += 1
            used.append(len(result.continuations))
            is_named = [(one.before.step, one.is_located) for one in changes] == [(policy.planted[0], True)]
            named += is_named
    return {
        "part": "planted mistakes",
        "resource": kind,
        "episodes": count,
        "named_exactly": named / count,
        "untouched_without_a_step": 1 - untouched_named / count,
        "bounds_95": wilson_bounds(named / count, count),
        "steps_without_a_possible_mistake": tried - count,
        "continuations_per_episode": sum(used) / len(used),
        "cpu_s": round(time.process_time() - began, 1),
    }


# Coverage


class Wanderer(AgentPolicy):
    """Moves right or down with a fixed probability, else anywhere."""

    is_free = True

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        return Wanderer(context.seed)

    async def resume(self, turns: Sequence[Any]) -> None:
        """Do nothing: each action is random."""

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        names = ("right", "down") if self.random.random() < TOWARDS_GOAL else ("left", "down", "right", "up")
        arguments = {"action": self.random.choice(names)}
        return PolicyOutput({"type": "tool_call", "name": "act", "arguments": arguments})


def true_values(horizon: int) -> list[list[float]]:
    """Return V[t][cell], the success probability of `Wanderer` with `horizon - t` steps left, on ice without slips."""
    moves = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
    chance = dict.fromkeys(moves, (1 - TOWARDS_GOAL) / 4)
    chance["right"] += TOWARDS_GOAL / 2
    chance["down"] += TOWARDS_GOAL / 2
    values = [[0.0] * 16 for _ in range(horizon + 1)]
    for t in reversed(range(horizon)):
        for cell in range(16):
            if LAKE[cell] in "HG":
                continue
            row, column = divmod(cell, SIDE)
            for name, (down, right) in moves.items():
                after = min(max(row + down, 0), 3) * SIDE + min(max(column + right, 0), 3)
                values[t][cell] += chance[name] * (1.0 if LAKE[after] == "G" else values[t + 1][after])
    return values


async def coverage(count: int, continuations: int) -> dict[str, Any]:
    """Compare the measured intervals with the true values."""
    horizon = 14
    config = {"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}}
    truth = true_values(horizon)
    worker = RLRolloutWorker(task("gymnasium", config, horizon), Wanderer())
    covered = measured = alarms = 0
    async with AsyncRewardAgent(solved) as rewards:
        for seed in range(count):
            episode = await worker.collect_episode(seed=seed)
            counterfactual = CounterfactualWorker(worker, rewards, seed=seed)
            result = await counterfactual.measure(episode, float(episode.get_return() > 0.5), continuations)
            cells = cells_of(episode)
            values = [truth[t][cells[t]] for t in range(len(episode))]
            for value in result.values:
                if 0.0 < values[value.step] < 1.0:
                    low, high = value.bounds()
                    covered += low <= values[value.step] <= high
                    measured += 1
            ends = [*values, float(result.passed)]
            alarms += sum(ends[one.before.step] == ends[one.after.step] for one in result.search.changes())
    return {
        "part": "coverage",
        "episodes": count,
        "intervals": measured,
        "coverage": covered / measured,
        "bounds_95": wilson_bounds(covered / measured, measured),
        "changes_without_a_true_one": alarms,
    }


def cells_of(episode: SingleAgentEpisode) -> list[int]:
    """Return the cell before each step, by repeating the moves."""
    row = column = 0
    cells = []
    for t in range(len(episode)):
        cells.append(row * SIDE + column)
        name = episode.get_actions(t)["arguments"]["action"]
        row = min(max(row + {"down": 1, "up": -1}.get(name, 0), 0), 3)
        column = min(max(column + {"right": 1, "left": -1}.get(name, 0), 0), 3)
    return cells


# Repeated episodes and cost

KINDS: dict[str, dict[str, Any]] = {
    "alfworld": {},
    "sokoban": {},
    "webshop": {},
    "gymnasium": {"env_id": "FrozenLake-v1"},
    "sqlite": {},
    "python_state": {"initial_state": {"x": 0}},
}


class Dice(ReplayForkResource):
    """Throws dice, and forks by repeating the throws."""

    async def _setup(self, config: dict[str, Any]) -> None:
        self.random, self.throws = random.Random(0), list[int]()

    async def _reset(self, seed: int | None) -> None:
        self.random, self.throws = random.Random(seed), []

    def _reseed(self, seed: int | None) -> None:
        self.random = random.Random(seed)

    async def _step(self, action_name: str, action_params: dict[str, Any]) -> StepOutcome:
        self.throws.append(self.random.randint(1, 6))
        return StepOutcome({"throws": self.throws}, reward=float(self.throws[-1]))

    async def get_tools_spec(self) -> list[ToolSpec]:
        return [tool_spec("throw", "Throw a die.")]

    async def state_key(self) -> str:
        return str(self.throws)


async def repeats(count: int) -> dict[str, Any]:
    """Continue episodes from each step with their recorded actions, and compare the conversations and returns.

    A language model that decodes greedily repeats its actions and tokens by itself.
    """
    equal = continued = episodes = 0
    dice = Dice()
    await dice.setup({})
    tasks = {kind: task(kind, config, 10, noise="shared") for kind, config in KINDS.items()}
    tasks["dice"] = TaskDefinitionModel(name="dice", max_episode_steps=10, noise="shared")
    for kind, definition in tasks.items():
        for seed in range(-(-count // len(tasks))):
            worker = RLRolloutWorker(definition, RandomPolicy(), environment=dice if kind == "dice" else None)
            episode = await worker.collect_episode(seed=seed)
            script = ScriptedPolicy([episode.get_actions(t) for t in range(len(episode))])
            episodes += 1
            for step in range(len(episode)):
                (again,) = await worker.continue_from(episode, step, policy=script)
                continued += 1
                equal += (
                    again.environment_rewards() == episode.environment_rewards() and again.messages == episode.messages
                )
    worker = with_tokens()
    for seed in range(-(-count // len(KINDS))):
        episode = await worker.collect_episode(seed=seed)
        episodes += 1
        for step in range(len(episode)):
            (again,) = await worker.continue_from(episode, step)
            continued += 1
            equal += again.messages == episode.messages and again.tokens.ids == episode.tokens.ids
    return {"part": "repeats", "episodes": episodes, "continuations": continued, "equal": equal / continued}


def with_tokens() -> RLRolloutWorker:
    """Return a worker for the household with the example's language model, which decodes greedily."""
    from reward_kit.agent import make_policy
    from reward_kit.rl.training.plan import load_plan

    folder = ROOT / "examples" / "alfworld_household"
    plan = load_plan(folder / "train.yaml")
    assert plan.config.policy is not None
    policy = make_policy("hf", {**plan.config.policy.options(), "temperature": 0.0}, folder)
    return RLRolloutWorker(plan.task.definition, policy)


async def cost(rounds: int = 300) -> list[dict[str, Any]]:
    """Time the starts of continuations and whole continuations of one step, by resource."""
    lines = []
    workers = {kind: RLRolloutWorker(task(kind, config, 20), RandomPolicy()) for kind, config in KINDS.items()}
    for kind, worker in {**workers, "alfworld, policy with tokens": with_tokens()}.items():
        episode = await worker.collect_episode(seed=1)
        async with worker.branch(episode, len(episode) - 1) as branch:
            await branch.finish(await branch.episode(0))
            began = time.perf_counter()
            for index in range(rounds):
                await branch.finish(await branch.episode(index))
            forked = time.perf_counter()
            for index in range(rounds):
                await worker.collect_episode(branch, index)
            ended = time.perf_counter()
        lines.append(
            {
                "part": "cost",
                "resource": kind,
                "steps_before": len(episode) - 1,
                "forks_per_s": round(rounds / (forked - began)),
                "continuations_of_one_step_per_s": round(rounds / (ended - forked)),
            }
        )
    return lines


async def cost_of_why(continuations: int) -> list[dict[str, Any]]:
    """Time `why` for an episode of 20 steps, with a scripted policy and with a model behind a local server."""
    call = {"type": "tool_call", "name": "set_value"}
    actions = [{**call, "arguments": {"path": "x", "value": number}} for number in range(20)]
    definition = task("python_state", {"initial_state": {"x": 0}}, 20, initial_user_prompt="Count.")
    lines = []
    with running_server(21) as url:
        model = OpenAIAgentPolicy("bench", base_url=url, api_key="sk-none")
        for name, policy in (("scripted", ScriptedPolicy(actions)), ("instant HTTP server", model)):
            worker = RLRolloutWorker(definition, policy)
            episode = await worker.collect_episode()
            async with AsyncRewardAgent(solved) as rewards:
                began, cpu = time.perf_counter(), time.process_time()
                result = await CounterfactualWorker(worker, rewards).measure(episode, 0.0, continuations)
                used = len(result.continuations)
                lines.append(
                    {
                        "part": "cost of why",
                        "policy": name,
                        "steps": len(episode),
                        "continuations": used,
                        "steps_taken": sum(one.steps for one in result.continuations),
                        "seconds": round(time.perf_counter() - began, 2),
                        "cpu_s": round(time.process_time() - cpu, 2),
                    }
                )
        await model.close()
    return lines


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=300, help="planted and untouched episodes per resource")
    parser.add_argument("--lakes", type=int, default=400, help="episodes for the coverage")
    parser.add_argument("--replays", type=int, default=200, help="repeated episodes")
    parser.add_argument("--continuations", type=int, default=160, help="continuations per episode")
    options = parser.parse_args()

    def show(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)

    for line in [*await cost(), *await cost_of_why(options.continuations)]:
        show(line)
    show(await repeats(options.replays))
    show(await coverage(options.lakes, options.continuations))
    for kind in ("alfworld", "sokoban"):
        show(await planted_mistakes(kind, options.episodes, options.continuations))


if __name__ == "__main__":
    asyncio.run(main())
