"""Speed of the household environment: problem generation, and load, step and fork times of both engines.

    .venv/bin/python benchmarks/household.py [--real-python PYTHON] [--problems 12] [--rounds 3] [--solve 0]

The native engine is compared with TextWorld's ("real"): both play the same commands on the same problems, and their
observations must be equal. The real engine requires the extra `text-games`, in this Python or in the one given with
`--real-python`; without it only the native engine is measured. Also printed is the success rate of a random policy.
`--solve 200` measures the success rate of the real planner on 200 held-out problems per task type, with its plans
replayed on the native engine (minutes). Times are minima over the rounds. On a shared machine compare ratios.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import anyio

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from reward_kit.environments.alfworld import RealEngine  # noqa: E402
from reward_kit.environments.household_engine import HouseholdEngine  # noqa: E402
from reward_kit.environments.household_problems import (  # noqa: E402
    Problem,
    TaskType,
    generate_problem,
)
from reward_kit.errors import ConfigError  # noqa: E402

WORKER = "reward_kit.environments.household_worker"
STEPS = 20
WORKERS = 2


class Game(NamedTuple):
    """A problem and the commands to play."""

    problem: Problem
    commands: list[str]


class RealTimes(NamedTuple):
    """Seconds on the real engine: one value per game, and one per step in `steps`."""

    loads: list[float]
    plans: list[float]
    steps: list[float]


def best_of(rounds: int, run: Callable[[], float]) -> float:
    """Return the minimum over the rounds."""
    return min(run() for _ in range(rounds))


def generation(rounds: int, count: int = 10_000) -> float:
    """Return the seconds to generate `count` problems."""

    def once() -> float:
        start = time.perf_counter()
        for index in range(count):
            generate_problem("train", index)
        return time.perf_counter() - start

    return best_of(rounds, once)


def games(count: int) -> list[Game]:
    """Return held-out problems of all types, each with random admissible commands."""
    return [
        Game(problem, _random_commands(problem))
        for problem in (generate_problem("held_out", index) for index in range(count))
    ]


def _random_commands(problem: Problem) -> list[str]:
    rng = random.Random(problem.id)
    engine = HouseholdEngine(problem)
    commands = []
    for _ in range(STEPS):
        commands.append(rng.choice(engine.admissible()))
        engine.step(commands[-1])
    return commands


def native_step(played: Sequence[Game], rounds: int) -> float:
    """Return seconds per step of the native engine with warm tables, as in training."""
    engines = [HouseholdEngine(game.problem) for game in played]

    def once() -> float:
        start = time.perf_counter()
        for _ in range(20):
            for engine, game in zip(engines, played, strict=True):
                engine.reset()
                for command in game.commands:
                    engine.step(command)
        return (time.perf_counter() - start) / (20 * STEPS * len(played))

    return best_of(rounds, once)


def native_first_episode(played: Sequence[Game], rounds: int) -> float:
    """Return seconds per step in the first episode of a problem, including engine creation."""

    def once() -> float:
        start = time.perf_counter()
        for game in played:
            engine = HouseholdEngine(game.problem)
            for command in game.commands:
                engine.step(command)
        return (time.perf_counter() - start) / (STEPS * len(played))

    return best_of(rounds, once)


def native_load(played: Sequence[Game], rounds: int) -> float:
    """Return seconds to create a native engine for a problem."""

    def once() -> float:
        start = time.perf_counter()
        for game in played:
            HouseholdEngine(game.problem)
        return (time.perf_counter() - start) / len(played)

    return best_of(rounds, once)


def native_fork(played: Sequence[Game], rounds: int, count: int = 1_000) -> float:
    """Return seconds per fork in the middle of an episode."""
    engines = [HouseholdEngine(game.problem) for game in played]
    for engine, game in zip(engines, played, strict=True):
        for command in game.commands:
            engine.step(command)

    def once() -> float:
        start = time.perf_counter()
        for engine in engines:
            for _ in range(count):
                engine.fork()
        return (time.perf_counter() - start) / (count * len(engines))

    return best_of(rounds, once)


async def real_times(played: Sequence[Game], python: str) -> RealTimes:
    """Time the games on the real engine, and check that observations equal those of the native one."""
    times = RealTimes([], [], [])
    real = RealEngine(worker=[python, "-m", WORKER])
    await real.start()
    for game in played:
        native = HouseholdEngine(game.problem)
        start = time.perf_counter()
        view = await real.load(game.problem)
        times.loads.append(time.perf_counter() - start)
        assert view == native.reset(), game.problem.id
        start = time.perf_counter()
        await real.expert()
        times.plans.append(time.perf_counter() - start)
        for command in game.commands:
            start = time.perf_counter()
            view = await real.step(command)
            times.steps.append(time.perf_counter() - start)
            assert view == native.step(command), (game.problem.id, command)
    await real.close()
    return times


async def planner_failures(count: int, python: str) -> dict[TaskType, list[str]]:
    """Return the ids of held-out problems, out of `count` per task type, that the planner does not solve."""
    problems = [generate_problem("held_out", index, 0, kind) for kind in TaskType for index in range(count)]
    unsolved: dict[TaskType, list[str]] = {kind: [] for kind in TaskType}

    async def work(part: Sequence[Problem]) -> None:
        real = RealEngine(worker=[python, "-m", WORKER])
        await real.start()
        for problem in part:
            await real.load(problem)
            if not _wins(problem, await real.expert()):
                unsolved[problem.task_type].append(problem.id)
        await real.close()

    async with anyio.create_task_group() as group:
        for number in range(WORKERS):
            group.start_soon(work, problems[number::WORKERS])
    return unsolved


def _wins(problem: Problem, plan: Sequence[str]) -> bool:
    engine = HouseholdEngine(problem)
    return any(engine.step(command).won for command in plan)


def random_success(count: int, steps: int = 50) -> dict[TaskType, float]:
    """Return the success rate of random admissible commands on held-out problems, by task type."""
    return {
        kind: sum(_random_wins(generate_problem("held_out", index, 0, kind), steps) for index in range(count)) / count
        for kind in TaskType
    }


def _random_wins(problem: Problem, steps: int) -> bool:
    rng = random.Random(f"random {problem.id}")
    engine = HouseholdEngine(problem)
    return any(engine.step(rng.choice(engine.admissible())).won for _ in range(steps))


def report_real(times: RealTimes, native: float) -> None:
    """Print the real engine's times and its ratio to the native one."""
    step = sum(times.steps) / len(times.steps)
    print(f"real: load         {median(times.loads) * 1e3:10.0f} ms (median), {max(times.loads) * 1e3:.0f} ms (max)")
    print(f"real: plan         {median(times.plans) * 1e3:10.0f} ms (median), {max(times.plans) * 1e3:.0f} ms (max)")
    print(f"real: step         {step * 1e3:10.1f} ms (mean), {max(times.steps) * 1e3:.0f} ms (max)")
    print(f"ratio real/native  {step / native:10.0f} (time per step)")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real-python", default=sys.executable, help="a Python with the extra `text-games`")
    parser.add_argument("--problems", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--solve", type=int, default=0, help="problems per task type to solve with the planner")
    options = parser.parse_args()
    played = games(options.problems)
    step = native_step(played, options.rounds)
    print(f"10,000 problems    {generation(options.rounds):10.2f} s")
    print(f"native: load       {native_load(played, options.rounds) * 1e6:10.0f} µs")
    print(f"native: step       {step * 1e6:10.2f} µs")
    print(
        f"native: first step {native_first_episode(played, options.rounds) * 1e6:10.2f} µs (first episode, with load)"
    )
    print(f"native: fork       {native_fork(played, options.rounds) * 1e6:10.2f} µs")
    for kind, share in random_success(200).items():
        print(f"random, 50 steps   {share:10.1%}  {kind}")
    try:
        report_real(anyio.run(real_times, played, options.real_python), step)
    except ConfigError as error:
        print(f"real: not measured: {error}")
        return
    if options.solve:
        for kind, ids in anyio.run(planner_failures, options.solve, options.real_python).items():
            solved = options.solve - len(ids)
            print(f"planner success    {solved:5d} of {options.solve}  {kind} {' '.join(ids)}")


if __name__ == "__main__":
    main()
