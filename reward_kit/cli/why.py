"""`reward-kit why`: continue finished episodes to find the steps at which they were lost or won."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import click
from rich import box
from rich.table import Table
from rich.text import Text

from reward_kit.cli.echo import echo, echo_json
from reward_kit.cli.options import (
    Number,
    SectionedCommand,
    WholeNumber,
    complete_policies,
    complete_runs,
    json_option,
    newest_run_option,
    report_hidden_secrets,
    run_or_newest,
    set_option,
)
from reward_kit.cli.outcome import note_console, note_page
from reward_kit.cli.run import keys_for_trust, with_run_limits
from reward_kit.cli.trust import require_trust_in_file, trust_option
from reward_kit.console import SafeConsole
from reward_kit.display_text import escape_text, pluralize
from reward_kit.errors import ConfigError, RewardKitError, StoreError
from reward_kit.providers.session import ProviderSession
from reward_kit.report.run_page import write_page
from reward_kit.runs.counterfactual import (
    Counterfactual,
    MeasuredEpisode,
    choose_episodes,
    open_measuring,
    write_result,
)
from reward_kit.runs.counterfactual_file import read_counterfactuals
from reward_kit.runs.files import COUNTERFACTUALS_FILE
from reward_kit.runs.inputs import differences, refuse_changes
from reward_kit.runs.plan import RunArgs, RunPlan, plan_run
from reward_kit.runs.run_folder import RunHeader, episode_at, is_open_elsewhere
from reward_kit.runs.step_search import Change, StepValue
from reward_kit.runs.task_file import parse_override
from reward_kit.runs.tasks import load_task
from reward_kit.task_parts import RunLimitsModel

_SECTIONS = {
    "Episodes": ("limit", "log_dir"),
    "Policy": ("model", "policy", "base_url"),
    "Search": ("continuations", "max_cost", "seed", "max_concurrency"),
    "Task": ("overrides", "force", "trust"),
    "Output": ("as_json", "verbose"),
}
_LONGEST_ACTION = 70
_MOST_INSTEAD = 3
_BAR = 12
_TABLE_WIDTH = 58  # without the column of actions


@click.command(name="why", cls=SectionedCommand, sections=_SECTIONS)
@click.argument("run", required=False, type=click.Path(path_type=Path), shell_complete=complete_runs)
@click.argument("episode", required=False)
@click.option(
    "--limit",
    type=WholeNumber(1),
    default=3,
    show_default=True,
    help="Without EPISODE: the maximum number of failed episodes to examine.",
)
@newest_run_option()
@click.option("--model", metavar="PROVIDER/NAME", help="Continue with this model instead of the episode's policy.")
@click.option(
    "--policy", shell_complete=complete_policies, help="Continue with this policy: random, expert or file.py:Class."
)
@click.option("--base-url", help="The endpoint of the model.")
@click.option(
    "--continuations",
    type=WholeNumber(8),
    default=160,
    show_default=True,
    help="Maximum number of continuations per episode.",
)
@click.option(
    "--max-cost", type=Number(0, min_open=True), metavar="X", help="Stop when the continuations have cost X US dollars."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed for the continuations.")
@click.option(
    "--max-concurrency",
    type=WholeNumber(1),
    default=16,
    show_default=True,
    help="Maximum number of concurrent continuations.",
)
@set_option("Set a key of the policy (policy.KEY), a limit (run_limits.KEY), or a secret that was not stored.")
@click.option("--force", is_flag=True, help="Continue even if files of the task have changed.")
@trust_option
@json_option("Print the results as JSON on standard output.")
def command(run: Path | None, episode: str | None, log_dir: Path, **options: Any) -> None:
    """Find the steps at which episodes of RUN were lost or won.

    The episode's policy continues the episode from a step multiple times, with different random numbers. The share of
    the continuations that pass is the success probability before that step. The search finds the steps between which
    this probability changes, and shows what the continuations that passed did instead.

    EPISODE is a rollout id or the beginning of one. Without EPISODE, the first failed episodes of the run are examined.
    Without RUN, the newest run is used. Results are written to counterfactual.jsonl and report.html in the run's
    directory.

    \b
    Examples:
      reward-kit why
      reward-kit why runs/my-run task-0c3a5e-0
      reward-kit why runs/my-run --policy expert --continuations 80
    """
    path = run_or_newest(run, log_dir)
    if is_open_elsewhere(path):
        raise StoreError(f"{path} is open in another process; wait until it has finished")
    with contextlib.redirect_stdout(sys.stderr):
        plan, traffic, chosen = _prepare(path, episode, options)
        try:
            results = anyio.run(_measure_all, path, plan, traffic, chosen, options["continuations"])
        except KeyboardInterrupt:
            if (path / COUNTERFACTUALS_FILE).exists():
                echo(f"interrupted; the measured values are in {path / COUNTERFACTUALS_FILE}", err=True)
            raise
    if options["as_json"]:
        echo_json({"run": str(path), "episodes": [result.to_json() for result in results]})
    else:
        console = SafeConsole()
        for result in results:
            _show(console, result)
    if not results:
        raise RewardKitError("nothing was measured")
    note_console().print(f"Written to {path / COUNTERFACTUALS_FILE}")
    note_page(*write_page(path))


def _prepare(
    path: Path, episode: str | None, options: Mapping[str, Any]
) -> tuple[RunPlan, ProviderSession, list[MeasuredEpisode]]:
    """Load the task and policies of a run, and choose the episodes."""
    header = RunHeader.read_folder(path)
    if header.task_path is None or header.from_python is not None:
        raise ConfigError(
            f"{path} was not started from a task file, so its task cannot be loaded; in Python, use "
            "RLRolloutWorker.continue_from"
        )
    overrides = dict(parse_override(item) for item in options["overrides"])
    args = RunArgs.from_header(header)
    hidden = report_hidden_secrets(header.overrides, overrides, ", or set it in the environment")
    kept = {key: value for key, value in args.overrides.items() if not key.startswith("run_limits.")}
    args = replace(args, overrides=kept).with_changes(
        overrides, options["base_url"], hidden, command="why", allowed=("run_limits.", "policy.")
    )
    typed = {**overrides, **keys_for_trust([options["policy"]] if options["policy"] else [], options["base_url"])}
    stored = {**header.overrides, **keys_for_trust(header.policies, header.base_url)}
    own = set() if require_trust_in_file(args.task_path, typed, stored) else {*args.overrides} - {*overrides}
    if options["model"] or options["policy"]:
        models = (options["model"],) if options["model"] else ()
        policies = (options["policy"],) if options["policy"] else ()
        if models and policies:
            raise click.UsageError("use either --model or --policy")
        args = replace(args, models=models, policies=policies)
    list(read_counterfactuals(path))  # report a damaged file before measuring
    chosen = choose_episodes(path, header, episode, options["limit"])
    traffic = ProviderSession()
    task = load_task(args.task_path, args.overrides, stored=own)
    changes = differences(path, header.digests, task.digests, task.inputs)
    if warning := refuse_changes(path, changes, use="examined", force=options["force"]):
        echo(warning, err=True)
    # The limits of the run are not limits of its continuations.
    definition = task.definition.model_copy(update={"run_limits": RunLimitsModel()})
    task = with_run_limits(replace(task, definition=definition), None, overrides, options["max_cost"])
    args = replace(args, seed=options["seed"])
    echo(f"task file: {args.task_path}", err=True)
    plan = plan_run(task, args, max_concurrency=options["max_concurrency"], traffic=traffic)
    if plan.has_human:
        raise ConfigError("a person cannot continue episodes; choose a different --policy, or --model")
    unknown = {one.row.policy for one in chosen} - {named.label for named in plan.policies}
    if len(plan.policies) > 1 and unknown:
        raise ConfigError(f"{path}: policy {min(unknown)!r} of these episodes is not in the run; pass --policy")
    return plan, traffic, chosen


async def _measure_all(
    path: Path,
    plan: RunPlan,
    traffic: ProviderSession,
    chosen: Sequence[MeasuredEpisode],
    continuations: int,
) -> list[Counterfactual]:
    results: list[Counterfactual] = []
    async with open_measuring(plan, traffic) as workers:
        for one in chosen:
            worker = workers[one.row.policy] if len(workers) > 1 else next(iter(workers.values()))
            episode = episode_at(path, one.offset)

            def report(result: Counterfactual, value: StepValue) -> None:
                write_result(path, result, plan.redaction)  # an interrupted search keeps the values it has paid for
                passed = f"{value.passed} of {value.scored} continuations passed"
                echo(f"{result.rollout_id}: step {value.step}: {passed}", err=True)

            try:
                result = await worker.measure(episode, one.score, continuations, report)
            except RewardKitError as error:
                if len(chosen) == 1:
                    raise
                echo(f"{episode.id_}: not measured: {error}", err=True)
                continue
            if result.values:
                write_result(path, result, plan.redaction)
                results.append(result)
            if result.stopped is not None:
                echo(f"stopped at a limit: {result.stopped}", err=True)
                if rest := len(chosen) - chosen.index(one) - 1:
                    echo(f"{pluralize(rest, 'episode')} not examined", err=True)
                break
    return results


def _show(console: SafeConsole, result: Counterfactual) -> None:
    """Print the measured values of an episode, and the steps at which it was lost or won."""
    outcome = "passed" if result.passed else "failed"
    by = f", continued by {result.continued_by}" if result.continued_by != result.policy else ""
    steps = pluralize(len(result.actions), "step")
    title = f"{result.rollout_id}  {result.policy}{by}: {outcome} with score {result.score:g} after {steps}"
    table = Table(title=Text(title, "bold"), box=box.SIMPLE_HEAD, title_justify="left")
    for name, width in (("step", 4), ("success", 7), ("", _BAR), ("95% interval", 12), ("passed", 6)):
        table.add_column(name, justify="right" if name else "left", no_wrap=True, min_width=width)
    table.add_column("action", no_wrap=True)
    for value in result.values:
        low, high = value.bounds()
        table.add_row(
            str(value.step),
            f"{value.mean:.2f}",
            "█" * round(value.mean * _BAR),
            f"{low:.2f}–{high:.2f}",
            f"{value.passed}/{value.scored}",
            Text(escape_text(result.actions[value.step], max(console.width - _TABLE_WIDTH, 12))),
        )
    console.print(table)
    changes = result.search.changes()
    for change in changes:
        console.print(Text(_describe(result, change)))
    if not changes:
        console.print(Text(f"No change of the success probability is significant{_largest_loss(result)}."))
    used = f"{len(result.continuations):,} continuations"
    cost = f", {result.cost:.4f} US dollars" if result.cost else ""
    console.print(Text(f"Used {used}{cost}.\n", "dim"))


def _largest_loss(result: Counterfactual) -> str:
    """Describe the largest decrease between two measured steps, as the end of a sentence."""
    drops = [(before.mean - after.mean, before, after) for before, after in pairwise(result.values)]
    drop, before, after = max(drops, key=lambda one: one[0], default=(0.0, None, None))
    if drop <= 0 or before is None or after is None:
        return f"; it was {result.values[0].mean:.2f} before the first step" if result.values else ""
    return (
        f". The largest loss is between step {before.step} ({before.mean:.2f}) and step {after.step} "
        f"({after.mean:.2f}); more --continuations could confirm it"
    )


def _describe(result: Counterfactual, change: Change) -> str:
    """Describe a change of the success probability, and what successful continuations did instead."""
    before, after = change.before, change.after
    word = "lost" if change.difference < 0 else "gained"
    end = f"step {after.step}" if after.step < len(result.actions) else "the end"
    where = f"at step {before.step}" if change.is_located else f"between step {before.step} and {end}"
    lines = [f"Success probability {word} {where}: {before.mean:.2f} → {after.mean:.2f}"]
    if change.is_located:
        lines.append(f"  action: {escape_text(result.actions[before.step], _LONGEST_ACTION)}")
    if change.difference < 0 and (instead := result.instead(change)):
        lines.append(f"  first actions of the continuations from step {before.step} that passed:")
        lines += [f"    {count} × {escape_text(action, _LONGEST_ACTION)}" for action, count in instead[:_MOST_INSTEAD]]
    return "\n".join(lines)
