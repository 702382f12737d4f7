"""A sweep: its plan, its directory, and its runs in parallel processes."""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from reward_kit.blocking import run_blocking
from reward_kit.errors import ConfigError, RewardKitError, StoreError, TrainingError, boundary
from reward_kit.private_files import make_private_folder
from reward_kit.processes import LOG_FOLDER, ChildProcess, start_process
from reward_kit.report.sweep_page import write_sweep_page
from reward_kit.rl.training.plan import TrainingPlan, check_policy, load_plan
from reward_kit.rl.training.resume import changes_since, new_run_header, stored_config, value_differences
from reward_kit.rl.training.sweep_file import START, SweepFile
from reward_kit.rl.training.sweep_results import (
    EVALUATIONS,
    Evaluations,
    SweepFacts,
    append_evaluation,
    read_evaluations,
    run_facts,
    summarize_sweep,
    sweep_tables,
)
from reward_kit.rl.training.sweep_run import EvaluationRequest, RunRequest, check_category
from reward_kit.rl.training.train_file import check_resources
from reward_kit.runs.comparison_table import markdown_table
from reward_kit.runs.files import (
    SUMMARY_FILE,
    SWEEP_FILE,
    cut_torn_line,
    report_store_errors,
    write_atomically,
)
from reward_kit.runs.inputs import hash_path
from reward_kit.runs.plan import INTERRUPTED, Control, Interruptible
from reward_kit.runs.redaction import without_secrets
from reward_kit.runs.run_folder import RunHeader, lock_folder, new_run_path, read_header, software_versions
from reward_kit.runs.task_file import overrides_from

CHANGEABLE = ("processes",)
"""The keys of the sweep file that may change when a sweep is resumed."""
_SCHEMA_VERSION = 1
_CHECK_S = 0.2


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """A sweep whose arms have been loaded and checked with the first seed."""

    file: SweepFile
    arms: Mapping[str, TrainingPlan]
    temperatures: Sequence[float | None]  # None for the temperature of the policy
    starts: Sequence[int]  # the seeds with which the untrained policy is evaluated
    samples: int  # the number of held-out samples
    digests: Mapping[str, str]  # SHA-256 of the inputs that belong to no arm

    @property
    def processes(self) -> int:
        """The number of runs at a time."""
        if (processes := self.file.config.processes) is not None:
            return processes
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores // (self.arms[self.file.baseline].config.threads or 1))

    def names(self) -> Iterator[tuple[str, int]]:
        """Yield the arm and the seed of each run. All arms of a seed come before the next seed."""
        for seed in self.file.seeds:
            yield from ((arm, seed) for arm in self.file.config.arms)

    def request(self, arm: str, seed: int, folder: Path, known: Evaluations) -> RunRequest:
        """Return the request for the process of a run, or for that of the untrained policy.

        Args:
            arm: the name of the arm, or START.
            seed: the seed.
            folder: the directory of the sweep.
            known: the evaluations that exist already.
        """
        plan = self.arms[self.file.baseline if arm == START else arm]
        overrides = {**plan.overrides, "seed": seed}
        if (wandb := plan.config.logs.wandb) is not None and wandb.group is None:
            overrides["logs.wandb.group"] = folder.name
        rollouts = self.file.config.evaluation.rollouts
        return RunRequest(
            train=str(self.file.train_path.resolve()),
            overrides=overrides,
            run=None if arm == START else str((folder / f"{arm}-{seed}").resolve()),
            evaluation_overrides=self.file.evaluation_overrides(overrides),
            evaluations=[
                EvaluationRequest(temperature=temperature, rollouts=1 if temperature == 0 else rollouts)
                for temperature in self.temperatures
                if (arm, seed, temperature) not in known
            ],
            by=self.file.config.evaluation.by,
            sys_path=sys.path,
        )


def load_sweep(file: SweepFile) -> SweepPlan:
    """Load the train file of each arm and all objects that it names, and check them.

    Raises:
        ConfigError: If an arm cannot be trained or evaluated. The message names the line of the arm.
    """
    arms: dict[str, TrainingPlan] = {}
    with _located(file, file.baseline):
        overrides = {**file.overrides(file.baseline), "seed": file.seeds[0]}
        for_evaluation = file.evaluation_overrides(overrides)
        evaluated = load_plan(file.train_path, for_evaluation, stored=for_evaluation)
    if evaluated.held_out is None or evaluated.config.evaluation is None:
        raise ConfigError(
            f"{file.path}: no held-out samples to compare scores on; set evaluation.dataset_path, or add an "
            f"evaluation section to {file.config.train}"
        )
    if (by := file.config.evaluation.by) is not None:
        try:
            check_category(evaluated.held_out.samples, by)
        except ConfigError as error:
            raise ConfigError(f"{file.located.where(('evaluation', 'by'))}: evaluation.by: {error}") from error
    for arm, changes in file.config.arms.items():
        with _located(file, arm):
            overrides = {**file.overrides(arm), "seed": file.seeds[0]}
            arms[arm] = plan = load_plan(file.train_path, overrides, stored=overrides)
            check_policy(plan)
            if arm == file.baseline or any(key.partition(".")[0] == "task" for key in changes):
                check_resources(plan)
            if plan.config.engine.type == "ray":
                raise ConfigError("engine: ray cannot be used in a sweep; use one process per run")
    chosen: Sequence[float | None] = file.config.evaluation.temperatures or [
        of_arm.temperature if (of_arm := arms[file.baseline].config.evaluation) is not None else None
    ]
    # Samples that are drawn with the seed differ between the seeds, and so does the score of the untrained policy.
    starts = file.seeds if evaluated.config.evaluation.hold_out is not None else file.seeds[:1]
    dataset = file.config.evaluation.dataset_path
    digests = {} if dataset is None else {"evaluation.dataset_path": hash_path(file.path.parent / dataset)}
    return SweepPlan(file, arms, chosen, starts, len(evaluated.held_out.samples), digests)


@contextmanager
def _located(file: SweepFile, arm: str) -> Iterator[None]:
    """Begin the messages of errors in the block with the line and the name of an arm."""
    where = f"{file.located.where(('arms', arm))}: arms.{arm}"
    try:
        with overrides_from(where):
            yield
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from error


def differences(plan: SweepPlan) -> dict[str, list[str]]:
    """Return, for each arm, a text for each key whose value differs from that of the baseline."""
    base = stored_config(plan.arms[plan.file.baseline])
    return {
        arm: [f"{one.key}: {one.now}, not {one.before}" for one in value_differences(base, stored_config(other))]
        for arm, other in plan.arms.items()
        if arm != plan.file.baseline
    }


# The directory of a sweep


class SweepHeader(BaseModel):
    """The content of `sweep.json`.

    Attributes:
        sweep_path: the sweep file.
        config: the content of the file, with defaults filled in and secrets omitted.
        arms: the `run.json` that each arm had for the first seed.
        digests: the SHA-256 of the inputs that belong to no arm.
        status: "running", "complete", "interrupted" or "failed".
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    schema_version: int = _SCHEMA_VERSION
    name: str
    sweep_path: str
    config: Mapping[str, Any]
    arms: Mapping[str, RunHeader]
    digests: Mapping[str, str] = {}
    versions: Mapping[str, str] = Field(default_factory=software_versions)
    status: str = "running"
    started_at: AwareDatetime = Field(default_factory=lambda: datetime.datetime.now(datetime.UTC))

    @classmethod
    def of(cls, plan: SweepPlan) -> SweepHeader:
        """Return the header of a new sweep."""
        return cls(
            name=plan.file.config.name,
            sweep_path=str(plan.file.path.resolve()),
            config=without_secrets(plan.file.config.model_dump(mode="json")),
            arms={arm: new_run_header(arm, one) for arm, one in plan.arms.items()},
            digests=dict(plan.digests),
        )

    @classmethod
    def read(cls, folder: Path) -> SweepHeader:
        """Read the header of a sweep."""
        if not (folder / SWEEP_FILE).is_file():
            raise ConfigError(f"{folder} is not a sweep: it has no {SWEEP_FILE}")
        return read_header(folder / SWEEP_FILE, cls, _SCHEMA_VERSION)

    def write(self, folder: Path, plan: SweepPlan) -> None:
        """Replace `sweep.json`."""
        text = json.dumps(self.model_dump(mode="json"), indent=2, allow_nan=False).encode("ascii") + b"\n"
        write_atomically(folder / SWEEP_FILE, _redact(plan, text))


def _redact(plan: SweepPlan, text: bytes) -> bytes:
    for one in plan.arms.values():
        text = one.redaction.redact_line(text)
    return text


def create_sweep(plan: SweepPlan, log_dir: Path) -> Path:
    """Create the directory of a new sweep, including `sweep.json`."""
    path = new_run_path(log_dir, plan.file.config.name)
    try:
        make_private_folder(path, parents=True)
    except OSError as error:
        raise ConfigError(f"cannot create {path}: {error.strerror}; choose another --log-dir") from error
    SweepHeader.of(plan).write(path, plan)
    return path


def latest_sweep(log_dir: Path) -> Path:
    """Return the newest sweep in a directory."""
    found = {}
    for path in log_dir.glob(f"*/{SWEEP_FILE}"):
        with suppress(StoreError):  # a damaged sweep does not block others
            found[path.parent] = SweepHeader.read(path.parent).started_at
    if not found:
        raise ConfigError(f"no sweep in {log_dir}; start one, or pass its directory with --resume FOLDER")
    return max(found, key=found.__getitem__)


def changed_inputs(header: SweepHeader, plan: SweepPlan, folder: Path) -> list[str]:
    """Return descriptions of the inputs that have changed since a sweep began."""
    config = without_secrets(plan.file.config.model_dump(mode="json"))
    fixed = [{key: value for key, value in one.items() if key not in CHANGEABLE} for one in (header.config, config)]
    changed = [one.text for one in value_differences(*fixed)]
    changed += [name for name in plan.digests if header.digests.get(name) != plan.digests[name]]
    for arm in [arm for arm in plan.arms if arm in header.arms]:
        changed += [f"{arm}: {text}" for text in changes_since(header.arms[arm], plan.arms[arm], folder).refused]
    return changed


# Running

Listener = Callable[[str, Mapping[str, Any]], None]
"""A function that is called with the name of a run and each report of its process."""


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """The outcome of a sweep: its directory, its status, and the content of `summary.json`.

    The status is "complete", "interrupted", or "failed" if a run failed.
    """

    path: Path
    status: str
    summary: dict[str, Any]


def sweep_into(
    folder: Path,
    plan: SweepPlan,
    listener: Listener = lambda name, report: None,
    interruptible: Interruptible = lambda control: nullcontext(),
) -> SweepOutcome:
    """Make all runs and evaluations that are missing in the directory of a sweep, and write its summary and page."""
    session = _SweepSession(folder, plan, listener)

    async def run() -> str | None:
        control, token = Control(), LOG_FOLDER.set(folder / "logs")
        try:
            async with interruptible(control):
                with control.scope:
                    await session.run(control)
        finally:
            LOG_FOLDER.reset(token)
        return control.stop_reason

    with lock_folder(folder):
        cut_torn_line(folder / EVALUATIONS)
        header = SweepHeader.read(folder).model_copy(update={"status": "running"})
        header.write(folder, plan)
        status = "failed"
        try:
            stop_reason = run_blocking(run())
            if session.fatal is not None:
                raise session.fatal
            if not session.is_unfinished:
                status = "complete"
            elif stop_reason:
                status = INTERRUPTED
        finally:
            with report_store_errors() if status == "failed" else nullcontext():
                header.model_copy(update={"status": status}).write(folder, plan)
        summary = write_results(folder, plan, status, session.errors)
        try:
            with boundary(StoreError, "the report"):
                write_sweep_page(folder, summary, sweep_tables(summary))
        except RewardKitError as error:  # a damaged file of a run must not hide the results
            listener(header.name, {"note": f"report.html was not written: {error}"})
        return SweepOutcome(folder, status, summary)


@dataclass(slots=True)
class _SweepSession:
    """The processes of a sweep."""

    folder: Path
    plan: SweepPlan
    listener: Listener
    errors: dict[str, str] = field(default_factory=dict)
    running: dict[str, ChildProcess] = field(default_factory=dict)
    fatal: TrainingError | None = None  # the reason why no run can be compared

    @property
    def is_unfinished(self) -> bool:
        """True if an evaluation is missing."""
        known = read_evaluations(self.folder)
        return any(self.plan.request(*name, self.folder, known).evaluations for name in self._names())

    def _names(self) -> list[tuple[str, int]]:
        return [*((START, seed) for seed in self.plan.starts), *self.plan.names()]

    async def run(self, control: Control) -> None:
        """Make all missing runs and evaluations."""
        slots = anyio.CapacityLimiter(self.plan.processes)

        async def make(arm: str, seed: int) -> None:
            async with slots:
                request = self.plan.request(arm, seed, self.folder, read_evaluations(self.folder))
                if request.evaluations and not control.stop_reason:
                    await self._make(arm, seed, request, control)

        async def pass_on_stop() -> None:
            """Interrupt the processes when the sweep is to stop."""
            while not control.stop_reason:  # noqa: ASYNC110
                await anyio.sleep(_CHECK_S)
            for child in self.running.values():
                os.kill(child.pid, signal.SIGTERM)  # a trainer stops after the current update

        async with anyio.create_task_group() as watching:
            watching.start_soon(pass_on_stop)
            async with anyio.create_task_group() as tasks:
                for arm, seed in self._names():
                    tasks.start_soon(make, arm, seed)
            watching.cancel_scope.cancel()

    async def _make(self, arm: str, seed: int, request: RunRequest, control: Control) -> None:
        """Run the process of a run, and store its evaluations."""
        name = f"{arm}-{seed}"
        # Without -P, modules in the working directory would hide installed ones, unlike in this process.
        command = [sys.executable, "-P", "-m", "reward_kit.rl.training.sweep_run"]
        child = await start_process(command, cwd=None, env=os.environ, log_name=name, piped=True)
        self.running[name] = child
        status = None
        given, reports = child.pipes
        try:
            with given:
                given.write(request.model_dump_json().encode())
            self.listener(name, {"started": True})
            while line := await anyio.to_thread.run_sync(reports.readline, abandon_on_cancel=True):
                with boundary(StoreError, f"the process of {name} printed an invalid line"):
                    report = json.loads(line)
                if "evaluation" in report:
                    append_evaluation(self.folder, {"arm": arm, "seed": seed, **report["evaluation"]})
                status = report.get("status", status)
                if "error" in report:
                    self.errors[name] = report["error"]
                self.listener(name, report)
        finally:
            del self.running[name]
            await child.end()
            reports.close()
        if status is None and name not in self.errors and not control.stop_reason:
            self.errors[name] = child.log_tail(1) or f"its process ended with exit code {child.returncode}"
            self.listener(name, {"error": self.errors[name]})
        if arm == START and name in self.errors:
            self.fatal = TrainingError(f"the untrained policy cannot be evaluated: {self.errors[name]}")
            control.scope.cancel()


def write_results(folder: Path, plan: SweepPlan, status: str, errors: Mapping[str, str]) -> dict[str, Any]:
    """Write `summary.json`, and return its content."""
    facts = SweepFacts(
        name=plan.file.config.name,
        status=status,
        baseline=plan.file.baseline,
        seeds=plan.file.seeds,
        temperatures=plan.temperatures,
        by=plan.file.config.evaluation.by,
        runs={
            arm: {seed: run_facts(folder / f"{arm}-{seed}", errors.get(f"{arm}-{seed}")) for seed in plan.file.seeds}
            for arm in plan.arms
        },
        evaluations=read_evaluations(folder),
    )
    summary = summarize_sweep(facts)
    tables = sweep_tables(summary)
    parts = [
        f"### {table.title}\n\n{markdown_table(table.columns, table.rows, left=table.columns[:1])}" for table in tables
    ]
    notes = "\n".join(f"- {note}" for note in summary["notes"])
    summary["markdown"] = "\n\n".join(filter(None, [*parts, notes]))
    text = json.dumps(summary, indent=2, allow_nan=False).encode("ascii") + b"\n"
    write_atomically(folder / SUMMARY_FILE, _redact(plan, text))
    return summary
