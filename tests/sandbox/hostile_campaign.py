"""Run hostile code in the sandbox at every strength, level and user, and in an unprotected baseline.

    python -m tests.sandbox.hostile_campaign FOLDER [--user-python PYTHON] [--no-baseline] [--only NAME …]

Each combination runs in a cage of its own (`hostile_cage`), with canaries around it, and prints one row of a table; the
exit status is 1 where the sandbox missed anything. What the baseline missed is printed beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from reward_kit.processes import temporary_root
from reward_kit.sandbox import Limits, Outcome, Program, Sandbox
from reward_kit.sandbox.outcome import Level, Strength
from tests.sandbox.hostile_cage import HERE, in_cage, missing_cage
from tests.sandbox.hostile_canaries import Canaries, Expectation, Surroundings, processes, resident_mb
from tests.sandbox.hostile_case import (
    CPU_S,
    DISK_MB,
    MEMORY_MB,
    OUTPUT_KB,
    REQUEST,
    RESULT_KB,
    TESTS,
    WALL_S,
    Case,
    Seen,
    problems_of,
    read_cases,
    share_passed,
    word_of,
)

LIMITS = Limits(WALL_S, CPU_S, MEMORY_MB, disk_mb=DISK_MB, output_kb=OUTPUT_KB, result_kb=RESULT_KB)
_HONEST = Program("def evaluate(messages, ground_truth=None, **rest):\n    return {'score': 1.0}\n")
_SLOTS = 2
_NAIVE_S = 20.0
_LEVELS: tuple[Level, ...] = ("isolated", "warm")
_STRENGTHS: tuple[Strength, ...] = ("namespaces", "landlock")


@dataclass(frozen=True)
class Row:
    """A row of the table: the combination, the number of passed cases, and the problems of the others."""

    title: str
    passed: int
    total: int
    seconds: float
    problems: dict[str, list[str]]

    def __str__(self) -> str:
        return f"{self.title:<38} {self.passed:>4}/{self.total:<4} {self.seconds:>7.1f} s"


class OfSandbox(Expectation):
    """The processes and files of an open sandbox: zygotes, each with a warm or waiting child."""

    def __init__(self, sandbox: Sandbox, strength: Strength, level: Level) -> None:
        self._sandbox = sandbox
        self._zygote = 2 if strength == "namespaces" else 1
        self._is_warm = level == "warm"
        self._root = str(temporary_root())

    def process(self, pid: int) -> bool:
        """Return whether it is a zygote, the only worker below one, or a waiting child."""
        parents = processes()
        depth, above = 0, pid
        while above != os.getpid():
            if above not in parents:
                return pid not in parents  # it has ended
            depth, above = depth + 1, parents[above]
        is_worker = self._is_warm and depth == self._zygote + 1 and list(parents.values()).count(parents[pid]) == 1
        return depth <= self._zygote or is_worker or pid in self._sandbox.waiting_children

    def file(self, path: str) -> bool:
        """Return whether it is our process's folder, a zygote's, or its child's, which must be empty unless warm."""
        if not path.startswith(self._root):
            return False
        depth = len(Path(path[len(self._root) :]).parts)
        try:
            is_waiting = depth == 3 and not list(Path(path).iterdir()) and len(list(Path(path).parent.iterdir())) == 1
        except OSError:  # it is gone
            return True
        return depth <= 2 or is_waiting or self._is_warm


async def campaign(cases: Sequence[Case], strength: Strength, level: Level) -> list[tuple[str, list[str]]]:
    """Return each case's name with its problems."""
    found = []
    with Canaries() as canaries:
        async with Sandbox(strength=strength, slots=_SLOTS) as sandbox:
            await asyncio.gather(*(_call(sandbox, _HONEST.source, level) for _ in range(_SLOTS)))
            expected = OfSandbox(sandbox, strength, level)
            surroundings = Surroundings(("/tmp", "/dev/shm"))
            ours = {os.getpid(), int(canaries.values["CANARYPID"]), 1, 2}
            surroundings.processes = {pid for pid in surroundings.processes if pid in ours or _is_guardian(pid)}
            for case in cases:
                before = resident_mb()
                seen = await _run(sandbox, case, case.filled(canaries.values), level)
                seen.problems += await _after(sandbox, level, canaries, surroundings, expected)
                if resident_mb() - before > 100:
                    seen.problems.append(f"host: {resident_mb() - before:.0f} MB of the host's memory")
                found.append((case.name, problems_of(case, seen, canaries.secrets)))
        left = [pid for pid in processes() if pid not in surroundings.processes]
    return [*found, *([("(closing)", [f"left: processes {left}"])] if left else [])]


async def _after(
    sandbox: Sandbox, level: Level, canaries: Canaries, surroundings: Surroundings, expected: OfSandbox
) -> list[str]:
    async with asyncio.timeout(5):
        while not sandbox.is_settled:  # noqa: ASYNC110 - a child is known when it has said that it is ready
            await asyncio.sleep(0.001)
    problems = canaries.touched() + surroundings.left(expected)
    probes = await asyncio.gather(*(_call(sandbox, _HONEST.source, level) for _ in range(_SLOTS)))
    return problems + [f"probe: {word_of(probe)}: {probe.failure}" for probe in probes if probe.value != {"score": 1.0}]


async def _run(sandbox: Sandbox, case: Case, source: str, level: Level) -> Seen:
    started = time.monotonic()
    if case.kind == "code":
        outcomes = await sandbox.ask(
            Program(source, "solve", form="plain"), [given for given, _ in TESTS], limits=LIMITS
        )
        passed = share_passed([None if one.failure else one.value for one in outcomes])
        last = outcomes[-1]
        return Seen(word_of(last), None, passed, _shown(outcomes), time.monotonic() - started)
    outcome = await _call(sandbox, source, level)
    seen = Seen(word_of(outcome), outcome.value, text=_shown([outcome]))
    if case.repeat:
        seen.again = (await _call(sandbox, source, level)).value
    seen.wall_s = time.monotonic() - started
    return seen


async def _call(sandbox: Sandbox, source: str, level: Level) -> Outcome:
    request = copy.deepcopy(REQUEST)
    outcome = await sandbox.call(Program(source), request, limits=LIMITS, level=level)
    assert request == REQUEST, "the caller's request was changed"
    return outcome


def _shown(outcomes: Sequence[Outcome]) -> str:
    return "".join(f"{one.value}{one.failure}{one.stdout}{one.stderr}" for one in outcomes)


def _is_guardian(pid: int) -> bool:
    try:
        return b"guardian" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


def row_of(title: str, command: Sequence[str], user: int, total: int, keep: Sequence[Path], limit_s: float) -> Row:
    """Run one combination in a cage."""
    started = time.monotonic()
    done = in_cage(command, user, keep, limit_s)
    try:
        found: dict[str, list[str]] = dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        found = {"(runner)": [f"it was lost, with status {done.returncode}: {done.stderr[-2000:]}"]}
        return Row(title, 0, total, time.monotonic() - started, found)
    problems = {name: texts for name, texts in found.items() if texts}
    return Row(title, total - len(problems), total, time.monotonic() - started, problems)


def naive_row(folder: Path, cases: Sequence[Case], python: str, user: int) -> Row:
    """Run the baseline with a cage per case, so that a case that kills the runner costs no other."""
    started, problems = time.monotonic(), {}
    script = str(HERE.with_name("hostile_naive.py"))
    for case in cases:
        command = [python, script, str(folder / f"{case.name}.py")]
        try:
            done = in_cage(command, user, _kept(folder, python), _NAIVE_S)
            texts = json.loads(done.stdout.splitlines()[-1])["problems"]
        except subprocess.TimeoutExpired:
            texts = ["runner: it was frozen"]
        except (IndexError, ValueError):
            texts = ["runner: it was killed"]
        if texts:
            problems[case.name] = texts
    title = f"baseline: subprocess, guard     uid {user}"
    return Row(title, len(cases) - len(problems), len(cases), time.monotonic() - started, problems)


def _kept(folder: Path, python: str) -> tuple[Path, ...]:
    return folder, Path(python).parent.parent


def _users(user_python: str) -> Iterator[tuple[int, str]]:
    """Return the users to run as, each with an interpreter that it can read."""
    yield os.geteuid(), sys.executable
    if os.geteuid() == 0:
        yield 1000, user_python


def _can_run(python: str, user: int, keep: Sequence[Path]) -> str:
    probe = [python, "-c", f"import sys; sys.path.insert(0, {str(HERE.parents[2])!r}); import reward_kit.sandbox.host"]
    done = in_cage(probe, user, keep, _NAIVE_S)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


def main() -> int:
    """Run all combinations, or, with --inside, the one that a cage was made for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--user-python", default=sys.executable, help="an interpreter that uid 1000 can read")
    parser.add_argument("--no-baseline", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    parser.add_argument("--inside", nargs=2, metavar=("STRENGTH", "LEVEL"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder: Path = given.folder.resolve()
    cases = read_cases(folder, given.only)
    if given.inside:
        print(json.dumps(asyncio.run(campaign(cases, *given.inside))))
        return 0
    if not cases or missing_cage():
        print(missing_cage() or f"no case in {folder}", file=sys.stderr)
        return 2
    rows = list(_rows(folder, cases, given))
    return int(any(row.problems for row in rows))


def _rows(folder: Path, cases: Sequence[Case], given: argparse.Namespace) -> Iterator[Row]:
    """Return the sandbox's rows; the baseline's is printed and not counted."""
    print(f"{len(cases)} cases of {folder}, load {os.getloadavg()[0]:.1f}", flush=True)
    for user, python in _users(given.user_python):
        if reason := _can_run(python, user, _kept(folder, python)):
            print(f"uid {user}: left out, {python} does not run there: {reason}", flush=True)
            continue
        for strength in _STRENGTHS:
            for level in _LEVELS:
                yield _shown_row(_sandbox_row(folder, cases, python, user, strength, level, given.only))
        if user and not given.no_baseline:
            row = naive_row(folder, cases, python, user)
            _shown_row(row)
            kinds = Counter(text.partition(":")[0] for texts in row.problems.values() for text in texts[:1])
            print("    of these:", ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()), flush=True)


def _sandbox_row(
    folder: Path, cases: Sequence[Case], python: str, user: int, strength: Strength, level: Level, only: Sequence[str]
) -> Row:
    inside = [str(folder), "--inside", strength, level, *(["--only", *only] if only else [])]
    command = [python, str(HERE.with_name("hostile_campaign.py")), *inside]
    title = f"{strength:<12} {level:<10} uid {user}"
    return row_of(title, command, user, len(cases), _kept(folder, python), 60 + 2 * (WALL_S + 4) * len(cases))


def _shown_row(row: Row) -> Row:
    print(row, flush=True)
    for name, texts in row.problems.items():
        print(f"    {name}: {'; '.join(texts)[:300]}", flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
