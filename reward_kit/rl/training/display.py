"""Progress lines of training on standard error: a line for each update, or one that is redrawn on a terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Literal, Self

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from reward_kit.console import SafeConsole
from reward_kit.rl.training.state import Progress
from reward_kit.runs.files import HELD_OUT_SCORE

DisplayKind = Literal["rich", "plain", "none"]


class TrainingDisplay:
    """Shows how training goes. Use it as a context manager.

    Args:
        kind: "rich" draws a bar besides, "plain" prints lines, "none" is silent.
        updates: how many there will be.
        console: where it draws, standard error by default.
        evaluated_every: so many updates, for the time that is left; None: never.
    """

    def __init__(
        self, kind: DisplayKind, updates: int, console: SafeConsole | None = None, *, evaluated_every: int | None = None
    ) -> None:
        self._kind, self._updates, self._every = kind, updates, evaluated_every
        self._console = console or SafeConsole(stderr=True)
        self._live = Live(self, console=self._console, refresh_per_second=4, transient=True) if kind == "rich" else None
        self._done = 0
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._evaluation_s = 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def begin_at(self, updates: int) -> None:
        """So many updates were made before."""
        self._done = updates

    def say(self, note: str) -> None:
        """Show a note."""
        if self._kind != "none":
            self._console.print(note, style="yellow", soft_wrap=True)

    def updated(self, update: int, figures: Mapping[str, float], progress: Progress) -> None:
        """An update is made."""
        self._done = update
        if (seconds := figures.get("time/total_s")) is not None:
            self._seconds.append(seconds)
        self._evaluation_s = figures.get("time/evaluate_s", self._evaluation_s)
        if self._kind != "none":
            line = self._line(update, figures, progress)
            self._console.print(line, soft_wrap=True)

    def __rich__(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(self._updates, 1), completed=self._done, width=30)
        grid.add_row(bar, Text(f"update {self._done}/{self._updates}{self._left()}"))
        return grid

    def _line(self, update: int, figures: Mapping[str, float], progress: Progress) -> str:
        width = len(str(self._updates))
        parts = [f"update {update:{width}}/{self._updates}", *_told(figures)]
        if (found := figures.get(HELD_OUT_SCORE)) is not None:
            best = f" (best {progress.best:.3f})" if progress.best is not None and progress.best > found else ""
            parts.append(f"held-out {found:.3f}{best}")
        return "  ".join(parts) + self._left()

    def _evaluations_left(self) -> int:
        """Those of every so many updates, and the one after the last."""
        if self._every is None:
            return 0
        return -(-self._updates // self._every) - self._done // self._every

    def _left(self) -> str:
        left = self._updates - self._done
        # The first of a process makes what the others find made, and of one alone nobody can tell.
        known = list(self._seconds)[1:] if len(self._seconds) < _RECENT else list(self._seconds)
        if left <= 0 or not known:
            return ""
        seconds = left * sum(known) / len(known) + self._evaluations_left() * self._evaluation_s
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        told = f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
        return f"  {told} left"


_RECENT = 20
"""Updates whose mean says how long the next ones will take: games that are learned grow shorter, and answers longer."""
_SHOWN = (
    ("score/mean", "score", ".3f"),
    ("learner/approx_kl", "kl", ".4f"),
    ("learner/clip_fraction", "clipped", ".1%"),
    ("learner/lag_mean", "lag", ".1f"),
    ("overlap/hidden_share", "hidden", ".0%"),
    ("speed/sampled_tokens_per_s", "tokens/s", ",.0f"),
    ("time/total_s", "seconds", ".1f"),
)


def _told(figures: Mapping[str, float]) -> list[str]:
    # In `sync` nothing is hidden, and to say so on every line would hide what is said.
    shown = {name: value for name, value in figures.items() if name != "overlap/hidden_share" or value >= 0.005}
    told = [f"{label} {shown[name]:{form}}" for name, label, form in _SHOWN if name in shown]
    if unscored := figures.get("score/unscored"):
        told.append(f"{unscored:.0f} unscored")
    alarms = [name.removeprefix("learner/alarm/") for name in figures if name.startswith("learner/alarm/")]
    return [*told, f"ALARM {', '.join(alarms)}"] if alarms else told
