"""Test the files of the Sokoban training example."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from reward_kit.cli.main import program
from reward_kit.environments.sokoban import LEGEND, read_level
from reward_kit.loading import load_module
from reward_kit.rl.model_kit.models import load_model

EXAMPLE = Path(__file__).parents[3] / "examples" / "sokoban_training"


def boards_of(name: str) -> list[tuple[str, str]]:
    """Return the kind and the board of each row."""
    rows = [json.loads(line) for line in (EXAMPLE / name).read_text(encoding="utf-8").splitlines()]
    return [(row["kind"], row["resource_config"]["level"]) for row in rows]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_module(str(EXAMPLE / "make_warm_start.py"))


def test_no_board_is_both_trained_on_and_held_out() -> None:
    trained, held_out = boards_of("boards.jsonl"), boards_of("held_out.jsonl")
    assert (len(set(trained)), len(set(held_out))) == (len(trained), len(held_out)) == (3_000, 256)
    assert not {board for _, board in trained} & {board for _, board in held_out}


def test_boards_match_the_generating_script_and_demonstrations_use_no_held_out_board() -> None:
    held_out, trained, rest = load_module(str(EXAMPLE / "make_boards.py")).split()
    assert boards_of("held_out.jsonl") == [(board.kind, board.text) for board in held_out]
    assert boards_of("boards.jsonl") == [(board.kind, board.text) for board in trained]
    assert not {board.text for board in held_out} & {board.text for board in (*trained, *rest)}


def test_only_turning_boards_need_pushes_in_several_directions(script: ModuleType) -> None:
    for kind, board in boards_of("held_out.jsonl")[:64]:
        level = read_level(board)
        position, pushes = level.start, set[str]()
        for act in script.demonstration(level, NoSlips()):
            after = level.move(position, level.steps()[act.move])
            assert after is not None
            if after.boxes != position.boxes:
                pushes.add(act.move)
            position = after
        assert level.is_solved(position)
        assert (len(pushes) == 1) == (kind == "straight")


class NoSlips(random.Random):
    """A generator whose every number is above the share of random moves."""

    def random(self) -> float:
        return 0.999


def test_board_takes_one_known_token_per_row(script: ModuleType) -> None:
    tokenizer = load_model(EXAMPLE / "warm_start").tokenizer
    assert tokenizer is not None
    ids = tokenizer.get_vocab()
    assert sorted(ids) == sorted(script.make_tokenizer().get_vocab())
    for _, board in boards_of("held_out.jsonl"):
        rows = [ids[row] for row in board.split("\n")[1:-1]]
        for text in (f" {board}", f" {board}\n\n{LEGEND}\nPush.", f" {board}\nNothing moves: the way is blocked."):
            assert tokenizer.encode(text, add_special_tokens=False) == rows


def test_only_moves_of_the_solver_are_learned(script: ModuleType) -> None:
    tokenizer = script.make_tokenizer()
    board = boards_of("held_out.jsonl")[0][1]
    acts = [script.Act("up", True, board), script.Act("down", False, board)]
    rows = script.to_rows(tokenizer, [(board, acts)])
    learned = rows.batch["input_ids"][0][rows.batch["action_mask"][0] == 1]
    assert tokenizer.convert_ids_to_tokens(learned.tolist()) == ["down", "<|end|>"]


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_dry_run_succeeds(command: str) -> None:
    done = CliRunner().invoke(program, [command, str(EXAMPLE / f"{command}.yaml"), "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "g2po" in done.output
