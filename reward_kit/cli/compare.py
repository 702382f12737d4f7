"""`reward-kit compare`: show the differences between runs with confidence intervals, and apply gates for CI."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click
from rich.console import RenderableType

from reward_kit.cli.echo import echo, echo_json
from reward_kit.cli.options import (
    GateNumber,
    Number,
    WholeNumber,
    complete_runs,
    fail_under_options,
    json_option,
    newest_run_option,
    thresholds,
    two_newest,
)
from reward_kit.cli.outcome import note_console
from reward_kit.console import SafeConsole
from reward_kit.display_text import escape_text
from reward_kit.runs.comparison import compare, read_sides, regression_gates, to_json, under_gate
from reward_kit.runs.comparison_table import comparison_markdown, comparison_notes, comparison_table, markdown_table
from reward_kit.runs.training_comparison import (
    are_training_runs,
    read_training_sides,
    training_json,
    training_lines,
    training_notes,
    training_table,
)


@click.command(name="compare")
@click.argument(
    "runs",
    nargs=-1,
    type=click.Path(path_type=Path),
    metavar="[RUN]...",
    shell_complete=complete_runs,
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="A policy to compare, if the runs have multiple policies; may be repeated.",
)
@newest_run_option("the two newest runs")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write an HTML page, such as compare.html."
)
@click.option(
    "--fail-on-regression",
    type=GateNumber(
        0, hint="write METRIC=MARGIN, put --fail-on-regression after the runs, or write --fail-on-regression=0"
    ),
    is_flag=False,
    flag_value="0",
    multiple=True,
    metavar="[[METRIC=]MARGIN]",
    help="Exit with code 1 if the score or METRIC of a run is significantly worse than the baseline's, by more than "
    "MARGIN (default 0); may be repeated.",
)
@fail_under_options("the mean score of the last run")
@click.option(
    "--fail-on-error",
    "error_limit",
    type=Number(0),
    default=0,
    show_default=True,
    metavar="X",
    help="With a gate: fail if more than X episodes of a run ended with an error.",
)
@click.option("--seed", type=WholeNumber(0), default=0, show_default=True, help="Random seed for the resampling.")
@click.option(
    "--display", type=click.Choice(["rich", "plain"]), help="Table style; default: rich on a terminal, otherwise plain."
)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print a Markdown table, for example for a pull request.")
@json_option("Print the comparison as JSON on standard output.")
def command(
    runs: tuple[Path, ...],
    policies: tuple[str, ...],
    log_dir: Path,
    output: Path | None,
    fail_on_regression: tuple[tuple[float, str | None], ...],
    fail_under: tuple[tuple[float, str | None], ...],
    lower_bound: bool,
    error_limit: float,
    seed: int,
    display: str | None,
    as_markdown: bool,
    as_json: bool,
) -> None:
    """Compare runs with the first RUN on their common samples. A RUN is a directory written by `run` or `score`.

    Runs of `train` are compared by their last held-out evaluation.

    The first RUN is the baseline. With a single RUN, its policies are compared. Without RUN, the two newest runs of a
    task are compared, with the older run as the baseline.

    \b
    Examples:
      reward-kit compare
      reward-kit compare runs/before runs/after
      reward-kit compare runs/before runs/after -o compare.html --fail-on-regression 0.02
      reward-kit compare runs/before runs/after --fail-on-regression --fail-on-regression state=0.05
      reward-kit compare runs/before runs/after --markdown >> "$GITHUB_STEP_SUMMARY"
      reward-kit compare runs/both --policy openai/small --policy openai/large
    """
    minimums = thresholds(fail_under, lower_bound)
    if as_markdown and as_json:
        raise click.UsageError("use either --markdown or --json")
    if are_training_runs(runs):
        if output or fail_on_regression or minimums or policies:
            raise click.UsageError("of training runs, only the table, --json and --markdown are available")
        _compare_training(runs, display, as_markdown=as_markdown, as_json=as_json)
        return
    comparison = compare(read_sides(runs or two_newest(log_dir), policies), seed)
    gates = []
    for margin, metric in fail_on_regression:
        gates += regression_gates(comparison, margin, metric, error_limit=error_limit)
    gates += [under_gate(comparison.sides[-1], minimum, error_limit=error_limit) for minimum in minimums]
    if as_json:
        echo_json({**to_json(comparison), "gates": [gate._asdict() for gate in gates]}, allow_nan=False)
    elif as_markdown:
        echo(comparison_markdown(comparison, gates))
    else:
        _print_table(partial(comparison_table, comparison), display)
    note = note_console()
    for text in comparison_notes(comparison):
        note.print(f"warning: {text}", style="yellow")
    if output is not None:
        from reward_kit.report.comparison_page import write_comparison

        note.print(f"Report:  {write_comparison(comparison, output)}")
    for gate in gates:
        outcome, style = ("failed", "red") if gate.failed else ("passed", "")
        note.print(f"Gate {outcome}: {escape_text(gate.message, 2_000)}", style=style)
    sys.exit(int(any(gate.failed for gate in gates)))


def _print_table(table: Callable[..., RenderableType], display: str | None) -> None:
    """Print a table. `table` is a function with the parameter `plain`."""
    is_terminal = sys.stdout.isatty()
    is_plain = display == "plain" or (display is None and not is_terminal)
    # Plain lines are not wrapped, so that other programs can read them.
    wide = SafeConsole(width=10_000, no_color=True)
    console = wide if is_plain else SafeConsole(width=None if is_terminal else 120)
    console.print(table(plain=is_plain))


def _compare_training(runs: Sequence[Path], display: str | None, *, as_markdown: bool, as_json: bool) -> None:
    sides = read_training_sides(runs)
    if as_json:
        echo_json(training_json(sides), allow_nan=False)
    elif as_markdown:
        rows = [[name, *cells] for name, cells in training_lines(sides)]
        echo(markdown_table(["", *(side.label for side in sides)], rows, left=[""]))
    else:
        _print_table(partial(training_table, sides), display)
    for text in training_notes(sides):
        note_console().print(f"note: {text}")
