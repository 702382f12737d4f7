"""CPU time of GiGPO credit for 1,000 to 1,000,000 steps, and of grouping 10,000 states by similarity.

    .venv/bin/python benchmarks/credit.py [--sizes 1000 10000 100000 1000000] [--rounds 3] [--quick]

A batch consists of groups of 100 steps in 8 trajectories; each group has 40 distinct states. Compared, in the same run
and on the same batch:

- `gigpo_credit` and `system_apply_gigpo_to_batch_steps` ("with copies"), which read `StepData`.
- A plain implementation in 25 lines (dictionaries and `bincount`) on prepared lists and arrays. Results must agree to
  1e-9.
- The loops of verl-agent: a search through the whole batch for each row's trajectory and for each group, and statistics
  row by row. It is our reimplementation in NumPy, without the token axis. It is quadratic, so it runs on at most 10,000
  steps. Results must agree with `episode_statistics="step"`.

Grouping by similarity is compared with difflib, matched greedily against the first state of each group found so far.
difflib is timed on a few groups and extrapolated, as groups are independent. Times are CPU seconds on one core, minimum
over the rounds. On a shared machine compare ratios, not absolute times.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from reward_kit.agent import StepData  # noqa: E402
from reward_kit.credit.state_hashes import anchor_codes  # noqa: E402
from reward_kit.rl_helpers import gigpo_credit, system_apply_gigpo_to_batch_steps  # noqa: E402

GROUP, TRAJECTORIES, POOL = 100, 8, 40
GAMMA, OMEGA, EPSILON = 0.95, 0.5, 1e-6
SMALL, TARGET_STEPS, TARGET_SECONDS = 10_000, 100_000, 0.12
SIMILAR_STEPS, SIMILAR_SECONDS, THRESHOLD = 10_000, 5.0, 0.9
THINGS = ["apple", "bed", "bowl", "bread", "cabinet", "desk", "drawer", "egg", "fridge", "knife", "mug", "pan", "shelf"]


class Columns(NamedTuple):
    """A batch in columns, one item per step: the input of the plain and the loop implementation."""

    states: list[str]
    rewards: np.ndarray
    trajectories: np.ndarray
    groups: np.ndarray
    scores: np.ndarray


class Batch(NamedTuple):
    """The same batch as `StepData`, and as columns."""

    steps: list[list[StepData]]
    scores: list[float]
    group_ids: list[str]
    columns: Columns


# Batches


def text(rng: random.Random, size: int) -> str:
    """Return a household-like observation of `size` characters."""
    words: list[str] = []
    while len(words) * 10 < size + 20:
        words.append(f"{rng.choice(THINGS)} {rng.randrange(1, 30)}{rng.choice((',', ', and', ' on', '. You see'))}")
    return " ".join(words)[:size]


def make_pool(rng: random.Random, state_size: int) -> list[str]:
    """Return the 40 distinct states of a group."""
    return [text(rng, state_size) for _ in range(POOL)]


def draw(rng: random.Random, pool: Sequence[str], noise: bool = False) -> list[str]:
    """Draw 100 states; with `noise`, each ends in a different number, like a timestamp."""
    drawn = rng.choices(pool, k=GROUP)
    # As in a run, equal texts are different objects.
    return [state[:-8] + (f"{rng.randrange(10**8):08d}" if noise else state[-8:]) for state in drawn]


def make_batch(steps: int, state_size: int) -> Batch:
    """Return a batch, the same for the same arguments."""
    rng = random.Random(f"{steps} {state_size}")
    batch, scores, group_ids, states = [], [], [], []
    for group in range(steps // GROUP):
        drawn = draw(rng, make_pool(rng, state_size))
        states += drawn
        cuts = [GROUP * number // TRAJECTORIES for number in range(TRAJECTORIES + 1)]
        for start, stop in pairwise(cuts):
            rewards = [rng.choice((0.0, 0.0, 0.1, -0.1)) for _ in range(start, stop)]
            batch.append([make_step(k, *pair) for k, pair in enumerate(zip(drawn[start:stop], rewards, strict=True))])
            scores.append(rng.choice((0.0, 1.0, 0.5)))
            group_ids.append(f"group {group}")
    return Batch(batch, scores, group_ids, make_columns(batch, scores, group_ids, states))


def make_step(index: int, state: str, reward: float) -> StepData:
    """Return a step as a worker records it."""
    return StepData(
        system_step_index=index,
        observation_data=state,
        action_taken={"type": "text", "content": "look"},
        base_reward=reward,
        step_info={"assistant_turn_index": index},
    )


def make_columns(
    batch: Sequence[Sequence[StepData]], scores: Sequence[float], group_ids: Sequence[str], states: list[str]
) -> Columns:
    """Return the batch in columns."""
    lengths = [len(steps) for steps in batch]
    names = np.array([f"trajectory {number}" for number in range(len(batch))], dtype=object)
    return Columns(
        states,
        np.array([step.base_reward for steps in batch for step in steps]),
        np.repeat(names, lengths),
        np.repeat(np.array(group_ids, dtype=object), lengths),
        np.repeat(np.array(scores), lengths),
    )


# Other implementations


def plain_form(columns: Columns) -> np.ndarray:
    """GiGPO with dictionaries and `bincount`, as written by hand for this layout."""
    returns = columns.rewards.tolist()
    names = columns.trajectories.tolist()
    for k in range(len(returns) - 2, -1, -1):
        if names[k] is names[k + 1]:
            returns[k] += GAMMA * returns[k + 1]
    groups = columns.groups.tolist()
    starts = [0] + [k for k in range(1, len(names)) if names[k] is not names[k - 1]]
    lengths = np.diff([*starts, len(names)])
    episode = np.repeat(standardize(columns.scores[starts], [groups[k] for k in starts]), lengths)
    step = standardize(np.array(returns), list(zip(groups, columns.states, strict=True)))
    return OMEGA * episode + (1 - OMEGA) * step


def standardize(values: np.ndarray, keys: Sequence[object]) -> np.ndarray:
    """Return (x - mean) / (std + epsilon) among equal keys."""
    numbers: dict[object, int] = {}
    codes = np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), dtype=np.int64, count=len(keys))
    sizes = np.bincount(codes)
    centered = values - (np.bincount(codes, values) / sizes)[codes]
    deviations = np.sqrt(np.bincount(codes, centered**2) / np.maximum(sizes - 1, 1))
    return centered / (deviations + EPSILON)[codes]


def loop_form_returns(columns: Columns) -> np.ndarray:
    """Return discounted returns; each row searches all rows for its trajectory."""
    returns = np.zeros(len(columns.rewards))
    for row, name in enumerate(columns.trajectories):
        (own,) = np.where(columns.trajectories == name)
        for later in own[own >= row][::-1]:
            returns[row] = columns.rewards[later] + GAMMA * returns[row]
    return returns


def loop_form_advantages(columns: Columns, returns: np.ndarray) -> np.ndarray:
    """Return advantages; each group searches all rows, statistics are computed row by row."""
    anchors: list[Any] = [None] * len(returns)
    for group in dict.fromkeys(columns.groups):
        for row in np.where(columns.groups == group)[0]:
            anchors[row] = (group, columns.states[row])
    episode = loop_form_normalized(columns.scores, columns.groups)
    return OMEGA * episode + (1 - OMEGA) * loop_form_normalized(returns, anchors)


def loop_form_normalized(values: np.ndarray, keys: Iterable[object]) -> np.ndarray:
    """Return (x - mean) / (std + epsilon) among rows with equal keys, in Python."""
    members = defaultdict(list)
    for value, key in zip(values, keys, strict=True):
        members[key].append(value)
    means = {key: np.mean(group) for key, group in members.items()}
    deviations = {key: np.std(group, ddof=1) if len(group) > 1 else 1.0 for key, group in members.items()}
    return np.array([(x - means[key]) / (deviations[key] + EPSILON) for x, key in zip(values, keys, strict=True)])


def greedy_difflib(states: Sequence[str]) -> int:
    """Return the number of groups; a state joins the first group whose first member is similar."""
    firsts: list[str] = []
    for state in states:
        if not any(SequenceMatcher(None, first, state).ratio() >= THRESHOLD for first in firsts):
            firsts.append(state)
    return len(firsts)


# Times


def best_of(rounds: int, work: Callable[[], object]) -> float:
    """Return the minimum CPU seconds over the rounds, without freeing the result of `work`."""
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        result = work()
        seconds.append(time.process_time() - start)
        del result
    return min(seconds)


class Times(NamedTuple):
    """Seconds per batch. The first call includes hashing of the texts, which Python caches."""

    first: float
    estimator: float
    whole: float
    plain: float


def measure(batch: Batch, rounds: int) -> Times:
    """Check that ours and the plain implementation agree, and time both."""
    options: dict[str, Any] = {"omega": OMEGA, "gamma": GAMMA, "epsilon": EPSILON, "group_ids": batch.group_ids}

    def estimate() -> np.ndarray:
        return gigpo_credit(batch.steps, batch.scores, **options).advantages_S

    def apply() -> object:
        return system_apply_gigpo_to_batch_steps(batch.steps, batch.scores, state_hashing_function=None, **options)

    first = best_of(1, estimate)
    np.testing.assert_allclose(estimate(), plain_form(batch.columns), atol=1e-9, rtol=0)
    seconds = [best_of(rounds, work) for work in (estimate, apply, lambda: plain_form(batch.columns))]
    return Times(first, *seconds)


def report_sizes(sizes: Sequence[int], state_size: int, rounds: int) -> None:
    """Print a row per size, and the growth of time per step from 10,000 steps to the largest size."""
    print(f"states of {state_size} B   first call   estimator  with copies  plain form")
    results = {}
    for steps in sizes:
        times = results[steps] = measure(make_batch(steps, state_size), rounds)
        target = f"  (target: with copies {TARGET_SECONDS} s)" if steps == TARGET_STEPS else ""
        cells = "  ".join(f"{seconds:8.4f} s" for seconds in times)
        print(f"{steps:9,d} steps    {cells}{target}")
    small = next((steps for steps in sizes if steps >= SMALL), sizes[-1])
    if small < sizes[-1]:
        growth = [
            times[1] / times[0] for times in zip(*(per_step(results[n], n) for n in (small, sizes[-1])), strict=True)
        ]
        cells = "  ".join(f"{ratio:8.2f} ×" for ratio in growth)
        print(f"  time per step    {cells}  ratio of {sizes[-1]:,d} to {small:,d} steps")


def per_step(times: Times, steps: int) -> list[float]:
    """Return seconds per step."""
    return [seconds / steps for seconds in times]


def report_loop_form(sizes: Sequence[int], rounds: int) -> None:
    """Print the times of the loop implementation and ours."""
    options: dict[str, Any] = {"omega": OMEGA, "gamma": GAMMA, "epsilon": EPSILON, "episode_statistics": "step"}
    for steps in sizes:
        batch = make_batch(steps, 40)

        def ours(batch: Batch = batch) -> np.ndarray:
            return gigpo_credit(batch.steps, batch.scores, group_ids=batch.group_ids, **options).advantages_S

        returns = loop_form_returns(batch.columns)
        theirs = loop_form_advantages(batch.columns, returns)
        np.testing.assert_allclose(ours(), theirs, atol=1e-9, rtol=0)
        slow = best_of(1, partial(loop_form_returns, batch.columns))
        advantages = best_of(rounds, partial(loop_form_advantages, batch.columns, returns))
        fast = best_of(rounds, ours)
        print(
            f"{steps:9,d} steps, loops as in verl-agent: returns {slow:.3f} s, advantages {advantages:.3f} s;"
            f" ours, both: {fast:.4f} s (ratio {(slow + advantages) / fast:.0f})"
        )


def similar_groups(steps: int, state_size: int) -> dict[str, list[list[str]]]:
    """The states of each group, by what they are."""
    rng = random.Random("similar")
    shared = make_pool(rng, state_size)
    pools = [make_pool(rng, state_size) for _ in range(steps // GROUP)]
    return {
        "one pool of 40 for all groups": [draw(rng, shared) for _ in pools],
        "a pool of 40 for each group": [draw(rng, pool) for pool in pools],
        "the same, each with its own time": [draw(rng, pool, noise=True) for pool in pools],
    }


def report_similarity(steps: int, state_size: int, difflib_groups: int) -> None:
    """Grouping by similarity, once each, for texts that repeat and for texts of which no two are equal."""
    for kind, groups in similar_groups(steps, state_size).items():
        batch = [[make_step(k, state, 0.0) for k, state in enumerate(states)] for states in groups]
        groups_S = np.repeat(np.arange(len(groups)), GROUP)
        start = time.process_time()
        codes_S = anchor_codes(batch, groups_S, {"name": "similarity", "threshold": THRESHOLD})
        seconds = time.process_time() - start
        anchors = len(set(codes_S.tolist()))
        goal = f"  (target {SIMILAR_SECONDS:.0f} s)" if (steps, state_size) == (SIMILAR_STEPS, 2000) else ""
        print(f"{steps:9,d} states, {state_size} B, {kind}: similarity {seconds:.2f} s, {anchors} anchor states{goal}")
        if difflib_groups:
            report_difflib(groups, difflib_groups, seconds)


def report_difflib(groups: Sequence[Sequence[str]], measured: int, ours: float) -> None:
    """Time difflib on the first groups and extrapolate to all."""
    part = best_of(1, lambda: [greedy_difflib(states) for states in groups[:measured]])
    whole = part * len(groups) / measured
    print(
        f"          difflib, greedy: {part:.1f} s for {measured * GROUP} states; extrapolated to {len(groups)} groups"
        f" {whole:.0f} s (ratio {whole / ours:.0f})"
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000], metavar="STEPS")
    parser.add_argument("--state-sizes", type=int, nargs="+", default=[40, 2_000], metavar="BYTES")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loop-sizes", type=int, nargs="*", default=[1_000, 10_000], metavar="STEPS")
    parser.add_argument("--similar", type=int, default=SIMILAR_STEPS, metavar="STATES", help="0 skips it")
    parser.add_argument(
        "--difflib-groups", type=int, default=5, help="groups of 100 states to time difflib on; 0 skips it"
    )
    parser.add_argument("--quick", action="store_true", help="up to 100,000 steps; loops and difflib on few")
    options = parser.parse_args()
    if options.quick:
        options.sizes = [size for size in options.sizes if size <= TARGET_STEPS]
        options.loop_sizes, options.difflib_groups = [1_000], 1
    for state_size in options.state_sizes:
        report_sizes(options.sizes, state_size, options.rounds)
    report_loop_form(options.loop_sizes, options.rounds)
    if options.similar:
        report_similarity(options.similar, 2_000, options.difflib_groups)


if __name__ == "__main__":
    main()
