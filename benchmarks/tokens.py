"""Throughput of building training rows from episodes in tokens/s, compared with a plain loop.

    .venv/bin/python benchmarks/tokens.py [--episodes 256] [--turns 20] [--rounds 9]

Episodes have `EpisodeTokens` of 20 turns: each turn's context is everything so far and about 50 new tokens, and about
30 tokens are sampled. All steps have credit and all episodes scores. Times are medians of CPU time on one thread, which
other load on the machine affects little. Padding does not count as tokens. The exit status is 1 if the arrays of both
implementations differ, or if `build_rows` reaches less than 5M tokens/s.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from reward_kit.agent import StepData, episode_steps
from reward_kit.episodes import SingleAgentEpisode
from reward_kit.tokens import build_rows, micro_batches, pack_rows, row_columns

TARGET = 5e6
PAD = 0
OBSERVATION, ACTION = 50, 30


def play(number: int, turns: int) -> SingleAgentEpisode:
    """Return an episode with tokens, as a worker records it."""
    rng = random.Random(number)
    episode = SingleAgentEpisode(f"r{number}")
    episode.add_env_reset("a room")
    episode.custom_data = {"group_id": f"g{number // 8}", "sample": {}, "ground_truth": None}
    context: list[int] = []
    for turn in range(turns):
        context += rng.choices(range(1, 32_000), k=rng.randint(OBSERVATION // 2, OBSERVATION * 3 // 2))
        sampled = rng.choices(range(1, 32_000), k=rng.randint(ACTION // 2, ACTION * 3 // 2))
        episode.tokens.add_turn(turn, context, sampled, [-rng.random() for _ in sampled], policy_version=3)
        context += sampled
        call = {"type": "tool_call", "name": "go", "arguments": {"to": "kitchen"}}
        episode.add_env_step("a room", call, 0.0, terminated=turn == turns - 1)
    return episode


def credited_steps(episode: SingleAgentEpisode) -> list[StepData]:
    """Return the steps of an episode with random credit."""
    rng = random.Random(episode.id_)
    update = [
        {name: rng.gauss(0, 1) for name in ("advantage", "return_to_go", "base_reward")} for _ in range(len(episode))
    ]
    return [step.model_copy(update=values) for step, values in zip(episode_steps(episode), update, strict=True)]


def loop_rows(episodes: list[SingleAgentEpisode], steps: list[list[StepData]]) -> dict[str, np.ndarray]:
    """Return the arrays of `build_rows`, computed row by row and action by action."""
    rows = [(row, owner) for owner, episode in enumerate(episodes) for row in episode.tokens.rows()]
    sizes = [len(row.prompt_ids) + len(row.completion_ids) for row, _ in rows]
    count, width = len(rows), max(sizes)
    batch: dict[str, np.ndarray] = {
        "prompt_ids": np.full((count, max(len(row.prompt_ids) for row, _ in rows)), PAD, dtype=np.int32),
        "completion_ids": np.full((count, max(len(row.completion_ids) for row, _ in rows)), PAD, dtype=np.int32),
        "input_ids": np.full((count, width), PAD, dtype=np.int32),
        "policy_versions": np.full((count, width), -1, dtype=np.int32),
        "position_ids": np.zeros((count, width), dtype=np.int32),
    }
    masks = ("attention_mask", "completion_mask", "action_mask", "loss_mask")
    batch |= {key: np.zeros((count, width), dtype=np.int8) for key in masks}
    batch |= {key: np.zeros((count, width)) for key in ("logprobs", "advantages", "returns", "step_rewards")}
    for index, (row, owner) in enumerate(rows):
        prompt, size = len(row.prompt_ids), sizes[index]
        batch["prompt_ids"][index, :prompt] = batch["input_ids"][index, :prompt] = row.prompt_ids
        batch["completion_ids"][index, : size - prompt] = batch["input_ids"][index, prompt:size] = row.completion_ids
        batch["attention_mask"][index, :size] = 1
        batch["position_ids"][index, :size] = np.arange(size)
        batch["completion_mask"][index, prompt:size] = 1
        for key in ("action_mask", "logprobs", "policy_versions"):
            batch[key][index, prompt:size] = getattr(row, key)
        for number in np.unique(row.steps[row.steps >= 0]):
            indices = prompt + np.flatnonzero(row.steps == number)
            step = steps[owner][number]
            batch["loss_mask"][index, indices] = 1
            batch["advantages"][index, indices] = step.advantage
            batch["returns"][index, indices] = step.return_to_go
            batch["step_rewards"][index, indices[-1]] = step.base_reward
    return batch


def median_s(call: Callable[[], Any], rounds: int) -> float:
    """Return the median CPU seconds of a call after a warm-up."""
    call()
    times = []
    for _ in range(rounds):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return median(times)


def main() -> None:
    """Run the benchmark; exit with 1 if the target is missed or the results differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    episodes = [play(number, options.turns) for number in range(options.episodes)]
    steps = [credited_steps(episode) for episode in episodes]
    scores = [1.0] * len(episodes)
    tokens = sum(len(episode.tokens) for episode in episodes)
    print(f"{options.episodes} episodes of {options.turns} turns, {tokens:,} tokens")
    implementations: dict[str, Callable[[], Any]] = {
        "rows, padded": lambda: build_rows(episodes, steps, pad_token_id=PAD, scores=scores),
        "rows, outer padding": lambda: build_rows(episodes, steps, pad_token_id=PAD, scores=scores, padding="outer"),
        "rows, packed": lambda: pack_rows(row_columns(episodes, steps, scores=scores)),
        "plain loop, padded": lambda: loop_rows(episodes, steps),
    }
    times = {name: median_s(call, options.rounds) for name, call in implementations.items()}
    for name, seconds in times.items():
        print(f"{name:20s} {seconds * 1e3:8.1f} ms {tokens / seconds / 1e6:8.2f} M tokens/s")
    rows, looped = implementations["rows, padded"](), loop_rows(episodes, steps)
    differing = [key for key in rows.batch.keys() | looped if not np.array_equal(rows.batch[key], looped[key])]
    lengths = rows.lengths()
    budget = 4 * int(lengths.max())
    seconds = median_s(lambda: micro_batches(lengths, budget), options.rounds)
    parts = [int(lengths[part].sum()) for part in micro_batches(lengths, budget)]
    print(f"{'micro-batches':20s} {seconds * 1e3:8.1f} ms, {len(parts)} with {min(parts):,} to {max(parts):,} tokens")
    print(f"equal results: {not differing} {' '.join(differing)}")
    if differing or tokens / times["rows, padded"] < TARGET:
        sys.exit(f"missed the target: {TARGET / 1e6:g} M tokens/s and equal results")


if __name__ == "__main__":
    main()
