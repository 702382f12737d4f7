"""The household: how fast problems are made, how fast each engine plays, how often the real planner solves.

    .venv/bin/python benchmarks/household.py [--real-python PYTHON] [--problems 12] [--rounds 3] [--solve 0]

Both engines play the same commands of the same problems in the same run, and must say the same. The real engine needs
`pip install -e '.[text-games]'`, here or in the Python that `--real-python` names; without it the native half
runs alone. `--solve 200` asks the planner for 200 held-out problems of each task type, and plays its plans on the
native engine (minutes). Times are the best of the rounds, because this machine is shared; compare the ratios.
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
    """A problem and the commands that both engines play."""

    problem: Problem
    commands: list[str]


class RealTimes(NamedTuple):
    """Seconds on the real engine: one value a game, but `steps` one a step."""

    loads: list[float]
    plans: list[float]
    steps: list[float]


def best_of(rounds: int, run: Callable[[], float]) -> float:
    """The least of the rounds' results."""
    return min(run() for _ in range(rounds))


def generation(rounds: int, count: int = 10_000) -> float:
    """Seconds for `count` problems."""

    def once() -> float:
        start = time.perf_counter()
        for index in range(count):
            generate_problem("train", index)
        return time.perf_counter() - start

    return best_of(rounds, once)


def games(count: int) -> list[Game]:
    """Held-out problems of all types, each with random admissible commands."""
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
    """Seconds for one step of the native engine, its tables warm as in training."""
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
    """Seconds for one step in the first episode of a problem, the engine's making included."""

    def once() -> float:
        start = time.perf_counter()
        for game in played:
            engine = HouseholdEngine(game.problem)
            for command in game.commands:
                engine.step(command)
        return (time.perf_counter() - start) / (STEPS * len(played))

    return best_of(rounds, once)


def native_load(played: Sequence[Game], rounds: int) -> float:
    """Seconds to make a native engine of a problem that it has not seen."""

    def once() -> float:
        start = time.perf_counter()
        for game in played:
            HouseholdEngine(game.problem)
        return (time.perf_counter() - start) / len(played)

    return best_of(rounds, once)


def native_fork(played: Sequence[Game], rounds: int, count: int = 1_000) -> float:
    """Seconds for one fork in the middle of an episode."""
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
    """Play the games on the real engine, and check that it says what the native one says."""
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


async def planner_fails(count: int, python: str) -> dict[TaskType, list[str]]:
    """For each task type, which of `count` held-out problems the planner does not solve, by their ids."""
    asked = [generate_problem("held_out", index, 0, kind) for kind in TaskType for index in range(count)]
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
            group.start_soon(work, asked[number::WORKERS])
    return unsolved


def _wins(problem: Problem, plan: Sequence[str]) -> bool:
    engine = HouseholdEngine(problem)
    return any(engine.step(command).won for command in plan)


def random_success(count: int, steps: int = 50) -> dict[TaskType, float]:
    """The share of held-out problems that random admissible commands solve, by task type, on the native engine."""
    return {
        kind: sum(_random_wins(generate_problem("held_out", index, 0, kind), steps) for index in range(count)) / count
        for kind in TaskType
    }


def _random_wins(problem: Problem, steps: int) -> bool:
    rng = random.Random(f"random {problem.id}")
    engine = HouseholdEngine(problem)
    return any(engine.step(rng.choice(engine.admissible())).won for _ in range(steps))


def report_real(times: RealTimes, native: float) -> None:
    """Print the real engine's times and the ratio."""
    step = sum(times.steps) / len(times.steps)
    print(f"real: load         {median(times.loads) * 1e3:10.0f} ms (median), {max(times.loads) * 1e3:.0f} ms at most")
    print(f"real: plan         {median(times.plans) * 1e3:10.0f} ms (median), {max(times.plans) * 1e3:.0f} ms at most")
    print(f"real: step         {step * 1e3:10.1f} ms (mean), {max(times.steps) * 1e3:.0f} ms at most")
    print(f"native over real   {step / native:10.0f} × the steps per second")


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real-python", default=sys.executable, help="a Python with the extra text-games")
    parser.add_argument("--problems", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--solve", type=int, default=0, help="problems per task type to ask the planner for")
    options = parser.parse_args()
    played = games(options.problems)
    step = native_step(played, options.rounds)
    print(f"10,000 problems    {generation(options.rounds):10.2f} s")
    print(f"native: load       {native_load(played, options.rounds) * 1e6:10.0f} µs")
    print(f"native: step       {step * 1e6:10.2f} µs")
    print(
        f"native: first step {native_first_episode(played, options.rounds) * 1e6:10.2f} µs (new problem, all included)"
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
        for kind, ids in anyio.run(planner_fails, options.solve, options.real_python).items():
            solved = options.solve - len(ids)
            print(f"planner solves     {solved:5d} of {options.solve}  {kind} {' '.join(ids)}")


if __name__ == "__main__":
    main()
