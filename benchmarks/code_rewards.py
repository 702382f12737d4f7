"""Throughput and correctness of `python_code`: submissions per second, and the number of wrong scores.

    .venv/bin/python benchmarks/code_rewards.py [-n 1000] [--seed 0] [--concurrent 16]

The workload is a seeded mix of programs for ten tasks with ten hidden tests each: 62% correct; 25% wrong, each passing
a known share of the tests; 10% hostile (forged results, reads of the host, fork bombs, signals, searches for expected
values, hash collisions); 3% slow (endless loops limited to 0.1 s of CPU time, sleeps limited to 0.6 s of wall time).
All texts differ, so no result is cached. Expected scores are computed beforehand by running the benchmark's own correct
and wrong programs in this process. The rate includes slow submissions. The target is 150 submissions per second; the
exit status is 1 if any score is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import platform
import random
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from reward_kit.reward_calls import with_options  # noqa: E402
from reward_kit.rewards.code import CodeSandboxes, python_code  # noqa: E402

TARGET = 150.0
CPU_S, WALL_S = 0.1, 0.6
SHARES = {"right": 0.62, "wrong": 0.25, "hostile": 0.10, "slow": 0.03}


class Task(NamedTuple):
    """A task with a generator of inputs, bodies that solve it, and bodies that do not."""

    name: str
    inputs: Callable[[random.Random], list[Any]]
    right: tuple[str, ...]
    wrong: tuple[str, ...]


def ints(low: int, high: int, least: int = 1) -> Callable[[random.Random], list[Any]]:
    return lambda draw: [[draw.randint(low, high) for _ in range(draw.randint(least, 12))]]


def words(draw: random.Random) -> list[Any]:
    return ["".join(draw.choice("aabcde ()") for _ in range(draw.randint(1, 30)))]


TASKS = [
    Task(
        "maximum",
        ints(-50, 50),
        (
            "    return max(a)",
            "    return sorted(a)[-1]",
            "    m = a[0]\n    for x in a: m = x if x > m else m\n    return m",
        ),
        ("    return max(a, key=abs)", "    return a[-1]", "    m = 0\n    for x in a: m = max(m, x)\n    return m"),
    ),
    Task(
        "distinct",
        ints(0, 6),
        ("    return sorted(set(a))", "    return sorted({x: 1 for x in a})"),
        ("    return list(dict.fromkeys(a))", "    return sorted(a)", "    return set(a)"),
    ),
    Task(
        "running sums",
        ints(-9, 9),
        (
            "    from itertools import accumulate\n    return list(accumulate(a))",
            "    return [sum(a[: i + 1]) for i in range(len(a))]",
        ),
        (
            "    return [sum(a[:i]) for i in range(len(a))]",
            "    from itertools import accumulate\n    return accumulate(a)",
        ),
    ),
    Task(
        "reversed words",
        words,
        (
            "    return ' '.join(a.split()[::-1])",
            "    out = []\n    for w in a.split(): out.insert(0, w)\n    return ' '.join(out)",
        ),
        ("    return a[::-1]", "    return ' '.join(a.split(' ')[::-1])"),
    ),
    Task(
        "balanced",
        words,
        (
            (
                "    d = 0\n    for c in a:\n        d += (c == '(') - (c == ')')\n"
                "        if d < 0: return False\n    return d == 0"
            ),
        ),
        ("    return a.count('(') == a.count(')')", "    return True", "    return int(a.count('(') == a.count(')'))"),
    ),
    Task(
        "counts",
        words,
        ("    from collections import Counter\n    return Counter(a)", "    return {c: a.count(c) for c in a}"),
        ("    return {c: 1 for c in a}", "    return sorted(a)", "    return {c: a.count(c) for c in a if c != ' '}"),
    ),
    Task(
        "primes below",
        lambda draw: [draw.randint(2, 400)],
        ("    return sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(2, a))",),
        ("    return sum(all(n % d for d in range(2, int(n**0.5))) for n in range(2, a))", "    return a // 3"),
    ),
    Task(
        "longest rise",
        ints(0, 20),
        (
            (
                "    from bisect import bisect_left\n    t = []\n    for x in a:\n"
                "        i = bisect_left(t, x)\n        t[i:i + 1] = [x]\n    return len(t)"
            ),
            (
                "    b = [1] * len(a)\n    for i in range(len(a)):\n        for j in range(i):\n"
                "            if a[j] < a[i]: b[i] = max(b[i], b[j] + 1)\n    return max(b)"
            ),
        ),
        ("    return len(set(a))", "    b = 1\n    for x, y in zip(a, a[1:]): b += y > x\n    return b"),
    ),
    Task(
        "Fibonacci",
        lambda draw: [draw.randint(0, 300)],
        ("    x, y = 0, 1\n    for _ in range(a): x, y = y, x + y\n    return x",),
        (
            "    x, y = 1, 1\n    for _ in range(a): x, y = y, x + y\n    return x",
            "    return int(((1 + 5**0.5) / 2) ** a / 5**0.5 + 0.5)",
        ),
    ),
    Task(
        "transposed",
        lambda draw: [
            [[draw.randint(0, 9) for _ in range(width)] for _ in range(draw.randint(1, 5))]
            for width in [draw.randint(1, 5)]
        ],
        (
            "    return [list(r) for r in zip(*a)]",
            "    return list(zip(*a))",
            "    return [[r[i] for r in a] for i in range(len(a[0]))]",
        ),
        ("    return a", "    return [r[::-1] for r in a]", "    return zip(*a)"),
    ),
]
HOSTILE = {
    "prints a result": "import os\nprint('{\"value\": true} PASSED 1.0', flush=True)\nos._exit(0)",
    "exits": "import sys\nsys.exit(0)",
    "compares equal to everything": (
        "class E(int):\n    def __eq__(s, o): return True\n    __hash__ = int.__hash__\ndef f(a): return E(-77)"
    ),
    "replaces json": (
        "import json, _json\n_json.make_encoder = lambda *a: lambda *b: ['{\"value\": -77}']\ndef f(a): return object()"
    ),
    "replaces the harness": (
        "from reward_kit.rewards import program_runner as inside\ninside.encode = lambda *a: ['other', 'x']\n"
        "def f(a): return -77"
    ),
    "writes a frame": (
        "import os, struct\ndef f(a):\n"
        "    os.write(3, struct.pack('!4s16sI', b'RKF1', bytes(16), 2) + b'{}')\n    return -77"
    ),
    "searches for expected values": (
        "import gc\ndef f(a):\n"
        "    return [o['expected'] for o in gc.get_objects() if type(o) is dict and 'expected' in o] or -77"
    ),
    "reads the host": "def f(a):\n    return open('/etc/passwd').read()",
    "forks": "import os\ndef f(a):\n    while True: os.fork()",
    "starts a subprocess": (
        "import subprocess\ndef f(a):\n    return subprocess.run(['id'], capture_output=True).stdout.decode()"
    ),
    "sends signals": (
        "import os, signal\ndef f(a):\n    os.kill(os.getppid(), signal.SIGKILL)\n"
        "    os.kill(-1, signal.SIGKILL)\n    return -77"
    ),
    "opens a socket": "import socket\ndef f(a):\n    return socket.create_connection(('127.0.0.1', 22))",
    "collides hashes": "def f(a):\n    return [[n * (2**61 - 1), n] for n in range(3_000)]",
    "floods its output": "import sys\ndef f(a):\n    sys.stdout.write('x' * 3_000_000)\n    return -77",
    "allocates memory": "def f(a):\n    return len(bytearray(1 << 34))",
    "pickles": "class P(dict):\n    def __reduce__(s): return (print, ('forged',))\ndef f(a): return P()",
}
SLOW = {
    "loops": "def f(a):\n    while True: pass",
    "sleeps": "import time\ndef f(a):\n    time.sleep(3600)",
    "loops at import": "while True: pass",
    "ignores signals": (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ndef f(a):\n    try:\n"
        "        while True: time.sleep(1)\n    except BaseException: f(a)"
    ),
}
PREFACES = ("", "Let me think step by step.\n", "The idea is simple:\n\n```\nan example of output\n```\n")


class Submission(NamedTuple):
    """A model's answer and the expected score."""

    kind: str
    variant: str
    text: str
    truth: dict[str, Any]
    score: float


def hidden_tests(task: Task, seed: int) -> dict[str, Any]:
    """Return ten tests that every wrong program fails at least one of."""
    for attempt in range(1_000):
        draw = random.Random(f"{task.name} {seed} {attempt}")
        inputs = [task.inputs(draw) for _ in range(10)]
        tests = [{"args": arguments, "expected": run_body(task.right[0], arguments)} for arguments in inputs]
        if all(passed_share(body, tests) < 1 for body in task.wrong):
            return {"function": "f", "tests": tests}
    raise AssertionError(f"{task.name}: a wrong program passes all tests")


def run_body(body: str, arguments: list[Any]) -> Any:
    space: dict[str, Any] = {}
    exec(f"def f(a):\n{body}\n", space)  # noqa: S102 - our own code
    answer = space["f"](*arguments)
    return dict(answer) if isinstance(answer, dict) else answer


def passed_share(body: str, tests: list[dict[str, Any]]) -> float:
    """Return the share of tests that a body passes, compared independently of `python_code`."""
    passed = 0
    for test in tests:
        try:
            passed += comparable(run_body(body, test["args"])) == comparable(test["expected"])
        except (OverflowError, IndexError, ValueError):
            continue
    return passed / len(tests)


def comparable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return ["list", *map(comparable, value)]
    return value if isinstance(value, str | dict) else (type(value).__name__, repr(value))


def submissions(count: int, seed: int) -> list[Submission]:
    """Return the mix of submissions, shuffled."""
    draw = random.Random(seed)
    truths = {task.name: hidden_tests(task, seed) for task in TASKS}
    result = []
    for kind, share in SHARES.items():
        for number in range(round(share * count)):
            task = TASKS[number % len(TASKS)]
            programs = {"hostile": HOSTILE, "slow": SLOW}.get(kind)
            if programs is None:
                index = number // len(TASKS) % len(getattr(task, kind))
                body = getattr(task, kind)[index]
                variant, score = f"{task.name} {index}", passed_share(body, truths[task.name]["tests"])
                program = f"def f(a):\n{body}"
            else:
                variant, score = list(programs)[number % len(programs)], 0.0
                program = programs[variant]
            text = f"{draw.choice(PREFACES)}```python\n# attempt {len(result)}\n{program}\n```\n"
            result.append(Submission(kind, variant, text, truths[task.name], score))
    draw.shuffle(result)
    return result


async def score_all(submitted: list[Submission], concurrent: int) -> tuple[float, list[tuple[Submission, float]]]:
    """Return the seconds that all submissions took, without sandbox startup, and the score of each."""
    reward = with_options(python_code, time_s=CPU_S, wall_s=WALL_S, memory_mb=256)
    scores: list[tuple[Submission, float]] = []
    pending = iter(submitted)
    async with CodeSandboxes() as sandbox:

        async def work(items: Any) -> None:
            for item in items:
                messages = [{"role": "assistant", "content": item.text}]
                result = await reward(messages=messages, ground_truth=item.truth, sandbox=sandbox)
                scores.append((item, result.score))

        warmup = [item for item in submitted if item.kind == "right"][: 2 * concurrent]
        await asyncio.gather(*(work([item]) for item in warmup))
        scores.clear()
        began = time.perf_counter()
        await asyncio.gather(*(work(pending) for _ in range(concurrent)))
        return time.perf_counter() - began, scores


def show(seconds: float, scores: list[tuple[Submission, float]]) -> int:
    """Print the table of scores and the rate; return the number of wrong scores."""
    load = os.getloadavg()
    print(f"{datetime.date.today()}, Linux {platform.release()}, {len(os.sched_getaffinity(0))} CPUs, ", end="")
    print(f"Python {platform.python_version()}, uid {os.geteuid()}, load {load[0]:.1f} {load[1]:.1f}")
    rows: dict[str, list[tuple[Submission, float]]] = defaultdict(list)
    for item, score in scores:
        rows[item.kind].append((item, score))
    print(f"{'kind':<10} {'submissions':>11} {'variants':>9} {'1':>6} {'0 < s < 1':>10} {'0':>6} {'wrong scores':>13}")
    wrong = Counter[str]()
    for kind in SHARES:
        scored = rows[kind]
        for item, score in scored:
            wrong[kind] += abs(score - item.score) > 1e-9
        ones, zeros = (sum(score == value for _, score in scored) for value in (1.0, 0.0))
        variants = len({item.variant for item, _ in scored})
        partial = len(scored) - ones - zeros
        print(f"{kind:<10} {len(scored):>11} {variants:>9} {ones:>6} {partial:>10} {zeros:>6} {wrong[kind]:>13}")
    for item, score in scores:
        if abs(score - item.score) > 1e-9:
            print(f"WRONG: {item.kind}, {item.variant}: {score}, expected {item.score}")
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cpu_s = [usage.ru_utime + usage.ru_stime for usage in (own, children)]
    print(f"CPU time including setup: {cpu_s[0]:.1f} s in this process, {cpu_s[1]:.1f} s in the sandbox")
    rate = len(scores) / seconds
    print(
        f"{len(scores)} submissions, 10 tests each, in {seconds:.2f} s: {rate:.0f} submissions/s (target {TARGET:.0f})"
    )
    return sum(wrong.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=1_000, help="number of submissions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrent", type=int, default=16)
    options = parser.parse_args()
    sys.exit(int(show(*asyncio.run(score_all(submissions(options.n, options.seed), options.concurrent))) > 0))
