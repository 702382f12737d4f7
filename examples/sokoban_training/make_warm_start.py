"""Make `warm_start/`: a small decoder that can push a box straight to its goal, the start of `train.yaml`.

It is trained on demonstrations of the solver with random moves in between, which are not part of the loss. Only one
demonstration in 320 starts on a board on which the box has to be pushed around a corner.

    python make_warm_start.py [--seed N] [--folder warm_start]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from reward_kit.environments.sokoban import DIRECTIONS, Level, solve
from reward_kit.episodes import AllowedIds
from reward_kit.loading import load_module
from reward_kit.rl import TERSE_TEMPLATE, SFTConfig, build_decoder, build_tokenizer, describe, fit, save_model
from reward_kit.tokens import TokenBatch

HERE = Path(__file__).parent
BOARDS = load_module(str(HERE / "make_boards.py"))
WIDTH = BOARDS.SIDE - 2
"""Columns of the room without the wall."""

CONTEXT, MOVES = 160, 16
DEMONSTRATIONS = {"straight": 15_950, "turn": 50}
SLIPS = 0.2
"""Share of random moves."""

SFT = SFTConfig(
    max_tokens_per_batch=2_000,
    lr=3e-3,
    warmup_share=0.04,
    betas=(0.9, 0.98),
    min_lr_share=0.05,
    use_allowed_ids=True,
    label_smoothing=0.1,
)
MARKS = {"#": "#", " ": " ", ".": ".", "$": "$", "*": "$.", "@": "@", "+": "@."}
"""The contents of a cell: for example, `*` is a box and a goal."""


class Act(NamedTuple):
    """A move, whether it was random, and the board after it."""

    move: str
    is_slip: bool
    board: str


def demonstration(level: Level, draws: random.Random) -> list[Act]:
    """Return the moves on a board until it is solved or cannot be solved any more, at most `MOVES`."""
    position, acts = level.start, list[Act]()
    while len(acts) < MOVES and (plan := solve(level, position, node_limit=5_000)):
        is_slip = draws.random() < SLIPS
        move = draws.choice(DIRECTIONS) if is_slip else plan[0]
        position = level.move(position, level.steps()[move]) or position
        acts.append(Act(move, is_slip, level.text(position)))
    return acts


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per row of the room. The outer wall and the explanations are dropped."""
    rows = ["".join(cells) for cells in product(MARKS, repeat=WIDTH)]
    rows = [row for row in rows if all(sum(mark in MARKS[cell] for cell in row) <= 1 for mark in "@$.")]
    return build_tokenizer(
        words=[*(f"#{row}#" for row in rows), *DIRECTIONS],
        units=[rf"#[# .$*@+]{{{WIDTH}}}#"],
        spaces="none",
        dropped=[rf"\A\s*#{{{BOARDS.SIDE}}}\n", rf"\n#{{{BOARDS.SIDE}}}(?!\n#)[\s\S]*"],
        chat_template=TERSE_TEMPLATE,
        context=CONTEXT,
    )


def compose_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Initialize the embedding of a row as the sum of random embeddings of its columns' contents, in place."""
    table, generator = model.get_input_embeddings().weight.data, torch.Generator().manual_seed(seed)
    std = float(table.std())
    parts = {
        (column, mark): torch.randn(table.shape[1], generator=generator) * std
        for column in range(WIDTH)
        for mark in "# .$@"
    }
    for text, token in tokenizer.get_vocab().items():
        if text.startswith("#"):
            marks = [(column, mark) for column, cell in enumerate(text[1:-1]) for mark in MARKS[cell]]
            table[token] = torch.stack([parts[mark] for mark in marks]).sum(dim=0) / 2


def to_rows(tokenizer: PreTrainedTokenizerFast, written: Sequence[tuple[str, list[Act]]]) -> TokenBatch:
    """Return the tokens of demonstrations; the policy's own moves are the targets, among the four moves."""
    ids = tokenizer.get_vocab()
    start, end = ids["<|assistant|>"], ids["<|end|>"]
    allowed = [np.array(sorted(ids[move] for move in DIRECTIONS), np.int32), np.array([end], np.int32)]
    lines, targets = list[list[int]](), list[list[int]]()
    for board, acts in written:
        line, places = [*_row_ids(ids, board), start], list[int]()
        for act in acts:
            if not act.is_slip:
                places += [len(line), len(line) + 1]
            line += [ids[act.move], end, *_row_ids(ids, act.board), start]
        if places:
            lines.append(line[: places[-1] + 1])
            targets.append(places)
    shape = (len(lines), max(map(len, lines)))
    ids_BT, real_BT, taught_BT = (
        np.full(shape, tokenizer.pad_token_id, np.int32),
        np.zeros(shape, np.int8),
        np.zeros(shape, np.int8),
    )
    allowed_B = np.empty(len(lines), dtype=object)
    for row, (line, places) in enumerate(zip(lines, targets, strict=True)):
        ids_BT[row, : len(line)], real_BT[row, : len(line)], taught_BT[row, places] = line, 1, 1
        allowed_B[row] = AllowedIds.shared(places, range(len(places)), allowed * (len(places) // 2))
    batch = {"input_ids": ids_BT, "attention_mask": real_BT, "action_mask": taught_BT}
    return TokenBatch(batch, {"allowed_ids": allowed_B}, {"padding": "right"})


def _row_ids(ids: dict[str, int], board: str) -> list[int]:
    return [ids[row] for row in board.split("\n")[1:-1]]


def make(folder: Path, *, seed: int = 0) -> None:
    """Train the model and save it.

    Args:
        folder: where to save it, for `policy.model`.
        seed: of boards, random moves, weights and the order of training.
    """
    began, draws = time.process_time(), random.Random(seed)
    _, trained, rest = BOARDS.split()
    written = []
    for kind, count in DEMONSTRATIONS.items():
        boards = [board for board in (*trained, *rest) if board.kind == kind]
        for board in draws.choices(boards, k=count):
            written.append((board.text, demonstration(board.level, draws)))
    tokenizer = make_tokenizer()
    rows = to_rows(tokenizer, written)
    model = build_decoder(tokenizer, layers=2, width=96, heads=4, hidden=224, context=CONTEXT, seed=seed)
    compose_rows(model, tokenizer, seed)
    print(f"{describe(model)}; {len(rows)} demonstrations after {time.process_time() - began:.0f} s of CPU time")
    reports = fit(model, rows, replace(SFT, seed=seed))
    save_model(folder, model, tokenizer)
    print(f"loss {reports[-1].loss:.3f}; written to {folder} after {time.process_time() - began:.0f} s of CPU time")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=HERE / "warm_start")
    options = parser.parse_args()
    torch.set_num_threads(1)
    make(options.folder, seed=options.seed)


if __name__ == "__main__":
    main()
