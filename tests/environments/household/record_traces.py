"""Record episodes of the real engine for the tests of the native one.

    python tests/environments/household/record_traces.py [--count 2040] [--processes 2] [--out traces.jsonl.xz]

Needs the extra `text-games`. It goes on where it was stopped: each process appends to a part of its own beside the
output, and the parts are joined at the end (`--join` joins what is there). One line is one episode:

    {"kind", "problem", "plan", "start": [observation, commands, reward, done],
     "steps": [[command, observation, change, reward, done], ...]}

`commands` is the full sorted list; a `change` is what left it and what came, `[[...], [...]]`, or null for nothing. A
reader gets every list back with `commands_after`. A trace ends at `done` or after so many steps.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import Process
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from reward_kit.environments.household_problems import (
    KNIVES,
    OPENABLE,
    SPLITS,
    Problem,
    Receptacle,
    TaskType,
    Thing,
    generate_problem,
)
from reward_kit.environments.household_worker import Game

KINDS = ("expert", "uniform", "noisy_expert", "by_verb", "uniform", "expert_then_random")
FIRST_WORKOUT = 1_740
"""From this episode on, a thing of a kitchen is sliced, cleaned, heated and cooled, which random commands seldom do."""
FIRST_NEAR_MISS = 1_980
"""From this episode on, the goal is nearly reached in a way that does not count, and then reached."""
SEED = 3_000
WORKOUT_TASKS = (TaskType.PICK_TWO, TaskType.HEAT, TaskType.COOL, TaskType.CLEAN)
LARGE_EVERY = 7
SMALL = 10

Item = TypeVar("Item", Receptacle, Thing)


def commands_after(commands: Sequence[str], change: Sequence[Sequence[str]] | None) -> list[str]:
    """Return the sorted commands after a recorded change."""
    if change is None:
        return list(commands)
    gone, new = change
    return sorted((set(commands) - set(gone)) | set(new))


def trace_kind(index: int) -> str:
    """Return how an episode is played."""
    if index >= FIRST_NEAR_MISS:
        return "near_miss"
    return "workout" if index >= FIRST_WORKOUT else KINDS[index // len(TaskType) % len(KINDS)]


def trace_problem(index: int) -> Problem:
    """Return the problem of a trace: types and splits in turn, mostly small ones, which are twice as fast."""
    kind = trace_kind(index)
    task_type = list(TaskType)[index % len(TaskType)]
    if kind == "workout":
        task_type = WORKOUT_TASKS[index % len(WORKOUT_TASKS)]
    split = SPLITS[index // (len(TaskType) * len(KINDS)) % len(SPLITS)]
    large = index // len(TaskType) % LARGE_EVERY == 0
    for seed in range(SEED, SEED + 100_000):
        drawn = generate_problem(split, index, seed, task_type)
        if _suits(drawn, kind) and (large or len(drawn.receptacles) <= SMALL):
            return drawn
    raise AssertionError("no such problem")


def _suits(drawn: Problem, kind: str) -> bool:
    if kind == "workout":
        return bool(_knives(drawn)) and any(thing.sliceable for thing in drawn.things)
    if kind == "near_miss" and drawn.task_type is TaskType.PICK_TWO:
        return len(_of_type(drawn.receptacles, drawn.destination)) > 1
    if kind == "near_miss" and drawn.task_type is TaskType.LOOK_IN_LIGHT:
        return len({thing.type for thing in drawn.things if thing.toggleable}) > 1
    return True


def record(game: Game, index: int) -> dict[str, Any]:
    """Play one episode."""
    rng = random.Random(f"trace {index}")
    drawn = trace_problem(index)
    kind = trace_kind(index)
    view = game.load({"problem": drawn.to_json()})
    plan = game.expert({}) if "expert" in kind else None
    start = [view["observation"], view["commands"], view["reward"], view["done"]]
    assert view["commands"] == sorted(set(view["commands"]))
    steps = []
    scripted = kind in ("workout", "near_miss")
    script = (_workout if kind == "workout" else _near_miss)(rng, drawn) if scripted else _script(rng, kind, plan or [])
    script = iter(script)
    for _ in range(rng.randint(12, 25) + (10 if scripted else 0)):
        command = next(script, None) or _next_command(rng, kind, view["commands"], drawn)
        before, view = view["commands"], game.step({"command": command})
        steps.append([command, view["observation"], _change(before, view["commands"]), view["reward"], view["done"]])
        assert commands_after(before, steps[-1][2]) == view["commands"]
        if view["done"]:
            break
    return {"kind": kind, "problem": drawn.to_json(), "plan": plan, "start": start, "steps": steps}


def _script(rng: random.Random, kind: str, plan: Sequence[str]) -> Iterator[str | None]:
    """Yield the planner's commands; None where another command is inserted."""
    if kind == "expert_then_random":
        plan = plan[: rng.randint(1, max(1, len(plan) - 1))]
    for command in plan:
        if kind == "noisy_expert" and rng.random() < 0.3:
            yield None
        yield command


def _knives(drawn: Problem) -> list[Thing]:
    return [thing for thing in drawn.things if thing.type in KNIVES]


def _workout(rng: random.Random, drawn: Problem) -> Iterable[str]:
    """Usually slice an object, then clean, heat and cool it in some order, with examinations."""
    thing = rng.choice([thing for thing in drawn.things if thing.sliceable])
    if rng.random() < 0.8:
        knife = rng.choice(_knives(drawn))
        yield from [*_reach(knife.at), f"take {knife.name} from {knife.at}", f"examine {knife.name}"]
        yield f"go to {thing.at}"
        yield from [f"slice {thing.name} with {knife.name}", "look"]
        yield from ["go to sinkbasin 1", f"clean {knife.name} with sinkbasin 1", f"move {knife.name} to sinkbasin 1"]
    yield from [*_reach(thing.at), f"take {thing.name} from {thing.at}", f"examine {thing.name}"]
    uses = ["clean {} with sinkbasin 1", "heat {} with microwave 1", "cool {} with fridge 1"]
    for use in rng.sample(uses, 3) + rng.sample(uses, 2):
        yield from [f"go to {use.split(' with ')[1]}", use.format(thing.name)]
        if rng.random() < 0.8:
            yield f"examine {thing.name}"
    yield from ["go to countertop 1", f"move {thing.name} to countertop 1", f"take {thing.name} from countertop 1"]


def _near_miss(rng: random.Random, drawn: Problem) -> list[str]:
    """Do the task, but first in a way that must not count."""
    target, *more = rng.sample(_of_type(drawn.things, drawn.target), len(_of_type(drawn.things, drawn.target)))
    fetch = [*_reach(target.at), f"take {target.name} from {target.at}"]
    if drawn.task_type is TaskType.LOOK_IN_LIGHT:
        right = _of_type(drawn.things, drawn.destination)
        wrong = [lamp for lamp in drawn.things if lamp.toggleable and lamp.type != drawn.destination]
        before = wrong + (right if rng.random() < 0.5 else [])
        lit = [command for lamp in before for command in (f"go to {lamp.at}", f"use {lamp.name}")]
        again = [command for lamp in wrong + right for command in (f"go to {lamp.at}", f"use {lamp.name}")]
        return [*lit, *fetch, *again]
    places = [item.name for item in _of_type(drawn.receptacles, drawn.destination)]
    rng.shuffle(places)
    put = [*_reach(places[0]), f"move {target.name} to {places[0]}"]
    back = f"take {target.name} from {places[0]}"
    if drawn.task_type is TaskType.PICK_TWO:
        second = [*_reach(more[0].at), f"take {more[0].name} from {more[0].at}", *_reach(places[1])]
        apart = [f"move {more[0].name} to {places[1]}", f"close {places[1]}", f"open {places[1]}"]
        together = [
            f"take {more[0].name} from {places[1]}",
            f"go to {places[0]}",
            f"move {more[0].name} to {places[0]}",
        ]
        return [*fetch, *put, *second, *apart, *together]
    clean, heat, cool = (
        [f"go to {place} 1", f"{verb} {target.name} with {place} 1"]
        for verb, place in (("clean", "sinkbasin"), ("heat", "microwave"), ("cool", "fridge"))
    )
    useless, needed = {
        TaskType.CLEAN: ([*heat, *cool], clean),
        TaskType.HEAT: ([*clean, *heat, *cool], heat),
        TaskType.COOL: ([*clean, *cool, *heat], cool),
        TaskType.PICK_AND_PLACE: (["look"], []),
    }[drawn.task_type]
    return [*fetch, *useless, *put, back, *needed, f"go to {places[0]}", f"move {target.name} to {places[0]}"]


def _of_type(items: Sequence[Item], kind: str) -> list[Item]:
    return [item for item in items if item.type == kind]


def _reach(place: str) -> list[str]:
    return [f"go to {place}", *([f"open {place}"] if place.split(" ")[0] in OPENABLE else [])]


def _next_command(rng: random.Random, kind: str, commands: Sequence[str], drawn: Problem) -> str:
    if kind == "noisy_expert":
        harmless = [name for name in commands if name.split()[0] in ("look", "inventory", "examine", "help")]
        return rng.choice([rng.choice(harmless), _mistake(rng, commands, drawn)])
    if rng.random() < (0.05 if kind == "uniform" else 0.1):
        return _mistake(rng, commands, drawn)
    if kind == "uniform":
        return rng.choice(commands)
    verb = rng.choice(sorted({name.split()[0] for name in commands}))
    return rng.choice([name for name in commands if name.split()[0] == verb])


def _mistake(rng: random.Random, commands: Sequence[str], drawn: Problem) -> str:
    """Return a misspelled or mostly impossible command; outer white space is ignored."""
    command = rng.choice(commands)
    thing, place = rng.choice(drawn.things).name, rng.choice(drawn.receptacles).name
    at = rng.randrange(len(command))
    impossible = [
        f"go to {place}",
        f"open {place}",
        f"close {place}",
        f"take {thing} from {place}",
        f"move {thing} to {place}",
        f"put {thing} in/on {place}",
        f"examine {thing}",
        f"use {thing}",
        f"clean {thing} with {place}",
        f"heat {thing} with {place}",
        f"cool {thing} with {place}",
        f"slice {thing} with knife 1",
    ]
    misspelt = [
        command[:at] + command[at + 1 :],
        command.upper(),
        f"  {command}\n",
        command.replace(" ", "  "),
        f"{command}.",
        "",
    ]
    return rng.choice(misspelt) if rng.random() < 0.4 else rng.choice(impossible)


def _change(before: Sequence[str], after: Sequence[str]) -> list[list[str]] | None:
    gone, new = sorted(set(before) - set(after)), sorted(set(after) - set(before))
    return [gone, new] if gone or new else None


def _record_part(part: Path, indices: Sequence[int]) -> None:
    whole = part.read_text().rpartition("\n")[0].splitlines() if part.exists() else []
    part.write_text("".join(f"{line}\n" for line in whole))
    done = len(whole)
    game = Game()
    with part.open("a") as file:
        for index in indices[done:]:
            file.write(json.dumps(record(game, index), separators=(",", ":")) + "\n")
            file.flush()


def join(parts: Sequence[Path], out: Path) -> int:
    """Write the complete lines of all parts, ordered by episode; return their number."""
    columns = [[line for line in part.read_text().splitlines(keepends=True) if line.endswith("\n")] for part in parts]
    longest = max(len(column) for column in columns)
    lines = [column[row] for row in range(longest) for column in columns if row < len(column)]
    out.write_bytes(lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME))
    return len(lines)


def main() -> None:
    """Record, then join."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2_040)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("traces.jsonl.xz"))
    parser.add_argument("--parts", type=Path, default=Path("/tmp/household_traces"))
    parser.add_argument("--join", action="store_true", help="record nothing, join what is there")
    options = parser.parse_args()
    options.parts.mkdir(parents=True, exist_ok=True)
    parts = [options.parts / f"part{number}.jsonl" for number in range(options.processes)]
    if not options.join:
        ranges = [range(number, options.count, options.processes) for number in range(options.processes)]
        workers = [Process(target=_record_part, args=pair) for pair in zip(parts, ranges, strict=True)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    print(f"{join(parts, options.out)} episodes, {options.out.stat().st_size / 1e6:.2f} MB, in {options.out}")


if __name__ == "__main__":
    main()
