"""Live progress on standard error: running score with its interval, rate, errors and time left.

`rich` redraws one line on a terminal; `plain` prints a line now and then, for logs; `none` is silent.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from reward_kit.console import SafeConsole
from reward_kit.reward_agent.stats import AgentStats
from reward_kit.runs.summary import EpisodeRow, score_interval
from reward_kit.runs.tables import figure

DisplayKind = Literal["rich", "plain", "none"]
_FEWEST_SAMPLES = 5  # an interval from fewer says nothing while the run goes on


class Display:
    """Shows a run's progress. Use it as a context manager; it listens to the run.

    Args:
        kind: "rich", "plain" or "none".
        total: the number of episodes.
        console: where it draws, standard error by default.

    Attributes:
        scoring: tells how the scoring goes, where the run scores; None until somebody says who does.
    """

    def __init__(self, kind: DisplayKind, total: int, console: SafeConsole | None = None) -> None:
        self._kind, self._total = kind, total
        self.scoring: Callable[[], AgentStats | None] = lambda: None
        self._console = console or SafeConsole(stderr=True)
        self._live = Live(self, console=self._console, refresh_per_second=4, transient=True) if kind == "rich" else None
        self._began = time.monotonic()
        self._stopped = self._errors = self._scored = self._waiting = self._resumed = self._scored_before = 0
        self._scores: dict[str, list[float]] = defaultdict(list)
        self._samples: dict[str, list[str]] = defaultdict(list)
        self._next_line = self._began + 5.0

    def __enter__(self) -> Self:
        # What was told before was there already, and says nothing about the rate.
        self._began, self._resumed, self._scored_before = time.monotonic(), self._stopped, self._scored
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)
        elif self._kind == "plain":
            self._console.print(self._line())

    def say(self, note: str) -> None:
        """Show a note beside the progress."""
        if self._kind != "none":
            self._console.print(note, style="yellow")

    def episode_stopped(self, row: EpisodeRow) -> None:
        """An episode is over."""
        self._stopped += 1
        self._errors += row.is_error
        self._waiting += not row.is_error
        self._print_now_and_then()

    def episode_scored(self, row: EpisodeRow) -> None:
        """An episode has a score, or an error in place of one."""
        self._scored += 1
        self._waiting -= 1
        self._errors += row.score_error is not None
        if row.score is not None:
            self._scores[row.policy].append(row.score)
            self._samples[row.policy].append(row.sample_id)

    def __rich__(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(self._total, 1), completed=self._stopped, width=30)
        grid.add_row(bar, Text(self._line()))
        return grid

    def _line(self) -> str:
        """The progress as one line of text."""
        seconds = max(time.monotonic() - self._began, 1e-3)
        # Where there is nothing to collect, as when transcripts are scored, the work is the scoring.
        only_scores = self._resumed >= self._total
        done = self._scored - self._scored_before if only_scores else self._stopped - self._resumed
        rest = self._waiting if only_scores else self._total - self._stopped
        rate = done / seconds
        left = rest / rate if rate > 0 else None
        parts = [f"{self._stopped}/{self._total}", *self._score_parts(), *([f"{rate:.1f}/s"] if done else [])]
        if self._errors:
            parts.append(f"{self._errors} broken")
        parts += self._waiting_parts()
        if left is not None and rest:
            parts.append(f"{_duration(left)} left")
        return "  ".join(parts)

    def _score_parts(self) -> list[str]:
        parts = []
        for policy, scores in self._scores.items():
            interval = score_interval(scores, self._samples[policy])
            shown = figure(interval.mean)
            if interval.low is not None and interval.high is not None and interval.n_clusters >= _FEWEST_SAMPLES:
                shown += f" [{figure(interval.low)}, {figure(interval.high)}]"
            parts.append(f"{policy} {shown}" if len(self._scores) > 1 else f"score {shown}")
        return parts

    def _waiting_parts(self) -> list[str]:
        stats = self.scoring()
        if not self._waiting or (stats is None and not self._scored):
            return []
        told = f"{self._waiting} waiting for a score"
        if stats is not None:
            median = "" if stats.latency_p50_s is None else f", p50 {stats.latency_p50_s:.2f}s"
            told += f" ({stats.in_flight} in flight{median})"
        return [told]

    def _print_now_and_then(self) -> None:
        if self._kind != "plain":
            return
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + 5.0
            self._console.print(self._line())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
