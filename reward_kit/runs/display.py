"""The progress display and the summary table of a run: scores, confidence intervals and errors of each policy."""

from __future__ import annotations

import io
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Literal, Self

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from reward_kit.console import SafeConsole
from reward_kit.display_text import printable
from reward_kit.reward_agent.stats import AgentStats
from reward_kit.runs.files import SUMMARY_FILE
from reward_kit.runs.statistics import Interval, bounded_interval
from reward_kit.runs.summary import TOKEN_DETAILS, EpisodeRow, PolicySummary, metric_names

_MOST_LINES = 8
_MOST_METRICS = 40  # The maximum number of lines; a reward may return a metric for each test of each sample


def summary_table(summaries: Sequence[PolicySummary], title: str) -> RenderableType:
    """Return a table with the figures of each policy, followed by the first error of each policy.

    Each policy is a column if all columns fit the width, and a row otherwise.
    """
    parts: list[RenderableType] = [
        FigureTable([printable(summary.policy) for summary in summaries], _lines(summaries), title=title),
        *small_table("Metrics", *metric_rows(summaries)),
        *small_table("Tags", *_tag_rows(summaries)),
    ]
    for summary in summaries:
        if summary.first_error:  # show the first line, the end of the rest, and the frames of the user's code
            first, *more = printable(summary.first_error).splitlines()
            if len(more) > _MOST_LINES:  # the end of a server's log contains the reason
                more = ["…", *more[1 - _MOST_LINES :]]
            frames = printable(summary.first_traceback or "").splitlines()[1:]
            parts.append(Text(f"first error of {printable(summary.policy)}: {first[:500]}", style="red"))
            if more:
                parts.append(Text("\n".join(more), style="red", no_wrap=True, overflow="ellipsis"))
            if frames:
                parts.append(Text("\n".join(frames[:13]), style="red"))
    return Group(*parts)


class FigureTable:
    """A table of figures with one column per policy or run if all columns fit the console, otherwise one row for each.

    Args:
        names: the names of the policies or runs. A name may contain line breaks.
        lines: the name of each figure, and a cell for each policy or run.
        title: the title above the table.
        is_plain: whether to omit lines, colors and the padding at the edges.
    """

    def __init__(
        self, names: Sequence[str], lines: Sequence[tuple[str, list[str]]], *, title: str = "", is_plain: bool = False
    ) -> None:
        # Names are Text objects, since brackets in a plain string would be parsed as markup.
        self._title = Text(printable(title), "bold") if title else None
        self._names = [Text(name) for name in names]
        self._lines = lines
        self._is_plain = is_plain

    def _table(self) -> Table:
        return Table(
            box=None if self._is_plain else box.SIMPLE_HEAVY, title_justify="left", pad_edge=not self._is_plain
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = self._table()
        wide.title = self._title
        wide.add_column("", style="" if self._is_plain else "dim", no_wrap=True)
        for name in self._names:
            wide.add_column(name, justify="right", overflow="fold")
        for label, cells in self._lines:
            wide.add_row(label, *map(Text, cells))
        label_width, *widths = (max(map(cell_len, lines)) for lines in self._columns())
        if len(self._names) < 2 or label_width + sum(widths) + 3 * len(widths) + 4 <= options.max_width:
            yield wide
            return
        if self._title:
            yield self._title
        yield from self._stacked(options.max_width)

    def _columns(self) -> list[list[str]]:
        """Return the lines of each column: first the labels, then one column for each policy or run."""
        labels = [label for label, _ in self._lines]
        cells = ([line for _, row in self._lines for line in row[at].splitlines()] for at in range(len(self._names)))
        return [labels, *(column or [""] for column in cells)]

    def _stacked(self, width: int) -> Iterator[Table]:
        """Return tables that have a row for each policy or run and as many figures as fit.

        Figures that no policy or run has are omitted.
        """
        name_width = min(max(cell_len(line) for name in self._names for line in name.plain.splitlines()), width // 3)
        left = [(label, cells) for label, cells in self._lines if any(cell not in ("", "–") for cell in cells)]
        while left:
            table = self._table()
            table.add_column("", overflow="fold", width=name_width)
            free, rows, later = width - name_width - 4, [list[str]() for _ in self._names], []
            for name, cells in left:
                needed = max(cell_len(word) for word in (*name.split(), *itertools.chain(*map(str.splitlines, cells))))
                if rows[0] and needed + 3 > free:
                    later.append((name, cells))
                    continue
                free -= needed + 3
                table.add_column(name, justify="right", width=needed)
                for row, cell in zip(rows, cells, strict=True):
                    row.append(cell)
            left = later
            for own_name, row in zip(self._names, rows, strict=True):
                table.add_row(own_name, *map(Text, row))
            yield table


def small_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    is_plain: bool = False,
    full_list: str = SUMMARY_FILE,
) -> list[RenderableType]:
    """Return a table below the main table, or nothing without rows.

    `full_list` is the place where all rows can be found.
    """
    if not rows:
        return []
    style = {"box": None, "pad_edge": False} if is_plain else {"box": box.SIMPLE}
    table = Table(title=Text(title, "" if is_plain else "bold"), title_justify="left", **style)
    for name in columns:
        is_name = name in ("metric", "tag", "policy")
        table.add_column(name, justify="left" if is_name else "right", overflow="fold", no_wrap=not is_name)
    for cells in rows[:_MOST_METRICS]:
        table.add_row(*(Text(printable(cell)) for cell in cells))
    more = len(rows) - _MOST_METRICS
    return [table, *([Text(f"… and {more:,} more in {full_list}")] if more > 0 else [])]


def _tag_rows(summaries: Sequence[PolicySummary]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of the table of tags. It has a row for each tag and policy."""
    tags = sorted({tag for one in summaries for tag in one.tags})
    found = [(tag, one.policy, one.tags[tag]) for tag in tags for one in summaries if tag in one.tags]
    rows = [[tag, policy, interval_text(part.score), f"{part.scored:,}"] for tag, policy, part in found]
    if len(summaries) > 1:
        return ["tag", "policy", "mean score", "n"], rows
    return ["tag", "mean score", "n"], [[tag, mean, count] for tag, _, mean, count in rows]


def metric_rows(summaries: Sequence[PolicySummary]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of the table of metrics; columns that are the same in all rows are omitted."""
    pairs = [(name, one) for name in metric_names(summaries) for one in summaries if name in one.metrics]
    means = [one.metrics[name] for name, one in pairs]
    missing = [mean.n_unscored if mean else one.episodes for mean, (_, one) in zip(means, pairs, strict=True)]
    columns = {
        "metric": [name for name, _ in pairs],
        "policy": [one.policy for _, one in pairs] if len(summaries) > 1 else [],
        "mean": [interval_text(mean) if mean else "no value" for mean in means],
        "n": [f"{mean.n if mean else 0:,}" for mean in means],
        "missing": [f"{count:,}" for count in missing] if any(missing) else [],
    }
    filled = {name: cells for name, cells in columns.items() if cells}
    return [*filled], [list(cells) for cells in zip(*filled.values(), strict=True)]


def as_text(summaries: Sequence[PolicySummary], title: str) -> str:
    """Return `summary_table` as plain text that is 120 columns wide."""
    console = SafeConsole(width=120, file=io.StringIO(), color_system=None, force_jupyter=False)
    with console.capture() as captured:
        console.print(summary_table(summaries, title))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")


def _lines(summaries: Sequence[PolicySummary]) -> list[tuple[str, list[str]]]:
    lines = [
        ("mean score", [interval_text(summary.score) for summary in summaries]),
        ("pass@1", [_share(summary.pass_at_1) for summary in summaries]),
    ]
    # If there were errors, the k of the complete samples may differ between policies.
    for k in sorted({summary.k for summary in summaries if summary.k > 1}):
        lines += [
            (f"pass@{k}", [_share(summary.pass_at_k if summary.k == k else None) for summary in summaries]),
            (f"pass^{k}", [_share(summary.pass_hat_k if summary.k == k else None) for summary in summaries]),
        ]
    if any(summary.pass_excluded for summary in summaries):
        lines.append(("samples not in pass@", [str(summary.pass_excluded) for summary in summaries]))
    lines += [
        ("episodes (scored)", [f"{summary.episodes} ({summary.scored})" for summary in summaries]),
        ("failures (scored, not passed)", [str(summary.failures) for summary in summaries]),
        *([("imputed scores", [str(s.imputed) for s in summaries])] if any(s.imputed for s in summaries) else []),
        ("errors", [_counts(summary.errors) for summary in summaries]),
        ("limits (cut off)", [str(summary.limits) for summary in summaries]),
        ("stop reasons", [_counts(summary.stop_reasons) for summary in summaries]),
        ("tool errors", [str(summary.tool_errors) for summary in summaries]),
        ("environment return", [_number(summary.mean_return) for summary in summaries]),
        ("steps per episode", [f"{summary.mean_steps:.1f}" for summary in summaries]),
    ]
    if any(summary.tokens for summary in summaries):
        lines.append(("tokens", [f"{summary.tokens:,}" for summary in summaries]))
    for key, name in TOKEN_DETAILS.items():
        if any(key in summary.token_details for summary in summaries):
            lines.append((name, [f"{summary.token_details.get(key, 0):,}" for summary in summaries]))
    return lines + cost_lines(summaries)


def cost_lines(summaries: Sequence[PolicySummary]) -> list[tuple[str, list[str]]]:
    """Return the rows with the costs of policies and judges; rows that do not apply are omitted."""
    lines = []
    if any(summary.tokens for summary in summaries):
        lines.append(("cost", [cost_text(summary) for summary in summaries]))
    if any(summary.judge_calls for summary in summaries):
        lines.append(("judge cost", [judge_cost_text(summary) for summary in summaries]))
    return lines


def cost_text(summary: PolicySummary) -> str:
    """Format the cost of a policy, excluding the cost of its judge."""
    return _cost(summary.cost, is_used=summary.tokens > 0)


def judge_cost_text(summary: PolicySummary) -> str:
    """Format the cost of the judges that scored the episodes of a policy."""
    return _cost(summary.judge_cost, is_used=summary.judge_calls > 0)


def interval_text(interval: Interval | None) -> str:
    """Format a mean and its interval, or return "unscored"."""
    return "unscored" if interval is None else _with_bounds(interval, figure)


def difference_text(interval: Interval | None) -> str:
    """Format a difference and its interval, or return a dash."""
    return "–" if interval is None else _with_bounds(interval, signed)


def _with_bounds(interval: Interval, text: Callable[[float], str]) -> str:
    if interval.low is None or interval.high is None:
        return text(interval.mean)
    return f"{text(interval.mean)}  [{text(interval.low)}, {text(interval.high)}]"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def figure(value: float) -> str:
    """Format a score with three decimals, or with six significant digits if it is large."""
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.6g}"


def signed(value: float | None) -> str:
    """Format a difference with its sign, or return a dash."""
    if value is None:
        return "–"
    text = figure(abs(value))
    return f"{'−' if value < 0 else '+'}{text}" if float(text) else text


def _number(value: float | None) -> str:
    return "–" if value is None else figure(value)


def dollars(value: float) -> str:
    """Format an amount of US dollars."""
    return f"${value:.4f}"


def _cost(value: float | None, *, is_used: bool) -> str:
    if value is None:
        return "unknown" if is_used else "–"
    return dollars(value)


def _counts(counts: Mapping[str, int]) -> str:
    return "\n".join(f"{name} {count}" for name, count in counts.items()) or "0"


DisplayKind = Literal["rich", "plain", "none"]
_FEWEST_SAMPLES = 5  # for an interval in the progress line


_PLAIN_LINE_S, _QUIET_S = 5.0, 15.0  # between the lines of the plain display, with and without stopped episodes


class Display:
    """The progress display of a run, and a listener for the events of the run. Use it as a context manager."""

    def __init__(self, kind: DisplayKind, total: int, console: SafeConsole | None = None) -> None:
        self._kind, self._total = kind, total
        self.scoring: Callable[[], AgentStats | None] = lambda: None
        self.slowest: Callable[[], str | None] = lambda: None
        self._console = console or SafeConsole(stderr=True)
        self._live = Live(self, console=self._console, refresh_per_second=4, transient=True) if kind == "rich" else None
        self._began = time.monotonic()
        self._stopped = self._errors = self._scored = self._waiting = self._resumed = self._scored_before = 0
        self._scores: dict[str, list[tuple[float, str]]] = defaultdict(list)
        self._last_line = self._began
        self._has_ended = threading.Event()

    def __enter__(self) -> Self:
        # Episodes of an earlier process do not count toward the rate.
        self._began, self._resumed, self._scored_before = time.monotonic(), self._stopped, self._scored
        if self._live is not None:
            self._live.__enter__()
        elif self._kind == "plain":
            threading.Thread(target=self._print_while_quiet, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended.set()
        if self._live is not None:
            self._live.__exit__(kind, error, trace)
        elif self._kind == "plain":
            self._console.print(self._line())

    def notify(self, note: str) -> None:
        """Show a note above the progress."""
        if self._kind != "none":
            self._console.print(note, style="yellow")

    def episode_stopped(self, row: EpisodeRow) -> None:
        """Count a stopped episode."""
        self._stopped += 1
        self._errors += row.is_error
        self._waiting += not row.is_error
        if self._kind == "plain":
            self._print_after(_PLAIN_LINE_S)

    def episode_scored(self, row: EpisodeRow) -> None:
        """Count a score or a scoring error."""
        self._scored += 1
        self._waiting -= 1
        self._errors += row.score_error is not None
        if row.score is not None:
            self._scores[row.policy].append((row.score, row.sample_id))

    def _print_while_quiet(self) -> None:
        """Print a line regularly even if no episode stops, so a log shows that the run is still active."""
        while not self._has_ended.wait(_QUIET_S / 10):
            self._print_after(_QUIET_S)

    def _print_after(self, seconds: float) -> None:
        if time.monotonic() - self._last_line >= seconds:
            self._last_line = time.monotonic()
            self._console.print(self._line())

    def __rich__(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(self._total, 1), completed=self._stopped, width=30)
        grid.add_row(bar, Text(self._line()))
        return grid

    def _line(self) -> str:
        """Return the progress as one line of text."""
        seconds = max(time.monotonic() - self._began, 1e-3)
        # If there are no episodes to collect, for example for transcripts, show the progress of scoring.
        only_scores = self._resumed >= self._total
        done = self._scored - self._scored_before if only_scores else self._stopped - self._resumed
        rest = self._waiting if only_scores else self._total - self._stopped
        rate = done / seconds
        parts = [f"{self._stopped}/{self._total}"]
        # Copy the figures, since another thread may refresh the display.
        for policy, pairs in [(policy, list(pairs)) for policy, pairs in list(self._scores.items()) if pairs]:
            interval = bounded_interval([score for score, _ in pairs], [sample for _, sample in pairs])
            is_wide = interval.n_clusters < _FEWEST_SAMPLES
            shown = figure(interval.mean) if is_wide else _with_bounds(interval, figure).replace("  ", " ")
            parts.append(f"{policy} {shown}" if len(self._scores) > 1 else f"score {shown}")
        if done:
            parts.append(f"{rate:.1f}/s")
        if self._errors:
            parts.append(f"{self._errors} errors")
        stats = self.scoring()
        if self._waiting and (stats is not None or self._scored):
            median = "" if stats is None or stats.latency_p50_s is None else f", p50 {stats.latency_p50_s:.2f}s"
            flight = "" if stats is None else f" ({stats.in_flight} in flight{median})"
            parts.append(f"{self._waiting} waiting for a score{flight}")
        if rest and rate > 0:
            parts.append(f"{duration_text(rest / rate)} left")
        if slowest := self.slowest():
            parts.append(f"slowest: {slowest}")
        return "  ".join(parts)


def duration_text(seconds: float) -> str:
    """Format a duration in seconds in the form "3m05s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
