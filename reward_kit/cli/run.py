"""`reward-kit run`: from a task file to scored, resumable episodes on disk."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import click
from click.core import ParameterSource

from reward_kit.agent.policies import make_policy
from reward_kit.cli.outcome import close_run, display_kind, interruptible, log_to
from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.models import PolicyModel
from reward_kit.runs.display import Display
from reward_kit.runs.runner import Control, NamedPolicy, Plan, Run
from reward_kit.runs.store import RunStore, latest_run, new_run_path, read_json, without_secrets
from reward_kit.runs.tasks import Task, check_world, load_task, parse_override, selected

_PROVIDERS = ("openai",)
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
@click.option("--model", "models", multiple=True, metavar="openai/NAME", help="A model to run; repeat to compare.")
@click.option("--policy", "policies", multiple=True, help="random, expert, human, or module:Class; repeat to compare.")
@click.option("--base-url", help="The OpenAI-compatible endpoint of the --models (else OPENAI_BASE_URL).")
@click.option("-n", "--rollouts", type=click.IntRange(1), help="Episodes of each sample.")
@click.option("--limit", type=click.IntRange(1), help="Run the first N samples only.")
@click.option("--sample-id", "sample_ids", multiple=True, help="Run this sample only; may be repeated.")
@click.option("--max-concurrency", type=click.IntRange(1), default=16, show_default=True, help="Episodes in flight.")
@click.option("--seed", type=int, default=0, show_default=True, help="Everything random derives from it.")
@click.option("-T", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key of the task (dotted for inner).")
@click.option("--log-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--resume", is_flag=False, flag_value=_LATEST, metavar="[RUN]", help="Go on; default: the latest run.")
@click.option("--fail-under", type=float, metavar="X", help="Exit 1 where a mean score is below X.")
@click.option("--fail-on-error", type=click.FloatRange(0), metavar="X", help="Stop once more than X episodes broke.")
@click.option("--display", type=click.Choice(["rich", "plain", "none"]), help="Progress; default by terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON on standard output.")
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
        _show_plan(plan)
        return
    store = RunStore(path) if path is not None else _new_store(log_dir, plan, request)
    sys.exit(_execute(store, plan, display, fail_under, fail_on_error, as_json))


def _refuse_options_with_resume() -> None:
    """What is run was decided when the run began; an option that would change it is an error, not a silent no-op."""
    context = click.get_current_context()
    decided = ("models", "policies", "base_url", "rollouts", "limit", "sample_ids", "seed", "overrides")
    for name in decided:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = next(p.opts[0] for p in context.command.params if p.name == name)
            raise click.UsageError(f"{option} cannot be changed by --resume; start a new run")


def _execute(
    store: RunStore, plan: Plan, display: str | None, fail_under: float | None, error_limit: float | None, as_json: bool
) -> int:
    async def run() -> int:
        control = Control()
        shown = Display(display_kind(display), plan.total)
        execution = Run(plan, store, listener=shown, control=control, error_limit=error_limit)
        async with interruptible(control, shown):
            with shown:
                await execution.execute()
        return close_run(
            store,
            list(execution.rows.values()),
            control,
            title=f"{plan.task.definition.name}  ({len(plan.samples)} samples × {plan.rollouts})",
            pass_threshold=plan.task.definition.pass_threshold,
            expected=plan.total,
            fail_under=fail_under,
            as_json=as_json,
            resume_command=["reward-kit", "run", "--resume", str(store.path)],
        )

    with store:
        log_to(store.path / "run.log")
        return anyio.run(run)


def _plan(task: Task, request: Request, max_concurrency: int) -> Plan:
    folder = task.path.resolve().parent
    chosen = _choose_policies(task, request)
    return Plan(
        task=task,
        policies=[NamedPolicy(label, make_policy(kind, options, folder)) for label, kind, options in chosen],
        samples=selected(task, request.limit, request.sample_ids),
        rollouts=request.rollouts or task.rollouts_per_sample,
        seed=request.seed,
        max_concurrency=max_concurrency,
    )


class Choice(NamedTuple):
    """A policy to run: its label in results, and what `make_policy` takes."""

    label: str
    type: str
    options: dict[str, Any]


def _choose_policies(task: Task, request: Request) -> list[Choice]:
    """What was asked for, with the task file's options where the type agrees; else the task file's own policy.

    Raises:
        ConfigError: no policy is named anywhere, a provider is unknown, or two policies have one label.
    """
    in_file = task.definition.policy
    chosen = [_model_choice(model, in_file) for model in request.models]
    chosen += [Choice(name, name, _file_options(name, in_file)) for name in request.policies]
    if not chosen and in_file is not None:
        label = f"openai/{in_file.options().get('model')}" if in_file.type == "openai" else in_file.type
        chosen = [Choice(label, in_file.type, in_file.options())]
    if not chosen:
        raise ConfigError(
            f"{task.path}: no policy. Give --model openai/NAME, --policy random, or a policy: block in the file"
        )
    if request.base_url is not None:
        if all(choice.type != "openai" for choice in chosen):
            raise ConfigError("--base-url is for models, and no policy of this run is one; give --model openai/NAME")
        for choice in chosen:
            if choice.type == "openai":
                choice.options["base_url"] = request.base_url
    labels = [choice.label for choice in chosen]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"two policies are called {next(x for x in labels if labels.count(x) > 1)!r}")
    return chosen


def _model_choice(model: str, in_file: PolicyModel | None) -> Choice:
    provider, separator, name = model.partition("/")
    if not separator or not name or provider not in _PROVIDERS:
        raise ConfigError(
            f"--model {model!r}: write openai/NAME{did_you_mean(provider, _PROVIDERS)} "
            "(any OpenAI-compatible endpoint through --base-url)"
        )
    return Choice(model, provider, {**_file_options(provider, in_file), "model": name})


def _file_options(name: str, in_file: PolicyModel | None) -> dict[str, Any]:
    return in_file.options() if in_file is not None and in_file.type == name else {}


def _new_store(log_dir: Path, plan: Plan, request: Request) -> RunStore:
    path = new_run_path(log_dir, plan.task.definition.name)
    header = {
        "run_id": path.name,
        "task_name": plan.task.definition.name,
        "task_path": str(request.task_path.resolve()),
        "task_digest": plan.task.digest,
        "task": without_secrets(plan.task.definition.model_dump(mode="json", exclude_defaults=True)),
        "overrides": dict(request.overrides),
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
    header = read_json(path / "run.json")
    if "task_path" not in header:
        raise ConfigError(f"{path} is no run of a task and cannot be resumed")
    given = {field.name: header[field.name] for field in fields(Request) if field.name != "task_path"}
    return Request(task_path=Path(header["task_path"]), **given)


def _refuse_changed_task(path: Path, task: Task) -> None:
    if read_json(path / "run.json")["task_digest"] != task.digest:
        raise ConfigError(
            f"{task.path} or its dataset has changed since {path} began; its episodes would not belong together. "
            "Start a new run, or undo the change"
        )


def _show_plan(plan: Plan) -> None:
    names = ", ".join(named.label for named in plan.policies)
    reward = plan.task.reward.id if plan.task.reward else "none"
    click.echo(f"task:     {plan.task.definition.name} ({plan.task.path})")
    click.echo(f"policies: {names}")
    click.echo(f"samples:  {len(plan.samples)} × {plan.rollouts} rollouts = {plan.total} episodes")
    click.echo(f"reward:   {reward}")
    click.echo(f"resource: {plan.task.definition.resource_type or 'none'}")
    click.echo("nothing was written")
