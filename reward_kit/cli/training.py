"""What `reward-kit train` does, once it is known that everything it needs is installed."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import click

from reward_kit.cli.echo import echo, echo_json
from reward_kit.cli.options import LATEST, report_hidden_secrets
from reward_kit.cli.outcome import (
    allow_many_connections,
    display_kind,
    interruptible,
    log_to,
    note_console,
    write_page,
)
from reward_kit.cli.trust import require_trust_in_file
from reward_kit.display_text import counted
from reward_kit.errors import ConfigError
from reward_kit.processes import LOG_FOLDER
from reward_kit.rl.learner.crew import Crew, crew_of_processes
from reward_kit.rl.training.carry_out import Outcome, carry_out
from reward_kit.rl.training.display import TrainingDisplay
from reward_kit.rl.training.explain import explained, notes
from reward_kit.rl.training.plan import TrainingPlan, load_plan
from reward_kit.rl.training.policy_checks import check_policy
from reward_kit.rl.training.resuming import CHANGEABLE, changes_since
from reward_kit.rl.training.run_folder import RunFolder, header_of, latest_training, remove_unused, training_of
from reward_kit.rl.training.session import INTERRUPTED
from reward_kit.rl.training.setup import Makers
from reward_kit.rl.training.together import help_to_train, sharded_by
from reward_kit.runs import events
from reward_kit.runs.files import METRICS
from reward_kit.runs.plan import Control
from reward_kit.runs.redaction import without_hidden
from reward_kit.runs.run_folder import FILE, RunHeader, new_run_path
from reward_kit.runs.task_file import parse_override
from reward_kit.runs.tasks import check_world


@dataclass(frozen=True, slots=True)
class Asked:
    """What the flags of `train` said.

    Attributes:
        config: the train file; None where a run goes on.
        overrides: KEY=VALUE, laid over the file.
        log_dir: where the run's folder is made.
        resume: the run that goes on, or LATEST; None for a new one.
        force: go on though files changed.
        display: the kind of progress.
        as_json: the summary goes to standard output as JSON.
        dry_run: check, and write nothing.
    """

    config: Path | None
    overrides: tuple[str, ...]
    log_dir: Path
    resume: str | None
    force: bool
    display: str | None
    as_json: bool
    dry_run: bool


def train(asked: Asked) -> None:
    """Train as asked, in this process or as one of several that `torchrun` started.

    Exits with the code that says how it went; returns where this process helped another one, which says it.

    Raises:
        ConfigError: the train file or a flag is wrong.
        UsageError: the flags do not go together.
    """
    with crew_of_processes() as crew:
        if crew is not None and not crew.processes.is_first:
            if not help_to_train(crew):
                sys.exit(0)  # the first process has said what there is to say
            return
        code = _as_first(asked, crew)
    sys.exit(code)


def _as_first(asked: Asked, crew: Crew | None) -> int:
    # What a user's code prints must not mix with the summary on standard output.
    with contextlib.redirect_stdout(sys.stderr):
        path, plan = _planned(asked)
        check_policy(plan)
        _check_world(plan)
    if asked.dry_run:
        if asked.as_json:
            echo_json({"dry_run": True, "run": plan.name})
        else:
            echo(explained(plan))
        echo("Nothing was written.", err=True)
        return 0
    if path is None:
        path = new_run_path(asked.log_dir, plan.name)
        RunFolder.create(path, header_of(path.name, plan), plan.redaction)
    try:
        return _train(plan, path, asked, crew)
    except (ConfigError, ExceptionGroup) as error:
        is_refused = isinstance(error, ConfigError) or error.subgroup(ConfigError) is not None
        if is_refused and asked.resume is None:  # by what only weights or worlds could tell: nothing to go on from
            remove_unused(path)
        raise


def _planned(asked: Asked) -> tuple[Path | None, TrainingPlan]:
    """What is trained, and the folder of the run that goes on."""
    given = dict(parse_override(item) for item in asked.overrides)
    if asked.resume is not None:
        if asked.config is not None:
            require_trust_in_file(asked.config, given)
        path = _run_to_resume(asked.resume, asked.config, asked.log_dir)
        return path, _plan_to_resume(path, given, asked.force)
    if asked.config is None:
        raise click.UsageError("name a train file, or give --resume")
    if asked.force:
        raise click.UsageError("--force goes with --resume")
    require_trust_in_file(asked.config, given)
    return None, load_plan(asked.config, given)


def _check_world(plan: TrainingPlan) -> None:
    anyio.run(check_world, plan.task.definition, plan.samples, plan.task.located)
    for note in [*plan.task.notes, *notes(plan)]:
        echo(note, err=True)
    if (held_out := plan.held_out) is not None:
        anyio.run(check_world, held_out.task.definition, held_out.samples, held_out.task.located)


def _run_to_resume(resume: str, config: Path | None, log_dir: Path) -> Path:
    path = Path(resume) if resume != LATEST else latest_training(log_dir, load_plan(config).name if config else None)
    if not (path / FILE).is_file():
        raise ConfigError(f"--resume: {path} is no run; name a folder with a {FILE}, or none for the latest")
    return path


def _plan_to_resume(path: Path, given: Mapping[str, Any], force: bool) -> TrainingPlan:
    """The plan of a run that goes on, with what a resume may change.

    Raises:
        ConfigError: something would change that the earlier updates were made with.
    """
    header = RunHeader.read(path)
    training = training_of(header, path)
    is_agreed = require_trust_in_file(Path(training.train_path), given, training.overrides)
    hidden = report_hidden_secrets(training.overrides, given)
    for key in given:
        if key.partition(".")[0] not in CHANGEABLE and key not in hidden:
            raise ConfigError(
                f"-T {key} cannot be changed by --resume; start a new run. These can: {', '.join(CHANGEABLE)}"
            )
    before = without_hidden(training.overrides) | {key: given[key] for key in hidden if key in given}
    stored = () if is_agreed else before.keys() - given.keys()
    plan = load_plan(Path(training.train_path), before, stored=stored)
    changes = changes_since(header, plan, path)
    for change in changes.allowed:
        echo(f"{change}", err=True)
    if changes.refused:
        told = f"{path} cannot go on as it began, because these changed: {', '.join(changes.refused)}"
        if not force:
            raise ConfigError(f"{told}. Start a new run, undo the change, or go on all the same with --force")
        echo(f"--force: {told}", err=True)
    if given:
        plan = load_plan(Path(training.train_path), {**before, **given}, stored=stored)
    if header.status == "complete" and training.updates >= plan.config.updates:
        done = counted(training.updates, "update")
        more = shlex.join(["reward-kit", "train", "--resume", str(path), "-T", f"updates={2 * training.updates}"])
        echo(f"{path} is finished: it has made its {done}. To train further, raise updates:  {more}", err=True)
    return plan


def _train(plan: TrainingPlan, path: Path, asked: Asked, crew: Crew | None) -> int:
    makers = _makers(plan, crew)
    evaluation = plan.config.evaluation
    every = evaluation.every if evaluation is not None else None
    shown = TrainingDisplay(display_kind(asked.display), plan.config.updates, evaluated_every=every)

    def stoppable(control: Control, watching: TrainingDisplay) -> AbstractAsyncContextManager[None]:
        return interruptible(control, watching, None)

    async def run() -> Outcome:
        with shown, contextlib.redirect_stdout(sys.stderr):
            return await carry_out(plan, folder, shown, stoppable, makers)

    allow_many_connections()
    # Bars of libraries that load and write weights would be drawn over ours.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with RunFolder(path, plan.redaction) as folder:
        log_to(path / "run.log", plan.redaction)
        LOG_FOLDER.set(path / "logs")
        events.began(path, "training", plan.config.updates)
        try:
            outcome = anyio.run(run)
        finally:
            _write_page(path)
        events.ended(path, "training", outcome.status)
    return _end(path, outcome, asked.as_json, _started_by(crew))


def _makers(plan: TrainingPlan, crew: Crew | None) -> Makers:
    """Of what is in other processes."""
    makers = Makers() if crew is None else Makers(sharded_by(crew))
    if plan.config.engine.type == "local":
        return makers
    from reward_kit.integrations.ray.training import on_cluster

    return on_cluster(plan, makers)


def _started_by(crew: Crew | None) -> list[str]:
    """The words with which this command was called, as far as a resume needs them."""
    if crew is None:
        return ["reward-kit"]
    here = os.environ.get("LOCAL_WORLD_SIZE", str(crew.processes.size))
    return ["torchrun", "--nproc-per-node", here, "-m", "reward_kit.cli.main"]


def _write_page(path: Path) -> None:
    """Also of a run that failed or was stopped: how it went until then."""
    metrics = path / METRICS
    if metrics.is_file() and metrics.stat().st_size:
        write_page(path, note_console())


def _end(path: Path, outcome: Outcome, as_json: bool, called: Sequence[str]) -> int:
    if as_json:
        echo_json({"run": str(path), "status": outcome.status, **outcome.summary})
    elif (best := outcome.summary.get("best")) is not None:
        update = outcome.summary["best_update"]
        when = f"after update {update}" if update else "before the first update; none was better, so there is no model/"
        echo(f"best {outcome.summary['metric']} {best:.3f} {when}")
    echo(f"Written to {path}", err=True)
    if outcome.status != INTERRUPTED:
        return 0
    echo(f"Go on with:  {shlex.join([*called, 'train', '--resume', str(path)])}", err=True)
    return 130
