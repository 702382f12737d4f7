"""What `run` and `score` share: carrying a plan out, and the end: the table, the next command, gates, exit code."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import anyio
from rich.console import Console, RenderableType

from reward_kit.agent.tool_execution import CURRENT_TOOL_ERRORS, ToolErrors
from reward_kit.cli import operator_log
from reward_kit.cli.echo import echo_json
from reward_kit.console import SafeConsole
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, RewardKitError, StoreError, boundary
from reward_kit.processes import LOG_FOLDER
from reward_kit.runs import events
from reward_kit.runs.credit import RunCredit, assign_credit, headline, settings_of, write_section
from reward_kit.runs.display import Display, DisplayKind
from reward_kit.runs.engine import Engine
from reward_kit.runs.plan import Control, Plan
from reward_kit.runs.redaction import Redaction
from reward_kit.runs.run_log import log_handler
from reward_kit.runs.runner import Run
from reward_kit.runs.store import RunStore
from reward_kit.runs.summary import EpisodeRow, PolicySummary, summarise, summary_to_json
from reward_kit.runs.tables import summary_table
from reward_kit.task_parts import CreditModel

if TYPE_CHECKING:
    from reward_kit.providers.session import ProviderSession

INTERRUPTED = "interrupted"
GRACE_VARIABLE = "REWARD_KIT_STOP_GRACE_S"
"""The environment variable with the seconds that an interrupted run has to finish what is in flight."""

_STOP_GRACE_S = 60.0
_OPEN_FILES = 65_536
logger = logging.getLogger("reward_kit.cli")


def display_kind(asked: str | None) -> DisplayKind:
    """What was asked for, else rich on a terminal and plain elsewhere, also where log lines come in between."""
    if asked in ("rich", "plain", "none"):
        return asked  # type: ignore[return-value]
    return "rich" if sys.stderr.isatty() and not operator_log.is_on() else "plain"


class Speaker(Protocol):
    """Who tells the user."""

    def say(self, note: str) -> None:
        """Show a note."""


@asynccontextmanager
async def interruptible(
    control: Control, display: Speaker, traffic: ProviderSession | None, grace_s: float | None = None
) -> AsyncIterator[None]:
    """Ctrl-C once finishes what is in flight, twice stops now; SIGTERM counts as Ctrl-C.

    While an endpoint is down nothing that is in flight can finish, and once is enough.

    Args:
        control: of the run.
        display: for what is happening.
        traffic: of the run's endpoints, if it has any.
        grace_s: seconds to finish what is in flight, which may wait for a stuck server; None for no limit.
    """
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_watch_signals, control, display, lambda: traffic is not None and traffic.is_down, grace_s)
        yield
        tasks.cancel_scope.cancel()


async def _watch_signals(
    control: Control, display: Speaker, is_down: Callable[[], bool], grace_s: float | None
) -> None:
    def stop_now() -> None:
        control.finish(INTERRUPTED)
        display.say("stopping now; what was in flight runs again on resume")
        control.scope.cancel()

    async def stop_after(seconds: float) -> None:
        await anyio.sleep(seconds)
        stop_now()

    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with anyio.create_task_group() as waiting:
            async for _ in signals:
                if control.stop_reason or is_down():
                    stop_now()
                    continue
                control.finish(INTERRUPTED)
                most = "" if grace_s is None else f", for at most {grace_s:g} s"
                display.say(f"finishing what is in flight{most}; Ctrl-C again stops now")
                if grace_s is not None:
                    waiting.start_soon(stop_after, grace_s)


def stop_grace_s() -> float:
    """Return how long an interrupted run may finish what is in flight: `REWARD_KIT_STOP_GRACE_S`, or 60 seconds.

    Raises:
        ConfigError: the variable is not a number of seconds.
    """
    given = os.environ.get(GRACE_VARIABLE, "")
    try:
        seconds = float(given or _STOP_GRACE_S)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"{GRACE_VARIABLE}={given!r}: expected a number of seconds, such as 60")
    return seconds


def log_to(path: Path, redaction: Redaction) -> None:
    """Send what the package logs, full tracebacks among it, to a file, without secrets."""
    operator_log.also_keep_out(redaction)
    logger = logging.getLogger("reward_kit")
    logger.addHandler(log_handler(path, redaction))
    logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def _say_and_log(display: Display, line: str) -> None:
    display.say(line)
    logger.warning("%s", line)


def allow_many_connections() -> None:
    """As many open files as the system lets us have; the usual soft limit is less than a thousand episodes need."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else _OPEN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a bound of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, _OPEN_FILES), hard))


class FurtherPart(NamedTuple):
    """A part of a result beside the table: the name of it in `summary.json`, its figures, and how it is shown."""

    name: str
    figures: Mapping[str, Any]
    shown: RenderableType


@dataclass(frozen=True, slots=True)
class Ending:
    """How a command ends: what it shows, and what its exit code depends on.

    Attributes:
        title: of the table.
        pass_threshold: a score of at least this passes.
        expected: the number of episodes.
        fail_under: the gate on mean scores.
        as_json: print the summary as JSON in place of the table.
        resume_command: what goes on with an incomplete run; None where nothing can.
        credit: how each step is credited; None where the task does not ask for it.
        further: makes one more part of the result of the run's rows; None where there is none.
    """

    title: str
    pass_threshold: float
    expected: int
    fail_under: float | None = None
    as_json: bool = False
    resume_command: Sequence[str] | None = None
    credit: CreditModel | None = None
    further: Callable[[Sequence[EpisodeRow]], FurtherPart] | None = None


def run_into(
    plan: Plan,
    store: RunStore,
    ending: Ending,
    *,
    display: str | None,
    traffic: ProviderSession | None = None,
    error_limit: float | None = None,
    only_failed: bool = False,
    given: Iterable[SingleAgentEpisode] = (),
    engine: Engine | None = None,
) -> int:
    """Run a plan into its store and end the command.

    Args:
        plan: what is run.
        store: where to.
        ending: how the command ends.
        display: the kind of progress that was asked for.
        traffic: what all requests to model endpoints share; None where there are none. It is closed.
        error_limit: stops the run.
        only_failed: run again what broke, and nothing else.
        given: episodes that are there already and are only to be scored.
        engine: where episodes are collected; by default in this process.

    Returns:
        The exit code.
    """
    grace_s = stop_grace_s()

    async def run() -> int:
        control, shown = Control(), Display(display_kind(display), ending.expected)
        execution = Run(
            plan,
            store,
            listener=shown,
            control=control,
            error_limit=error_limit,
            only_failed=only_failed,
            engine=engine,
        )
        shown.scoring = lambda: execution.scoring
        tool_errors = ToolErrors()
        CURRENT_TOOL_ERRORS.set(tool_errors)
        if traffic is not None:
            from reward_kit.providers.session import CURRENT_PROVIDER_SESSION

            CURRENT_PROVIDER_SESSION.set(traffic)  # for rewards that ask a model
            traffic.notice, traffic.gave_up = partial(_say_and_log, shown), control.give_up
            if traffic.cassette is not None:
                traffic.cassette.redact = store.redaction.of_line
        execution.take_stock()
        execution.take_given(given)
        async with interruptible(control, shown, traffic, grace_s):
            with shown, contextlib.redirect_stdout(sys.stderr):
                await execution.execute()
        events.ended(store.path, "run", store.header.status)
        code = close_run(store, list(execution.rows.values()), execution.missing(), control, ending)
        for line in tool_errors.lines(store.path / "run.log"):
            note_console().print(line, style="yellow")
        return code

    allow_many_connections()
    with store:
        log_to(store.path / "run.log", store.redaction)
        store.write_header(store.header.with_(run_limits=plan.definition.run_limits.model_dump()))
        LOG_FOLDER.set(store.path / "logs")
        events.began(store.path, "run", plan.total)
        try:
            return anyio.run(run)
        finally:
            if traffic is not None:
                traffic.close()


def close_run(store: RunStore, rows: Sequence[EpisodeRow], missing: int, control: Control, ending: Ending) -> int:
    """Write the summary, show it, and decide the exit code; `missing` episodes are not there or wait for a score."""
    summaries = summarise(rows, ending.pass_threshold)
    document = summary_to_json(summaries)
    further = ending.further(rows) if ending.further is not None else None
    document |= {further.name: further.figures} if further is not None else {}
    # Where credit was assigned before, by hand perhaps, the scores may be others by now.
    credit = ending.credit or settings_of(store.path)
    store.write_summary(document)
    note = note_console()
    credited, credit_code = _credited(store, credit, note)
    document |= {"credit": credited.section} if credited is not None else {}
    if ending.as_json:
        status = "interrupted" if missing else "complete"
        echo_json({"run": str(store.path), "status": status, **document})
    elif summaries:
        _console().print(summary_table(summaries, ending.title), *([further.shown] if further is not None else []))
    if missing:
        reason = control.stop_reason or "failed"
        there = f"{len(rows)} of {ending.expected} episodes are there"
        unscored = missing - (ending.expected - len(rows))
        note.print(f"Stopped ({reason}): {there}{f', {unscored} of them wait for a score' if unscored > 0 else ''}.")
    note.print(f"Written to {store.path}")
    write_page(store.path, note)
    if credited is not None:
        _tell_of_credit(credited, store.path, note)
    if missing and ending.resume_command:
        more = f" -T run_limits.{control.reached.key}=MORE" if control.reached else ""
        note.print(f"Go on with:  {shlex.join(ending.resume_command)}{more}")
    elif ending.resume_command and any(summary.scored for summary in summaries):
        _tell_what_next(store.path, note)
    if broken := sum(sum(summary.errors.values()) for summary in summaries):
        log = f"; tracebacks are in {store.path / 'run.log'}" if (store.path / "run.log").exists() else ""
        note.print(_that_broke(broken) + log)
        if ending.resume_command:
            command = shlex.join([*ending.resume_command, "--only-failed"])
            mended = "  (and --force where you have mended the reward or the task)" if "--resume" in command else ""
            note.print(f"Run those again with:  {command}{mended}")
    # Ctrl-C after the last episode began changed nothing; a limit on errors that was passed is a gate all the same.
    stopped = control.stop_reason if missing or control.stop_reason != INTERRUPTED else None
    if control.is_failure:
        return 3
    return _exit_code(summaries, stopped, bool(missing), ending.fail_under, note) or credit_code


def _tell_what_next(path: Path, note: Console) -> None:
    """Reading the episodes comes first; only then does one know what another reward should say of them."""
    note.print(f"Read the episodes:  {shlex.join(['reward-kit', 'view', str(path), '--open'])}")
    again = ["reward-kit", "rescore", str(path), "--reward", "FILE.py:FUNCTION"]
    note.print(f"Score them with another reward:  {shlex.join(again)}")


def _credited(store: RunStore, credit: CreditModel | None, note: Console) -> tuple[RunCredit | None, int]:
    """Assign credit where it is asked for. A failure leaves the run as it is and costs the exit code alone."""
    if credit is None:
        return None, 0
    try:
        credited = assign_credit(store.path, credit)
        write_section(store.path, credited)
    except RewardKitError as error:
        logger.warning("no credit: %s", error)
        note.print(f"No credit was assigned: {error}", style="red")
        return None, error.exit_code
    return credited, 0


def note_console() -> Console:
    """For what is told beside the result, on standard error."""
    return SafeConsole(stderr=True, soft_wrap=True)


def write_page(path: Path, note: Console) -> None:
    """Write `report.html`. A failure leaves the run and its exit code as they are; `reward-kit report` tries again."""
    from reward_kit.report.run_page import write_report

    try:
        with boundary(StoreError, "the report"):
            note.print(f"Its page:  {write_report(path)}")
    except RewardKitError as error:
        logger.warning("no report: %s", error)
        note.print(f"No report was written: {error}", style="red")


def _tell_of_credit(credited: RunCredit, path: Path, note: Console) -> None:
    note.print(f"{headline(credited.section)}; its best and worst:  {shlex.join(['reward-kit', 'credit', str(path)])}")
    for warning in credited.warnings:
        note.print(f"warning: {warning}", style="yellow")


def _that_broke(count: int) -> str:
    return "1 episode broke and is kept as an error" if count == 1 else f"{count} episodes broke and are kept as errors"


def _exit_code(
    summaries: Sequence[PolicySummary], stopped: str | None, incomplete: bool, fail_under: float | None, note: Console
) -> int:
    if stopped == INTERRUPTED:
        return 130
    if summaries and all(sum(summary.errors.values()) == summary.episodes for summary in summaries):
        note.print("Every episode broke.", style="red")
        return 3
    if stopped is not None:
        note.print(f"Gate failed: {stopped}", style="red")
        return 1
    if incomplete:
        return 3
    below = [s.policy for s in summaries if fail_under is not None and (s.score is None or s.score.mean < fail_under)]
    if below:
        note.print(f"Gate failed: mean score below {fail_under:g} for {', '.join(below)}", style="red")
    return int(bool(below))


def _console() -> Console:
    """Standard output; wide enough for the table where it is no terminal."""
    return SafeConsole(width=None if sys.stdout.isatty() else 120)
