"""`reward-kit run`: from a task file to scored, resumable episodes on disk."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import click
import pydantic
from click.core import ParameterSource

from reward_kit.cli import completing
from reward_kit.cli.echo import echo, echo_json
from reward_kit.cli.engine_flags import EngineFlags, where_it_is_collected
from reward_kit.cli.going_on import LATEST, goes_on
from reward_kit.cli.numbers import Number, WholeNumber
from reward_kit.cli.outcome import Ending, run_into
from reward_kit.cli.resumed_secrets import told_of_hidden
from reward_kit.cli.reward_flags import keys_of_walls, where_it_runs
from reward_kit.cli.trust import require_trust_in_file, trust_option
from reward_kit.display_text import counted
from reward_kit.errors import ConfigError
from reward_kit.runs.header import RunHeader
from reward_kit.runs.overrides import parse_override
from reward_kit.runs.plan import Plan
from reward_kit.runs.preparation import has_human, new_store, plan_of
from reward_kit.runs.redaction import is_hidden
from reward_kit.runs.request import Request, changes_since, header_to_resume
from reward_kit.runs.resources import check_world
from reward_kit.runs.store import RunStore, latest_run
from reward_kit.runs.tasks import LoadedTask, load_task, read_definition
from reward_kit.runs.yaml_lines import LocatedYaml
from reward_kit.task_parts import RunLimitsModel
from reward_kit.validation import describe_validation_error

if TYPE_CHECKING:
    from reward_kit.providers.session import ProviderSession
    from reward_kit.runs.engine import Engine
    from reward_kit.runs.redaction import Redaction


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the flags of `run` said, each under the name of its flag."""

    task: Path | None
    models: tuple[str, ...]
    policies: tuple[str, ...]
    base_url: str | None
    rollouts: int | None
    limit: int | None
    sample_ids: tuple[str, ...]
    max_concurrency: int
    seed: int
    overrides: tuple[str, ...]
    sandbox: str | None
    collecting: EngineFlags
    log_dir: Path
    resume: str | None
    only_failed: bool
    force: bool
    max_cost: float | None
    record: Path | None
    replay: Path | None
    fail_under: float | None
    fail_on_error: float | None
    display: str | None
    as_json: bool
    dry_run: bool

    def request(self, task: Path, overrides: Mapping[str, Any]) -> Request:
        """What a new run is asked to do."""
        given = (self.models, self.policies, self.base_url, self.rollouts, self.limit, self.sample_ids, self.seed)
        return Request(task, overrides, *given)


class Ready(NamedTuple):
    """What is checked and loaded.

    Attributes:
        task: as it was loaded.
        request: what of it is run, and by whom.
        plan: the same, with its parties made.
        redaction: what is kept out of everything that is written.
        traffic: of the run.
        engine: where episodes are collected; None for this process.
        path: the folder of the run that goes on; None for a new one.
    """

    task: LoadedTask
    request: Request
    plan: Plan
    redaction: Redaction
    traffic: ProviderSession
    engine: Engine | None
    path: Path | None


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
    shell_complete=completing.policies,
    help="random, expert, human, scripted, replay:RUN or file.py:Class; repeat to compare.",
)
@click.option("--base-url", help="The OpenAI-compatible endpoint of the --models (else OPENAI_BASE_URL).")
@click.option("-n", "--rollouts", type=WholeNumber(1), help="Episodes of each sample.")
@click.option("--limit", type=WholeNumber(1), help="Run the first N samples only.")
@click.option(
    "--sample-id",
    "sample_ids",
    multiple=True,
    envvar="REWARD_KIT_RUN_SAMPLE_ID",
    help="Run this sample only; may be repeated.",
)
@click.option("--max-concurrency", type=WholeNumber(1), default=16, show_default=True, help="Episodes in flight.")
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
@where_it_runs("the task's")
@where_it_is_collected()
@goes_on
@click.option("--only-failed", is_flag=True, help="With --resume: run again what broke, and nothing else.")
@click.option("--force", is_flag=True, help="With --resume: go on though the task's files changed.")
@click.option("--max-cost", type=Number(0, min_open=True), metavar="X", help="Stop at X US dollars.")
@click.option("--record", type=click.Path(path_type=Path), metavar="FILE", help="Keep every answer of a model in FILE.")
@click.option("--replay", type=click.Path(path_type=Path), metavar="FILE", help="Take answers from FILE, call nobody.")
@click.option("--fail-under", type=Number(), metavar="X", help="Exit 1 where a mean score is below X.")
@click.option("--fail-on-error", type=Number(0), metavar="X", help="Stop once more than X episodes broke.")
@click.option("--display", type=click.Choice(["rich", "plain", "none"]), help="Progress; default by terminal.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    envvar="REWARD_KIT_RUN_JSON",
    help="Print the summary as JSON on standard output.",
)
@click.option("--dry-run", is_flag=True, help="Check everything, show what would run, write nothing.")
@trust_option
def command(**given: Any) -> None:
    """Run TASK, a YAML file: collect episodes, score them, write them down, show a table.

    \b
    Examples:
      reward-kit run task.yaml --model openai/gpt-5-mini -n 4
      reward-kit run task.yaml --policy expert --policy random
      reward-kit run --resume
    """
    asked = Asked(**given)
    # What a user's code prints, when it is loaded too, must not mix with the summary on standard output.
    with contextlib.redirect_stdout(sys.stderr):
        ready = _made_ready(asked)
    echo("".join(f"{note}\n" for note in ready.task.notes), err=True, nl=False)
    if asked.dry_run:
        _show_plan(ready.plan, asked.as_json)
        return
    sys.exit(_carried_out(ready, asked))


def _made_ready(asked: Asked) -> Ready:
    """Everything that is checked and loaded before something is written.

    Raises:
        ConfigError: the task, or what is asked of it, is wrong.
        UsageError: the flags do not go together.
    """
    path, header, parsed = None, None, dict(parse_override(item) for item in asked.overrides)
    stored: set[str] = set()
    if asked.resume is not None:
        _refuse_options_with_resume()
        path = _run_to_resume(asked.resume, asked.task, asked.log_dir)
        header = header_to_resume(path)
        request = _as_it_was_asked(header, parsed, asked.base_url)
        named = _named(header.policies, None if asked.base_url else header.base_url)
        typed = {**parsed, **_named((), asked.base_url)}
        is_agreed = require_trust_in_file(request.task_path, typed, {**header.overrides, **named})
        if not is_agreed:
            stored = {*request.overrides} - {*parsed} | ({"base_url"} if asked.base_url is None else set())
    elif asked.task is not None:
        parsed |= keys_of_walls(asked.sandbox)
        request = asked.request(asked.task, parsed)
        require_trust_in_file(asked.task, {**parsed, **_named(asked.policies, asked.base_url)})
    else:
        raise click.UsageError("name a task file, or give --resume")
    _refuse_what_goes_with_resume(asked.resume, only_failed=asked.only_failed, force=asked.force)
    asked.collecting.refuse_unused({"--record": asked.record, "--replay": asked.replay})
    traffic = _traffic(asked.record, asked.replay, asked.dry_run)
    loaded = _loaded(request, traffic, stored)
    if path is not None and header is not None:
        _check_unchanged(path, header, loaded, asked.force)
    loaded = _with_run_limits(loaded, header, parsed, asked.max_cost)
    acted = asked.collecting.as_the_driver_needs_it(loaded)
    plan, redaction = plan_of(acted, request, asked.max_concurrency, traffic)
    engine = asked.collecting.engine_of(loaded, request, plan, traffic)
    anyio.run(check_world, loaded.definition, loaded.samples, loaded.located)
    _record(asked.record, traffic, asked.dry_run)  # opened last, so that bad input leaves none behind
    return Ready(loaded, request, plan, redaction, traffic, engine, path)


def _named(policies: Sequence[str], base_url: str | None) -> dict[str, Any]:
    """The options besides -T that name code or an endpoint, as keys for the question of trust."""
    return {"--policy": list(policies), **({"--base-url": base_url} if base_url is not None else {})}


def _carried_out(ready: Ready, asked: Asked) -> int:
    """Run what is ready, in a new folder or in that of the run which goes on; its exit code."""
    plan = ready.plan
    if ready.path is not None:
        store = RunStore(ready.path, ready.redaction)
    else:
        store = new_store(asked.log_dir, ready.task, plan, ready.request, ready.redaction)
    return run_into(
        plan,
        store,
        _ending(plan, store.path, asked.fail_under, asked.as_json),
        display=_display(asked.display, plan),
        traffic=ready.traffic,
        error_limit=asked.fail_on_error,
        only_failed=asked.only_failed,
        engine=ready.engine,
    )


def _refuse_what_goes_with_resume(resume: str | None, *, only_failed: bool, force: bool) -> None:
    if resume is None and (only_failed or force):
        raise click.UsageError(f"{'--only-failed' if only_failed else '--force'} goes with --resume")


def _display(asked: str | None, plan: Plan) -> str | None:
    # The terminal belongs to the person who plays.
    return "none" if asked is None and has_human(plan.policies, plan.user) else asked


def _ending(plan: Plan, path: Path, fail_under: float | None, as_json: bool) -> Ending:
    definition = plan.definition
    return Ending(
        title=f"{definition.name}  ({counted(len(plan.samples), 'sample')} × {plan.rollouts})",
        pass_threshold=definition.pass_threshold,
        expected=plan.total,
        fail_under=fail_under,
        as_json=as_json,
        resume_command=["reward-kit", "run", "--resume", str(path)],
        credit=definition.credit,
    )


def _refuse_options_with_resume() -> None:
    """What is run was decided when the run began; an option that would change it is an error, not a silent no-op."""
    context = click.get_current_context()
    for name in ("models", "policies", "rollouts", "limit", "sample_ids", "seed", "sandbox"):
        source = context.get_parameter_source(name)
        parameter = next(p for p in context.command.params if p.name == name)
        if source is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{parameter.opts[0]} cannot be changed by --resume; start a new run")
        if source is ParameterSource.ENVIRONMENT:
            echo(f"{parameter.opts[0]} of the environment is not used: a resume keeps what was decided", err=True)


def _as_it_was_asked(header: RunHeader, given: Mapping[str, Any], base_url: str | None) -> Request:
    """What the run was asked to do, with what the resume is given.

    Raises:
        ConfigError: an override would change what is run, or the endpoint holds a secret, which is not stored.
    """
    if base_url is None and is_hidden(header.base_url):
        raise ConfigError(
            f"the run's endpoint was {header.base_url}, of which a secret was not stored; give --base-url"
        )
    hidden = told_of_hidden(header.overrides, given, ", or set it in the environment")
    return Request.of_run(header).changed(given, base_url, hidden)


def _with_run_limits(
    task: LoadedTask, header: RunHeader | None, given: Mapping[str, Any], max_cost: float | None
) -> LoadedTask:
    """The task with other limits of the run: those of the command line, when the run began and now."""
    limits = dict(header.run_limits) if header is not None else {}
    limits |= {key.partition(".")[2]: value for key, value in given.items() if key.startswith("run_limits.")}
    limits |= {"cost": max_cost} if max_cost is not None else {}
    try:
        changed = RunLimitsModel.model_validate({**task.definition.run_limits.model_dump(), **limits})
    except pydantic.ValidationError as error:
        raise ConfigError("; ".join(describe_validation_error(error, RunLimitsModel))) from None
    return replace(task, definition=task.definition.model_copy(update={"run_limits": changed}))


def _traffic(record: Path | None, replay: Path | None, dry_run: bool) -> ProviderSession:
    """What all requests of this run share, with the recording that their answers come from; a dry run makes none."""
    from reward_kit.providers.cassette import Cassette
    from reward_kit.providers.session import ProviderSession

    if record is not None and replay is not None:
        raise click.UsageError("give --record or --replay, not both")
    traffic = ProviderSession(cassette=Cassette.replay(replay) if replay is not None else None, is_dry_run=dry_run)
    if dry_run:
        traffic.notice = lambda line: echo(f"note: {line}; a dry run needs none", err=True)
    return traffic


def _loaded(request: Request, traffic: ProviderSession, stored: Collection[str]) -> LoadedTask:
    """The task of a request. A judge learns from the traffic of a dry run that no request will be made.

    Args:
        request: what is run.
        traffic: of the run.
        stored: what of it comes from the file of the run that goes on, and so leads no key anywhere.
    """
    from reward_kit.providers.session import CURRENT_PROVIDER_SESSION

    token = CURRENT_PROVIDER_SESSION.set(traffic if traffic.is_dry_run else None)
    try:
        return load_task(request.task_path, request.overrides, stored=stored)
    finally:
        CURRENT_PROVIDER_SESSION.reset(token)


def _record(path: Path | None, traffic: ProviderSession, dry_run: bool) -> None:
    """Keep the answers in a recording, if one is asked for. A dry run reads one that is there, and begins none."""
    if path is None or (dry_run and not path.exists()):
        return
    from reward_kit.providers.cassette import Cassette

    traffic.cassette = Cassette.replay(path) if dry_run else Cassette.record(path)
    if held := traffic.cassette.held:
        count = "1 exchange that is" if held == 1 else f"{held} exchanges that are"
        echo(f"--record {path} adds to {count} there", err=True)


def _run_to_resume(resume: str, task: Path | None, log_dir: Path) -> Path:
    if resume != LATEST:
        return Path(resume)
    return latest_run(log_dir, read_definition(LocatedYaml(task)).name if task is not None else None)


def _check_unchanged(path: Path, header: RunHeader, task: LoadedTask, force: bool) -> None:
    """Episodes and scores of one run belong together only while what they come from is the same."""
    changes = changes_since(path, header, task)
    if not changes:
        return
    shown = "\n".join(changes)
    if not force:
        raise ConfigError(
            f"{path} cannot go on, because its results would not belong together:\n{shown}\n"
            "Start a new run, undo the change, or go on all the same with --force"
        )
    echo(f"--force: {path} goes on, though its results may not belong together:\n{shown}", err=True)


def _show_plan(plan: Plan, as_json: bool) -> None:
    facts = {
        "task": plan.definition.name,
        "policies": [named.label for named in plan.policies],
        "samples": len(plan.samples),
        "rollouts": plan.rollouts,
        "episodes": plan.total,
        "reward": plan.reward.id if plan.reward else None,
        "resource": plan.definition.resource_type,
        "user": plan.definition.user.type if plan.definition.user else None,
        "tools": sorted(plan.tools.get_tools()) if plan.tools else [],
    }
    if as_json:
        echo_json({"dry_run": True, **facts})
        return
    for key, value in facts.items():
        echo(f"{key + ':':<10}{', '.join(value) if isinstance(value, list) else value}")
    echo("Nothing was written.")
