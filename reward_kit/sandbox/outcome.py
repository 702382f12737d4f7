"""The outcome of a call. The host determines it from the bytes that it received and from the kernel's counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from reward_kit.errors import Failure, FailureClass
from reward_kit.sandbox.frames import FrameError, FrameFault
from reward_kit.sandbox.linux import THREADS
from reward_kit.sandbox.program import Limits

Level = Literal["isolated", "warm"]
Strength = Literal["namespaces", "landlock", "process"]
OutcomeKind = (
    FrameFault
    | Literal[
        "ok",
        "wall",
        "cpu",
        "memory",
        "disk",
        "open_files",
        "processes",
        "denied",
        "exception",
        "load",
        "exit",
        "signal",
        "forbidden_call",
        "type",
        "cycle",
        "setup",
        "zygote",
    ]
)
MEANINGS: Final[dict[OutcomeKind, str]] = {
    "ok": "The function returned a value.",
    "wall": "The call exceeded its wall time limit.",
    "cpu": "The call exceeded its CPU time limit.",
    "memory": "The call exceeded its memory limit.",
    "disk": "The work directory exceeds its limit.",
    "open_files": "The code opened more files than the limit.",
    "processes": "The code started more processes or threads than the limit. By default, it must not start any.",
    "denied": "The code attempted something that the sandbox denies, such as using the network or an unlisted file.",
    "exception": "The function raised an exception.",
    "load": "The file could not be loaded because of a syntax error, a missing module, or a missing function.",
    "exit": "The process exited before it returned a result.",
    "signal": "The process was killed by a signal, for example because a native extension crashed.",
    "forbidden_call": "The code made a system call for a different architecture.",
    "type": "The result contains a value that JSON cannot represent.",
    "cycle": "The result contains itself.",
    "setup": "The sandbox could not be set up, so the code was not run. `reward-kit doctor` shows the reason.",
    "zygote": "The process that starts the sandbox's children ended. The call can be retried.",
    "no_result": "The process ended before it returned a result.",
    "forged_frame": "The answer was not written by the harness.",
    "truncated_frame": "The answer is incomplete.",
    "extra_frame": "More than one answer was written.",
    "result_size": "The result is larger than the limit.",
    "not_json": "The answer is not JSON.",
    "non_finite": "The result contains NaN or infinity.",
    "huge_integer": "The result contains an integer with more than a thousand digits.",
    "duplicate_key": "A mapping in the result has a duplicate key.",
    "nesting": "The result is nested too deeply.",
    "surrogate": "A string in the result is not valid Unicode.",
}
"""The meaning of each kind, for the documentation."""
_CLASSES: Final[dict[str, FailureClass]] = {
    **dict.fromkeys(("wall", "cpu"), "timeout"),
    **dict.fromkeys(("memory", "disk", "open_files", "processes", "result_size"), "limit"),
    **dict.fromkeys(("denied", "setup"), "refused"),
    **dict.fromkeys(
        (
            *("type", "cycle", "not_json", "non_finite", "huge_integer", "duplicate_key", "nesting", "surrogate"),
            *("forged_frame", "truncated_frame", "extra_frame"),
        ),
        "invalid_result",
    ),
}
# The kinds that the harness may report. It shares a process with hostile code. The host detects all other kinds.
_REPORTABLE: Final = frozenset(
    {
        *("exception", "load", "exit", "memory", "disk", "open_files", "processes", "denied"),
        *("type", "cycle", "not_json", "huge_integer", "nesting", "result_size"),
    }
)
_SIGSYS: Final = 31
_SIGKILL: Final = 9


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a call.

    Attributes:
        value: the returned value, converted to JSON types. None if the call failed.
        failure: the failure, or None if the call succeeded.
        kind: "ok", or the exact type of the failure. Records count the broader `failure.failure_class`.
        stdout, stderr: the output up to the size limit. Invalid UTF-8 is replaced.
        is_output_cut: True if the output exceeded the size limit.
        level: "isolated" or "warm".
        strength: the strength of the sandbox.
        wall_s: the wall time in seconds, measured by the host.
        cpu_s: the CPU time in seconds, measured by the kernel. For a warm call, this is the time of the worker.
        peak_memory_mb: the peak resident memory in MiB, including the memory shared with the zygote. 0 if a warm worker
            continues to run.
        exit: the exit status, which is negative for a signal. None if the process continues to run or was lost.
    """

    value: Any
    failure: Failure | None
    kind: OutcomeKind
    stdout: str = ""
    stderr: str = ""
    is_output_cut: bool = False
    level: Level = "isolated"
    strength: Strength = "namespaces"
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_mb: float = 0.0
    exit: int | None = None

    @staticmethod
    def class_of(kind: OutcomeKind) -> FailureClass:
        """Return the failure class for a type of failure."""
        return _CLASSES.get(kind, "crash")


@dataclass(slots=True)
class Evidence:
    """The facts about a call that determine its outcome."""

    is_ready: bool = False  # True if the child reported that it was confined before it read the program
    answer: Any = None  # the decoded answer; meaningless if `fault` is set
    fault: FrameError | None = None  # the reason for a missing answer
    # The reason why the child was killed: "late", "cpu" or "disk" at the respective limit, "fault" for invalid output,
    # "killed" for any other reason; "lost" if the zygote died.
    how: Literal["ended", "late", "cpu", "disk", "fault", "killed", "lost"] = "ended"
    exit: int | None = None  # see `Outcome`
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_mb: float = 0.0
    stdout: bytes = b""
    stderr: bytes = b""
    is_output_cut: bool = False


class _CallFailed(Exception):
    """Raised if a call failed. It contains the type, the message and the traceback."""


def judge(evidence: Evidence, limits: Limits, level: Level, strength: Strength) -> Outcome:
    """Determine the outcome of a call."""
    failure, value = None, None
    kind: OutcomeKind = "ok"
    try:
        value = _value(evidence, limits)
    except _CallFailed as failed:
        kind, message, trace = failed.args
        failure = Failure(Outcome.class_of(kind), "Sandbox", message, trace)
    return Outcome(
        value,
        failure,
        kind,
        evidence.stdout.decode("utf-8", "replace"),
        evidence.stderr.decode("utf-8", "replace"),
        evidence.is_output_cut,
        level,
        strength,
        evidence.wall_s,
        evidence.cpu_s,
        evidence.peak_memory_mb,
        evidence.exit,
    )


def _value(evidence: Evidence, limits: Limits) -> Any:
    if evidence.how == "lost":
        raise _CallFailed("zygote", "the process that starts the sandbox's children ended; the call can be retried", "")
    if not evidence.is_ready and evidence.how != "late":
        detail = evidence.stderr.decode("utf-8", "replace").strip() or f"exit status {evidence.exit}"
        raise _CallFailed("setup", f"the sandbox could not be set up, so the code was not run: {detail[:500]}", "")
    if evidence.how == "late":
        raise _CallFailed("wall", f"the call took more than {limits.wall_s:g} s of wall time{_raise('wall_s')}", "")
    if evidence.how == "cpu":
        raise _beyond_cpu(limits)
    if evidence.how == "disk":
        raise _CallFailed("disk", _with_limit("disk", "", limits), "")
    fault = evidence.fault
    if fault is not None and fault.kind == "no_result":
        status = evidence.exit
        if status == -_SIGKILL and evidence.cpu_s >= 0.75 * limits.cpu_s:
            raise _beyond_cpu(limits)
        if status == -_SIGSYS:
            raise _CallFailed("forbidden_call", "the code made a system call for a different architecture", "")
        if status is not None and status < 0:
            raise _CallFailed("signal", f"the process was killed by signal {-status} before it returned a result", "")
        raise _CallFailed("no_result", f"the process exited with status {status} before it returned a result", "")
    if fault is not None:
        raise _CallFailed(fault.kind, _with_limit(fault.kind, str(fault), limits), "")
    return _checked(evidence.answer, limits)


def _beyond_cpu(limits: Limits) -> _CallFailed:
    return _CallFailed("cpu", f"the call used more than {limits.cpu_s:g} s of CPU time{_raise('cpu_s')}", "")


def _checked(answer: Any, limits: Limits) -> Any:
    """Return the value in an answer, or raise the failure that the harness reported."""
    if not isinstance(answer, dict) or not (answer.keys() <= {"value", "error", "left"}):
        raise _CallFailed("forged_frame", "the answer was not written by the harness", "")
    error = answer.get("error")
    if error is None:
        if "value" not in answer:
            raise _CallFailed("forged_frame", "the answer was not written by the harness", "")
        return answer["value"]
    parts = [error.get(name) for name in ("kind", "type", "message", "traceback")] if isinstance(error, dict) else []
    texts = [text for text in parts if isinstance(text, str)]
    if len(texts) != 4 or texts[0] not in _REPORTABLE:
        raise _CallFailed("forged_frame", "the answer was not written by the harness", "")
    kind, name, message, trace = texts
    text = ": ".join(part for part in (name, message) if part)
    raise _CallFailed(kind, _with_limit(kind, text, limits), trace)


def _with_limit(kind: str, message: str, limits: Limits) -> str:
    """Append the limit that was reached, if any, and how to raise it."""
    texts = {
        "memory": (f"the call needed more than {limits.memory_mb:,} MiB of memory", "memory_mb"),
        "disk": (f"the work directory is limited to {limits.disk_mb:,} MiB", "disk_mb"),
        "open_files": (f"the limit is {limits.open_files:,} open descriptors", "open_files"),
        "processes": (f"the limit is {limits.processes:,} processes and {THREADS} threads", "processes"),
        "result_size": (f"a result is limited to {limits.result_kb:,} KiB", "result_kb"),
    }
    if kind not in texts:
        return message
    text, name = texts[kind]
    return f"{text}{_raise(name)}" + (f" ({message})" if message else "")


def _raise(name: str) -> str:
    return f"; raise limits.{name} if the code needs more"
