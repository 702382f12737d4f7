"""`reward-kit check`: check a task file, a reward or a resource before a run, or check a finished run."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import click
from click.core import ParameterSource

from reward_kit.agent.actions import as_text
from reward_kit.agent.policies import make_policy
from reward_kit.checks.findings import FAIL_ON, Finding, Report
from reward_kit.checks.harbor import can_use_container, check_harbor_task
from reward_kit.checks.resource import check_resource
from reward_kit.checks.reward import Plan, TaskReport, check_reward, check_task, is_reward, load, why_not_free
from reward_kit.checks.reward_bench import Given, quoted
from reward_kit.checks.rows import FORMATS
from reward_kit.checks.run import check_file, check_run, is_foreign_file, is_run
from reward_kit.checks.source_facts import rewards_in
from reward_kit.cli.echo import echo, echo_json
from reward_kit.cli.options import (
    Number,
    WholeNumber,
    complete_policies,
    complete_rewards,
    complete_targets,
    json_option,
    sandbox_keys,
    set_option,
)
from reward_kit.cli.trust import describe_code, require_trust_in, require_trust_in_file, trust_option
from reward_kit.display_text import pluralize
from reward_kit.environments.config import resource_class
from reward_kit.environments.harbor_task import is_task_folder
from reward_kit.errors import ConfigError, EnvironmentFailure, RewardKitError, boundary
from reward_kit.reward_agent.loading import SandboxChoice
from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.reward_agent.sources import read_source
from reward_kit.runs.plan import RunArgs, plan_run
from reward_kit.runs.scoring import read_transcripts
from reward_kit.runs.task_file import parse_override
from reward_kit.runs.task_folders import is_like_task_file
from reward_kit.runs.tasks import check_resource_starts, load_task, read_task, select_samples
from reward_kit.runs.trust import plan_file_code

_TARGETS_OF_OPTION = {
    "config": ("resource",),
    "steps": ("resource",),
    **dict.fromkeys(("options", "data", "ground_truth", "gold", "against", "read_path", "deadline"), ("reward",)),
    "sandbox": ("reward", "task file"),
    **dict.fromkeys(("limit", "gold_policy", "no_run"), ("task file",)),
    **dict.fromkeys(("fail_on", "as_json"), ("reward", "task file", "run", "file of rollouts", "Harbor task")),
    "seed": ("reward", "task file", "resource"),
    "form": ("file of rollouts",),
}
"""The kinds of targets to which an option applies."""
_SECONDS_BETWEEN = 5.0


@click.command(name="check")
@click.argument("target", shell_complete=complete_targets)
@set_option("Resource: set a key of the configuration.", ("-c", "--config", "config"))
@set_option("Reward: set an option.", ("-O", "--option", "options"))
@click.option(
    "--steps",
    type=WholeNumber(1),
    default=20,
    show_default=True,
    help="Resource: number of random actions to try.",
)
@click.option(
    "--data", type=click.Path(path_type=Path), help="Reward: transcripts on which to test it, in the format of `score`."
)
@click.option("--ground-truth", multiple=True, metavar="JSON", help="Reward: a ground truth; may be repeated.")
@click.option("--gold", multiple=True, metavar="TEXT", help="Reward: a correct answer for each ground truth.")
@click.option(
    "--against",
    metavar="FILE.py:FUNCTION",
    shell_complete=complete_rewards,
    help="Reward: a second reward with which to compare it.",
)
@click.option(
    "--sandbox",
    type=click.Choice(["in_process", "warm", "isolated"]),
    help="Reward, task file: the sandbox level; default: warm for your own files.",
)
@click.option(
    "--read-path", multiple=True, metavar="PATH", help="Reward: a file or directory that the reward may read."
)
@click.option(
    "--deadline",
    type=Number(0.01),
    default=10.0,
    show_default=True,
    metavar="S",
    help="Reward: time limit for one call in seconds.",
)
@click.option(
    "--limit", type=WholeNumber(1), default=10, show_default=True, help="Task file: number of samples to check."
)
@click.option(
    "--gold-policy",
    metavar="NAME",
    shell_complete=complete_policies,
    help="Task file: a policy that solves the task; default: the resource's expert.",
)
@click.option(
    "--fail-on",
    type=click.Choice(FAIL_ON),
    default="error",
    show_default=True,
    help="Reward, task file, run, rollouts, Harbor task: exit with code 1 if a finding has this level or a higher one.",
)
@json_option("Reward, task file, run, rollouts, Harbor task: print the findings as JSON.")
@click.option("--format", "form", type=click.Choice(FORMATS), help="File of rollouts: the trainer that wrote it.")
@click.option("--seed", default=0, show_default=True, help="Random seed for all random choices.")
@click.option(
    "--no-run", is_flag=True, help="Task file: only read the file and its dataset, and show the code that would run."
)
@trust_option
def command(target: str, config: tuple[str, ...], steps: int, seed: int, **more: Any) -> None:
    """Check TARGET: a task file, a reward, a resource, a run, or a Harbor task folder.

    A folder of Harbor tasks and an OpenEnv folder (openenv.yaml) are checked like a task file.

    A task is checked on its first samples: a reference solution (the row's gold_actions or gold_answer, a policy, or
    the resource's expert) must score 1, and an agent that does nothing must score 0. The task's reward is then checked
    on these episodes.

    A reward (file.py:function or package.module:function) is called in its sandbox with unusual, wrong, exploiting and
    long rollouts. A resource (a built-in name, module:Class or file.py:Class) is checked with random actions: forks,
    determinism and state keys must be as declared.

    A reward may also have the signature of TRL, verl, verifiers, OpenEnv or f(answer, target). The tests of a Harbor
    task folder (task.toml) are run with the reference solution and with exploits, in the sandbox or in containers.

    A run (a directory) is checked episode by episode: tokens, masks, log-probabilities, messages, stop reasons, groups
    and credit. With --format, a .json or .jsonl file with the rollouts of another trainer is checked in the same way.

    Exit codes: 0 without findings, 1 with findings, 2 for wrong usage.

    \b
    Examples:
      reward-kit check task.yaml
      reward-kit check my_reward.py:exact
      reward-kit check my_reward.py:exact --ground-truth 42 --gold 'The answer is 42.' --fail-on warning
      reward-kit check my_reward.py:exact --data transcripts.jsonl --against other.py:graded --json
      reward-kit check my_world.py:MyResource -c size=4
      reward-kit check gymnasium -c env_id=FrozenLake-v1
      reward-kit check runs/lake-20261121T101500Z-1a2b3c
      reward-kit check rollouts.jsonl --format trl
      reward-kit check tasks/hello-world
    """
    if target.endswith((".yaml", ".yml")) or is_like_task_file(Path(target)):
        _reject_options_unless("task file")
        if more["no_run"]:
            _, samples = read_task(Path(target))
            code = plan_file_code(Path(target))
            echo(f"{target}: no errors found without running code. {pluralize(len(samples), 'sample')}.")
            echo("\n".join(["It would run:", *describe_code(code)]) if code.files else "It does not refer to any code.")
            echo("Nothing was run.")
            return
        require_trust_in_file(Path(target), {"--gold-policy": more["gold_policy"]})
        _check_task(Path(target), more, seed)
    elif is_task_folder(target):
        _reject_options_unless("Harbor task")
        folder = Path(target)
        with _status_line() as show_attempt:
            findings = anyio.run(check_harbor_task, folder, show_attempt)
        if any(one.kind == "not-run" for one in findings.findings) and anyio.run(can_use_container, folder):
            require_trust_in_file(folder)
            with _status_line() as show_attempt:
                findings = anyio.run(partial(check_harbor_task, folder, show_attempt, in_container=True))
        _print_report(findings, more["fail_on"], more["as_json"])
    elif is_run(target):
        _reject_options_unless("run")
        due, is_shown = time.monotonic() + _SECONDS_BETWEEN, False

        def show(number: int, share: float) -> None:
            nonlocal due, is_shown
            if time.monotonic() >= due:
                due, is_shown = time.monotonic() + _SECONDS_BETWEEN, True
                echo(f"{pluralize(number, 'episode')}, {share:.0%}", err=True)

        report = check_run(Path(target), show)
        if is_shown:
            echo("100%", err=True)
        _print_report(report, more["fail_on"], more["as_json"])
    elif is_foreign_file(target):
        _reject_options_unless("file of rollouts")
        _print_report(check_file(Path(target), more["form"]), more["fail_on"], more["as_json"])
    elif is_reward(target):
        _reject_options_unless("reward")
        require_trust_in([one for one in (target, more["against"]) if one])
        _check_reward(target, more, seed)
    else:
        _reject_options_unless("resource")
        require_trust_in([target])
        _check_resource(target, dict(parse_override(item, "-c") for item in config), steps, seed)


def _print_report(report: Report | TaskReport, fail_on: str, as_json: bool) -> None:
    """Print the report, and exit with the exit code determined by the report."""
    if as_json:
        echo_json(report.to_json(), indent=2)
    else:
        echo("\n".join(report.lines()))
    sys.exit(report.exit_code(fail_on))


def _reject_options_unless(kind: str) -> None:
    context = click.get_current_context()
    for parameter in context.command.params:
        is_given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        kinds = _TARGETS_OF_OPTION.get(parameter.name or "", (kind,))
        if isinstance(parameter, click.Option) and is_given and kind not in kinds:
            raise click.UsageError(
                f"{parameter.opts[-1]} applies to a {' or a '.join(kinds)}, but the target is a {kind}"
            )


def _check_task(path: Path, options: Mapping[str, Any], seed: int) -> None:
    as_json = options["as_json"]
    task = load_task(path, sandbox_keys(options["sandbox"]))
    plan = plan_run(task, RunArgs(task_path=path), needs_policy=False)
    for note in task.notes:
        echo(note, err=True)
    if not anyio.run(check_resource_starts, task) and task.definition.tools is None:
        kind = task.definition.resource_type
        echo(f"warning: resource {kind!r} has no tools, so an agent can only write text", err=as_json)
    episodes = len(task.samples) * task.rollouts_per_sample
    reward = f"scored by {task.reward.id}" if task.reward else "not scored"
    by = (
        f"with {', '.join(named.label for named in plan.policies)}"
        if plan.policies
        else "with the policy that you pass"
    )
    size = f"{pluralize(len(task.samples), 'sample')}, {pluralize(episodes, 'episode')}"
    echo(f"{path}: the file is ok. {size} {by}, {reward}.", err=as_json)
    if task.reward is None:
        return
    if why := why_not_free(task, plan.user):
        echo(
            f"not checked: whether a correct solution scores 1 and doing nothing scores 0, because {why}",
            err=as_json,
        )
        return
    policy, name = None, options["gold_policy"]
    if name is not None:
        policy = name, make_policy(name, {}, path.resolve().parent)
    samples = select_samples(task, options["limit"])
    with _status_line() as show:
        report = anyio.run(partial(check_task, task, samples, plan.user, policy, seed=seed, tell=show))
    _print_report(report, options["fail_on"], as_json)


def _check_reward(target: str, options: Mapping[str, Any], seed: int) -> None:
    data = options["data"]
    rollouts = [ScoringRequest.from_episode(episode) for episode in read_transcripts(data)] if data else []
    if data and not rollouts:
        raise ConfigError(f"{data} has no rows")
    truths = []
    for text in options["ground_truth"]:
        try:
            truths.append(json.loads(text))
        except ValueError as error:
            raise ConfigError(
                f"--ground-truth {text!r} is not valid JSON: {error}; quote strings, as in '\"Paris\"'"
            ) from None
    plan = Plan(
        target,
        SandboxChoice(options["sandbox"], read_paths=options["read_path"], reward_time_s=options["deadline"]),
        Path.cwd(),
        Given(truths, options["gold"], rollouts),
        dict(parse_override(item, "-O") for item in options["options"]),
        options["against"],
        seed=seed,
    )
    loaded, other = load(plan)
    with _status_line() as show:
        report = anyio.run(check_reward, plan, loaded, other, show)
    for note in loaded.notes:
        echo(note, err=True)
    _print_report(report, options["fail_on"], options["as_json"])


@contextmanager
def _status_line() -> Iterator[Callable[[str], None]]:
    """Show the current check on one line of the terminal. Without a terminal, show nothing."""
    is_shown = sys.stderr.isatty()

    def show(what: str) -> None:
        if is_shown:
            echo(f"checking {quoted(what, 60)} …", nl=False, err=True, redraw=True)

    try:
        yield show
    finally:
        if is_shown:
            echo(nl=False, err=True, redraw=True)


def _merge_tools(findings: Sequence[Finding], tools: Sequence[str]) -> list[str]:
    """Return a line for each finding.

    Findings that differ only in the tool call are merged into one line that shows how many there are.
    """
    call = re.compile(rf"\b({'|'.join(map(re.escape, tools))})\([^()]*\)") if tools else re.compile("(?!)")
    lines: dict[str, list[str]] = {}
    for finding in findings:
        line = f"{finding.level}: {finding.message}"
        lines.setdefault(call.sub("tool", line), []).append(line)
    return [alike[0] + (f" ({len(alike)} findings)" if len(alike) > 1 else "") for alike in lines.values()]


def _check_resource(target: str, config: dict[str, Any], steps: int, seed: int) -> None:
    if target.endswith(".py") and Path(target).is_file():
        rewards = [f"{target}:{name}" for name in rewards_in(read_source(Path(target)))]
        raise ConfigError(f"{target}: specify the object to check: {', '.join(rewards) or 'file.py:function'}")
    if Path(target).exists():
        raise ConfigError(f"{target} is neither a task file (.yaml) nor a resource (a name, or file.py:Class)")
    kind = resource_class(target)

    async def check() -> tuple[list[Finding], list[str]]:
        findings = await check_resource(kind, config, seed=seed, steps=steps)
        resource = kind()
        try:
            with boundary(EnvironmentFailure, "a first look"):
                await resource.setup(config)
                await resource.reset(seed)
                functions = [tool["function"] for tool in await resource.get_tools_spec()]
                observation = as_text(await resource.get_observation()) or "(none)"
        except RewardKitError:
            if all(finding.level != "error" for finding in findings):
                raise
            return findings, []  # the findings report the problem
        finally:
            await resource.close()
        tools = []
        for function in functions:
            arguments = ", ".join(function["parameters"].get("properties", ()))
            tools.append(f"tool {function['name']}({arguments}): {function.get('description', '(no description)')}")
        return findings, [*tools, f"first observation:\n{observation}"]

    findings, look = anyio.run(check)
    of_rows = ", ".join(sorted(kind.per_sample_keys_for(config)))
    problems = _merge_tools(findings, [line.partition("(")[0].removeprefix("tool ") for line in look])
    for line in (*problems, *([f"rows may set: {of_rows}"] if of_rows else []), *look):
        echo(line)
    errors = sum(problem.startswith("error") for problem in problems)
    verdict = pluralize(errors, "error") if errors else "ok"
    echo(f"{target}: {verdict} ({kind.fork_kind_for(config)} fork, {steps} steps)")
    if errors:
        sys.exit(1)
