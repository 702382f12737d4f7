"""`reward-kit import`: make a run from the logs of other tools."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click

from reward_kit.cli.echo import echo, echo_json
from reward_kit.cli.options import json_option, log_dir_option
from reward_kit.cli.trust import trust_new_folder
from reward_kit.console import SafeConsole
from reward_kit.display_text import pluralize
from reward_kit.runs.display import summary_table
from reward_kit.runs.files import SUMMARY_FILE, read_json
from reward_kit.runs.logs.importing import FORMATS, import_logs
from reward_kit.runs.logs.openai_evals import convert_evals, is_eval


@click.command(name="import")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE…")
@click.option("--format", "form", type=click.Choice(list(FORMATS)), help="Format; default: detected from the content.")
@click.option(
    "--score", "scorer", metavar="NAME", help="Name of the score to use; default: the first score with a number."
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FOLDER", help="OpenAI Evals: the new task's directory."
)
@log_dir_option("Parent of the new run's directory.")
@json_option()
def command(
    files: tuple[Path, ...], form: str | None, scorer: str | None, output: Path | None, log_dir: Path, as_json: bool
) -> None:
    """Make a run from logs of other tools, or a task from an eval of OpenAI Evals.

    FILE is a log of inspect_ai (.eval or .json), a trajectory in ATIF (Harbor), a traces.jsonl of verifiers, a JSONL
    file of OpenAI chats or responses, or a session file of Claude Code. The run can be viewed, scored, compared,
    checked, and exported again. It keeps a copy of each log. Fields without a place in an episode are listed. If FILE
    is a YAML file of the registry of OpenAI Evals, its task is written to -o.

    \b
    Examples:
      reward-kit import logs/2026-11-29_sums.eval
      reward-kit import jobs/2026-11-29/*/agent/trajectory.json
      reward-kit import chats.jsonl
      reward-kit import evals/registry/evals/test-match.yaml -o test_match
    """
    if any(map(is_eval, files)):
        if output is None or len(files) > 1:
            raise click.UsageError("an eval of OpenAI Evals needs -o FOLDER and no other FILE")
        tasks = convert_evals(files[0], output)
        trust_new_folder(output)
        for converted in tasks:
            echo(f"{converted.path}: {pluralize(converted.samples, 'sample')}", err=True)
            _report_fields("Not in the task", converted.dropped)
        judge = " -T reward_options.model=JUDGE" if tasks[0].is_judged else ""
        echo(f"Run it:  reward-kit run {tasks[0].path} --model PROVIDER/MODEL{judge}", err=True)
        if judge:
            echo("If the judge is not a model of OpenAI, add  -T reward_options.base_url=URL", err=True)
        return
    if output is not None:
        raise click.UsageError("-o applies only to an eval of OpenAI Evals; the run is written to --log-dir")
    imported = import_logs(files, log_dir, form=form, scorer=scorer)
    if as_json:
        summary: dict[str, Any] = read_json(imported.path / SUMMARY_FILE)
        fields = {"extra": dict(imported.report.extra), "log_only": dict(imported.report.log_only)}
        echo_json({"run": str(imported.path), **summary, "fields": fields})
        return
    episodes = sum(policy.episodes for policy in imported.policies)
    SafeConsole(width=120).print(
        summary_table(imported.policies, f"{files[0].name}  ({pluralize(episodes, 'episode')})")
    )
    _report_fields("Stored in custom_data.log of the episodes", imported.report.extra)
    _report_fields("Only in the run's copy of the log", imported.report.log_only)
    echo(f"Written to {imported.path}", err=True)


def _report_fields(title: str, counts: Counter[str]) -> None:
    if counts:
        fields = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
        echo(f"{title}: {fields}", err=True)
