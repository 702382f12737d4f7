"""`reward-kit export`: write a run as tables, as chats for fine-tuning, as logs for other tools, or as traces."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from reward_kit.cli.echo import echo
from reward_kit.cli.options import Number, complete_runs, newest_run_option, run_or_newest
from reward_kit.cli.trust import require_trust_in_file, trust_option
from reward_kit.display_text import pluralize
from reward_kit.errors import ConfigError, StoreError, boundary
from reward_kit.private_files import make_private_folder
from reward_kit.runs.chats import Unfit, make_chat
from reward_kit.runs.export import (
    STDOUT,
    STEPS,
    TABLES,
    CreditLines,
    Selection,
    binary_file,
    open_table,
    read_header,
    selected,
    table_rows,
)
from reward_kit.runs.logs.exporting import EXPORTED, export_logs
from reward_kit.runs.otlp import export_results, traces_endpoint
from reward_kit.runs.results import Result
from reward_kit.runs.run_folder import RunHeader

CHATS = "openai-jsonl"
_PROGRESS_EPISODES = 1_000
_UNREADABLE = "episodes.jsonl: {} cannot be read as an episode"


@click.command(name="export")
@click.argument("run", required=False, type=click.Path(path_type=Path), shell_complete=complete_runs)
@click.option("--format", "form", type=click.Choice(["parquet", "csv", CHATS, *EXPORTED]), help="Output format.")
@click.option(
    "--otlp",
    metavar="URL|env",
    help="Send the episodes as traces to this OpenTelemetry collector; env: use OTEL_EXPORTER_OTLP_ENDPOINT.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Output file, or a directory for multiple tables; - is standard output. Default: RUN/export/.",
)
@newest_run_option()
@click.option(
    "--table",
    "tables",
    type=click.Choice(list(TABLES)),
    multiple=True,
    help="Parquet, CSV: the table to write; may be repeated. Default: all.",
)
@click.option("--min-score", type=Number(), metavar="X", help="Export only episodes with a score of at least X.")
@click.option("--only-passed", is_flag=True, help="Export only episodes that passed.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="Export only the episodes of this policy; may be repeated.",
)
@click.option("--raw", is_flag=True, help="CSV: write text unchanged, even if a spreadsheet would evaluate it.")
@click.option(
    "--tools",
    type=click.Path(path_type=Path),
    metavar="FILE.json",
    help=f"{CHATS}: a JSON list of tools in OpenAI's format. Default: the tools of the run's task.",
)
@trust_option
def command(
    run: Path | None,
    form: str | None,
    otlp: str | None,
    output: Path | None,
    log_dir: Path,
    tables: tuple[str, ...],
    min_score: float | None,
    only_passed: bool,
    policies: tuple[str, ...],
    raw: bool,
    tools: Path | None,
) -> None:
    """Export RUN as tables of its episodes, scores and steps, as chats, as logs, or as OpenTelemetry traces.

    Without RUN, the newest run is used.

    \b
    Examples:
      reward-kit export --format parquet
      reward-kit export runs/my-run --format csv --table episodes -o episodes.csv
      reward-kit export runs/my-run --format openai-jsonl --only-passed -o train.jsonl
      reward-kit export runs/my-run --format inspect -o my-run.eval
      reward-kit export runs/my-run --otlp http://localhost:4318
    """
    if (form is None) == (otlp is None):
        raise click.UsageError("pass either --format or --otlp")
    if otlp is not None and output is not None:
        raise click.UsageError("-o has no effect with --otlp")
    endpoint = traces_endpoint(otlp) if otlp is not None else None
    for flag, value, forms in (
        ("--table", tables, ("csv", "parquet")),
        ("--raw", raw, ("csv",)),
        ("--tools", tools, (CHATS,)),
    ):
        if value and form not in forms:
            given = f"--format {form}" if form is not None else "--otlp"
            raise ConfigError(f"{flag} has no effect with {given}, only with {' and '.join(forms)}")
    run = run_or_newest(run, log_dir)
    header = read_header(run)
    selection = Selection(header.pass_threshold, min_score, only_passed, policies)
    if endpoint is not None:
        _send_traces(header, selection, endpoint, run)
    elif form is None or form == CHATS:
        target = output or _folder(run / "export", is_private=True) / "chats.jsonl"
        _check_target(target)
        _write_chats(run, header, selection, target, tools, is_private=output is None)
    elif form in EXPORTED:
        target = output or _folder(run / "export", is_private=True) / form
        _write_logs(run, header, selection, form, target, is_private=output is None)
    else:
        targets = _targets(run, form, output, tables)
        _write_tables(run, selection, form, targets, is_raw=raw, is_private=output is None)


def _folder(path: Path, *, is_private: bool) -> Path:
    try:
        (make_private_folder if is_private else Path.mkdir)(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create {path}: {error.strerror}; pass a different file with -o") from None
    return path


def _check_target(path: Path) -> None:
    if path != STDOUT and not path.parent.is_dir():
        raise ConfigError(f"-o {path}: directory {path.parent} does not exist; create it first")
    if path.is_dir():
        raise ConfigError(f"-o {path} is a directory; pass a file")


def _targets(run: Path, form: str, output: Path | None, tables: Sequence[str]) -> dict[str, Path]:
    """Return the path of the output file for each table."""
    chosen = list(dict.fromkeys(tables)) or list(TABLES)
    if output is not None and len(chosen) == 1 and not output.is_dir():
        if output == STDOUT and form == "parquet":
            raise ConfigError("-o -: Parquet is a binary format; pass a file")
        _check_target(output)
        return {chosen[0]: output}
    if output == STDOUT:
        raise ConfigError("-o - writes only one table; select it with --table")
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"-o {output}: directory {output.parent} does not exist; create it first")
    if output is not None and output.suffix in (".csv", ".parquet"):
        raise ConfigError(
            f"-o {output}: {len(chosen)} tables require a directory; pass a directory, or select one table with --table"
        )
    folder = _folder(output or run / "export", is_private=output is None)
    return {name: folder / f"{name}.{form}" for name in chosen}


def _write_tables(
    run: Path, selection: Selection, form: str, targets: Mapping[str, Path], *, is_raw: bool, is_private: bool
) -> None:
    credit = CreditLines(run) if STEPS.name in targets else None
    metadata, count, rows = {"run": run.name, "written_by": "reward-kit"}, 0, Counter[str]()
    with ExitStack() as files:
        sinks = {
            name: files.enter_context(
                open_table(path, form, TABLES[name], metadata, is_raw=is_raw, is_private=is_private)
            )
            for name, path in targets.items()
        }
        for result in _require_any(selected(run, selection), selection):
            count += 1
            for name, sink in sinks.items():
                lines = credit.read(result.episode["rollout_id"]) if credit is not None and name == STEPS.name else []
                with boundary(StoreError, _UNREADABLE.format(result.episode["rollout_id"])):
                    made = table_rows(TABLES[name], result, selection.pass_threshold, lines)
                for row in made:
                    sink.write(row)
                rows[name] += len(made)
    for name, path in targets.items():
        _report(f"{name}: {rows[name]:,} rows of {count:,} episodes", path)
    _report_left_out(selection.left_out)


def _require_any(results: Iterator[Result], selection: Selection) -> Iterator[Result]:
    """Yield the results, and raise an error if the run has no results."""
    is_empty = True
    for result in results:
        is_empty = False
        yield result
    if is_empty:
        why = (
            ", ".join(f"{count:,} {reason}" for reason, count in selection.left_out.items())
            or "the run has no episodes"
        )
        raise ConfigError(f"no episodes to export: {why}")


def _write_chats(
    run: Path, header: RunHeader, selection: Selection, target: Path, given: Path | None, *, is_private: bool
) -> None:
    tools, count = _tools(run, header, selection, given), 0
    unfit, dropped, examples = Counter[str](), Counter[str](), dict[str, str]()

    def reasons() -> str:
        most = unfit.most_common(10)
        return "; ".join(f"{times:,} {reason} (such as {examples[reason]})" for reason, times in most)

    with binary_file(target, is_private=is_private) as file:
        for result in _require_any(selected(run, selection), selection):
            rollout_id = result.episode["rollout_id"]
            try:
                if result.episode.get("failure"):
                    raise Unfit("broke")
                with boundary(StoreError, _UNREADABLE.format(rollout_id)):
                    chat = make_chat(result.episode["messages"])
                    line = chat.line(tools)
            except Unfit as reason:
                unfit[str(reason)] += 1
                examples.setdefault(str(reason), rollout_id)
                continue
            file.write(line.encode())
            dropped += chat.dropped
            count += 1
        if not count:
            raise ConfigError(f"no episode can be written: {reasons()}")
    _report(f"{count:,} chats", target)
    for name, times in dropped.items():
        echo(f"the format cannot store: {name} ({times:,} times)", err=True)
    _report_left_out(selection.left_out)
    if unfit:
        echo(f"{sum(unfit.values()):,} episodes cannot be written in this format: {reasons()}", err=True)


def _write_logs(
    run: Path, header: RunHeader, selection: Selection, form: str, target: Path, *, is_private: bool
) -> None:
    results = _require_any(selected(run, selection), selection)
    exported = export_logs(run, header, results, form, target, is_private=is_private)
    _report(f"{pluralize(exported.episodes, 'episode')} in {pluralize(len(exported.paths), 'log')}", target)
    for name, times in sorted(exported.dropped.items()):
        echo(f"the format cannot store: {name} ({times:,} times)", err=True)
    _report_left_out(selection.left_out)


def _send_traces(header: RunHeader, selection: Selection, endpoint: str, run: Path) -> None:
    results = _require_any(selected(run, selection), selection)

    def progress(count: int) -> None:
        if count % _PROGRESS_EPISODES == 0:
            echo(f"{count:,} episodes", err=True)

    episodes, spans = export_results(header, results, endpoint, progress)
    echo(f"{pluralize(episodes, 'episode')}, {pluralize(spans, 'span')}: {endpoint}", err=True)
    _report_left_out(selection.left_out)


def _tools(run: Path, header: RunHeader, selection: Selection, given: Path | None) -> Sequence[Mapping[str, Any]]:
    """Return the tools given by `--tools` or, if an episode calls tools, the task's tools."""
    from reward_kit.runs.chats import load_task_tools, read_tools

    if given is not None:
        return read_tools(given)
    wanted = replace(selection, left_out=Counter(), seen=set())  # they are counted when they are written
    if not any(message.get("tool_calls") for one in selected(run, wanted) for message in one.episode["messages"]):
        return []
    task_path = header.task_path or (header.rescored_from or {}).get("task_path")
    if task_path is not None and Path(task_path).is_file():
        require_trust_in_file(Path(task_path), stored=header.overrides)
    with contextlib.redirect_stdout(sys.stderr):  # a user's module may print when it is loaded
        found = load_task_tools(header)
    if found.changed:
        changed = ", ".join(found.changed)
        echo(f"the tools may differ from the run's tools, because these inputs changed: {changed}", err=True)
    return found.tools


def _report(text: str, path: Path) -> None:
    echo(f"{text}: {'standard output' if path == STDOUT else path}", err=True)


def _report_left_out(left_out: Counter[str]) -> None:
    if left_out:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
        echo(f"left out: {reasons}", err=True)
