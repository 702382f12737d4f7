"""Model-written programs with tests and expected scores: traps of public benchmarks, and forgeries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


def calls(*pairs: tuple[Any, Any], function: str = "f", **more: Any) -> dict[str, Any]:
    """Return tests of a function of one argument."""
    return {"function": function, "tests": [{"args": [given], "expected": wanted} for given, wanted in pairs], **more}


def runs(*pairs: tuple[str, str]) -> dict[str, Any]:
    return {"tests": [{"stdin": given, "stdout": wanted} for given, wanted in pairs]}


DOUBLE = calls((1, 2), (5, 10), (-3, -6), (0, 0))
SUM = runs(("1 2\n", "3\n"), ("10 -4\n", "6\n"))
TRUE = calls((1, True), (2, True), (3, True))


class Case(NamedTuple):
    """A program with its tests; `text` is the last message if it is more than the program in a block."""

    id: str
    program: str
    truth: Any
    score: float
    says: str = ""
    options: Mapping[str, Any] = MappingProxyType({})
    text: str = ""

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": self.text or f"So:\n```python\n{self.program}\n```\nDone."}]


RIGHT = "def f(x):\n    return 2 * x"
ADD = "a, b = map(int, input().split())\nprint(a + b)"
LEAVES_OPEN = """\
import threading, time
keep = []
def f(x):
    keep.append(open('/dev/null'))
    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
    return 2 * x
"""
LEAVES_LATER = """\
import os, threading
def f(x):
    threading.Timer(0.3, os._exit, (0,)).start()
    if x == 2:
        import time; time.sleep(1)
    return True
"""
BUSY = """\
import time
def f(x):
    end = time.process_time() + 0.15
    while time.process_time() < end: pass
    return x
"""
EQUAL_TEXT = """\
class A(str):
    def __eq__(s, o): return True
    def __str__(s): return 'b'
    __repr__ = __str__
def f(x): return A('a')
"""
HARNESS_REPLACED = """\
from reward_kit.rewards import program_runner as inside
from reward_kit.sandbox import harness
inside.encode = lambda *a: True
harness._encode = lambda *a: b'{"value": true}'
def f(x): return 7
"""
OWN_FRAME = """\
import os, struct
def f(x):
    p = b'{"value":2}'
    os.write(3, struct.pack('!4s16sI', b'RKF1', bytes(16), len(p)) + p)
    return 7
"""
LOOKS_AROUND = """\
import gc, sys
def f(x):
    for o in gc.get_objects():
        if type(o) is dict and 'expected' in o: return o['expected']
    frame = sys._getframe()
    while frame:
        if 'expected' in frame.f_locals: return frame.f_locals['expected']
        frame = frame.f_back
"""
CALL_CASES = [
    Case("right", RIGHT, DOUBLE, 1.0, "4 of 4 tests passed"),
    Case(
        "partly right earns its share",
        "def f(x):\n    return 2 * x if x > 0 else 7",
        DOUBLE,
        0.5,
        "test 3: f(-3) gave 7",
    ),
    Case("all or nothing", "def f(x):\n    return 2 * x if x else 1", DOUBLE, 0.0, "3 of 4", {"pass_rate": "all"}),
    Case(
        "raises on one test",
        "def f(x):\n    return [0, 2, 0, 0, 0, 10][x]",
        calls((1, 2), (9, 18), (5, 10)),
        2 / 3,
        "IndexError",
    ),
    Case("does not compile", "def f(x) return x", DOUBLE, 0.0, "SyntaxError"),
    Case("defines another function", "def g(x):\n    return 2 * x", DOUBLE, 0.0, "does not define a function 'f'"),
    Case("LeetCode: a method of Solution", "class Solution:\n    def f(self, x):\n        return 2 * x", DOUBLE, 1.0),
    Case(
        "a method by its class",
        "class A:\n    def g(self, x):\n        return 2 * x",
        calls((1, 2), function="A.g"),
        1.0,
    ),
    Case(
        "a new object for each test",
        "class Solution:\n    n = 0\n    def f(self, x):\n        self.n += 1\n        return self.n",
        calls((1, 1), (2, 1)),
        1.0,
    ),
    Case(
        "HumanEval: demonstration under __main__ is not run",
        RIGHT + "\nif __name__ == '__main__':\n    raise SystemExit(input())",
        DOUBLE,
        1.0,
    ),
    Case(
        "a dataclass finds its module",
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(x):\n    return P(x).x * 2",
        DOUBLE,
        1.0,
    ),
    Case("prints beside its answer", "def f(x):\n    print('2', x)\n    return 2 * x", DOUBLE, 1.0),
    Case(
        "recursion deeper than the default",
        "import sys\nsys.setrecursionlimit(10**6)\ndef f(x):\n    return 0 if x == 0 else 2 + f(x - 1)",
        calls((20_000, 40_000)),
        1.0,
    ),
    Case(
        "a factorial of thousands of digits",
        "import math\ndef f(x):\n    return math.factorial(x)",
        calls((2_000, math.factorial(2_000))),
        1.0,
    ),
    Case("changes its argument", "def f(x):\n    x.append(1)\n    return len(x)", calls(([1], 2), ([1], 2)), 1.0),
    Case(
        "keyword arguments",
        "def f(x, *, y=1):\n    return x - y",
        {"function": "f", "tests": [{"args": [3], "kwargs": {"y": 2}, "expected": 1}]},
        1.0,
    ),
    Case("a tuple is a list", "def f(x):\n    return (x, x)", calls((1, [1, 1])), 1.0),
    Case("1.0 is 1", "def f(x):\n    return x * 2.0", DOUBLE, 1.0),
    Case("True is not 1", "def f(x):\n    return True", calls((1, 1)), 0.0, "gave True, but 1 was expected"),
    Case("1 is not true", "def f(x):\n    return 1", TRUE, 0.0),
    Case("'10' is not 10", "def f(x):\n    return str(2 * x)", DOUBLE, 0.0),
    Case("0.1 + 0.2 is not 0.3", "def f(x):\n    return 0.1 + x", calls((0.2, 0.3)), 0.0),
    Case(
        "0.1 + 0.2 is 0.3 by a tolerance",
        "def f(x):\n    return 0.1 + x",
        calls((0.2, 0.3)),
        1.0,
        "",
        {"tolerance": 1e-9},
    ),
    Case(
        "a tolerance reaches into lists",
        "def f(x):\n    return {'a': [0.1 + x]}",
        calls((0.2, {"a": [0.3]})),
        1.0,
        "",
        {"tolerance": 1e-9},
    ),
    Case("another order is wrong", "def f(x):\n    return x[::-1]", calls(([1, 2], [1, 2])), 0.0),
    Case(
        "another order is right where any is",
        "def f(x):\n    return x[::-1]",
        calls(([1, [2, 3]], [1, [2, 3]])),
        1.0,
        "",
        {"unordered": True},
    ),
    Case(
        "any order: but inner lists keep theirs",
        "def f(x):\n    return [y[::-1] for y in x]",
        calls(([[2, 3], [1]], [[2, 3], [1]])),
        0.0,
        "",
        {"unordered": True},
    ),
    Case(
        "any order: duplicates count",
        "def f(x):\n    return [1, 1, 2]",
        calls(([], [1, 2, 2])),
        0.0,
        "",
        {"unordered": True},
    ),
    Case("keys that are numbers", "def f(x):\n    return {x: 'a'}", calls((1, {"1": "a"})), 1.0),
    Case("a set is no list", "def f(x):\n    return {1, 2}", calls((1, [1, 2])), 0.0),
    Case("a generator is no list", "def f(x):\n    yield x", calls((1, [1])), 0.0, "an object of type generator"),
    Case("nothing returned", "def f(x):\n    print(2 * x)", DOUBLE, 0.0, "gave None"),
    Case(
        "infinity and NaN",
        "def f(x):\n    return [float('inf'), float('nan')]",
        calls((1, [float("inf"), float("nan")])),
        1.0,
    ),
    Case("half a surrogate pair", "def f(x):\n    return chr(0xd800)", calls((1, "a"), (2, "\ud800")), 0.5),
    Case(
        "leaves threads and files open",
        LEAVES_OPEN,
        DOUBLE,
        1.0,
    ),
    Case(
        "leaves before the last answers",
        "import os\ndef f(x):\n    if x == -3: os._exit(0)\n    return 2 * x",
        DOUBLE,
        0.5,
    ),
    Case(
        "leaves after an answer: it is not given again",
        LEAVES_LATER,
        TRUE,
        1 / 3,
    ),
    Case(
        "too slow: the rest fails",
        "def f(x):\n    while x > 1: pass\n    return 2 * x",
        calls((1, 2), (2, 4), (0, 0)),
        1 / 3,
        "CPU time",
        {"time_s": 0.2},
    ),
    Case("sleeps too long", "import time\ndef f(x):\n    time.sleep(60)", DOUBLE, 0.0, "wall time", {"wall_s": 0.2}),
    Case(
        "CPU time is of all calls together",
        BUSY,
        calls(*((n, n) for n in range(6))),
        1 / 6,
        "CPU time",
        {"time_s": 0.25},
    ),
    Case("too much memory", "def f(x):\n    return len(bytearray(1 << 30))", DOUBLE, 0.0, "memory", {"memory_mb": 64}),
    Case("a result without end", "def f(x):\n    return 'x' * 10_000_000", DOUBLE, 0.0, "KiB"),
    Case(
        "a long right result has room",
        "def f(x):\n    return list(range(x))",
        calls((60_000, list(range(60_000)))),
        1.0,
    ),
    Case(
        "classes of tests are counted",
        "def f(x):\n    return 2 * x if x < 10 else 0",
        {
            "function": "f",
            "tests": [{"args": [1], "expected": 2, "class": "small"}, {"args": [10], "expected": 20, "class": "large"}],
        },
        0.5,
    ),
    Case("setup runs before", "def f(x):\n    return sqrt(x)", calls((4, 2.0), setup="from math import sqrt"), 1.0),
]
FORGERIES = [
    Case(
        "prints a verdict and leaves",
        "import os\nprint('{\"value\": 2} PASSED', flush=True)\nos._exit(0)",
        DOUBLE,
        0.0,
        "status 0",
    ),
    Case("exits at import", "import sys\nsys.exit(0)", DOUBLE, 0.0, "SystemExit"),
    Case(
        "an object equal to everything",
        "class A(int):\n    def __eq__(s, o): return True\n    __hash__ = int.__hash__\ndef f(x): return A(7)",
        DOUBLE,
        0.0,
    ),
    Case(
        "a text equal to everything",
        EQUAL_TEXT,
        calls((1, "b")),
        0.0,
    ),
    Case(
        "a dict with items of its own",
        "class D(dict):\n    def __len__(s): return 0\ndef f(x): return D(a=1)",
        calls((1, {})),
        0.0,
    ),
    Case(
        "json replaced",
        "import json, _json\njson.dumps = lambda *a, **k: '2'\n_json.make_encoder = None\ndef f(x): return 7",
        DOUBLE,
        0.0,
    ),
    Case(
        "the harness replaced",
        HARNESS_REPLACED,
        calls((1, 2), (2, 4)),
        0.0,
    ),
    Case(
        "a frame of its own",
        OWN_FRAME,
        DOUBLE,
        0.0,
    ),
    Case(
        "looks for what is expected in its process",
        LOOKS_AROUND,
        DOUBLE,
        0.0,
        "gave None",
    ),
    Case("a skipped test is not passed", "import unittest\ndef f(x): raise unittest.SkipTest('no')", DOUBLE, 0.0),
    Case(
        "assertions switched off",
        "import builtins\nbuiltins.AssertionError = None\ndef f(x): return 7",
        {"test_list": ["assert f(1) == 2"]},
        0.0,
    ),
    Case("forks", "import os\ndef f(x):\n    return 2 * x if os.fork() else 0", DOUBLE, 0.0),
    Case("reads the machine", "def f(x):\n    return open('/etc/passwd').read()", DOUBLE, 0.0),
    Case("opens a socket", "import socket\ndef f(x):\n    socket.create_connection(('127.0.0.1', 1))", DOUBLE, 0.0),
    Case(
        "colliding keys take little time",
        "def f(x):\n    return {n * (2**61 - 1) for n in range(5_000)}",
        {"test_list": ["assert f(1) == {1}"]},
        0.0,
    ),
]
