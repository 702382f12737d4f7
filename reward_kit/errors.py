"""Error types, the boundaries that raise them, and the failures stored in records.

1. Every boundary to foreign code or data has one flat error type below: configuration, provider, policy,
   environment, tool, reward function, alignment, training, store. They do not inherit from one another.
2. `boundary(ErrorType, what)` surrounds a call across such a boundary. Any exception that escapes is re-raised as
   that type, with the original exception as its cause. Errors of this package and cancellation pass unchanged.
3. Two places convert an error to a record: the rollout worker (on the episode) and the reward agent (on the score).
   Both call `Failure.from_exception`; other episodes and rewards continue.
4. The command line prints one line for a `RewardKitError` and exits with the error's `exit_code`.
"""

from __future__ import annotations

import asyncio
import difflib
import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, get_args

FailureClass = Literal["timeout", "crash", "limit", "invalid_result", "refused", "provider_error"]
FAILURE_CLASSES: tuple[str, ...] = get_args(FailureClass)
CLASS_MEANINGS: dict[FailureClass, str] = {
    "timeout": "The time limit was exceeded. Raise the limit that the message names, or make the code faster.",
    "crash": (
        "The code raised an exception, or its process ended. Read the traceback: its first frame is in your own file."
    ),
    "limit": (
        "A limit other than time was reached: memory, size, or number of calls. Raise the limit that the message names."
    ),
    "invalid_result": (
        "The returned value is not a valid result: it has the wrong type, is NaN, or names an unknown step. Fix "
        "the reward."
    ),
    "refused": (
        "The operation was not attempted, because the configuration forbids it or makes it impossible. Fix what "
        "the message names."
    ),
    "provider_error": "A model endpoint or a service did not respond, even after retries. Try again later.",
}
"""The meaning of each failure class, and what to do about it."""
_PACKAGE_FOLDER = f"{Path(__file__).parent}{os.sep}"
PACKAGE_DIRECTORIES = ("site-packages", "dist-packages")
"""The names of directories of installed packages."""
_INSTALLED = (*PACKAGE_DIRECTORIES, str(Path(os.__file__).parent) + os.sep)
_MESSAGE_LIMIT = 2_000
_MOST_KNOWN = 40  # The maximum number of names to list; a dataset may have thousands of samples.


class RewardKitError(Exception):
    """Base class of all errors that this package raises deliberately.

    `failure_class` is the class under which a failure is counted when it is recorded on an episode or a score.
    """

    failure_class: ClassVar[FailureClass] = "crash"
    exit_code: ClassVar[int] = 3
    recorded: Failure | None = None  # the recorded failure, for an error raised from a record
    judge_usage: str | None = None  # the usage of a judge whose call was paid for but returned no verdict


class ConfigError(RewardKitError, ValueError):
    """A task file, dataset, option or path is wrong. The error is raised before anything is written.

    Likely cause: a misspelled key, a value out of range, a missing file, or an extra that is not installed.

    What to do: fix the file, line and key that the message names; the message also suggests the nearest known name.
    """

    failure_class = "refused"
    exit_code = 2


class ProviderError(RewardKitError):
    """A model endpoint could not be reached, refused the request, or sent an invalid response.

    Likely cause: the server is not running; the URL, the key or the model's name is wrong; or the rate limit is
    exhausted.

    What to do: try the endpoint with one episode (`--limit 1`), lower `--max-concurrency`, and repeat the failed
    episodes with `reward-kit run --resume --only-failed`.
    """

    failure_class = "provider_error"


class PolicyError(RewardKitError):
    """An `AgentPolicy` raised an exception or returned something that is not an action.

    Likely cause: a bug in the policy that is triggered only by some observations.

    What to do: read the traceback, whose first frame is in the policy. Other episodes are not affected.
    """


class EnvironmentFailure(RewardKitError):
    """A `ForkableResource` or a tool raised an exception or violated its contract. The episode stays unscored.

    Likely cause: a bug in a tool, a `resource_config` that the environment rejects, a server that exited, or a method
    that returns the wrong type.

    What to do: read the traceback, whose first frame is in the tool. In a tool, raise a `ToolError` for mistakes of the
    agent. Test a resource alone with `reward-kit check`, which reports the violated part of the contract.
    """


class ToolError(RewardKitError):
    """A tool rejected a call. The agent sees the message and can try again.

    Raise this error in your own tools for mistakes of the agent; any other exception ends the episode with an error.

    Likely cause: the model called the tool with wrong arguments, which is normal in an episode.

    What to do: nothing if the agent recovers. If every agent makes the same mistake, fix the tool or its description.
    """


class RewardError(RewardKitError):
    """A reward function raised an exception or could not be called. The episode stays unscored.

    Likely cause: a rollout that the function does not expect, for example one with no tool calls, an empty answer or
    unusual characters.

    What to do: run `reward-kit check my_reward.py:function`, which tries such rollouts, fix the function, and score
    again with `reward-kit score RUN`.
    """


class InvalidResultError(RewardKitError, ValueError):
    """A reward function returned something that is not a valid result.

    Likely cause: the function returned None from a branch without `return`, NaN, a string, or a metric outside [0, 1].

    What to do: return a finite number or an `EvaluateResult` on every path; raise an error to leave a rollout unscored.
    """

    failure_class = "invalid_result"


class AlignmentError(RewardKitError):
    """A `StepOutput` names a step that does not exist, or two of them name the same step.

    Likely cause: `step_index` was counted from 1, or over messages; it must count the policy's actions from 0.

    What to do: return at most one `StepOutput` per action, with the index of the action. The message lists the valid
    indices.
    """

    failure_class = "invalid_result"


class DeadlineError(RewardKitError):
    """A call exceeded its time limit.

    Likely cause: an endless loop, a slow service, or a limit that is too low.

    What to do: raise the limit that the message names, such as `limits.reward_time_s`, or make the call faster.
    """

    failure_class = "timeout"


class LimitError(RewardKitError):
    """A limit other than time was reached, such as size, memory, or number of calls.

    A policy raises this error if the conversation no longer fits the model's context; the episode is then truncated,
    not failed.

    Likely cause: the work needs more memory, output, processes or tokens than the limit that the message names allows.

    What to do: raise that limit if the work needs it. For a conversation, lower `max_episode_steps` or shorten the
    outputs of tools.
    """

    failure_class = "limit"


class EpisodeError(RewardKitError, ValueError):
    """An episode was used in a way that its contract forbids, such as adding a step after its end.

    Likely cause: your own code adds a step before the reset, after the end, or out of order.

    What to do: follow the order that the message describes, and test a finished episode with `check_episode`.
    """


class TrainingError(RewardKitError):
    """An optimizer step is impossible or would destroy the weights. The step is skipped, and earlier steps are kept.

    Likely cause: a loss or gradient that is not finite because the learning rate is too high or the batch is broken.

    What to do: look at the batch in the `studies/` directory of the run, lower `ppo.lr`, and continue with `--resume`.
    """


class StoreError(RewardKitError):
    """A run directory cannot be read or written.

    Likely cause: a full disk, missing permissions, another process that has the run open, or an edited file.

    What to do: free space, fix permissions or end the other process, and continue with `--resume`; no data is lost.
    """


class boundary:
    """Context manager that re-raises any exception that escapes its block as one error type.

    `SystemExit` is included, so a script that exits does not end the run. This is a class because a generator-based
    context manager is four times as slow, and every step passes multiple boundaries.

    Args:
        error_type: the type to raise.
        what: the operation to name in the message, such as "tool 'move'".

    Raises:
        RewardKitError: the original exception if it already is a `RewardKitError`; otherwise an `error_type` whose
            cause is the original exception.
    """

    __slots__ = ("_error_type", "_what")

    def __init__(self, error_type: type[RewardKitError], what: str) -> None:
        self._error_type, self._what = error_type, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None or isinstance(error, RewardKitError):
            return
        if isinstance(error, asyncio.CancelledError):
            try:
                task = asyncio.current_task()
            except RuntimeError:  # no loop is running
                return
            if task is not None and task.cancelling() == 0:
                # The cancellation comes from foreign code that awaited a cancelled task; the current task was not
                # cancelled.
                raise self._error_type(f"{self._what}: a task that it awaited was cancelled") from error
        elif isinstance(error, Exception | SystemExit):
            text = safe_str(error)
            detail = f": {text}" if text else ""
            if isinstance(error, TimeoutError):
                raise DeadlineError(f"{self._what}: timed out{detail}") from error
            raise self._error_type(f"{self._what}: {type(error).__name__}{detail}") from error


def safe_str(value: Any) -> str:
    """Return `str(value)`, cut to a readable length, or a placeholder if `__str__` raises an exception."""
    try:
        text = str(value)
    except Exception as error:  # noqa: BLE001 - hostile code may raise anything here
        text = f"<{type(value).__name__} whose __str__ raised {type(error).__name__}>"
    return text if len(text) <= _MESSAGE_LIMIT else f"{text[:_MESSAGE_LIMIT]}… ({len(text)} characters)"


@dataclass(frozen=True, slots=True)
class Failure:
    """The record of an error on an episode or a score.

    Attributes:
        failure_class: one of `FAILURE_CLASSES`.
        where: the name of the error type, which identifies the boundary. For a user's subclass, the name of the base
            class in this module.
        message: a one-line description.
        traceback: at most 15 lines; the user's frames come first. Empty if no foreign code was involved.
    """

    failure_class: FailureClass
    where: str
    message: str
    traceback: str = ""

    @classmethod
    def from_exception(cls, error: BaseException) -> Failure:
        """Record `error`. An exception that is not a `RewardKitError` counts as a crash."""
        if isinstance(error, RewardKitError) and error.recorded is not None:
            return error.recorded
        failure_class: FailureClass = error.failure_class if isinstance(error, RewardKitError) else "crash"
        frames = user_traceback(error.__cause__ or error)
        public = (
            kind for kind in type(error).__mro__ if isinstance(error, RewardKitError) and kind.__module__ == __name__
        )
        return cls(failure_class, next(public, type(error)).__name__, safe_str(error), frames)

    def to_exception(self) -> RewardKitError:
        """Return an exception of the recorded type that carries this failure."""
        named: Any = globals().get(self.where)
        kind = named if isinstance(named, type) and issubclass(named, RewardKitError) else RewardKitError
        error = kind(self.message)
        error.recorded = self
        return error

    def to_line(self) -> str:
        """Return one line for logs and tables: the failure class and the message."""
        return f"{self.failure_class}: {self.message}"

    @classmethod
    def from_line(cls, line: str, where: str) -> Failure:
        """Parse a line written by `to_line`. A line that has no known class counts as a crash."""
        name, _, message = line.partition(": ")
        known = name in FAILURE_CLASSES
        return cls(name if known else "crash", where, message if known else line)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, str]:
        """Return the JSON form in which the failure is stored in files."""
        fields = {"where": self.where, "message": self.message, "traceback": self.traceback}
        return {"class": self.failure_class, **fields}

    @classmethod
    def from_json(cls, data: dict[str, str]) -> Failure:
        """Parse the JSON form written by `to_json`."""
        if data["class"] not in FAILURE_CLASSES:
            raise StoreError(f"unknown failure class {data['class']!r}; known: {', '.join(FAILURE_CLASSES)}")
        return cls(data["class"], data["where"], data["message"], data.get("traceback", ""))  # type: ignore[arg-type]


def user_traceback(error: BaseException, max_lines: int = 15) -> str:
    """Return the error and the frames of user code, innermost first, or "" if no frame is in user code."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_PACKAGE_FOLDER, "<frozen"))
        and not any(part in frame.filename for part in _INSTALLED)
    ]
    lines = [f"{type(error).__name__}: {safe_str(error)}".splitlines()[0]]
    for frame in reversed(own):
        lines += [f"  {frame.filename}:{frame.lineno} in {frame.name}", f"    {frame.line}"]
    return "\n".join(lines[:max_lines]) if own else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the nearest known word. If no word is near, list the known words."""
    names = sorted(set(known))
    lowered = {name.lower(): name for name in reversed(names)}
    nearest = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    if nearest:
        return f"; did you mean {lowered[nearest[0]]!r}?"
    shown = [*names[:_MOST_KNOWN], f"… ({len(names):,} in all)"] if len(names) > _MOST_KNOWN + 1 else names
    return f"; known: {', '.join(shown)}" if names else ""


def describe_read_error(path: Path, error: OSError | UnicodeError) -> str:
    """Return the reason why a file cannot be read.

    If the file is missing, suggest the nearest name in its directory.
    """
    if not isinstance(error, OSError):
        return f"not UTF-8 text ({error})"
    reason = error.strerror or type(error).__name__
    if not isinstance(error, FileNotFoundError) or not path.parent.is_dir():
        return reason
    near = did_you_mean(path.name, (entry.name for entry in path.parent.iterdir()))
    return f"{reason}{near}" if near.endswith("?") else reason


def type_name(value: Any) -> str:
    """Return the type of a value with an indefinite article: "a str", "an int"."""
    name = type(value).__name__ or "value"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def install_hint(extra: str) -> str:
    """Return the command that installs an extra from a clone, since this version is not in a package index."""
    return f"install the extra {extra!r}: pip install '/path/to/reward-kit[{extra}]' (in the clone: '.[{extra}]')"


@contextmanager
def requires_extra(extra: str, what: str) -> Iterator[None]:
    """Report a package that cannot be imported in this block as a missing extra that `what` needs.

    Raises:
        ConfigError: an import fails because a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("reward_kit"):
            raise
        raise ConfigError(f"{what} needs {error.name}; {install_hint(extra)}") from error
