"""Code that runs inside the sandbox to call or run a model-written program.

This code shares a process with untrusted code. It therefore provides no protection and never receives an expected
answer. Returned values are encoded as plain data and compared elsewhere; arguments use the same encoding. JSON has no
tuples, no sets, and no keys other than strings. Therefore, everything except None, booleans, strings and small numbers
is encoded as `[kind, content]`.

The sandbox imports this file before any call, so the file imports as little as possible.
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
    """Encode a value as JSON that records the kind of each nested value.

    An unsupported value becomes `["other", TYPE_NAME]`.
    """
    kind = type(value)
    if kind is bool or value is None:
        return value
    if kind is int:
        return value if -_SMALL < value < _SMALL else ["int", hex(value)]
    if kind is str:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return ["text", value.encode("utf-8", "surrogatepass").hex()]
        return value
    if kind is float:
        return value if math.isfinite(value) else ["float", repr(value)]
    if depth > _DEEPEST:
        return ["other", "value nested too deeply"]
    depth += 1
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
    # Subclasses, such as members of an IntEnum: use their plain value and ignore their overridden methods.
    if isinstance(value, int):
        return encode(int.__add__(value, 0))
    if isinstance(value, float):
        return encode(float.__add__(value, 0.0))
    if isinstance(value, str):
        return encode(str.__add__(value, ""))
    return ["other", kind.__name__]


def decode(value: Any) -> Any:
    """Decode the output of `encode`. Raise a ValueError if its form is wrong or a value is unsupported."""
    if not isinstance(value, list):
        return value
    if len(value) != 2 or not isinstance(value[0], str):
        raise ValueError("the answer is not in the encoded format")
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
    raise ValueError(f"the answer is not plain data: {content!r:.60}")


_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "text": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "bytes": bytes.fromhex,
}


def load_function(text: str, setup: str, name: str) -> Callable[[Any], Any]:
    """Run the program once as an imported module, and return its function.

    Args:
        text: the program.
        setup: code that runs before the program.
        name: the name of a function, `Class.method`, or the name of a method of `Solution`. A class is instantiated for
            each call.
    """
    space = _run_module("submission", setup, text)
    owner, _, method = name.rpartition(".")
    is_plain = not owner and name in space
    owner = owner or "Solution"
    if not is_plain and not (owner in space and hasattr(space[owner], method)):
        raise NameError(f"the program does not define a function {name!r}")

    def ask(call: Any) -> Any:
        arguments, named = decode(call["args"]), decode(call["kwargs"])
        function = space[name] if is_plain else getattr(space[owner](), method)
        return encode(function(*arguments, **named))

    return ask


def load_script(text: str, setup: str) -> Callable[[str], int]:
    """Return a function that runs the program as a script on a given input and returns the exit status."""

    def run(stdin: str) -> int:
        out = sys.stdout
        # Descriptor 0, sys.stdin and input() must all read the input.
        with open(".input", "wb") as file:  # noqa: PTH123 - the working directory of a call, its only one
            file.write(stdin.encode("utf-8", "surrogatepass"))
        descriptor = os.open(".input", os.O_RDONLY)
        os.unlink(".input")  # noqa: PTH108
        os.dup2(descriptor, 0)
        os.close(descriptor)
        sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        sys.stdout.reconfigure(line_buffering=False)  # type: ignore[union-attr]
        sys.setrecursionlimit(_RECURSION_LIMIT)
        try:
            _run_module("__main__", setup, text)
        except SystemExit as error:
            if error.code is None or isinstance(error.code, int):
                return int(error.code or 0)
            sys.stderr.write(f"{error.code}\n")
            return 1
        else:
            return 0
        finally:
            # Like an exiting interpreter, wait for threads, then call the registered exit functions.
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stdout = out

    return run


def _run_module(name: str, setup: str, text: str) -> dict[str, Any]:
    """Run the setup and the program as a module with this name, and return the module's namespace."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    for source, filename in ((setup, "<setup>"), (text, SUBMISSION)):
        if source:
            OWN_FILES.add(filename)
            linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
            exec(compile(source, filename, "exec", dont_inherit=True), vars(module))  # noqa: S102 - its purpose
    return vars(module)


def compile_program(
    text: str, filename: str, compile_command: list[str], run_command: list[str], limits: dict[str, float]
) -> Callable[[str], Any]:
    """Compile a program written in another language, and return a function that runs it on a given input.

    Once a run has exceeded its time limit, the program is not run again.

    Args:
        text: the program.
        filename: the file name of the program in the working directory.
        compile_command: the command that compiles the program, or [] for an interpreted language.
        run_command: the command that runs the program once in the working directory.
        limits: the limits, keyed by name: `compile_s` and `run_s` in seconds of wall time, `cpu_s` in seconds of CPU
            time per run, and `output` in bytes.
    """
    with open(filename, "wb") as file:  # noqa: PTH123
        file.write(text.encode("utf-8", "replace"))
    problem, is_late = "", False
    if compile_command:
        status, _, errors = _run_program(compile_command, b"", limits["compile_s"], limits["compile_s"], 1 << 16)
        problem, is_late = f"the program does not compile: {errors[-1500:]}" if status else "", status is None

    def run(stdin: str) -> Any:
        nonlocal is_late
        if problem:
            return {"problem": problem}
        if not is_late:
            given, size = stdin.encode("utf-8", "surrogatepass"), int(limits["output"])
            status, output, errors = _run_program(run_command, given, limits["run_s"], limits["cpu_s"], size)
            is_late = status is None
        return {"late": True} if is_late else {"status": status, "stdout": output, "stderr": errors[-500:]}

    return run


def _run_program(
    command: list[str], stdin: bytes, wall_s: float, cpu_s: float, output: int
) -> tuple[int | None, str, str]:
    """Return the exit status, and the beginnings of standard output and standard error.

    The status is `None` if the program exceeded a time limit.
    """
    import contextlib
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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime > cpu_s:
            status = None
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read(output + 1).decode("utf-8", "replace"))
    return status, texts[0], texts[1]
