"""Reward managers: how long a batch of episodes takes where nothing is shown.

    .venv/bin/python benchmarks/managers.py [--rows 1024] [--tokens 4096] [--rounds 15]

Rows are single episodes with a quarter of the width as prompt and a response of a random length, padded on both sides,
in verl's names. Beside `EpisodeRewardManager` runs the plain form, a loop over rows as managers are usually written:
masks are cut and summed and the score is set, row by row. It decodes nothing either, which usual ones do for every row.
What it gives must be ours, bit for bit. Milliseconds of CPU, all threads together, and of wall clock: on a machine that
others use too, the first says how long it takes on one that they do not. The forms run in turn; the target is for the
best round's CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from reward_kit.rl.reward_manager import EpisodeRewardManager  # noqa: E402

TARGET_MS = 10.0


class Batch:
    """A batch in the shape of verl's `DataProto`."""

    def __init__(self, rows: int, tokens: int, kind: torch.dtype) -> None:
        generator = np.random.default_rng(0)
        prompt = tokens // 4
        lengths = torch.from_numpy(generator.integers(1, tokens + 1, (rows, 1)))
        prompts = torch.from_numpy(generator.integers(1, prompt + 1, (rows, 1)))
        is_token = torch.arange(tokens)[None] < lengths
        # Every tenth stretch of 64 tokens is what a tool answered.
        acts = is_token & (torch.arange(tokens) // 64 % 10 != 9) | (torch.arange(tokens) == 0)
        self.batch = {
            "prompts": torch.ones((rows, prompt), dtype=torch.int64),
            "responses": torch.ones((rows, tokens), dtype=torch.int64),
            "attention_mask": torch.cat([torch.arange(prompt)[None] >= prompt - prompts, is_token], dim=1).to(kind),
            "response_mask": acts.to(kind),
        }
        self.non_tensor_batch = {
            "episode_rewards": generator.random(rows),
            "episode_lengths": generator.integers(1, 50, rows),
            "traj_uid": np.array([f"episode-{row}" for row in range(rows)], dtype=object),
        }
        ends = (acts & ~torch.nn.functional.pad(acts[:, 1:], (0, 1))).sum(dim=1).tolist()
        self.steps = np.empty(rows, dtype=object)
        for row, count in enumerate(ends):
            self.steps[row] = [0.5] * count


class NoTokenizer:
    """Decodes nothing."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        raise AssertionError("nothing is shown, so nothing is decoded")


def row_by_row(data: Any) -> torch.Tensor:
    """The plain form."""
    batch, width = data.batch, data.batch["responses"].shape[1]
    rewards = torch.zeros_like(batch["responses"], dtype=torch.float32)
    for row in range(len(rewards)):
        attention = batch["attention_mask"][row]
        length = int(attention[-width:].sum())
        places = batch["response_mask"][row][:length].nonzero()
        if len(places):
            rewards[row, places[-1, 0]] = float(data.non_tensor_batch["episode_rewards"][row])
    return rewards


class Times(NamedTuple):
    """Milliseconds of one round."""

    cpu: float
    wall: float


def timed(forms: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Times]]:
    """Each round of each form, in turn."""
    taken: dict[str, list[Times]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, form in forms.items():
            cpu, wall = time.process_time(), time.perf_counter()
            form()
            taken[name].append(Times((time.process_time() - cpu) * 1000, (time.perf_counter() - wall) * 1000))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 1024), ("tokens", 4096), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print(f"{options.rows:,} rows x {options.tokens:,} response tokens; torch with {torch.get_num_threads()} threads\n")
    columns = ("best CPU ms", "median CPU", "best wall", "median wall")
    print(f"{'masks':8}{'form':34}" + "".join(f"{column:>13}" for column in columns))
    plain = EpisodeRewardManager(NoTokenizer(), 0)
    variance = EpisodeRewardManager(NoTokenizer(), 0, normalization_type="variance")
    hybrid = EpisodeRewardManager(NoTokenizer(), 0, step_rewards=True)
    is_met = True
    for kind in (torch.int64, torch.int8, torch.bool):
        data = Batch(options.rows, options.tokens, kind)
        stepped = Batch(options.rows, options.tokens, kind)
        stepped.non_tensor_batch["step_rewards"] = stepped.steps
        if not torch.equal(plain(data), row_by_row(data)):
            sys.exit("the two forms do not agree")
        forms: dict[str, Callable[[], Any]] = {
            "EpisodeRewardManager": lambda data=data: plain(data, return_dict=True),
            "  normalization_type='variance'": lambda data=data: variance(data, return_dict=True),
            "  step_rewards=True, as lists": lambda data=stepped: hybrid(data, return_dict=True),
            "row by row": lambda data=data: row_by_row(data),
        }
        taken = timed(forms, options.rounds)
        for name, rounds in taken.items():
            numbers = [how(times) for times in zip(*rounds, strict=True) for how in (min, statistics.median)]
            print(f"{str(kind).removeprefix('torch.'):8}{name:34}" + "".join(f"{number:13.2f}" for number in numbers))
        is_met &= min(taken["EpisodeRewardManager"]).cpu <= TARGET_MS
    print(f"\ntarget: at most {TARGET_MS:g} ms of CPU in the best round: {'met' if is_met else 'MISSED'}")
    sys.exit(0 if is_met else 1)


if __name__ == "__main__":
    main()
