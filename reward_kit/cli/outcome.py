"""Run a plan from the command line, and handle progress, signals, the result table, gates and the exit code."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from rich.console import Console, RenderableType

from reward_kit.cli import operator_log
from reward_kit.cli.echo import echo_json
from reward_kit.console import SafeConsole
from reward_kit.display_text import pluralize
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, RewardKitError
from reward_kit.runs import runner
from reward_kit.runs.display import Display, DisplayKind, dollars, duration_text, figure, summary_table
from reward_kit.runs.files import LOG_FILE
from reward_kit.runs.plan import INTERRUPTED, Control, Interruptible, RunPlan
from reward_kit.runs.redaction import Redaction
from reward_kit.runs.run_folder import RunFolder
from reward_kit.runs.runner import Run, RunEngine, RunOutcome
from reward_kit.runs.summary import EpisodeRow, PolicySummary, Threshold

if TYPE_CHECKING:
    from reward_kit.providers.session import ProviderSession

GRACE_VARIABLE = "REWARD_KIT_STOP_GRACE_S"
"""The environment variable for the seconds that an interrupted run may take to finish running episodes."""
_STOP_GRACE_S = 60.0
_LONG_REQUEST_S, _LONG_EPISODE_S = 10.0, 30.0  # shown in the progress
_SCORING_GRACE_S = (
    5.0  # unscored episodes are scored on resume, so there is no need to wait for a judge that does not respond
)
_OPEN_FILES = 65_536
logger = logging.getLogger("reward_kit.cli")


def display_kind(asked: str | None) -> DisplayKind:
    """Return the requested display. The default is "rich" on a terminal without log output, and "plain" otherwise."""
    if asked in ("rich", "plain", "none"):
        return asked  # type: ignore[return-value]
    return "rich" if sys.stderr.isatty() and not operator_log.is_on() else "plain"


@asynccontextmanager
async def interruptible(
    control: Control,
    say: Callable[[str], None],
    traffic: ProviderSession | None,
    grace_s: float | None = None,
    collected: anyio.Event | None = None,
    *,
    finishing: str = "finishing running episodes",
    lost: str = "unfinished episodes will run again on resume",
) -> AsyncIterator[None]:
    """Finish the running episodes on the first Ctrl-C or SIGTERM, and stop immediately on the second.

    If an endpoint is down, episodes cannot finish, so even the first signal stops the run immediately.

    Args:
        control: the control of the run.
        say: a function that prints a note.
        traffic: the provider session of the run's endpoints, if any.
        grace_s: the time limit in seconds for finishing running episodes, or None for no limit.
        collected: an event that is set when no episode is running anymore. After that, a few more seconds are allowed
            for missing scores.
        finishing: the note after the first signal.
        lost: the note after the second signal.
    """

    def stop_now() -> None:
        control.finish(INTERRUPTED)
        say(f"stopping immediately; {lost}")
        control.scope.cancel()

    async def stop_later(seconds: float) -> None:
        await anyio.sleep(seconds)
        stop_now()

    async def stop_after_collecting(collected: anyio.Event, seconds: float) -> None:
        await collected.wait()
        await stop_later(seconds)

    async def watch_signals() -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                if control.stop_reason or (traffic is not None and traffic.is_down):
                    stop_now()
                    continue
                control.finish(INTERRUPTED)
                most = "" if grace_s is None else f", for at most {grace_s:g} s"
                say(f"{finishing}{most}; press Ctrl-C again to stop now")
                if grace_s is not None:
                    tasks.start_soon(stop_later, grace_s)
                if collected is not None:
                    tasks.start_soon(stop_after_collecting, collected, _SCORING_GRACE_S)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch_signals)
        yield
        tasks.cancel_scope.cancel()


def stop_after_updates(say: Callable[[str], None]) -> Interruptible:
    """Return the context manager of training, which finishes the current update on the first Ctrl-C or SIGTERM."""
    return lambda control: interruptible(
        control,
        say,
        None,
        finishing="finishing the current update",
        lost="updates since the last checkpoint will be repeated on resume",
    )


def keep_logs_in_run(redaction: Redaction) -> None:
    """Send the package's log only to the operator log and the run's log file. Secrets are redacted."""
    operator_log.add_redaction(redaction)
    logging.getLogger("reward_kit").propagate = False


def allow_many_connections() -> None:
    """Raise the limit on open files to the maximum, because the default is too low for a thousand episodes."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else _OPEN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a different limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, _OPEN_FILES), hard))


@dataclass(frozen=True, slots=True)
class Ending:
    """The settings for a command's exit code and final output.

    Attributes:
        title: the title of the table.
        expected: the number of episodes in the complete run.
        thresholds: the gates on mean scores and metrics.
        error_limit: the number of episodes that may end with an error. If it is `None`, errors do not stop the run but
            fail the gates.
        as_json: whether to print the summary as JSON instead of the table.
        resume_command: the command that resumes an incomplete run, or None if the run cannot be resumed.
        further: a function that takes the run's rows and returns additional keys for `summary.json`.
        shown: a function that takes the run's rows and returns the text to show below the table.
    """

    title: str
    expected: int
    thresholds: Sequence[Threshold] = ()
    error_limit: float | None = None
    as_json: bool = False
    resume_command: Sequence[str] | None = None
    further: Callable[[Sequence[EpisodeRow]], Mapping[str, Any]] = lambda _: {}
    shown: Callable[[Sequence[EpisodeRow]], Sequence[RenderableType]] = lambda _: ()


def run_into(
    plan: RunPlan,
    folder: RunFolder,
    ending: Ending,
    *,
    display: str | None,
    traffic: ProviderSession | None = None,
    only_failed: bool = False,
    given: Iterable[SingleAgentEpisode] = (),
    engine: RunEngine | None = None,
) -> int:
    """Run a plan in its directory, show the outcome, and return the exit code."""
    given_s = os.environ.get(GRACE_VARIABLE, "")
    try:
        grace_s = float(given_s or _STOP_GRACE_S)
    except ValueError:
        grace_s = math.nan
    if not 0 <= grace_s < math.inf:
        raise ConfigError(f"{GRACE_VARIABLE}={given_s!r}: must be a number of seconds, such as 60")
    shown = Display(display_kind(display), ending.expected)

    async def run() -> tuple[RunOutcome, Control]:
        control = Control()

        @asynccontextmanager
        async def watched(execution: Run) -> AsyncIterator[None]:
            shown.scoring = lambda: execution.scoring
            shown.slowest = lambda: _slowest_wait(execution, traffic)
            async with interruptible(control, shown.notify, traffic, grace_s, execution.collected):
                with shown, contextlib.redirect_stdout(sys.stderr):
                    yield

        outcome = await runner.run(
            plan,
            folder,
            control=control,
            traffic=traffic,
            listener=shown,
            watch=watched,
            error_limit=ending.error_limit,
            only_failed=only_failed,
            engine=engine,
            given=given,
            further=ending.further,
        )
        return outcome, control

    def notice(line: str) -> None:
        shown.notify(line)
        logger.warning("%s", line)

    if traffic is not None:
        traffic.notice = notice
    allow_many_connections()
    keep_logs_in_run(folder.redaction)
    try:
        with noting_resume(ending.resume_command, folder.path):
            outcome, control = anyio.run(run)
    finally:
        if traffic is not None:
            traffic.close()
    return show_outcome(outcome, control, ending)


def _slowest_wait(execution: Run, traffic: ProviderSession | None) -> str | None:
    """Return a description of the longest wait in a run, or None if no wait is long enough to report.

    A request is reported after 10 seconds and an episode after 30 seconds.
    """
    request = traffic.longest_wait() if traffic is not None else None
    if request is not None and request[0] >= _LONG_REQUEST_S:
        return f"{request[1]}, {duration_text(request[0])}"
    episode = execution.longest_episode()
    if episode is not None and episode[0] >= _LONG_EPISODE_S:
        return f"episode {episode[1]}, {duration_text(episode[0])}"
    return None


def show_outcome(outcome: RunOutcome, control: Control, ending: Ending) -> int:
    """Print the outcome of a run, suggest the next commands, and return the exit code."""
    policies, missing, note = outcome.policies, outcome.missing, note_console()
    resume = ending.resume_command
    if outcome.credit_error is not None:
        note.print(f"No credit was assigned: {outcome.credit_error}", style="red")
    if ending.as_json:
        status = INTERRUPTED if missing else "complete"
        echo_json({"run": str(outcome.path), "status": status, **outcome.summary})
    elif policies:
        # If standard output is not a terminal, this is wide enough for the table.
        console = SafeConsole(width=None if sys.stdout.isatty() else 120)
        console.print(summary_table(policies, ending.title), *ending.shown(outcome.rows))
    if missing:
        unscored = missing - (ending.expected - len(outcome.rows))
        waiting = f", {unscored} of them unscored" if unscored > 0 else ""
        done = f"{len(outcome.rows)} of {ending.expected} episodes are complete"
        idle = f", none of {', '.join(outcome.not_begun)}" if outcome.rows and outcome.not_begun else ""
        note.print(f"Stopped ({control.stop_reason or 'failed'}): {done}{waiting}{idle}.")
    if repeated := outcome.summary.get("repeated_cost"):
        note.print(f"Attempts that were replaced or not finished cost another {dollars(repeated)}")
    if cache := outcome.summary.get("cache"):
        calls = cache["hits"] + cache["misses"]
        note.print(f"{cache['hits']:,} of {pluralize(calls, 'model call')} answered from the cache {cache['path']}")
    note.print(f"Written to {outcome.path}")
    note_page(outcome.page, outcome.page_error)
    if outcome.credit is not None:
        from reward_kit.runs.credit import headline

        best = shlex.join(["reward-kit", "credit", str(outcome.path)])
        note.print(f"{headline(outcome.credit.section)}; show the best and worst steps with:  {best}")
        for warning in outcome.credit.warnings:
            note.print(f"warning: {warning}", style="yellow")
    if missing and resume:
        more = f" -T run_limits.{control.reached.key}=MORE" if control.reached else ""
        note.print(f"{resume_line(resume)}{more}")
        if control.is_failure and resume[:2] == ["reward-kit", "run"]:
            note.print(
                "To change the URL of the agent's model, add --base-url URL. To change a judge, edit the task file and"
            )
            note.print("add --force. To change the agent's model or a judge that was set with -T, start a new run.")
    elif resume and any(summary.scored for summary in policies):
        note.print(f"Read the episodes:  {shlex.join(['reward-kit', 'view', str(outcome.path), '--open'])}")
        again = ["reward-kit", "score", str(outcome.path), "--reward", "FILE.py:FUNCTION"]
        note.print(f"Score the episodes with a different reward:  {shlex.join(again)}")
    if broken := sum(sum(summary.errors.values()) for summary in policies):
        log = outcome.path / LOG_FILE
        note.print(
            f"{pluralize(broken, 'episode')} ended with an error{f'; tracebacks are in {log}' if log.exists() else ''}"
        )
        if resume:
            command = shlex.join([*resume, "--only-failed"])
            fixed = "  (and --force if you have fixed the reward or the task)" if "--resume" in command else ""
            note.print(f"Run these episodes again with:  {command}{fixed}")
    for line in outcome.warnings:
        note.print(line, style="yellow")
    if control.is_failure:
        return 3
    # A Ctrl-C after the last episode began has no effect. An exceeded error limit is still a gate.
    stopped = control.stop_reason if missing or control.stop_reason != INTERRUPTED else None
    if stopped == INTERRUPTED:
        return 130
    if policies and all(sum(summary.errors.values()) == summary.episodes for summary in policies):
        note.print("All episodes ended with an error.", style="red")
        return 3
    if stopped is not None:
        note.print(f"Gate failed: {stopped}", style="red")
        return 1
    if missing:
        return 3
    failures = [line for threshold in ending.thresholds for line in _gate_failures(policies, threshold)]
    if broken and ending.thresholds and ending.error_limit is None:
        failures.append(
            f"{broken} of {pluralize(len(outcome.rows), 'episode')} ended with an error and have no score; "
            f"to allow this, add --fail-on-error {broken}"
        )
    for line in failures:
        note.print(f"Gate failed: {line}", style="red")
    if failures:
        return 1
    return outcome.credit_error.exit_code if outcome.credit_error is not None else 0


def _gate_failures(policies: Sequence[PolicySummary], threshold: Threshold) -> Iterator[str]:
    """Yield a line for each gate that failed."""
    if unknown := threshold.unknown_metric(policies):
        yield unknown
        return
    values = {policy.policy: threshold.value(policy) for policy in policies}
    if missing := [policy for policy, value in values.items() if value is None]:
        yield f"{threshold.what} is unknown for {', '.join(missing)}, because no episode has a value"
    below = [(policy, value) for policy, value in values.items() if value is not None and value < threshold.least]
    if below:
        named = ", ".join(f"{policy} ({figure(value)})" for policy, value in below)
        yield f"{threshold.what} below {threshold.least:g} for {named}"


def resume_line(command: Sequence[str]) -> str:
    """Return the line with the command that resumes the run."""
    return f"Resume with:  {shlex.join(command)}"


@contextmanager
def noting_resume(command: Sequence[str] | None, path: Path) -> Iterator[None]:
    """If an error such as a full disk ends the run in `path`, add a note with the resume command to that error."""
    try:
        yield
    except (RewardKitError, ExceptionGroup) as error:
        if command and path.exists() and not isinstance(error, ConfigError):
            error.add_note(resume_line(command))
        raise


def note_console() -> Console:
    """Return the console for notes, which writes to standard error."""
    return SafeConsole(stderr=True, soft_wrap=True)


def note_page(page: Path | None, error: Exception | None) -> None:
    """Print the path of the run's page, or the reason why no page was written."""
    if error is not None:
        note_console().print(f"No report was written: {error}", style="red")
    elif page is not None:
        note_console().print(f"Report:  {page}")
