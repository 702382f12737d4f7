"""CPU and wall-clock time of `EpisodeRewardManager` per batch of episodes, compared with a loop over rows.

    .venv/bin/python benchmarks/managers.py [--rows 1024] [--tokens 4096] [--rounds 15]

A batch has verl's layout: one episode per row, a prompt of a quarter of the width, a response of random length, padded
on both sides. The loop, as reward managers are usually written, slices and sums the masks and sets the score row by
row. Neither decodes text (`num_examine=0`). Results must be equal bit for bit. Both alternate in every round. Times are
milliseconds of CPU time over all threads, which other load on the machine affects little, and of wall-clock time. The
exit status is 1 if the best round takes more than 10 ms of CPU time.
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
        # Every tenth block of 64 tokens is a tool result.
        is_sampled = is_token & (torch.arange(tokens) // 64 % 10 != 9) | (torch.arange(tokens) == 0)
        self.batch = {
            "prompts": torch.ones((rows, prompt), dtype=torch.int64),
            "responses": torch.ones((rows, tokens), dtype=torch.int64),
            "attention_mask": torch.cat([torch.arange(prompt)[None] >= prompt - prompts, is_token], dim=1).to(kind),
            "response_mask": is_sampled.to(kind),
        }
        self.non_tensor_batch = {
            "episode_rewards": generator.random(rows),
            "episode_lengths": generator.integers(1, 50, rows),
            "traj_uid": np.array([f"episode-{row}" for row in range(rows)], dtype=object),
        }
        ends = (is_sampled & ~torch.nn.functional.pad(is_sampled[:, 1:], (0, 1))).sum(dim=1).tolist()
        self.steps = np.empty(rows, dtype=object)
        for row, count in enumerate(ends):
            self.steps[row] = [0.5] * count


class NoTokenizer:
    """A tokenizer that must not be called."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        raise AssertionError("decode called with num_examine=0")


def row_by_row(data: Any) -> torch.Tensor:
    """Return the rewards, computed in a loop over rows."""
    batch, width = data.batch, data.batch["responses"].shape[1]
    rewards = torch.zeros_like(batch["responses"], dtype=torch.float32)
    for row in range(len(rewards)):
        attention = batch["attention_mask"][row]
        length = int(attention[-width:].sum())
        indices = batch["response_mask"][row][:length].nonzero()
        if len(indices):
            rewards[row, indices[-1, 0]] = float(data.non_tensor_batch["episode_rewards"][row])
    return rewards


class Times(NamedTuple):
    """Milliseconds of one round."""

    cpu: float
    wall: float


def measure(implementations: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Times]]:
    """Time each implementation, alternating in every round."""
    times: dict[str, list[Times]] = {name: [] for name in implementations}
    for _ in range(rounds):
        for name, run in implementations.items():
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            times[name].append(Times((time.process_time() - cpu) * 1000, (time.perf_counter() - wall) * 1000))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 1024), ("tokens", 4096), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print(f"{options.rows:,} rows x {options.tokens:,} response tokens; torch with {torch.get_num_threads()} threads\n")
    columns = ("min CPU ms", "median CPU", "min wall", "median wall")
    print(f"{'masks':8}{'implementation':34}" + "".join(f"{column:>13}" for column in columns))
    plain = EpisodeRewardManager(NoTokenizer(), 0)
    variance = EpisodeRewardManager(NoTokenizer(), 0, normalization_type="variance")
    hybrid = EpisodeRewardManager(NoTokenizer(), 0, step_rewards=True)
    is_met = True
    for kind in (torch.int64, torch.int8, torch.bool):
        data = Batch(options.rows, options.tokens, kind)
        stepped = Batch(options.rows, options.tokens, kind)
        stepped.non_tensor_batch["step_rewards"] = stepped.steps
        if not torch.equal(plain(data), row_by_row(data)):
            sys.exit("the results of the two implementations differ")
        implementations: dict[str, Callable[[], Any]] = {
            "EpisodeRewardManager": lambda data=data: plain(data, return_dict=True),
            "  normalization_type='variance'": lambda data=data: variance(data, return_dict=True),
            "  step_rewards=True, as lists": lambda data=stepped: hybrid(data, return_dict=True),
            "row by row": lambda data=data: row_by_row(data),
        }
        times = measure(implementations, options.rounds)
        for name, rounds in times.items():
            numbers = [reduce(values) for values in zip(*rounds, strict=True) for reduce in (min, statistics.median)]
            print(f"{str(kind).removeprefix('torch.'):8}{name:34}" + "".join(f"{number:13.2f}" for number in numbers))
        is_met &= min(times["EpisodeRewardManager"]).cpu <= TARGET_MS
    print(f"\ntarget: at most {TARGET_MS:g} ms of CPU time in the best round: {'met' if is_met else 'MISSED'}")
    sys.exit(0 if is_met else 1)


if __name__ == "__main__":
    main()
