"""The program that runs in the sandboxed child. It loads the user's code and answers each call with one frame.

It shares its process with hostile code, so it does not isolate anything. It only has to report honest mistakes
precisely. It binds the names that it uses before the user's code can change them. The host does not trust its
answers.
"""

from __future__ import annotations

import _json
import errno
import gc
import json
import linecache
import os
import sys
import types
from _thread import _count as thread_count
from collections.abc import Callable
from typing import Any

from reward_kit.sandbox.frames import HEADER, MAGIC

_LONGEST_TEXT = 2_000
_DEEPEST_TRACE = 12
_ERRNO_KINDS = {
    errno.EPERM: "denied",
    errno.EACCES: "denied",
    errno.EROFS: "denied",
    errno.ENOSPC: "disk",
    errno.EFBIG: "disk",
    errno.EDQUOT: "disk",
    errno.EMFILE: "open_files",
    errno.EAGAIN: "processes",
}
OWN_FILES: set[str] = set()
"""The files whose lines a traceback shows: the program and other code that was sent as text."""
SPOILT: list[str] = []
"""Reasons why this process must not answer further calls. Code that runs in the process adds them."""

# These names are bound at import, because the code under test may replace any builtin.
_len, _isinstance, _str = len, isinstance, str
_read, _write, _exit, _dup, _close = os.read, os.write, os._exit, os.dup, os.close
_loads = json.loads
_header = HEADER.pack
_type_of: Callable[[Any], type] = type


class _TooLarge(Exception):
    """Raised if a result exceeds the size limit."""


def serve(channel: int, max_result: int, *, is_single: bool) -> None:
    """Answer the calls on `channel` until it is closed. If `is_single` is true, answer only one call.

    This function never returns.
    """
    first = _read_frame(channel)
    if first is None:
        _exit(0)
    program = _loads(first[1])
    target, failure = _load(program)
    form = program["form"]
    del first, program
    while (frame := _read_frame(channel)) is not None:
        nonce, payload = frame
        out_of_memory = _framed(nonce, b'{"error":{"kind":"memory","type":"MemoryError","message":"","traceback":""}}')
        lowest = _dup(channel)
        _close(lowest)
        answer: dict[str, Any] = {}
        try:
            answer = {"error": failure} if failure is not None else _call(target, form, _loads(payload))
            _flush()
            frame_out = _framed(nonce, _encode(answer, max_result, lowest, channel))
        except MemoryError:
            frame_out = out_of_memory
        del frame, payload
        del answer
        _write_all(channel, frame_out)
        if is_single:
            break
    _exit(0)


def _read_frame(channel: int) -> tuple[bytes, bytes] | None:
    header = _read_exactly(channel, HEADER.size)
    if header is None:
        return None
    _, nonce, length = HEADER.unpack(header)
    payload = _read_exactly(channel, length)
    return None if payload is None else (nonce, payload)


def _read_exactly(channel: int, size: int) -> bytes | None:
    data = _read(channel, size)
    if _len(data) == size:
        return data
    parts = [data]
    got = _len(data)
    while data and got < size:
        data = _read(channel, size - got)
        got += _len(data)
        parts.append(data)
    return b"".join(parts) if got == size else None


def _framed(nonce: bytes, payload: bytes) -> bytes:
    return _header(MAGIC, nonce, _len(payload)) + payload


def _write_all(channel: int, data: bytes) -> None:
    sent = _write(channel, data)
    while sent < _len(data):
        sent += _write(channel, data[sent:])


def _load(program: dict[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """Execute the source code of the program, and return its function."""
    source, filename, function = program["source"], program["filename"], program["function"]
    module = types.ModuleType(program["module"])
    module.__file__ = filename
    sys.modules[module.__name__] = module
    OWN_FILES.add(filename)
    linecache.cache[filename] = (_len(source), None, source.splitlines(True), filename)
    try:
        exec(compile(source, filename, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - what this is for
        target = module.__dict__[function]
    except KeyError as error:
        if error.args == (function,) and function not in module.__dict__:
            return None, _error("load", "NameError", f"the code defines no function {function!r}")
        return None, _describe(error, "load")
    except BaseException as error:  # noqa: BLE001 - code under test may raise anything, and the host gets a description
        return None, _describe(error, "load")
    return target, None


def _call(target: Any, form: str, request: dict[str, Any]) -> dict[str, Any]:
    try:
        value = target(*request["args"], **request["kwargs"])
        if _isinstance(value, types.CoroutineType):
            value.close()
            return {"error": _error("type", "", "the function returned a coroutine; it must not be async")}
        if form == "reward" and _type_of(value).__module__.startswith("reward_kit"):
            value = value.model_dump(mode="python")
    except BaseException as error:  # noqa: BLE001 - code under test may raise anything, and the host gets a description
        return {"error": _describe(error, "exception")}
    return {"value": value}


def _describe(error: BaseException, kind: str) -> dict[str, Any]:
    """Describe an exception for the host, and clear its frames to free memory."""
    trace = []
    step = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if code.co_filename in OWN_FILES:
            line = linecache.getline(code.co_filename, step.tb_lineno).strip()
            trace.append(f"  {code.co_filename}:{step.tb_lineno} in {code.co_name}\n    {line}")
        try:
            step.tb_frame.clear()
        except RuntimeError:  # the frame is still running
            trace = trace[-_DEEPEST_TRACE:]
        step = step.tb_next
    name = _type_of(error).__name__
    if _isinstance(error, MemoryError):
        kind = "memory"
    elif _isinstance(error, SystemExit):
        kind = "exit"
    elif isinstance(error, OSError) and kind != "load":
        kind = errno_kind(error) or kind
    return _error(kind, name, _text(error), "\n".join([f"{name}: {_text(error)}", *trace[: -_DEEPEST_TRACE - 1 : -1]]))


def errno_kind(error: OSError) -> str | None:
    """Return the limit or restriction that caused an OSError, or None for any other error."""
    return _ERRNO_KINDS.get(error.errno or 0)


def _text(error: BaseException) -> str:
    try:
        return _str(error)
    except BaseException as second:  # noqa: BLE001 - a hostile __str__ may raise anything
        return f"<error whose __str__ raised {_type_of(second).__name__}>"


def _error(kind: str, name: str, message: str, trace: str = "") -> dict[str, Any]:
    return {"kind": kind, "type": _plain(name), "message": _plain(message), "traceback": _plain(trace)}


def _plain(text: str) -> str:
    return _str(text)[:_LONGEST_TEXT].encode("utf-8", "backslashreplace").decode("utf-8")


def _flush() -> None:
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except (OSError, ValueError, AttributeError):  # closed, or replaced by something else
            continue


def _encode(answer: dict[str, Any], max_result: int, lowest: int, channel: int) -> bytes:
    """Encode the answer to a call. A result that cannot be converted to JSON becomes an error."""
    try:
        payload = _json_of({**answer, "left": _left_behind(lowest, channel)})
        if _len(payload) > max_result:
            raise _TooLarge(f"the result has {_len(payload):,} bytes")
    except _TooLarge as error:
        problem = _error("result_size", "", error.args[0])
    except RecursionError:
        problem = _error("nesting", "", "the result is nested too deeply")
    except ValueError as error:
        kind = "cycle" if "ircular" in _text(error) else "huge_integer" if "digits" in _text(error) else "not_json"
        problem = _error(kind, "", f"the result cannot be converted to JSON: {_text(error)}")
    except TypeError as error:
        problem = _error("type", "", f"the result cannot be converted to JSON: {_text(error)}")
    else:
        return payload
    return _json_of({"error": problem, "left": _left_behind(lowest, channel)})


def _json_of(value: Any) -> bytes:
    markers: dict[int, Any] = {}
    encode = _json.make_encoder(markers, _converted, _json.encode_basestring_ascii, None, ":", ",", False, False, True)
    return "".join(encode(value, 0)).encode("ascii")


def _converted(value: Any) -> Any:
    """Convert NumPy numbers and pydantic models. This is the `default` function of the JSON encoder."""
    kind = _type_of(value)
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    if callable(getattr(kind, "model_dump", None)):
        return value.model_dump(mode="python")
    raise TypeError(f"a value of type {kind.__module__}.{kind.__qualname__} cannot be converted to JSON")


def _left_behind(lowest: int, channel: int) -> list[str]:
    """List what a call left behind, such as threads, if it would affect the next call of a warm worker."""
    left = [*SPOILT]
    if thread_count():
        left.append("threads")
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        left.append("processes")
    except ChildProcessError:  # there are no children or other descendants; orphans become children of process 1
        again = -1
    try:
        again = _dup(channel)
        _close(again)
    except OSError:
        again = -1
    if again != lowest:
        left.append("descriptors")
    return left


def prepare() -> None:
    """Do the work that all children need. It is done only once, in the zygote."""
    for name in ("stdout", "stderr"):
        # The output is line-buffered, so output that was written before a limit was reached is kept.
        getattr(sys, name).reconfigure(errors="backslashreplace", line_buffering=True)
    _json_of({"a": [1.5, "b", None]})
    _loads('{"a": [1.5, "b", null]}')
    gc.collect()
    gc.freeze()
