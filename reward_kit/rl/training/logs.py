"""Outputs for figures: `metrics.jsonl`, TensorBoard, Weights & Biases, and progress on standard error."""

from __future__ import annotations

import datetime
import json
import math
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from reward_kit.console import SafeConsole
from reward_kit.errors import ConfigError, install_hint
from reward_kit.private_files import private_opener
from reward_kit.rl.training.config import LogsModel, TrainModel
from reward_kit.rl.training.pipelines import Progress
from reward_kit.runs.files import HELD_OUT_SCORE, METRICS_FILE, append_line, cut_torn_line, wrap_os_errors
from reward_kit.runs.run_folder import GENERATED_NAME

DisplayKind = Literal["rich", "plain", "none"]


class MetricsFile:
    """The file `metrics.jsonl`. Each line contains an `update`, the UTC time `at`, and figures.

    Non-finite figures are written as null. The content of an existing file is kept, except for an incomplete last line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with wrap_os_errors("open", path):
            cut_torn_line(path)
            self._descriptor = private_opener(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return os.fstat(self._descriptor).st_size

    def cut(self, size: int) -> None:
        """Remove all lines beyond the first `size` bytes, because their updates will be repeated."""
        with wrap_os_errors("cut", self._path):
            os.ftruncate(self._descriptor, min(size, self.size))

    def write(self, update: int, figures: Mapping[str, float]) -> None:
        """Append a line.

        Raises:
            StoreError: If the line cannot be written.
        """
        known = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        at = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"update": update, "at": at, **known}, allow_nan=False).encode("ascii") + b"\n"
        append_line(self._descriptor, self._path, line)

    def close(self) -> None:
        os.close(self._descriptor)


class Logs:
    """All outputs for the figures of a run. Use it as a context manager.

    Args:
        run: the run directory. Its name identifies the run at Weights & Biases, so a resumed run continues there.
        options: the outputs other than `metrics.jsonl`.
        config: the resolved train file.
        first: the first update that will be written. In TensorBoard, any figures that earlier processes wrote for this
            update or later ones are hidden.
        metrics_size: the size in bytes to which `metrics.jsonl` is truncated.

    Raises:
        ConfigError: If a required package is not installed.
    """

    def __init__(self, run: Path, options: LogsModel, config: Mapping[str, Any], first: int, metrics_size: int) -> None:
        self.metrics = MetricsFile(run / METRICS_FILE)
        self.metrics.cut(metrics_size)
        self._tensorboard = self._wandb = None
        if options.tensorboard:
            if find_spec("tensorboard") is None:
                raise ConfigError(f"logs.tensorboard: tensorboard is not installed; {install_hint('train')}")
            from torch.utils.tensorboard import SummaryWriter

            make: Any = SummaryWriter
            self._tensorboard = make(str(run / "tensorboard"), purge_step=first)
        if (wandb := options.wandb) is not None:
            if find_spec("wandb") is None:
                raise ConfigError("logs.wandb: wandb is not installed; run pip install wandb, or remove this section")
            module: Any = import_module("wandb")
            self._wandb = module.init(
                project=wandb.project,
                entity=wandb.entity,
                mode=wandb.mode,
                group=wandb.group,
                id=_wandb_id(run),
                name=run.name,
                dir=str(run),
                resume="allow",
                config=dict(config),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.metrics.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def write(self, update: int, figures: Mapping[str, float]) -> None:
        """Write the figures of an update. Update 0 is the evaluation before the first update."""
        self.metrics.write(update, figures)
        if self._tensorboard is not None:
            for name, value in figures.items():
                self._tensorboard.add_scalar(name, value, update)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(dict(figures), step=update)


def _wandb_id(run: Path) -> str:
    """Return the id of a run at Weights & Biases, which must be unique in the project."""
    # The runs of a sweep have short names, so the name of the sweep's directory is added.
    name = run.name if GENERATED_NAME.search(run.name) else f"{run.resolve().parent.name}-{run.name}"
    return name[-_LONGEST_WANDB_ID:]


_LONGEST_WANDB_ID = 128
_RECENT = 20
"""The number of recent updates from which the remaining time is estimated, because episode lengths change."""
_SHOWN = (
    ("score/mean", "score", ".3f"),
    ("learner/approx_kl", "kl", ".4f"),
    ("learner/clip_fraction", "clipped", ".1%"),
    ("learner/lag_mean", "lag", ".1f"),
    ("overlap/hidden_share", "hidden", ".0%"),
    ("speed/sampled_tokens_per_s", "tokens/s", ",.0f"),
    ("time/total_s", "seconds", ".1f"),
)


class TrainingDisplay:
    """Shows progress on standard error. Use it as a context manager.

    "plain" prints a line for each update, "rich" also shows a progress bar, and "none" prints nothing.
    The train file's `config` contains the number of updates or steps, from which the remaining time is estimated.
    """

    def __init__(self, kind: DisplayKind, config: TrainModel, console: SafeConsole | None = None) -> None:
        self._kind, self._config = kind, config
        self._console = console or SafeConsole(stderr=True)
        self._live = Live(self, console=self._console, refresh_per_second=4, transient=True) if kind == "rich" else None
        self._progress = Progress()
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._env_steps: deque[int] = deque(maxlen=_RECENT)
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

    def begin_at(self, progress: Progress) -> None:
        """Set the progress that earlier processes have made."""
        self._progress = replace(progress)

    def say(self, note: str) -> None:
        """Show a note."""
        if self._kind != "none":
            self._console.print(note, style="yellow", soft_wrap=True)

    def updated(self, figures: Mapping[str, float], progress: Progress) -> None:
        """Show the figures of the latest update."""
        if (seconds := figures.get("time/total_s")) is not None:
            self._seconds.append(seconds)
            self._env_steps.append(progress.env_steps - self._progress.env_steps)
        self._progress = replace(progress)
        self._evaluation_s = figures.get("time/evaluate_s", self._evaluation_s)
        if self._kind == "none":
            return
        parts = [self._position()]
        # In `sync`, no time is hidden, and a column of zeros would only be a distraction.
        is_hidden = figures.get("overlap/hidden_share", 0.0) >= 0.005
        shown = [one for one in _SHOWN if one[0] in figures and (one[0] != "overlap/hidden_share" or is_hidden)]
        parts += [f"{label} {figures[name]:{form}}" for name, label, form in shown]
        if unscored := figures.get("score/unscored"):
            parts.append(f"{unscored:.0f} unscored")
        if alarms := [name.removeprefix("learner/alarm/") for name in figures if name.startswith("learner/alarm/")]:
            parts.append(f"ALARM {', '.join(alarms)}")
        if (score := figures.get(HELD_OUT_SCORE)) is not None:
            best = f" (best {progress.best:.3f})" if progress.best is not None and progress.best > score else ""
            parts.append(f"held-out {score:.3f}{best}")
        self._console.print("  ".join(parts) + self._time_left(), soft_wrap=True)

    def __rich__(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        updates, env_steps = self._config.updates, self._config.max_env_steps
        shares = [self._progress.updates / updates] if updates is not None else []
        shares += [self._progress.env_steps / env_steps] if env_steps is not None else []
        grid.add_row(
            ProgressBar(total=1.0, completed=max(shares), width=30), Text(self._position() + self._time_left())
        )
        return grid

    def _position(self) -> str:
        updates, env_steps = self._config.updates, self._config.max_env_steps
        text = f"update {self._progress.updates:{len(str(updates or 1000))}}" + (f"/{updates}" if updates else "")
        return text + (f"  {self._progress.env_steps:,}/{env_steps:,} steps" if env_steps is not None else "")

    def _updates_left(self) -> int:
        """Return the number of updates until the limit, which is an estimate if environment steps are limited."""
        left = []
        if (updates := self._config.updates) is not None:
            left.append(updates - self._progress.updates)
        if (env_steps := self._config.max_env_steps) is not None and (recent := sum(self._env_steps)):
            left.append(math.ceil((env_steps - self._progress.env_steps) * len(self._env_steps) / recent))
        return min(left, default=0)

    def _time_left(self) -> str:
        left = self._updates_left()
        # The first update of a process also warms caches, so it is not used for the estimate.
        known = list(self._seconds)[1:] if len(self._seconds) < _RECENT else list(self._seconds)
        if left <= 0 or not known:
            return ""
        evaluations = 0
        if (evaluation := self._config.evaluation) is not None:
            # Evaluations follow every n-th update and the last update.
            done, total, every = self._progress.updates, self._progress.updates + left, evaluation.every
            if evaluation.every_env_steps is not None:
                done, every = self._progress.env_steps, evaluation.every_env_steps
                total = done + left * sum(self._env_steps) // len(self._env_steps)
            evaluations = -(-total // every) - done // every
        seconds = left * sum(known) / len(known) + evaluations * self._evaluation_s
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        text = f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
        return f"  {text} left"
