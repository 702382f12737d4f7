"""What runs in the sandbox around a model's program: asks its function, runs it as a script, or compiles and runs it.

It shares a process with hostile code, so nothing here is a wall, and it never holds an expected answer. What a function
returns is taken apart into plain data here and compared elsewhere; the same form carries arguments in. JSON has no word
for tuples, sets or keys that are numbers, so all but None, booleans, text and small numbers is `[kind, content]`.

The sandbox imports this file before any call, so it imports next to nothing.
"""

from __future__ import annotations

import atexit
import linecache
import math
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from reward_kit.sandbox.harness import OWN_FILES

SUBMISSION = "<submission>"
_DEEPEST = 45
_SMALL = 1 << 64
_RECURSION_LIMIT = sys.getrecursionlimit()


def encode(value: Any, depth: int = 0) -> Any:
    """A value as JSON with the kinds that JSON lacks; anything else becomes `["other", name of its type]`."""
    kind = type(value)
    if kind is bool or value is None:
        return value
    if kind is int:
        return value if -_SMALL < value < _SMALL else ["int", hex(value)]
    if kind is str:
        return value if value.isascii() else _text(value)
    if kind is float:
        return value if math.isfinite(value) else ["float", repr(value)]
    if depth > _DEEPEST:
        return ["other", "something nested too deeply"]
    return _of_several(value, kind, depth + 1)


def _text(value: str) -> Any:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return ["text", value.encode("utf-8", "surrogatepass").hex()]
    return value


def _of_several(value: Any, kind: type, depth: int) -> Any:
    if kind.__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), depth)
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", [encode(item, depth) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(key, depth), encode(item, depth)] for key, item in value.items()]]
    if isinstance(value, set | frozenset):
        return ["set", [encode(item, depth) for item in value]]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, complex):
        return ["complex", [encode(value.real), encode(value.imag)]]
    # Subclasses, such as members of an IntEnum: the plain value in them, whatever they say of themselves.
    if isinstance(value, int):
        return encode(int.__add__(value, 0))
    if isinstance(value, float):
        return encode(float.__add__(value, 0.0))
    if isinstance(value, str):
        return encode(str.__add__(value, ""))
    return ["other", kind.__name__]


def decode(value: Any) -> Any:
    """The inverse of `encode`.

    Raises:
        ValueError: it is nothing that `encode` gives, or stands for no data.
    """
    if not isinstance(value, list):
        return value
    if len(value) != 2 or not isinstance(value[0], str):
        raise ValueError("the answer has a form of its own")
    kind, content = value
    if kind in ("list", "tuple", "set") and isinstance(content, list):
        items = [decode(item) for item in content]
        return items if kind == "list" else tuple(items) if kind == "tuple" else set(items)
    if kind == "dict" and isinstance(content, list):
        return {decode(key): decode(item) for key, item in content}
    if kind == "complex" and isinstance(content, list):
        return complex(*map(decode, content))
    if isinstance(content, str) and kind in _FROM_TEXT:
        return _FROM_TEXT[kind](content)
    raise ValueError(f"the answer is {content!r:.60}, which is not data")


_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "text": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "bytes": bytes.fromhex,
}


def function_of(text: str, setup: str, name: str) -> Callable[[Any], Any]:
    """The program's function, to be asked one call after the other; the program runs once, as an imported module.

    Args:
        text: the program.
        setup: what runs in its place before it.
        name: the function, `Class.method`, or a method of `Solution`; of a class a new object is made for each call.
    """
    module = _module("submission")
    _run_text(setup, "<setup>", module)
    _run_text(text, SUBMISSION, module)
    find = _finder(vars(module), name)

    def ask(call: Any) -> Any:
        arguments, named = decode(call["args"]), decode(call["kwargs"])
        return encode(find()(*arguments, **named))

    return ask


def _finder(space: dict[str, Any], name: str) -> Callable[[], Any]:
    owner, _, method = name.rpartition(".")
    if not owner and name in space:
        return lambda: space[name]
    owner = owner or "Solution"
    if owner in space and hasattr(space[owner], method):
        return lambda: getattr(space[owner](), method)
    raise NameError(f"the program defines no function {name!r}")


def script_of(text: str, setup: str) -> Callable[[str], int]:
    """The program as a script that reads its input and prints; a call runs all of it, and returns its exit status."""

    def run(stdin: str) -> int:
        out = sys.stdout
        _put_on_input(stdin)
        sys.stdout.reconfigure(line_buffering=False)  # type: ignore[union-attr]
        sys.setrecursionlimit(_RECURSION_LIMIT)
        module = _module("__main__")
        try:
            return _status(setup, text, module)
        finally:
            _finish()
            sys.stdout.flush()
            sys.stdout = out

    return run


def _status(setup: str, text: str, module: types.ModuleType) -> int:
    try:
        _run_text(setup, "<setup>", module)
        _run_text(text, SUBMISSION, module)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return int(error.code or 0)
        sys.stderr.write(f"{error.code}\n")
        return 1
    return 0


def _finish() -> None:
    """What an interpreter does at its end: wait for threads, then call what was registered for it."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()


def _put_on_input(text: str) -> None:
    """Make `text` what descriptor 0, `sys.stdin` and `input()` read."""
    with open(".input", "wb") as file:  # noqa: PTH123 - the work folder of a call, its only one
        file.write(text.encode("utf-8", "surrogatepass"))
    descriptor = os.open(".input", os.O_RDONLY)
    os.unlink(".input")  # noqa: PTH108
    os.dup2(descriptor, 0)
    os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module


def _run_text(text: str, filename: str, module: types.ModuleType) -> None:
    if not text:
        return
    OWN_FILES.add(filename)
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    exec(compile(text, filename, "exec", dont_inherit=True), vars(module))  # noqa: S102 - what this is for


def compiled(
    text: str, filename: str, compile_command: list[str], run_command: list[str], limits: dict[str, float]
) -> Callable[[str], Any]:
    """A program of another language: compiled once, run again for each input. After a run that was late none is made.

    Args:
        text: the program.
        filename: what it is called in the work folder.
        compile_command: [] where there is nothing to compile.
        run_command: with the work folder as the working directory.
        limits: `compile_s` and `run_s` of wall time, `cpu_s` of each run, and the bytes of its `output`.
    """
    with open(filename, "wb") as file:  # noqa: PTH123
        file.write(text.encode("utf-8", "replace"))
    problem = ""
    if compile_command:
        status, _, errors = _run_program(compile_command, b"", limits["compile_s"], limits["compile_s"], 1 << 16)
        problem = "" if status == 0 else f"it does not compile: {errors[-1_500:]}" if status is not None else "late"
    is_over = problem == "late"

    def run(stdin: str) -> Any:
        nonlocal is_over
        if problem and not is_over:
            return {"problem": problem}
        if is_over:
            return {"late": True}
        given = stdin.encode("utf-8", "surrogatepass")
        status, output, errors = _run_program(
            run_command, given, limits["run_s"], limits["cpu_s"], int(limits["output"])
        )
        is_over = status is None
        return {"late": True} if is_over else {"status": status, "stdout": output, "stderr": errors[-500:]}

    return run


def _run_program(
    command: list[str], stdin: bytes, wall_s: float, cpu_s: float, output: int
) -> tuple[int | None, str, str]:
    """Exit status (None where its time was up), output and errors, each as far as it is kept."""
    import resource
    import subprocess
    import tempfile

    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        given.write(stdin)
        given.seek(0)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        process = subprocess.Popen(command, stdin=given, stdout=out, stderr=errors, start_new_session=True)
        try:
            status: int | None = process.wait(wall_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_group(process.pid)
            process.wait()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime > cpu_s:
            status = None
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read(output + 1).decode("utf-8", "replace"))
    return status, texts[0], texts[1]


def _end_group(leader: int) -> None:
    try:
        os.killpg(leader, 9)
    except ProcessLookupError:
        return
