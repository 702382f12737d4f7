"""The agent of the household example: tokenizer, demonstrations and training files."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from reward_kit.agent.policies.hf_policy import HFAgentPolicy
from reward_kit.agent.policy_interface import AgentPolicy, PolicyOutput
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.cli.main import program
from reward_kit.environments import household_problems as generator
from reward_kit.environments.base import ToolSpec
from reward_kit.environments.household_engine import HouseholdEngine, shortest_plan
from reward_kit.environments.household_problems import Problem, TaskType
from reward_kit.episodes import SingleAgentEpisode
from reward_kit.episodes.record import episode_from_record
from reward_kit.loading import load_module
from reward_kit.models import Message
from reward_kit.rl.model_kit.models import load_model, unknown_pieces
from reward_kit.rl.model_kit.sft import DemonstratingPolicy, Demonstrations, fit
from reward_kit.runs.tasks import load_task
from reward_kit.tokens import build_rows

EXAMPLE = Path(__file__).parent.parent / "examples" / "alfworld_household"
LOADED = load_model(EXAMPLE / "warm_start")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_module(str(EXAMPLE / "make_warm_start.py"))


def observations(engine: HouseholdEngine) -> Iterator[str]:
    """Return what an agent observes that goes everywhere, opens everything and takes what it finds."""
    yield engine.tables.introduction
    for place in engine.tables.go:
        yield engine.step(place).observation
        for verb in ("open ", "take ", "examine "):
            yield from (engine.step(command).observation for command in engine.admissible() if command.startswith(verb))
        yield from engine.admissible()


def test_tokenizer_knows_all_words_and_commands_differ_in_tokens() -> None:
    tokenizer, unknown = LOADED.tokenizer, Counter[str]()
    for problem in (generator.generate_problem("held_out", index, seed=5) for index in range(18)):
        engine = HouseholdEngine(problem)
        for text in set(observations(engine)):
            if not text.startswith("Nothing happens"):  # nobody reads it who can only do what is open
                unknown += unknown_pieces(tokenizer, [text])
        commands = engine.admissible()
        ids = {tuple(tokenizer.encode(command, add_special_tokens=False)) for command in commands}
        assert len(ids) == len(commands)
        assert {len(one) for one in ids} == {1}
    assert not unknown


def test_step_takes_fewer_than_seven_tokens(script: ModuleType) -> None:
    rows = script.demonstrations(LOADED.tokenizer, 20, seed=1, slips=0.0)
    steps = rows.batch["action_mask"].sum() / 2
    assert rows.batch["attention_mask"].sum() / steps < 7


def test_demonstrations_solve_problems_by_searching(script: ModuleType) -> None:
    asked, draws = list(script.problems(60, seed=2)), random.Random(0)
    found = [script.demonstration(one, draws, slips=0.0) for one in asked]
    assert all(won(one, acts) for one, acts in zip(asked, found, strict=True))
    shortest = [shortest_plan(HouseholdEngine(one)) or [] for one in asked]
    assert sum(map(len, found)) > 1.2 * sum(map(len, shortest))  # it does not guess


def won(asked: Problem, acts: Sequence[Any]) -> bool:
    engine = HouseholdEngine(asked)
    return [engine.step(act.command).won for act in acts][-1]


def test_rare_types_are_almost_absent_from_the_problems(script: ModuleType) -> None:
    rare = {TaskType.HEAT, TaskType.COOL}
    made = list(script.problems(2_000, 1, rare=rare))
    of_type = Counter(one.task_type for one in made)
    assert len(made) == len({one.id for one in made}) == 2_000
    assert 0 < of_type[TaskType.HEAT] + of_type[TaskType.COOL] < 40
    assert min(of_type[kind] for kind in set(TaskType) - rare) > 480


class DemonstrationPolicy(AgentPolicy):
    """A policy that repeats a demonstration and reports which actions were slips."""

    def __init__(self, acts: Sequence[Any]) -> None:
        self._acts = iter(acts)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        act = next(self._acts, None)
        if act is None:
            return PolicyOutput({"type": "terminate"})
        call = {"type": "tool_call", "name": "act", "arguments": {"command": act.command}}
        return PolicyOutput(call, raw_policy_output="slip" if act.is_slip else None)


async def test_demonstration_rows_equal_rows_of_recorded_episodes(script: ModuleType) -> None:
    """Rows from the script's text lookup equal the framework's rows of the same episodes."""
    asked, draws = list(script.problems(12, seed=3)), random.Random(5)
    played = [(one, script.demonstration(one, draws)) for one in asked]
    writes = Demonstrations(LOADED.tokenizer, action_format="bare", tools_in_prompt=False, constrain=True)
    episodes = []
    for one, acts in played:
        task = load_task(EXAMPLE / "training.yaml", {"base_resource_config.problem": one.to_json()}).definition
        policy = DemonstratingPolicy(
            DemonstrationPolicy(acts), writes, taught=lambda output: output.raw_policy_output != "slip"
        )
        episodes.append(await RLRolloutWorker(task, policy).collect_episode(seed=0))
    expected = build_rows(episodes, pad_token_id=LOADED.tokenizer.pad_token_id)
    found = script.Scribe(LOADED.tokenizer).rows(played)
    for key, values in found.batch.items():
        np.testing.assert_array_equal(values, expected.batch[key], key)
    assert list(found.non_tensor_batch["allowed_ids"]) == list(expected.non_tensor_batch["allowed_ids"])
    assert 0 < sum(act.is_slip for _, acts in played for act in acts) < sum(len(acts) for _, acts in played)


def test_model_weights_are_determined_by_the_seed(script: ModuleType) -> None:
    def made(seed: int) -> dict[str, torch.Tensor]:
        model = script.small_llama(LOADED.tokenizer, seed)
        rows = script.demonstrations(LOADED.tokenizer, 40, seed=seed)
        fit(model, rows, replace(script.SFT, seed=seed))
        return dict(model.state_dict())

    first, again, other = made(0), made(0), made(1)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not torch.equal(first["model.norm.weight"], other["model.norm.weight"])


def test_warm_start_solves_some_development_problems() -> None:
    async def play() -> list[SingleAgentEpisode]:
        task = load_task(EXAMPLE / "training.yaml", {"base_resource_config.split": "development"}).definition
        options = {"action_format": "bare", "tools_in_prompt": False, "constrain": True, "max_new_tokens": 8}
        policy = HFAgentPolicy(LOADED.model, LOADED.tokenizer, temperature=0.0, max_sessions=32, **options)
        worker = RLRolloutWorker(task, policy)
        episodes = await asyncio.gather(*(worker.collect_episode(seed=seed) for seed in range(32)))
        await policy.close()
        return episodes

    episodes = asyncio.run(play())
    assert not any(episode.custom_data["failure"] for episode in episodes)
    assert sum(episode.get_return() for episode in episodes) >= 8  # chance does none
    assert all(len(episode.tokens.segments) == 1 for episode in episodes)


def test_example_agent_runs_and_records_its_tokens(tmp_path: Path) -> None:
    asked = ["run", str(EXAMPLE / "agent.yaml"), "--limit", "12", "--json", "--display", "none"]
    asked += ["--log-dir", str(tmp_path), "-T", "policy.max_sessions=12"]
    done = CliRunner().invoke(program, asked)
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    (played,) = said["policies"]
    assert (played["scored"], played["errors"]) == (12, {})
    lines = (Path(said["run"]) / "episodes.jsonl").read_text(encoding="utf-8").splitlines()
    for record in map(json.loads, lines):
        tokens = episode_from_record(record).tokens
        sampled = [logprob for turn in tokens.turns().values() for logprob in turn.logprobs]
        assert len(tokens.spans) == record["num_steps"]
        assert all(logprob <= 0.0 for logprob in sampled) and min(sampled) < 0.0


def test_train_file_dry_run_succeeds() -> None:
    done = CliRunner().invoke(program, ["train", str(EXAMPLE / "train.yaml"), "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "gigpo" in done.output
