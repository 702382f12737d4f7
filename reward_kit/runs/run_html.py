"""A finished run as a notebook shows it: what each policy came to, what broke or did not pass, where the page is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reward_kit.display_text import counted
from reward_kit.notebook_html import Html, element, escaped, faint, folded, line, link, strong, table, whole
from reward_kit.runs.display import figure, interval_text
from reward_kit.runs.summary import EpisodeRow, PolicySummary

_BAR = "color-mix(in srgb, currentColor {0}, transparent)"


def run_html(
    title: str,
    policies: Sequence[PolicySummary],
    broken: Sequence[EpisodeRow],
    failed: Sequence[EpisodeRow],
    why_stopped: str | None,
    page: Path,
    notes: Sequence[str] = (),
) -> str:
    """A finished run.

    Args:
        title: the task, and how much of it was run.
        policies: what each came to.
        broken: the episodes without a score because something broke.
        failed: the episodes that did not pass, the worst first.
        why_stopped: where a limit stopped it.
        page: the report.
        notes: what the user should know of how it ran.
    """
    parts = [line(strong(title))]
    if why_stopped:
        parts.append(line(strong("Stopped: "), why_stopped))
    parts.append(table([name for name, _ in _columns(policies)], policies, lambda one: _cells(policies, one)))
    if broken:
        parts.append(folded(f"{counted(len(broken), 'episode')} broke", _rows(broken, "what broke")))
    if failed:
        parts.append(folded(f"{counted(len(failed), 'episode')} did not pass", _rows(failed, "score")))
    parts += [line(faint(note)) for note in notes]
    parts.append(line(link(page)) if page.is_file() else line(faint(f"no report; the run is in {page.parent}")))
    return whole(*parts)


def _columns(policies: Sequence[PolicySummary]) -> list[tuple[str, bool]]:
    has_errors = any(one.errors for one in policies)
    costs = any(one.cost is not None for one in policies)
    named = [("policy", True), ("mean score", True), ("", True), ("pass rate", True), ("episodes", True)]
    named += [("not passed", True), ("broke", has_errors), ("cost", costs)]
    return [(name, is_there) for name, is_there in named if is_there]


def _cells(policies: Sequence[PolicySummary], one: PolicySummary) -> list[object]:
    cells: dict[str, object] = {
        "policy": one.policy,
        "mean score": strong(interval_text(one.score)),
        "": _bar(one),
        "pass rate": "–" if one.pass_at_1 is None else f"{one.pass_at_1:.1%}",
        "episodes": str(one.episodes) if one.scored == one.episodes else f"{one.scored} of {one.episodes} scored",
        "not passed": str(one.failures),
        "broke": ", ".join(f"{count} {name}" for name, count in one.errors.items()) or "0",
        "cost": "–" if one.cost is None else f"${one.cost:.4f}",
    }
    return [cells[name] for name, _ in _columns(policies)]


def _bar(one: PolicySummary) -> Html:
    """The mean of scores within [0, 1] as a bar, with its interval below it."""
    interval = one.score
    if interval is None or not 0.0 <= interval.mean <= 1.0:
        return escaped("")
    full = _BAR.format("75%")
    track = element("div", element("div", "", style=f"width:{interval.mean:.1%}; height:100%; background:{full};"),
                    style=f"width:7em; height:0.5em; margin-top:0.45em; background:{_BAR.format('15%')};")  # fmt: skip
    if interval.low is None or interval.high is None or not 0.0 <= interval.low <= interval.high <= 1.0:
        return track
    span = f"margin-left:{interval.low:.1%}; width:{interval.high - interval.low:.1%}; height:0.15em;"
    whisker = element("div", element("div", "", style=f"{span} background:{full};"), style="width:7em; margin-top:1px;")
    return Html(track + whisker)


def _rows(rows: Sequence[EpisodeRow], what: str) -> Html:
    def cells(row: EpisodeRow) -> list[object]:
        is_scored = row.score is not None and what == "score"
        told = figure(row.score or 0.0) if is_scored else (row.error_message or row.score_error or "")
        return [row.sample_id, row.rollout_id, told]

    return table(["sample", "episode", what], rows, cells)
