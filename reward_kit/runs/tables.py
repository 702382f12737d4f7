"""The closing table of a run: what each policy scored, how sure that is, and what went wrong."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reward_kit.console import SafeConsole
from reward_kit.display_text import printable
from reward_kit.runs.statistics import Interval
from reward_kit.runs.summary import PolicySummary

_MOST_LINES = 8


def summary_table(summaries: Sequence[PolicySummary], title: str) -> RenderableType:
    """One column per policy, side by side, and below it the first error of each."""
    # Names are Text, since brackets in a plain string would be taken for markup.
    table = Table(title=Text(printable(title), "bold"), box=box.SIMPLE_HEAVY, title_justify="left")
    table.add_column("", style="dim", no_wrap=True)
    for summary in summaries:
        table.add_column(Text(printable(summary.policy)), justify="right", overflow="fold")
    for name, cells in _lines(summaries):
        table.add_row(name, *cells)
    return Group(table, *(_first_error(summary) for summary in summaries if summary.first_error))


def as_text(summaries: Sequence[PolicySummary], title: str) -> str:
    """`summary_table` as plain text, 120 columns wide."""
    console = SafeConsole(width=120, file=io.StringIO(), color_system=None, force_jupyter=False)
    with console.capture() as captured:
        console.print(summary_table(summaries, title))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")


def _lines(summaries: Sequence[PolicySummary]) -> list[tuple[str, list[str]]]:
    lines = [
        ("mean score", [interval_text(summary.score) for summary in summaries]),
        ("pass@1", [_share(summary.pass_at_1) for summary in summaries]),
    ]
    # Where attempts broke, policies may differ in the k that they have complete samples of.
    for k in sorted({summary.k for summary in summaries if summary.k > 1}):
        lines += [
            (f"pass@{k}", [_share(summary.pass_at_k if summary.k == k else None) for summary in summaries]),
            (f"pass^{k}", [_share(summary.pass_hat_k if summary.k == k else None) for summary in summaries]),
        ]
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
        lines.append(("cost", [_cost(summary.cost) for summary in summaries]))
    return lines


def interval_text(interval: Interval | None) -> str:
    """A mean with its interval; "unscored" where there is none."""
    return "unscored" if interval is None else _with_bounds(interval, figure)


def difference_text(interval: Interval | None) -> str:
    """A difference with its interval, or a dash where there is none."""
    return "–" if interval is None else _with_bounds(interval, signed)


def _with_bounds(interval: Interval, told: Callable[[float], str]) -> str:
    if interval.low is None or interval.high is None:
        return told(interval.mean)
    return f"{told(interval.mean)}  [{told(interval.low)}, {told(interval.high)}]"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def figure(value: float) -> str:
    """A score for people: three digits after the point, and of a large one six in all."""
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.6g}"


def signed(value: float | None) -> str:
    """A difference with its sign, or a dash where there is none."""
    if value is None:
        return "–"
    text = figure(abs(value))
    return f"{'−' if value < 0 else '+'}{text}" if float(text) else text


def _number(value: float | None) -> str:
    return "–" if value is None else figure(value)


def _cost(value: float | None) -> str:
    return "unknown" if value is None else f"${value:.4f}"


def _counts(counts: Mapping[str, int]) -> str:
    return "\n".join(f"{name} {count}" for name, count in counts.items()) or "0"


def _first_error(summary: PolicySummary) -> RenderableType:
    """The first error: its first line, the end of its text, and the user's own frames if there are any."""
    first, *more = printable(summary.first_error or "").splitlines()
    if len(more) > _MOST_LINES:  # of a server's log, the end says why it ended
        more = ["…", *more[1 - _MOST_LINES :]]
    frames = printable(summary.first_traceback or "").splitlines()[1:]
    parts = [Text(f"first error of {printable(summary.policy)}: {first[:500]}", style="red")]
    if more:
        parts.append(Text("\n".join(more), style="red", no_wrap=True, overflow="ellipsis"))
    if frames:
        parts.append(Text("\n".join(frames[:13]), style="red"))
    return Group(*parts)
