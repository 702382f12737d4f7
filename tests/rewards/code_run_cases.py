"""Model-written scripts, replies that contain programs, and the test formats of benchmarks."""

from __future__ import annotations

import json

from tests.rewards.code_cases import ADD, CALL_CASES, DOUBLE, FORGERIES, RIGHT, SUM, Case, runs

IN_A_THREAD = """\
import threading
def main():
    print(sum(map(int, input().split())))
threading.stack_size(2**26)
threading.Thread(target=main).start()
"""
AT_EXIT = """\
import atexit, io, sys
out = io.StringIO()
sys.stdout = out
atexit.register(lambda: sys.__stdout__.write(out.getvalue()))
print(sum(map(int, input().split())))
"""
RUN_CASES = [
    Case("right", ADD, SUM, 1.0),
    Case("reads bytes", "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))", SUM, 1.0),
    Case("reads descriptor 0", "print(sum(map(int, open(0).read().split())))", SUM, 1.0),
    Case(
        "under __main__",
        f"def main():\n    {ADD.replace(chr(10), chr(10) + '    ')}\nif __name__ == '__main__':\n    main()",
        SUM,
        1.0,
    ),
    Case(
        "Codeforces: works in a thread",
        IN_A_THREAD,
        SUM,
        1.0,
    ),
    Case(
        "Codeforces: output is written at exit",
        AT_EXIT,
        SUM,
        1.0,
    ),
    Case("leaves with exit()", ADD + "\nexit()\nprint(1)", SUM, 1.0),
    Case("leaves with os._exit(0), flushed", ADD + "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)", SUM, 1.0),
    Case("prints right and crashes", ADD + "\n1 / 0", SUM, 0.0, "ZeroDivisionError"),
    Case("prints right and fails", ADD + "\nraise SystemExit(3)", SUM, 0.0, "exited with status 3"),
    Case("blanks at the ends of lines", "a, b = map(int, input().split())\nprint(a + b, '  \\n\\n')", SUM, 1.0),
    Case("exactly", "a, b = map(int, input().split())\nprint(a + b, '')", SUM, 0.0, "", {"stdout": "exact"}),
    Case("Windows' line ends", "print('1\\r\\n2', end='\\r\\n')", runs(("", "1\n2\n")), 1.0, "", {"stdout": "exact"}),
    Case("lines count", "print(1, 2)", runs(("", "1\n2\n")), 0.0),
    Case("words alone count", "print(1, 2)", runs(("", "1\n2\n")), 1.0, "", {"stdout": "tokens"}),
    Case("1.0 is another text than 1", "print(1.0)", runs(("", "1\n")), 0.0),
    Case("numbers by a tolerance", "print('x', 0.1 + 0.2)", runs(("", "x 0.3\n")), 1.0, "", {"tolerance": 1e-6}),
    Case("a tolerance is for numbers", "print('y', 0.3)", runs(("", "x 0.3\n")), 0.0, "", {"tolerance": 1e-6}),
    Case(
        "numbers beyond floats are compared as text",
        "print('9' * 310)",
        runs(("", "8" + "9" * 309)),
        0.0,
        "",
        {"tolerance": 1e-6},
    ),
    Case("prints nothing", "input()", SUM, 0.0, "printed ''"),
    Case("a prompt is output", "a, b = map(int, input('? ').split())\nprint(a + b)", SUM, 0.0),
    Case("reads more than there is", "input(); input()", SUM, 0.0, "EOFError"),
    Case(
        "nothing is left from run to run",
        "import random, sys\nprint(getattr(sys, 'seen', 0))\nsys.seen = 1",
        runs(("", "0\n"), ("", "0\n")),
        1.0,
    ),
    Case(
        "together: a fresh module, shared others",
        "import sys\nprint('x' in globals(), getattr(sys, 'seen', 0))\nx = sys.seen = 1",
        runs(("", "False 0\n"), ("", "False 1\n")),
        1.0,
        "",
        {"runs": "together"},
    ),
    Case("together: many runs", ADD, SUM, 1.0, "", {"runs": "together"}),
    Case(
        "too slow once, and the rest is not made",
        "n = int(input())\nwhile n: pass\nprint(n)",
        runs(("0", "0"), ("1", "1"), ("0", "0")),
        1 / 3,
        "CPU time",
        {"time_s": 0.2},
    ),
    Case("output without end", "while True: print('x' * 1000)", SUM, 0.0, "", {"time_s": 0.2}),
    Case("writes into its folder", "open('a.txt', 'w').write('7')\nprint(open('a.txt').read())", runs(("", "7")), 1.0),
    Case("input that is no ASCII", "print(input()[::-1])", runs(("äñ\n", "ñä\n")), 1.0),
    Case("long input", "import sys\nprint(len(sys.stdin.read()))", runs(("x" * 2_000_000, "2000000\n")), 1.0),
]
TEXTS = [
    Case(
        "the last block",
        "",
        DOUBLE,
        1.0,
        "",
        {},
        "First ```python\n1/0\n```\n```python\ndef f(x): return 0\n```\nNo:\n```python\n" + RIGHT + "\n```\n",
    ),
    Case("the first block", "", DOUBLE, 1.0, "", {"block": "first"}, f"```python\n{RIGHT}\n```\n```python\n1/0\n```"),
    Case(
        "joined blocks",
        "",
        DOUBLE,
        1.0,
        "",
        {"block": "joined"},
        "```python\ny = 2\n```\nand\n```py\ndef f(x): return y * x\n```",
    ),
    Case(
        "example of output after the program",
        "",
        DOUBLE,
        1.0,
        "",
        {},
        f"```python\n{RIGHT}\n```\nIt prints\n```\n10\n```\n```bash\npython f.py\n```",
    ),
    Case("a block without a tag", "", DOUBLE, 1.0, "", {}, f"~~~~\n{RIGHT}\n~~~~"),
    Case(
        "a block in a list", "", DOUBLE, 1.0, "", {}, "1. So:\n   ```python\n   def f(x):\n       return 2 * x\n   ```"
    ),
    Case("a block that is not closed", "", DOUBLE, 1.0, "", {}, f"```python\n{RIGHT}"),
    Case("another language only", "", DOUBLE, 0.0, "no fenced block of Python", {}, "```cpp\nint main() {}\n```"),
    Case("no block", "", DOUBLE, 0.0, "no fenced block", {}, RIGHT),
    Case("no block, and the whole reply is meant", "", DOUBLE, 1.0, "", {"unfenced": "whole"}, RIGHT),
    Case(
        "what was thought is no program",
        "",
        DOUBLE,
        0.0,
        "",
        {},
        f"<think>```python\n{RIGHT}\n```</think> I do not know.",
    ),
    Case("an empty block", "", DOUBLE, 0.0, "", {}, "```python\n\n```"),
    Case("half a surrogate pair in the program", "", DOUBLE, 1.0, "", {}, f"```python\n# \ud800\n{RIGHT}\n```"),
    Case("a NUL byte", "", DOUBLE, 0.0, "", {}, f"```python\n\0{RIGHT}\n```"),
]
HUMAN_EVAL = """METADATA = {'author': 'x'}

def check(candidate):
    xs = [1, 2]
    assert candidate(xs) == [2, 4], "first"
    assert candidate([]) == []
    assert abs(candidate([0.25])[0] - 0.5) < 1e-6
    assert not candidate([])
    for n in range(2):
        assert candidate([n]) == [2 * n]
    assert True, "done"
"""
EACH = "def f(xs): return [2 * x for x in xs]"
FORMS = [
    Case("HumanEval", EACH, {"test": HUMAN_EVAL, "entry_point": "f", "prompt": "def f(xs):"}, 1.0, "6 of 6"),
    Case("HumanEval: wrong", "def f(xs): return xs", {"test": HUMAN_EVAL, "entry_point": "f"}, 3 / 6),
    Case(
        "MBPP",
        EACH,
        {"test_list": ["assert f([1]) == [2]", "assert set(f((1, 2))) == set([4, 2])"], "test_setup_code": ""},
        1.0,
    ),
    Case(
        "MBPP: tuples are no lists in Python",
        EACH,
        {"test_list": ["assert f([1]) == (2,)"]},
        0.0,
        "in `f([1]) == (2,)` it gave [2]",
    ),
    Case(
        "MBPP: arguments keep their types",
        "def f(t, d): return type(t).__name__ + str(d[1])",
        {"test_list": ["assert f((1,), {1: 2}) == 'tuple2'"]},
        1.0,
    ),
    Case("MBPP: True is 1 in Python", "def f(x): return 1", {"test_list": ["assert f(2) == True"]}, 1.0),
    Case(
        "MBPP: floats by a tolerance",
        "def f(r): return 0.1 + r",
        {"test_list": ["assert f(0.2) == 0.3"]},
        1.0,
        "",
        {"tolerance": 1e-9},
    ),
    Case(
        "MBPP: test_imports",
        "def f(x): return math.floor(x)",
        {"test_list": ["assert f(2.5) == 2"], "test_imports": ["import math"]},
        1.0,
    ),
    Case("assertions as JSON of a list", EACH, json.dumps(["assert f([1]) == [2]"]), 1.0),
    Case("assertions as a text", EACH, "assert f([1]) == [2]\nassert f([2]) == [4]", 1.0),
    Case("APPS: runs", ADD, json.dumps({"inputs": ["1 2\n", "2 2\n"], "outputs": ["3\n", "4\n"]}), 1.0),
    Case("APPS: lines", "print(input() + input())", {"inputs": [["a", "b"]], "outputs": [["ab"]]}, 1.0),
    Case("APPS: calls", RIGHT, {"inputs": [[1], [2]], "outputs": [[2], [4]], "fn_name": "f"}, 1.0),
    Case("LiveCodeBench: runs", ADD, json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]), 1.0),
    Case(
        "LiveCodeBench: calls",
        "class Solution:\n    def f(self, a, b): return a + b",
        {"function": "f", "tests": [{"input": "[1]\n[2]", "output": "[1, 2]", "testtype": "functional"}]},
        1.0,
    ),
]
CASES = [*CALL_CASES, *FORGERIES, *RUN_CASES, *TEXTS, *FORMS]
