"""`reward-kit run`: from a task file to scored, resumable episodes on disk."""

from __future__ import annotations

import contextlib
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio
import click
from click.core import ParameterSource

from reward_kit.agent.policies.human_policy import HumanPolicy
from reward_kit.cli.outcome import Ending, carry_out
from reward_kit.errors import ConfigError
from reward_kit.runs.policies import make_policies
from reward_kit.runs.runner import NamedPolicy, Plan
from reward_kit.runs.store import HIDDEN, RunStore, latest_run, new_run_path, read_json, without_secrets
from reward_kit.runs.tasks import Task, check_world, load_task, parse_override, selected

_LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be run, as the command line or an earlier run's `run.json` says it."""

    task_path: Path
    overrides: Mapping[str, Any]
    models: Sequence[str]
    policies: Sequence[str]
    base_url: str | None
    rollouts: int | None
    limit: int | None
    sample_ids: Sequence[str]
    seed: int


@click.command(name="run")
@click.argument("task", required=False, type=click.Path(path_type=Path))
@click.option(
    "--model",
    "models",
    multiple=True,
    envvar="REWARD_KIT_RUN_MODEL",
    metavar="openai/NAME",
    help="A model to run; repeat to compare.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    envvar="REWARD_KIT_RUN_POLICY",
    help="random, expert, human, scripted, or file.py:Class; repeat to compare.",
)
@click.option("--base-url", help="The OpenAI-compatible endpoint of the --models (else OPENAI_BASE_URL).")
@click.option("-n", "--rollouts", type=click.IntRange(1), help="Episodes of each sample.")
@click.option("--limit", type=click.IntRange(1), help="Run the first N samples only.")
@click.option(
    "--sample-id",
    "sample_ids",
    multiple=True,
    envvar="REWARD_KIT_RUN_SAMPLE_ID",
    help="Run this sample only; may be repeated.",
)
@click.option("--max-concurrency", type=click.IntRange(1), default=16, show_default=True, help="Episodes in flight.")
@click.option("--seed", type=int, default=0, show_default=True, help="Everything random derives from it.")
@click.option(
    "-T",
    "--set",
    "overrides",
    multiple=True,
    envvar="REWARD_KIT_RUN_SET",
    metavar="KEY=VALUE",
    help="Set a key of the task (dotted for inner).",
)
@click.option("--log-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--resume", is_flag=False, flag_value=_LATEST, metavar="[RUN]", help="Go on; default: the latest run.")
@click.option("--fail-under", type=float, metavar="X", help="Exit 1 where a mean score is below X.")
@click.option("--fail-on-error", type=click.FloatRange(0), metavar="X", help="Stop once more than X episodes broke.")
@click.option("--display", type=click.Choice(["rich", "plain", "none"]), help="Progress; default by terminal.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    envvar="REWARD_KIT_RUN_JSON",
    help="Print the summary as JSON on standard output.",
)
@click.option("--dry-run", is_flag=True, help="Check everything, show what would run, write nothing.")
def command(
    task: Path | None,
    models: tuple[str, ...],
    policies: tuple[str, ...],
    base_url: str | None,
    rollouts: int | None,
    limit: int | None,
    sample_ids: tuple[str, ...],
    max_concurrency: int,
    seed: int,
    overrides: tuple[str, ...],
    log_dir: Path,
    resume: str | None,
    fail_under: float | None,
    fail_on_error: float | None,
    display: str | None,
    as_json: bool,
    dry_run: bool,
) -> None:
    """Run TASK, a YAML file: collect episodes, score them, write them down, show a table.

    \b
    Examples:
      reward-kit run task.yaml --model openai/gpt-5-mini -n 4
      reward-kit run task.yaml --policy expert --policy random
      reward-kit run --resume
    """
    # What a user's code prints, when it is loaded too, must not mix with the summary on standard output.
    with contextlib.redirect_stdout(sys.stderr):
        if resume is not None:
            _refuse_options_with_resume()
            path = _run_to_resume(resume, task, log_dir)
            request = _request_of(path)
        elif task is not None:
            path, parsed = None, dict(parse_override(item) for item in overrides)
            request = Request(task, parsed, models, policies, base_url, rollouts, limit, sample_ids, seed)
        else:
            raise click.UsageError("name a task file, or give --resume")
        loaded = load_task(request.task_path, request.overrides)
        if path is not None:
            _refuse_changed_task(path, loaded)
        plan = _plan(loaded, request, max_concurrency)
        anyio.run(check_world, loaded)
    if dry_run:
        _show_plan(plan, as_json)
        return
    store = RunStore(path) if path is not None else _new_store(log_dir, plan, request)
    ending = Ending(
        title=f"{loaded.definition.name}  ({len(plan.samples)} samples × {plan.rollouts})",
        pass_threshold=loaded.definition.pass_threshold,
        expected=plan.total,
        fail_under=fail_under,
        as_json=as_json,
        resume_command=["reward-kit", "run", "--resume", str(store.path)],
    )
    if display is None and _has_human(plan.policies):
        display = "none"  # the terminal belongs to the person who plays
    sys.exit(carry_out(plan, store, ending, display=display, error_limit=fail_on_error))


def _refuse_options_with_resume() -> None:
    """What is run was decided when the run began; an option that would change it is an error, not a silent no-op."""
    context = click.get_current_context()
    decided = ("models", "policies", "base_url", "rollouts", "limit", "sample_ids", "seed", "overrides")
    for name in decided:
        if context.get_parameter_source(name) in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT):
            option = next(p.opts[0] for p in context.command.params if p.name == name)
            raise click.UsageError(f"{option} cannot be changed by --resume; start a new run")


def _plan(task: Task, request: Request, max_concurrency: int) -> Plan:
    policies = make_policies(task, request.models, request.policies, request.base_url)
    if _has_human(policies):
        max_concurrency = 1  # a person plays one episode at a time
    return Plan(
        task=task,
        policies=policies,
        samples=selected(task, request.limit, request.sample_ids),
        rollouts=request.rollouts or task.rollouts_per_sample,
        seed=request.seed,
        max_concurrency=max_concurrency,
    )


def _has_human(policies: Sequence[NamedPolicy]) -> bool:
    return any(isinstance(named.policy, HumanPolicy) for named in policies)


def _new_store(log_dir: Path, plan: Plan, request: Request) -> RunStore:
    path = new_run_path(log_dir, plan.task.definition.name)
    header = {
        "run_id": path.name,
        "task_name": plan.task.definition.name,
        "task_path": str(request.task_path.resolve()),
        "digests": dict(plan.task.digests),
        "task": without_secrets(plan.task.definition.model_dump(mode="json", exclude_defaults=True)),
        "overrides": without_secrets(dict(request.overrides)),
        "models": list(request.models),
        "policies": list(request.policies),
        "base_url": request.base_url,
        "seed": request.seed,
        "rollouts": request.rollouts,
        "limit": request.limit,
        "sample_ids": list(request.sample_ids),
        "total": plan.total,
        "max_concurrency": plan.max_concurrency,
        "versions": {"reward_kit": version("reward-kit"), "python": platform.python_version()},
    }
    return RunStore.create(path, header)


def _run_to_resume(resume: str, task: Path | None, log_dir: Path) -> Path:
    if resume != _LATEST:
        return Path(resume)
    return latest_run(log_dir, load_task(task).definition.name if task is not None else None)


def _request_of(path: Path) -> Request:
    """What an earlier run was asked to do."""
    if not (path / "run.json").is_file():
        raise ConfigError(f"--resume: {path} is no run; name a folder with a run.json, or none for the latest")
    header = read_json(path / "run.json")
    if "task_path" not in header:
        raise ConfigError(f"{path} is no run of a task and cannot be resumed")
    given = {field.name: header[field.name] for field in fields(Request) if field.name != "task_path"}
    # A hidden secret is not stored; the policy finds it in the environment again.
    given["overrides"] = _without_hidden(given["overrides"])
    return Request(task_path=Path(header["task_path"]), **given)


def _without_hidden(value: Any) -> Any:
    """`value` without the entries, at any depth, that `without_secrets` replaced."""
    if isinstance(value, Mapping):
        return {key: _without_hidden(item) for key, item in value.items() if item != HIDDEN}
    return [_without_hidden(item) for item in value] if isinstance(value, list) else value


def _refuse_changed_task(path: Path, task: Task) -> None:
    """Episodes and scores of one run belong together only while what they come from is the same."""
    before = read_json(path / "run.json")["digests"]
    changed = sorted(name for name in before.keys() | task.digests.keys() if before.get(name) != task.digests.get(name))
    if changed:
        raise ConfigError(
            f"the {' and '.join(changed)} of {task.path} changed since {path} began; its results would not belong "
            "together. Start a new run, or undo the change"
        )


def _show_plan(plan: Plan, as_json: bool) -> None:
    facts = {
        "task": plan.task.definition.name,
        "policies": [named.label for named in plan.policies],
        "samples": len(plan.samples),
        "rollouts": plan.rollouts,
        "episodes": plan.total,
        "reward": plan.task.reward.id if plan.task.reward else None,
        "resource": plan.task.definition.resource_type,
        "tools": sorted(plan.task.tools.get_tools()) if plan.task.tools else [],
    }
    if as_json:
        click.echo(json.dumps({"dry_run": True, **facts}))
        return
    for key, value in facts.items():
        click.echo(f"{key + ':':<10}{', '.join(value) if isinstance(value, list) else value}")
    click.echo("Nothing was written.")
