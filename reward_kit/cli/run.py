"""`reward-kit run`: collect, score and store the episodes of a task.

The command first calls `load_task` (`runs/tasks.py`), which parses and resolves the task file, then `plan_run` and
`begin_run` (`runs/plan.py`), and finally `run` (`runs/runner.py`).
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import click
import pydantic
from click.core import ParameterSource

from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.rl_rollout_worker import FirstRequest, RLRolloutWorker
from reward_kit.cli.echo import echo, echo_json
from reward_kit.cli.options import (
    LATEST,
    Number,
    SectionedCommand,
    WholeNumber,
    cache_arguments,
    cache_option,
    complete_policies,
    display_option,
    fail_on_error_option,
    fail_under_options,
    json_option,
    report_hidden_secrets,
    resume_options,
    sandbox_keys,
    sandbox_options,
    set_option,
    thresholds,
)
from reward_kit.cli.outcome import Ending, run_into
from reward_kit.cli.trust import require_trust_in_file, trust_option
from reward_kit.display_text import escape_text, pluralize
from reward_kit.environments.servers import ServerPool
from reward_kit.errors import ConfigError
from reward_kit.models import Message
from reward_kit.providers.cassette import Cassette
from reward_kit.providers.response_cache import ResponseCache
from reward_kit.providers.session import CURRENT_PROVIDER_SESSION, ProviderSession
from reward_kit.runs.inputs import differences, refuse_changes
from reward_kit.runs.otlp import live_export, traces_endpoint
from reward_kit.runs.plan import RunArgs, RunPlan, begin_run, plan_run, read_resumable_header
from reward_kit.runs.redaction import is_hidden
from reward_kit.runs.run_folder import RunFolder, RunHeader, latest_run
from reward_kit.runs.summary import Threshold
from reward_kit.runs.task_file import LocatedYaml, parse_override, parse_task
from reward_kit.runs.tasks import LoadedTask, check_resource_starts, load_task
from reward_kit.task_parts import RunLimitsModel
from reward_kit.validation import describe_validation_error

if TYPE_CHECKING:
    from reward_kit.runs.runner import RunEngine

_KEPT_BY_RESUME = (
    *("models", "policies", "rollouts", "limit", "sample_ids", "seed"),
    "sandbox",
)
"""Options that determine the content of a run; a resume cannot change them."""
_SHOWN_CHARS = 400
"""The maximum length of a message or a tool in the output of a dry run."""
_SECTIONS = {
    "Models and policies": ("models", "policies", "base_url", "record", "replay", "cache"),
    "Samples": ("rollouts", "limit", "sample_ids", "seed"),
    "Task, reward and sandbox": ("overrides", "sandbox", "trust"),
    "Limits": ("max_concurrency", "max_cost", "fail_under", "lower_bound", "error_limit"),
    "Resume": ("resume", "only_failed", "force"),
    "Output": ("log_dir", "display", "as_json", "otlp", "dry_run", "verbose"),
    "Engine": ("engine", "address", "engine_options"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of `run`. The fields have the same names as the command's parameters."""

    task: Path | None
    models: tuple[str, ...]
    policies: tuple[str, ...]
    base_url: str | None
    record: Path | None
    replay: Path | None
    cache: Path | None
    rollouts: int | None
    limit: int | None
    sample_ids: tuple[str, ...]
    seed: int
    overrides: tuple[str, ...]
    sandbox: str | None
    max_concurrency: int
    max_cost: float | None
    thresholds: tuple[Threshold, ...]
    error_limit: float | None
    log_dir: Path
    resume: str | None
    only_failed: bool
    force: bool
    display: str | None
    as_json: bool
    dry_run: bool
    otlp: str | None
    engine: str
    address: str | None
    engine_options: tuple[str, ...]


@click.command(name="run", cls=SectionedCommand, sections=_SECTIONS)
@click.argument("task", required=False, type=click.Path(path_type=Path))
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="PROVIDER/NAME",
    help="A model to run, such as openai/NAME or anthropic/NAME; may be repeated to compare models.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    shell_complete=complete_policies,
    help="random, expert, human, scripted, replay:RUN or file.py:Class; may be repeated.",
)
@click.option("--base-url", help="The endpoint of the models; default: the provider's or, for openai, OPENAI_BASE_URL.")
@click.option("--record", type=click.Path(path_type=Path), metavar="FILE", help="Record the model's answers in FILE.")
@click.option(
    "--replay",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Replay answers from FILE instead of calling a model.",
)
@cache_option
@click.option("-n", "--rollouts", type=WholeNumber(1), help="Number of episodes per sample.")
@click.option("--limit", type=WholeNumber(1), help="Run only the first N samples.")
@click.option("--sample-id", "sample_ids", multiple=True, help="Run only this sample; may be repeated.")
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed for all random choices.")
@set_option("Set a key of the task (dotted if nested).")
@sandbox_options("the task's")
@trust_option
@click.option(
    "--max-concurrency",
    type=WholeNumber(1),
    default=16,
    show_default=True,
    help="Maximum number of concurrent episodes.",
)
@click.option(
    "--max-cost", type=Number(0, min_open=True), metavar="X", help="Stop the run when it has cost X US dollars."
)
@fail_under_options("a mean score")
@fail_on_error_option
@resume_options
@click.option("--only-failed", is_flag=True, help="With --resume: rerun only the episodes that ended with an error.")
@click.option("--force", is_flag=True, help="With --resume: continue even if files of the task have changed.")
@display_option()
@json_option()
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check all inputs and show the plan and the first request. Nothing is sent or written.",
)
@click.option(
    "--otlp",
    metavar="URL|env",
    help="Send the episodes as traces to this OpenTelemetry collector; env: use OTEL_EXPORTER_OTLP_ENDPOINT.",
)
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Where episodes are collected: in this process, or on a Ray cluster.",
)
@click.option(
    "--address", metavar="HOST:PORT|auto", help="Address of the Ray cluster; default: start one on this machine."
)
@set_option(
    "Set an option of the Ray workers: workers, cpus, gpus, reward_workers, ship, env, worker_wait_s.",
    ("-E", "--engine-option", "engine_options"),
)
def command(**options: Any) -> None:
    """Run TASK: collect, score and store its episodes, and show a table of results.

    TASK is a YAML file, a Harbor task folder (task.toml), a folder of them, or an OpenEnv folder (openenv.yaml).

    \b
    Examples:
      reward-kit run task.yaml --model openai/your-model -n 4
      reward-kit run task.yaml --policy expert --policy random
      reward-kit run harbor_tasks/hello-world --policy expert
      reward-kit run --resume
    """
    asked = RunOptions(thresholds=thresholds(options.pop("fail_under"), options.pop("lower_bound")), **options)
    overrides = dict(parse_override(item) for item in asked.overrides)
    endpoint = traces_endpoint(asked.otlp) if asked.otlp is not None else None
    path, header, stored = None, None, set[str]()
    # Output of the user's code must not mix with the summary on standard output.
    with contextlib.redirect_stdout(sys.stderr):
        if asked.resume is not None:
            path, header, args, stored = _prepare_resume(asked, overrides)
        elif asked.only_failed or asked.force:
            raise click.UsageError(f"{'--only-failed' if asked.only_failed else '--force'} requires --resume")
        elif asked.task is None:
            raise click.UsageError("pass a task file or a task folder, or --resume")
        else:
            overrides |= sandbox_keys(asked.sandbox)
            require_trust_in_file(asked.task, {**overrides, **keys_for_trust(asked.policies, asked.base_url)})
            given = {one.name: getattr(asked, one.name) for one in fields(RunArgs) if hasattr(asked, one.name)}
            args = RunArgs(**{**given, "task_path": asked.task, "overrides": overrides})
        traffic = _traffic(asked)
        with _dry_run(traffic):
            task = load_task(args.task_path, args.overrides, stored=stored)
        for threshold in asked.thresholds:
            if unknown := threshold.unknown_reward(task.definition):
                raise ConfigError(f"--fail-under: {unknown}")
        if path is not None and header is not None:
            changes = differences(path, header.digests, task.digests, task.inputs)
            if warning := refuse_changes(path, changes, force=asked.force):
                echo(warning, err=True)
        task = with_run_limits(task, header, overrides, asked.max_cost)
        planned = without_model_weights(task) if asked.engine == "ray" else task
        plan = plan_run(planned, args, max_concurrency=asked.max_concurrency, traffic=traffic)
        engine = _ray_engine(asked, task, args, plan, traffic) if asked.engine == "ray" else None
        with _dry_run(traffic):
            anyio.run(check_resource_starts, task)
        # Open the recording last, so that invalid input leaves no file behind. A dry run does not start a recording.
        if asked.record is not None and (not asked.dry_run or asked.record.exists()):
            traffic.cassette = Cassette.replay(asked.record) if asked.dry_run else Cassette.record(asked.record)
            if held := traffic.cassette.held:
                count = "1 existing exchange" if held == 1 else f"{held} existing exchanges"
                echo(f"--record {asked.record} appends to {count}", err=True)
        if asked.cache is not None and not asked.dry_run:
            traffic.cache = ResponseCache(asked.cache)
    echo("".join(f"{note}\n" for note in task.notes), err=True, nl=False)
    if asked.dry_run:
        with _dry_run(traffic):
            request = anyio.run(_first_request, plan)
        _show_plan(plan, request, asked.as_json)
        return
    folder = RunFolder(path, plan.redaction) if path is not None else begin_run(asked.log_dir, task, plan, args)
    ending = Ending(
        title=f"{plan.definition.name}  ({pluralize(len(plan.samples), 'sample')} × {plan.rollouts})",
        expected=plan.total,
        thresholds=asked.thresholds,
        error_limit=asked.error_limit,
        as_json=asked.as_json,
        resume_command=["reward-kit", "run", "--resume", str(folder.path), *cache_arguments(asked.cache)],
    )
    with contextlib.ExitStack() as stack:
        if endpoint is not None:
            stack.enter_context(live_export(endpoint, folder.path.name, plan.definition.name, plan.redaction))
        code = run_into(
            plan,
            folder,
            ending,
            display="none"
            if asked.display is None and plan.has_human
            else asked.display,  # The terminal of the human player
            traffic=traffic,
            only_failed=asked.only_failed,
            engine=engine,
        )
    sys.exit(code)


agent_eval = copy.copy(command)
agent_eval.help = """Run a task file. This is an alias of `run` with the same options.

\b
Example:
  reward-kit agent-eval --task-def task.yaml
"""
agent_eval.params = [
    click.Option(["--task-def", "task"], type=click.Path(path_type=Path), metavar="TASK", help="The task file."),
    *map(copy.copy, command.params[1:]),
]


def keys_for_trust(policies: Sequence[str], base_url: str | None) -> dict[str, Any]:
    """Return the options that refer to code or an endpoint, except -T, as task keys for the trust prompt."""
    return {"--policy": list(policies), **({"--base-url": base_url} if base_url is not None else {})}


def _prepare_resume(asked: RunOptions, overrides: Mapping[str, Any]) -> tuple[Path, RunHeader, RunArgs, set[str]]:
    """Return the directory, header and arguments of a run to resume, and the keys that exist only in its `run.json`."""
    context = click.get_current_context()
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in _KEPT_BY_RESUME and source is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{parameter.opts[0]} cannot be changed by --resume; start a new run")
        if parameter.name in _KEPT_BY_RESUME and source is ParameterSource.ENVIRONMENT:
            echo(
                f"{parameter.opts[0]} from the environment is ignored, because a resume keeps the options of the run",
                err=True,
            )
    if asked.resume != LATEST:
        path = Path(asked.resume or "")
    else:
        path = latest_run(asked.log_dir, parse_task(LocatedYaml(asked.task)).name if asked.task is not None else None)
    header = read_resumable_header(path)
    if asked.base_url is None and is_hidden(header.base_url):
        raise ConfigError(
            f"the endpoint {header.base_url} of the run contains a secret that was not stored; pass --base-url"
        )
    hidden = report_hidden_secrets(header.overrides, overrides, ", or set it in the environment")
    args = RunArgs.from_header(header).with_changes(overrides, asked.base_url, hidden, command="--resume")
    typed = {**overrides, **keys_for_trust((), asked.base_url)}
    stored = {**header.overrides, **keys_for_trust(header.policies, None if asked.base_url else header.base_url)}
    if require_trust_in_file(args.task_path, typed, stored):
        return path, header, args, set()
    own = {*args.overrides} - {*overrides} | ({"base_url"} if asked.base_url is None else set())
    return path, header, args, own


def with_run_limits(
    task: LoadedTask, header: RunHeader | None, overrides: Mapping[str, Any], max_cost: float | None
) -> LoadedTask:
    """Return the task with the limits from the task file, the earlier run, -T and --max-cost."""
    limits = dict(header.run_limits) if header is not None else {}
    limits |= {key.partition(".")[2]: value for key, value in overrides.items() if key.startswith("run_limits.")}
    limits |= {"cost": max_cost} if max_cost is not None else {}
    try:
        changed = RunLimitsModel.model_validate({**task.definition.run_limits.model_dump(), **limits})
    except pydantic.ValidationError as error:
        raise ConfigError("; ".join(describe_validation_error(error, RunLimitsModel))) from None
    return replace(task, definition=task.definition.model_copy(update={"run_limits": changed}))


@contextlib.contextmanager
def _dry_run(traffic: ProviderSession) -> Iterator[None]:
    """In a dry run, let judges work without a key and resources without a container, since nothing is started."""
    token = CURRENT_PROVIDER_SESSION.set(traffic if traffic.is_dry_run else None)
    try:
        yield
    finally:
        CURRENT_PROVIDER_SESSION.reset(token)


async def _first_request(plan: RunPlan) -> FirstRequest:
    """Return the first model request for the first sample."""
    worker = RLRolloutWorker(plan.definition, ScriptedPolicy([]), tools=plan.tools, user=plan.user)
    async with ServerPool():
        return await worker.first_request(plan.seed, sample=plan.samples[0])


def _show_plan(plan: RunPlan, request: FirstRequest, as_json: bool) -> None:
    functions = [spec["function"] for spec in request.tools]
    facts = {
        "task": plan.definition.name,
        "policies": [named.label for named in plan.policies],
        "samples": len(plan.samples),
        "rollouts": plan.rollouts,
        "episodes": plan.total,
        "reward": plan.reward.id if plan.reward else None,
        "resource": plan.definition.resource_type,
        "user": plan.definition.user.type if plan.definition.user else None,
        "tools": [function["name"] for function in functions],
    }
    if as_json:
        messages = [message.to_chat() for message in request.messages]
        sample = {"sample": plan.samples[0].id, "messages": messages, "tools": request.tools}
        echo_json({"dry_run": True, **facts, "first_request": sample})
        return
    for key, value in facts.items():
        if value is not None:
            echo(f"{key + ':':<10}{', '.join(value) if isinstance(value, list) else value}")
    echo(f"First request, for sample {plan.samples[0].id!r}:")
    shown = [(f"[{message.role}] ", _content(message)) for message in request.messages]
    if request.user_opens:
        shown.append(("[user] ", "(the simulated user's first message)"))
    for function in functions:
        names = ", ".join((function.get("parameters") or {}).get("properties") or ())
        shown.append((f"{function['name']}({names}): ", function.get("description") or ""))
    for start, text in shown:
        echo("  " + escape_text(f"{start}{text}", _SHOWN_CHARS).replace("\n", "\n    "))
    echo("Nothing was written.")


def _content(message: Message) -> str:
    """Return the text of a message, its tool calls, and the types of its other parts."""
    parts = message.content if isinstance(message.content, list) else []
    others = [f"({part.get('type')})" for part in parts if "text" not in part]
    calls = [f"({call.function.name}({call.function.arguments}))" for call in message.tool_calls or ()]
    return " ".join([message.text, *others, *calls]).strip()


def _traffic(asked: RunOptions) -> ProviderSession:
    """Return the provider session of this run, including its recording, if any.

    In a dry run, the session rejects all requests.
    """
    files = {"--record": asked.record, "--replay": asked.replay, "--cache": asked.cache}
    named = [option for option, file in files.items() if file is not None]
    if len(named) > 1:
        raise click.UsageError(f"use either {' or '.join(named)}")
    if asked.engine == "local" and (asked.address is not None or asked.engine_options):
        raise click.UsageError(f"{'--address' if asked.address is not None else '-E'} requires --engine ray")
    if asked.engine == "ray" and named:
        raise click.UsageError(f"{named[0]} requires --engine local, because other machines cannot access the file")
    cassette = Cassette.replay(asked.replay) if asked.replay is not None else None
    traffic = ProviderSession(cassette=cassette, is_dry_run=asked.dry_run)
    if asked.dry_run:
        traffic.notice = lambda line: echo(f"note: {line}; not required for a dry run", err=True)
    return traffic


def without_model_weights(task: LoadedTask) -> LoadedTask:
    """Return the task for the driver of a cluster, which creates the trained model without weights."""
    policy = task.definition.policy
    if policy is None or policy.type != "hf":
        return task
    outline = policy.model_copy(update={"device": "meta"})
    return replace(task, definition=task.definition.model_copy(update={"policy": outline}))


def _ray_engine(
    asked: RunOptions, task: LoadedTask, args: RunArgs, plan: RunPlan, traffic: ProviderSession
) -> RunEngine:
    from reward_kit.integrations.ray.engine import RayEngine
    from reward_kit.integrations.ray.options import RayOptions

    options = RayOptions.of(dict(parse_override(item, "-E") for item in asked.engine_options), asked.address)
    if plan.has_human:
        message = "a cluster cannot prompt the person at this terminal"
        raise ConfigError(f"--engine ray: {message}; use --engine local")
    return RayEngine(task, args, options, traffic)
