"""The page of a task in the viewer: the score, cost and latency of its runs, from oldest to newest."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from reward_kit.display_text import escape_text
from reward_kit.errors import RewardKitError
from reward_kit.report.rendering import NAME_LENGTH, Drawing, dollars, number, render, round_step, seconds
from reward_kit.report.run_data import outline_line
from reward_kit.report.viewer_runs import RunCatalog, RunRow
from reward_kit.runs.files import EPISODES_FILE
from reward_kit.runs.run_folder import placed_lines

MOST_RUNS = 50
_MOST_BYTES = 256_000_000  # bytes of episodes.jsonl to read for the latency of all runs of a page
_WIDTH, _LEFT, _RIGHT, _TALL, _GAP = 420.0, 58.0, 8.0, 96.0, 30.0
Latencies = Mapping[str, float]
"""The median duration of an episode in seconds, keyed by policy."""


class TrendPoint(NamedTuple):
    """A run of one policy."""

    row: RunRow
    latency_s: float | None  # the median over the episodes of the run

    @property
    def episode_cost(self) -> float | None:
        """The mean cost of an episode in US dollars; None if unknown."""
        return self.row.cost / self.row.episodes if self.row.cost is not None and self.row.episodes else None

    @property
    def href(self) -> str:
        """The address of the page of the run, relative to this page."""
        return f"../{quote(self.row.run, safe='', errors='surrogateescape')}/"


class LatencyReader:
    """A reader of the latencies of runs. It reads a run again if the run's files change."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int, int], Latencies]] = {}

    def read(self, runs: Iterable[Path]) -> dict[Path, Latencies]:
        """Return the latencies of runs, newest first, until the total size of the files becomes too large."""
        found: dict[Path, Latencies] = {}
        size = 0
        for run in runs:
            try:
                facts = (run / EPISODES_FILE).stat()
                state = facts.st_ino, facts.st_size, facts.st_mtime_ns
                if self._known.get(run, (None,))[0] != state:
                    size += facts.st_size
                    if size > _MOST_BYTES:
                        continue
                    self._known[run] = state, read_latencies(run)
                found[run] = self._known[run][1]
            except (OSError, RewardKitError):  # a removed or damaged run has no latency
                continue
        return found


def read_latencies(run: Path) -> Latencies:
    """Return the median duration of each policy's episodes."""
    durations: dict[str, dict[str, float]] = defaultdict(dict)
    for index, (_, line) in enumerate(placed_lines(run / EPISODES_FILE), 1):
        record = outline_line(run / EPISODES_FILE, index, line)
        duration = (record.get("timing") or {}).get("duration_s")
        if isinstance(duration, int | float) and duration >= 0:
            durations[record["policy"]][record["rollout_id"]] = float(duration)
    return {policy: statistics.median(own.values()) for policy, own in durations.items()}


def draw_trend(policy: str, points: Sequence[TrendPoint]) -> Drawing:
    """Draw the runs of a policy from left to right.

    For each run, the score and its interval, the cost and the latency are drawn.
    """
    description = f"Score, cost and latency of {len(points)} runs of {policy}, oldest first"
    drawing = Drawing(description, _WIDTH, 3 * (_TALL + _GAP) + 4)
    step = (_WIDTH - _LEFT - _RIGHT) / max(1, len(points))
    strips: list[tuple[str, str, Callable[[TrendPoint], float | None], Callable[[float | None], str]]] = [
        ("score", "c0", lambda point: point.row.mean, number),
        ("cost per episode", "c2", lambda point: point.episode_cost, dollars),
        ("seconds per episode (median)", "c1", lambda point: point.latency_s, seconds),
    ]
    for index, (title, kind, value_of, text_of) in enumerate(strips):
        top = 22 + index * (_TALL + _GAP)
        base = top + _TALL - 16
        values = [value_of(point) for point in points]
        bounds = [bound for point in points for bound in (point.row.low, point.row.high)] if index == 0 else []
        known = [value for value in (*values, *bounds) if value is not None]
        low, high = min([0.0, *known]), max([0.0, *known])
        high = low + max(high - low, round_step(high - low) if high > low else 1.0)

        def height(value: float, low: float = low, high: float = high, base: float = base, top: float = top) -> float:
            return base - (value / 2 - low / 2) / (high / 2 - low / 2) * (base - top)

        drawing.label(_LEFT, top - 8, title, "start", "title")
        drawing.path(f"M{_LEFT} {base}H{_WIDTH - _RIGHT}", "axis")
        if not any(value is not None for value in values):
            drawing.label(_LEFT, base - 20, "unknown", "start", "faint")
            continue
        for value in (low, high):
            drawing.label(_LEFT - 6, height(value) + 4, text_of(value), "end")
        drawing.path(f"M{_LEFT} {top}H{_WIDTH - _RIGHT}", "grid")
        line, is_drawn = "", False
        for place, point in enumerate(points):
            if (found := values[place]) is None:
                is_drawn = False
                continue
            x = round(_LEFT + (place + 0.5) * step, 1)
            y = round(height(found), 1)
            line += f"{'L' if is_drawn else 'M'}{x} {y}"
            is_drawn = True
            note = f"{escape_text(point.row.run, NAME_LENGTH)}: {text_of(found)}"
            if index == 0 and point.row.low is not None and point.row.high is not None:
                drawing.path(f"M{x} {height(point.row.low):.1f}V{height(point.row.high):.1f}", "whisker")
                note += f" [{number(point.row.low)}, {number(point.row.high)}]"
            drawing.rect(x - 4, y - 4, 8, 8, "dot", note)
        drawing.path(line, f"curve {kind}")
    return drawing


def trend_page(catalog: RunCatalog, task: str, latencies: LatencyReader) -> str:
    """Return the page with the newest runs of a task. The task is identified by its displayed name."""
    rows = [row for row in catalog.rows if row.task == task and row.episodes is not None]
    newest = list(dict.fromkeys(row.run for row in rows))[:MOST_RUNS]
    paths = {name: path for name in newest if (path := catalog.run_path(name)) is not None}
    found = latencies.read(paths.values())
    rows.sort(key=lambda row: (row.began, row.run, row.policy))
    points = [TrendPoint(row, found.get(paths[row.run], {}).get(row.policy)) for row in rows if row.run in paths]
    by_policy: dict[str, list[TrendPoint]] = defaultdict(list)
    for point in points:
        by_policy[point.row.policy].append(point)
    total = len({row.run for row in rows})
    return render(
        "trend.html.j2",
        None,
        styles=("page.css", "viewer.css"),
        script="",
        trusted={"data": ""},
        task=task,
        count=f"{total:,} run{'' if total == 1 else 's'}" + (f", the newest {MOST_RUNS}" if total > MOST_RUNS else ""),
        points=points,
        drawings=[(policy, draw_trend(policy, own)) for policy, own in sorted(by_policy.items())],
        dollars=dollars,
    )
