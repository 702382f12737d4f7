"""The usual baseline: a temporary file, a subprocess, a timeout, and a guard in the same process.

`python hostile_naive.py CASE` judges one case that way and prints one line of JSON. It confines nothing, so it runs in
`hostile_cage` alone, one case to a cage.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.sandbox.hostile_canaries import Canaries, Expectation, Surroundings, resident_mb
from tests.sandbox.hostile_case import (
    CPU_S,
    MEMORY_MB,
    REQUEST,
    TESTS,
    WALL_S,
    Case,
    Seen,
    problems_of,
    read_case,
)

_GUARD = f"""
import os, resource, shutil, subprocess
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_MB << 20},) * 2)
resource.setrlimit(resource.RLIMIT_CPU, ({int(CPU_S)},) * 2)
for name in ("kill", "killpg", "system", "fork", "forkpty", "setuid", "remove", "rename", "unlink", "chmod", "chown"):
    setattr(os, name, None)
shutil.rmtree = shutil.move = subprocess.Popen = None
"""
_CALL = {
    "reward": f"\nimport json as _json\nprint(_json.dumps(evaluate(**{REQUEST!r})))\n",
    "code": f"""
import json as _json
_passed = 0
for _given, _wanted in {TESTS!r}:
    try:
        _passed += solve(_given) == _wanted
    except Exception:
        pass
print(_json.dumps({{"score": _passed / {len(TESTS)}}}))
""",
}


def run(case: Case, source: str) -> Seen:
    """Run one case as the baseline does; the last line of the output is the result."""
    with tempfile.NamedTemporaryFile("w", suffix=".py", encoding="utf-8", errors="surrogateescape") as file:
        file.write(_GUARD + source + _CALL[case.kind])
        file.flush()
        started = time.monotonic()
        process = subprocess.Popen([sys.executable, file.name], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            output, errors = process.communicate(timeout=WALL_S)
        except subprocess.TimeoutExpired:
            process.kill()
            try:  # whoever else holds the pipe keeps it open
                output, errors = process.communicate(timeout=WALL_S)
            except subprocess.TimeoutExpired:
                output = errors = b""
            return Seen("timeout", wall_s=time.monotonic() - started)
    seen = _seen(case, process.returncode, output.decode("utf-8", "replace"), errors.decode("utf-8", "replace"))
    seen.wall_s = time.monotonic() - started
    return seen


def _seen(case: Case, status: int, output: str, errors: str) -> Seen:
    text = output[-100_000:] + errors[-100_000:]
    if status:
        last = errors.strip().rpartition("\n")[2]
        if status == -signal.SIGKILL or status == -signal.SIGXCPU:
            return Seen("timeout", text=text)
        if status < 0:
            return Seen("crashed", text=text)
        words = {"MemoryError": "memory", "PermissionError": "denied"}
        return Seen(next((word for name, word in words.items() if last.startswith(name)), "error"), text=text)
    try:
        value: Any = json.loads(output.strip().rpartition("\n")[2])
        score = float(value["score"])
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return Seen("error", text=text)
    if case.kind == "code":
        # What was printed may say anything; a share above the whole is what the baseline would hand on.
        return Seen("ok", value, score if math.isfinite(score) else 1.0, text)
    seen = Seen("ok", value, text=text)
    if (type(value["score"]) is not float and type(value["score"]) is not int) or not math.isfinite(score):
        seen.problems.append(f"invalid: {value['score']!r} was taken as a score")
    return seen


def main() -> None:
    """Judge one case, for which the whole cage was made."""
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (64 << 20, 64 << 20) if limit == resource.RLIMIT_FSIZE else (256, 256))
    case = read_case(Path(sys.argv[1]))
    with Canaries() as canaries:
        before, surroundings = resident_mb(), Surroundings(("/tmp", "/dev/shm"))
        seen = run(case, case.filled(canaries.values))
        if case.repeat:
            seen.again = run(case, case.filled(canaries.values)).value
        seen.problems += canaries.touched() + surroundings.left(Expectation())
        grown = resident_mb() - before
        if grown > 100:
            seen.problems.append(f"host: {grown:.0f} MB of the host's memory")
        print(json.dumps({"case": case.name, "problems": problems_of(case, seen, canaries.secrets)}), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
