"""The household's own agent: what its tokens keep, what its demonstrations show, and that its files fit together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from reward_kit.agent.policies.hf_policy import HFAgentPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.cli.main import program
from reward_kit.environments.household import generator
from reward_kit.environments.household.native import HouseholdEngine
from reward_kit.episodes import SingleAgentEpisode
from reward_kit.loading import load_module
from reward_kit.rl.model_kit import load_model, unknown_pieces
from reward_kit.runs.tasks import load_task

EXAMPLE = Path(__file__).parent.parent / "examples" / "alfworld_household"
LOADED = load_model(EXAMPLE / "warm_start")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_module(str(EXAMPLE / "make_warm_start.py"))


def told(engine: HouseholdEngine) -> Iterator[str]:
    """What an agent reads that goes everywhere, opens what is closed there and takes what it finds first."""
    yield engine.tables.introduction
    for place in engine.tables.go:
        yield engine.step(place).observation
        for verb in ("open ", "take ", "examine "):
            yield from (engine.step(command).observation for command in engine.admissible() if command.startswith(verb))
        yield from engine.admissible()


def test_no_word_of_other_rooms_is_unknown_and_no_two_commands_are_alike() -> None:
    tokenizer, unknown = LOADED.tokenizer, Counter[str]()
    for problem in generator.generate("held_out", 18, seed=5):
        engine = HouseholdEngine(problem)
        for text in set(told(engine)):
            if not text.startswith("Nothing happens"):  # nobody reads it who can only do what is open
                unknown += unknown_pieces(tokenizer, [text])
        commands = engine.admissible()
        ids = {tuple(tokenizer.encode(command, add_special_tokens=False)) for command in commands}
        assert len(ids) == len(commands)
        assert {len(one) for one in ids} == {1}
    assert not unknown


def test_a_step_costs_a_handful_of_tokens(script: ModuleType) -> None:
    rows = script.demonstrations(LOADED.tokenizer, 20, seed=1)
    steps = rows.batch["action_mask"].sum() / 2
    assert rows.batch["attention_mask"].sum() / steps < 7
    assert all(allowed is not None for allowed in rows.non_tensor_batch["allowed_ids"])


def test_who_looks_for_things_finds_them_without_knowing_where_they_are(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "SLIPS", 0.0)
    episodes = asyncio.run(script.episodes_of(script.Searcher(), range(60)))
    assert sum(episode.get_return() for episode in episodes) == 60
    plain = asyncio.run(script.episodes_of(script.ExpertPolicy(), range(60)))
    assert sum(map(len, episodes)) > 1.2 * sum(map(len, plain))  # it does not guess


def test_the_warm_start_does_chores_in_other_rooms() -> None:
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


def test_the_train_file_says_what_it_will_do() -> None:
    done = CliRunner().invoke(program, ["explain", str(EXAMPLE / "train.yaml")])
    assert done.exit_code == 0, done.output
    assert "gigpo" in done.output
