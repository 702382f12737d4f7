"""The implementation of `reward-kit train`: planning, resuming, dry runs, training and the final output."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from reward_kit.cli import operator_log
from reward_kit.cli.echo import echo, echo_json
from reward_kit.cli.options import LATEST, report_hidden_secrets
from reward_kit.cli.outcome import (
    allow_many_connections,
    display_kind,
    keep_logs_in_run,
    note_page,
    noting_resume,
    resume_line,
    stop_after_updates,
)
from reward_kit.cli.trust import require_trust_in_file
from reward_kit.display_text import pluralize
from reward_kit.errors import ConfigError
from reward_kit.report.run_page import write_page
from reward_kit.rl.learner.sharding import ProcessGroup, open_process_group
from reward_kit.rl.training.description import describe_plan, plan_notes
from reward_kit.rl.training.logs import TrainingDisplay
from reward_kit.rl.training.plan import TrainingPlan, check_policy, load_plan
from reward_kit.rl.training.resume import CHANGEABLE, changes_since
from reward_kit.rl.training.setup import Factories, follow_training, sharded_learner_factory
from reward_kit.rl.training.train_file import check_resources, create_run, train_into
from reward_kit.runs.inputs import refuse_changes
from reward_kit.runs.plan import INTERRUPTED
from reward_kit.runs.redaction import without_hidden
from reward_kit.runs.run_folder import RunHeader, latest_run
from reward_kit.runs.task_file import parse_override


@dataclass(frozen=True, slots=True)
class TrainArgs:
    """The options of `train`."""

    config: Path | None
    overrides: tuple[str, ...]
    log_dir: Path
    resume: str | None
    force: bool
    display: str | None
    as_json: bool
    dry_run: bool


def run_train(args: TrainArgs) -> None:
    """Train in this process and exit. The process may be one of several that `torchrun` started."""
    with open_process_group() as group:
        if group is not None and not group.processes.is_first:
            if not follow_training(group):
                sys.exit(0)  # the first process reports the error
            return
        code = _run_first(args, group)
    sys.exit(code)


def _run_first(args: TrainArgs, group: ProcessGroup | None) -> int:
    # Output of the user's code must not mix with the summary on standard output.
    with contextlib.redirect_stdout(sys.stderr):
        overrides = dict(parse_override(item) for item in args.overrides)
        path: Path | None = None
        if args.config is not None:
            require_trust_in_file(args.config, overrides)
        if args.resume is not None:
            path, plan = _plan_to_resume(args, overrides)
        elif args.config is None:
            raise click.UsageError("pass a train file, or --resume")
        elif args.force:
            raise click.UsageError("--force requires --resume")
        else:
            plan = load_plan(args.config, overrides)
        check_policy(plan)
        check_resources(plan)
        for note in [*plan.task.notes, *plan_notes(plan)]:
            echo(note, err=True)
    if args.dry_run:
        if args.as_json:
            echo_json({"dry_run": True, "run": plan.name})
        else:
            echo(describe_plan(plan))
        echo("Nothing was written.", err=True)
        return 0
    return _train(plan, path or create_run(plan, args.log_dir), args, group)


def _plan_to_resume(args: TrainArgs, given: dict[str, object]) -> tuple[Path, TrainingPlan]:
    """Return the run to resume, and its plan after applying overrides of keys that a resume may change."""
    if args.resume == LATEST:
        path = latest_run(args.log_dir, load_plan(args.config).name if args.config else None, training=True)
    else:
        path = Path(str(args.resume))
    header = RunHeader.read_resumable(path)
    training = header.require_training(path)
    train_file = args.config or Path(training.train_path)
    is_agreed = require_trust_in_file(train_file, given, training.overrides)
    hidden = report_hidden_secrets(training.overrides, given)
    for key in given:
        if key.partition(".")[0] not in CHANGEABLE and key not in hidden:
            raise ConfigError(
                f"-T {key} cannot be changed by --resume; start a new run. Keys that can be changed: "
                f"{', '.join(CHANGEABLE)}"
            )
    before = without_hidden(training.overrides) | {key: given[key] for key in hidden if key in given}
    stored = () if is_agreed else before.keys() - given.keys()
    plan = load_plan(train_file, before, stored=stored)
    changes = changes_since(header, plan, path)
    for change in changes.allowed:
        echo(change, err=True)
    if warning := refuse_changes(path, changes.refused, force=args.force):
        echo(warning, err=True)
    if given:
        plan = load_plan(train_file, {**before, **given}, stored=stored)
    reached = plan.config.reached_limits(training.updates, training.env_steps)
    if header.status == "complete" and reached:
        done = f"{pluralize(training.updates, 'update')} and {training.env_steps:,} environment steps"
        counts = {"updates": training.updates, "max_env_steps": training.env_steps}
        # The count may be far above a limit that was lowered, so suggest the next multiple of the limit.
        raised = [f"-T {key}={limit * (counts[key] // limit + 1)}" for key, limit in reached.items()]
        more = f"{shlex.join(['reward-kit', 'train', '--resume', str(path)])} {' '.join(raised)}"
        echo(f"{path} finished after {done}. To continue training, increase the limit:  {more}", err=True)
    return path, plan


def _train(plan: TrainingPlan, path: Path, args: TrainArgs, group: ProcessGroup | None) -> int:
    factories = Factories() if group is None else Factories(sharded_learner_factory(group))
    if plan.config.engine.type == "ray":
        from reward_kit.integrations.ray.training import on_cluster

        factories = on_cluster(plan, factories)
    display = TrainingDisplay(display_kind(args.display), plan.config)

    allow_many_connections()
    keep_logs_in_run(plan.redaction)
    called = ["reward-kit"]
    if group is not None:
        here = os.environ.get("LOCAL_WORLD_SIZE", str(group.processes.size))
        called = ["torchrun", "--nproc-per-node", here, "-m", "reward_kit.cli.main"]
    resume = [*called, "train", "--resume", str(path)]
    with (
        noting_resume(resume, path),
        contextlib.redirect_stdout(sys.stderr),
        operator_log.first_warnings(display.say, plan.redaction),
    ):
        outcome = train_into(
            path,
            plan,
            display,
            stop_after_updates(display.say),
            factories=factories,
            is_new=args.resume is None,
            on_end=lambda run: note_page(*write_page(run)),
        )

    if args.as_json:
        echo_json({"run": str(path), "status": outcome.status, **outcome.summary})
    elif (best := outcome.summary.get("best")) is not None:
        update = outcome.summary["best_update"]
        when = (
            f"after update {update}"
            if update
            else "before the first update; no update improved the metric, so model/ was not written"
        )
        echo(f"best {outcome.summary['metric']} {best:.3f} {when}")
    echo(f"Written to {path}", err=True)
    if outcome.status != INTERRUPTED:
        return 0
    echo(resume_line(resume), err=True)
    return 130
