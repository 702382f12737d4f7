"""The error types, the boundaries that raise them, and the failures that records keep.

1. Every boundary to foreign code or data has one flat error type below: configuration, provider, policy,
   environment, tool, reward function, alignment, training, store. They do not inherit from one another.
2. `boundary(ErrorType, what)` surrounds a call across such a boundary. Any exception that escapes is re-raised as
   that type, with the original as its cause; our own errors and cancellation pass unchanged.
3. Two places convert an error to a record: the rollout worker (on the episode) and the reward agent (on the score).
Both call `Failure.from_exception`; other episodes and rewards continue. 4. The command line prints one line for a
`RewardKitError` and exits with its `exit_code`.
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
    "timeout": "It exceeded its time limit. Raise the limit that the message names, or make it faster.",
    "crash": "Code raised an exception, or its process ended. Read the traceback: its first frame is in your own file.",
    "limit": "A bound other than time was reached: memory, size, calls. Raise the limit that the message names.",
    "invalid_result": "The returned value is not a result: a wrong type, NaN, an unknown step. Fix the reward.",
    "refused": "It was not attempted: the configuration forbids it or makes it impossible. Fix what the message names.",
    "provider_error": "A model endpoint or a service did not answer, even after retries. It may work later.",
}
"""The meaning of each failure class, and what to do."""
_PACKAGE_FOLDER = f"{Path(__file__).parent}{os.sep}"
_INSTALLED = ("site-packages", "dist-packages", str(Path(os.__file__).parent) + os.sep)
_MESSAGE_LIMIT = 2_000
_MOST_KNOWN = 40  # the maximum number of listed names, since a dataset may have thousands of samples


class RewardKitError(Exception):
    """Base of every error this package raises on purpose.

    `failure_class` is how the failure is counted when it is recorded on an episode or a score.
    """

    failure_class: ClassVar[FailureClass] = "crash"
    exit_code: ClassVar[int] = 3
    recorded: Failure | None = None  # the recorded failure, if raised again from a record


class ConfigError(RewardKitError, ValueError):
    """A task file, dataset, option or path is wrong. Raised before anything is written.

    Likely cause: a misspelled key, a value out of range, a missing file, or an extra that is not installed.

    What to do: fix what the message names: the file, the line and the key, with the nearest known name.
    """

    failure_class = "refused"
    exit_code = 2


class ProviderError(RewardKitError):
    """A model endpoint could not be reached, refused the request, or sent an invalid answer.

    Likely cause: the server does not run, the URL, the key or the model's name is wrong, or its rate limit is used up.

    What to do: try the endpoint with one episode (`--limit 1`), lower `--max-concurrency`, and repeat the failed
    episodes with `reward-kit run --resume --only-failed`.
    """

    failure_class = "provider_error"


class PolicyError(RewardKitError):
    """An `AgentPolicy` raised, or returned something that is not an action.

    Likely cause: a bug in the policy that only some observations trigger.

    What to do: read the traceback, whose first frame is in the policy; other episodes are not affected.
    """


class EnvironmentFailure(RewardKitError):
    """A `ForkableResource` or a tool raised, or broke its contract. The episode is unscored, which is not 0.

    Likely cause: a bug in a tool; a `resource_config` that the environment rejects, a server that exited, or a method
    that returns the wrong type.

    What to do: read the traceback, whose first frame is in the tool; raise a `ToolError` for a mistake of the agent.
    Test a resource alone with `reward-kit check`, which names the broken contract.
    """


class ToolError(RewardKitError):
    """A tool refused a call. The agent sees the message and can try again.

    Raise it in your own tools for mistakes of the agent; any other exception ends the episode with an error.

    Likely cause: the model called the tool with wrong arguments, which is normal in an episode.

    What to do: nothing if the agent recovers. If every agent fails on it, fix the tool or its description.
    """


class RewardError(RewardKitError):
    """A reward function raised or could not be called. The episode is unscored, which is not 0.

    Likely cause: a rollout that the function does not expect: no tool calls, an empty answer, unusual characters.

    What to do: `reward-kit check my_reward.py:function` tries such rollouts; score again with `reward-kit score RUN`.
    """


class InvalidResultError(RewardKitError, ValueError):
    """A reward function returned something that is not a result.

    Likely cause: None from a branch without `return`, NaN, a string, or a metric outside [0, 1].

    What to do: return a finite number or an `EvaluateResult` on every path; raise an error to leave a rollout unscored.
    """

    failure_class = "invalid_result"


class AlignmentError(RewardKitError):
    """A `StepOutput` names a step that does not exist, or two name the same step.

    Likely cause: `step_index` was counted from 1, or over messages; it counts the policy's actions from 0.

    What to do: return at most one `StepOutput` per action, with its index; the message lists the valid ones.
    """

    failure_class = "invalid_result"


class DeadlineError(RewardKitError):
    """A call exceeded its time limit.

    Likely cause: an endless loop, a slow service, or a limit that is too low.

    What to do: raise the limit that the message names, such as `limits.reward_time_s`, or make the work shorter.
    """

    failure_class = "timeout"


class LimitError(RewardKitError):
    """A limit other than time was reached: size, memory, number of calls.

    From a policy it means that the conversation no longer fits the model: the episode is truncated, not failed.

    Likely cause: more memory, output, processes or tokens than the limit that the message names.

    What to do: raise that limit if the work needs it; for a conversation lower `max_episode_steps`, or shorten the
    outputs of tools.
    """

    failure_class = "limit"


class EpisodeError(RewardKitError, ValueError):
    """An episode was used against its contract, such as a step after its end.

    Likely cause: your own code adds a step before the reset, after the end, or out of order.

    What to do: follow the order that the message names; `check_episode` checks a finished one.
    """


class TrainingError(RewardKitError):
    """An optimizer step is impossible or would destroy the weights; it is skipped, and earlier steps are kept.

    Likely cause: a loss or gradient that is not finite, from a learning rate that is too high or a broken batch.

    What to do: look at the batch in the run's directory `studies/`, lower `ppo.lr`, and continue with `--resume`.
    """


class StoreError(RewardKitError):
    """A run directory cannot be read or written.

    Likely cause: a full disk, missing permissions, another process that has the run open, or an edited file.

    What to do: free space, fix permissions or end the other process, and continue with `--resume`; no data is lost.
    """


class boundary:
    """Convert any exception that escapes the block, `SystemExit` included: a script that exits does not end the run.

    A class, because a generator's context manager costs four times as much and every step passes several.

    Args:
        error_type: the type of this boundary.
        what: the operation, for the message ("tool 'move'").

    Raises:
        RewardKitError: unchanged if it is one already; otherwise `error_type`, with the original as its cause.
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
                raise self._error_type(f"{self._what}: a task it awaited was cancelled") from error
        elif isinstance(error, Exception | SystemExit):
            text = safe_str(error)
            detail = f": {text}" if text else ""
            if isinstance(error, TimeoutError):
                raise DeadlineError(f"{self._what}: timed out{detail}") from error
            raise self._error_type(f"{self._what}: {type(error).__name__}{detail}") from error


def safe_str(value: Any) -> str:
    """Return `str(value)`, or a placeholder if a hostile `__str__` raises, cut to a readable length."""
    try:
        text = str(value)
    except Exception as error:  # noqa: BLE001 - hostile code may raise anything here
        text = f"<{type(value).__name__} whose text cannot be read: {type(error).__name__}>"
    return text if len(text) <= _MESSAGE_LIMIT else f"{text[:_MESSAGE_LIMIT]}… ({len(text)} characters)"


@dataclass(frozen=True, slots=True)
class Failure:
    """The record of an error on an episode or a score.

    Attributes:
        failure_class: one of `FAILURE_CLASSES`.
        where: the error type's name, which identifies the boundary; for a subclass of one of this module's types,
            the name of that type.
        message: one line for people.
        traceback: the user's frames first, at most 15 lines; empty without foreign code.
    """

    failure_class: FailureClass
    where: str
    message: str
    traceback: str = ""

    @classmethod
    def from_exception(cls, error: BaseException) -> Failure:
        """Record `error`; anything that is not ours counts as a crash."""
        if isinstance(error, RewardKitError) and error.recorded is not None:
            return error.recorded
        failure_class: FailureClass = error.failure_class if isinstance(error, RewardKitError) else "crash"
        frames = user_traceback(error.__cause__ or error)
        public = (
            kind for kind in type(error).__mro__ if isinstance(error, RewardKitError) and kind.__module__ == __name__
        )
        return cls(failure_class, next(public, type(error)).__name__, safe_str(error), frames)

    def to_exception(self) -> RewardKitError:
        """Return an error that can be raised again: of the recorded type, and recorded as this failure."""
        named: Any = globals().get(self.where)
        kind = named if isinstance(named, type) and issubclass(named, RewardKitError) else RewardKitError
        error = kind(self.message)
        error.recorded = self
        return error

    def to_line(self) -> str:
        """Return one line for logs and tables: the class, then the message."""
        return f"{self.failure_class}: {self.message}"

    @classmethod
    def from_line(cls, line: str, where: str) -> Failure:
        """Return the failure of a line from `to_line`; without a class it is a crash."""
        name, _, message = line.partition(": ")
        known = name in FAILURE_CLASSES
        return cls(name if known else "crash", where, message if known else line)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, str]:
        """Return the JSON form of files."""
        fields = {"where": self.where, "message": self.message, "traceback": self.traceback}
        return {"class": self.failure_class, **fields}

    @classmethod
    def from_json(cls, data: dict[str, str]) -> Failure:
        """Return the failure of `to_json`."""
        if data["class"] not in FAILURE_CLASSES:
            raise StoreError(f"unknown failure class {data['class']!r}; known: {', '.join(FAILURE_CLASSES)}")
        return cls(data["class"], data["where"], data["message"], data.get("traceback", ""))  # type: ignore[arg-type]


def user_traceback(error: BaseException, max_lines: int = 15) -> str:
    """Return the error and the frames of user code, innermost first; "" without any."""
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
    """Return "; did you mean 'x'?" for the nearest known word, else the list of known words."""
    names = sorted(set(known))
    lowered = {name.lower(): name for name in reversed(names)}
    nearest = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    if nearest:
        return f"; did you mean {lowered[nearest[0]]!r}?"
    shown = [*names[:_MOST_KNOWN], f"… ({len(names):,} in all)"] if len(names) > _MOST_KNOWN + 1 else names
    return f"; known: {', '.join(shown)}" if names else ""


def describe_read_error(path: Path, error: OSError | UnicodeError) -> str:
    """Return the reason why a file cannot be read; for a missing file with the nearest name in its directory."""
    if not isinstance(error, OSError):
        return f"not UTF-8 text ({error})"
    reason = error.strerror or type(error).__name__
    if not isinstance(error, FileNotFoundError) or not path.parent.is_dir():
        return reason
    near = did_you_mean(path.name, (entry.name for entry in path.parent.iterdir()))
    return f"{reason}{near}" if near.endswith("?") else reason


def type_name(value: Any) -> str:
    """Return the type of a value with its article: "a str", "an int"."""
    name = type(value).__name__ or "value"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def install_hint(extra: str) -> str:
    """Return the command that installs an extra; no package index has this version."""
    return f"install the extra {extra!r}: pip install '/path/to/reward-kit[{extra}]' (in the clone: '.[{extra}]')"


@contextmanager
def requires_extra(extra: str, what: str) -> Iterator[None]:
    """Report a missing package in this block's imports as a missing extra, in the name of `what`.

    Raises:
        ConfigError: an import fails because a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("reward_kit"):
            raise
        raise ConfigError(f"{what} needs {error.name}; {install_hint(extra)}") from error
