"""Test the FrozenLake example: after a minute of training, the model solves held-out lakes."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner

from reward_kit.cli.main import program
from reward_kit.loading import load_module
from reward_kit.rl.model_kit.models import load_model, unknown_pieces
from reward_kit.rl.training.plan import load_plan
from tests.rl.training.frozen_lake import metrics_of, train

LEARNED = 0.85
"""Runs end at 0.93 to 0.95 of 256 lakes, with a standard error of 0.016; seeds and processors spread them by as much.

This is four such spreads below, and far above the 0.4 that the warm start does not reach.
"""
EXAMPLE = Path(__file__).parents[3] / "examples" / "frozen_lake_training"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_module(str(EXAMPLE / "make_warm_start.py"))


def maps_of(name: str) -> list[tuple[str, ...]]:
    lines = (EXAMPLE / name).read_text(encoding="utf-8").splitlines()
    return [tuple(json.loads(line)["resource_config"]["env_kwargs"]["desc"]) for line in lines]


def test_no_map_is_both_trained_on_and_held_out() -> None:
    trained, held_out = maps_of("lakes.jsonl"), maps_of("held_out.jsonl")
    assert (len(set(trained)), len(set(held_out))) == (len(trained), len(held_out)) == (1500, 256)
    assert not set(trained) & set(held_out)


def test_maps_match_the_generating_script() -> None:
    drawn = load_module(str(EXAMPLE / "make_lakes.py")).maps()
    assert [*maps_of("held_out.jsonl"), *maps_of("lakes.jsonl")] == drawn


def test_board_takes_four_known_tokens(script: ModuleType) -> None:
    tokenizer = load_model(EXAMPLE / "warm_start").tokenizer
    boards = {board(desc, place) for desc in maps_of("held_out.jsonl") for place in range(16)}
    assert tokenizer is not None
    assert not unknown_pieces(tokenizer, boards)
    assert {len(tokenizer.encode(text)) for text in boards} == {4}
    assert sorted(tokenizer.get_vocab()) == sorted(script.make_tokenizer().get_vocab())


def board(desc: tuple[str, ...], place: int) -> str:
    cells = [[f" {cell} " for cell in line] for line in desc]
    row, column = divmod(place, 4)
    cells[row][column] = f"[{desc[row][column]}]"
    return "\n".join("".join(line).rstrip() for line in cells)


def test_train_file_dry_run_succeeds() -> None:
    done = CliRunner().invoke(program, ["train", str(EXAMPLE / "train.yaml"), "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "gigpo" in done.output


async def test_training_generalizes_to_held_out_lakes(tmp_path: Path) -> None:
    outcome = await train(load_plan(EXAMPLE / "train.yaml"), tmp_path / "run")
    scores = [line["held_out/score"] for line in metrics_of(tmp_path / "run") if "held_out/score" in line]
    assert outcome.status == "complete"
    assert scores[0] <= 0.4
    assert scores[-1] >= LEARNED


@pytest.mark.campaign
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_training_succeeds_for_any_seed_and_warm_start(tmp_path: Path, script: ModuleType, seed: int) -> None:
    torch.set_num_threads(1)
    began = time.process_time()
    script.make(tmp_path / "warm", seed=seed)
    warm = time.process_time()
    plan = load_plan(EXAMPLE / "train.yaml", {"seed": seed, "policy.model": str(tmp_path / "warm")})
    asyncio.run(train(plan, tmp_path / "run"))
    trained = time.process_time()
    before, after = (scores_of(tmp_path, model) for model in ("warm", "run/model"))
    print(f"seed {seed}: sampled {before[0]:.3f} -> {after[0]:.3f}, greedy {before[1]:.3f} -> {after[1]:.3f}")
    print(f"CPU seconds: warm start {warm - began:.0f}, training with evaluations {trained - warm:.0f}")
    assert before[0] <= 0.4
    assert after[0] >= LEARNED


def scores_of(folder: Path, model: str) -> tuple[float, float]:
    """Return the scores of a model on held-out lakes, with sampled and with greedy actions."""
    options = ["--log-dir", str(folder / "runs"), "--json", "--display", "none", "-T", f"policy.model={folder / model}"]
    found = []
    for temperature in (1, 0):
        asked = ["run", str(EXAMPLE / "agent.yaml"), *options, "-T", f"policy.temperature={temperature}"]
        done = CliRunner().invoke(program, asked)
        assert done.exit_code == 0, done.output
        found.append(json.loads(done.stdout)["policies"][0]["score"]["mean"])
    return found[0], found[1]
