"""Where figures go: `metrics.jsonl` always, TensorBoard and Weights & Biases where the train file asks for them."""

from __future__ import annotations

import datetime
import json
import math
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from reward_kit.errors import ConfigError, how_to_install
from reward_kit.private_files import private_opener
from reward_kit.rl.training.config import LogsModel, WandbModel
from reward_kit.runs.files import METRICS, cut_torn_line, told_of


class Writer(Protocol):
    """Takes the figures of one update after the other."""

    def write(self, update: int, figures: Mapping[str, float]) -> None:
        """The figures of an update; update 0 is before the first."""

    def close(self) -> None:
        """No more will come."""


class MetricsFile:
    """`metrics.jsonl`: a line for each update, with `update`, `at` (UTC) and its figures. What is not finite is null.

    Args:
        path: the file; what is there stays, but for a torn last line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with told_of("open", path):
            cut_torn_line(path)
            self._descriptor = private_opener(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    @property
    def size(self) -> int:
        """Bytes so far."""
        return os.fstat(self._descriptor).st_size

    def cut(self, size: int) -> None:
        """Forget what was written beyond `size` bytes: those updates will be made again."""
        with told_of("cut", self._path):
            os.ftruncate(self._descriptor, min(size, self.size))

    def write(self, update: int, figures: Mapping[str, float]) -> None:
        """Add a line.

        Raises:
            StoreError: it cannot be written.
        """
        known = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        at = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"update": update, "at": at, **known}, allow_nan=False).encode("ascii") + b"\n"
        with told_of("write", self._path):
            os.write(self._descriptor, line)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class TensorBoardWriter:
    """TensorBoard's event files.

    Args:
        folder: where to.
        first: the first update that will be written; what an earlier process wrote from there on is hidden.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, folder: Path, first: int = 0) -> None:
        if find_spec("tensorboard") is None:
            raise ConfigError(f"logs.tensorboard: tensorboard is not installed; {how_to_install('train')}")
        from torch.utils.tensorboard import SummaryWriter

        make: Any = SummaryWriter
        self._writer = make(str(folder), purge_step=first or None)

    def write(self, update: int, figures: Mapping[str, float]) -> None:
        """A scalar for each."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, update)
        self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        self._writer.close()


class WandbWriter:
    """A run of Weights & Biases; the one thing here that leaves the machine, where its mode is online.

    Args:
        asked: the project.
        run: the folder of the run, whose name is the id, so that a resume goes on with it.
        config: the resolved train file.

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(self, asked: WandbModel, run: Path, config: Mapping[str, Any]) -> None:
        if find_spec("wandb") is None:
            raise ConfigError("logs.wandb: wandb is not installed; pip install wandb, or leave the block out")
        from importlib import import_module

        wandb: Any = import_module("wandb")
        self._run = wandb.init(
            project=asked.project,
            entity=asked.entity,
            mode=asked.mode,
            id=run.name,
            name=run.name,
            dir=str(run),
            resume="allow",
            config=dict(config),
        )

    def write(self, update: int, figures: Mapping[str, float]) -> None:
        """One step of the run."""
        self._run.log(dict(figures), step=update)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


class Logs:
    """All writers of a run. Use it as a context manager.

    Args:
        run: the folder of the run.
        asked: which there are besides `metrics.jsonl`.
        config: the resolved train file.
        first: the first update that will be written.
        metrics_size: how much of `metrics.jsonl` stays; None leaves it.

    Raises:
        ConfigError: what is asked for is not installed.
    """

    def __init__(
        self, run: Path, asked: LogsModel, config: Mapping[str, Any], first: int = 0, metrics_size: int | None = None
    ) -> None:
        self.metrics = MetricsFile(run / METRICS)
        if metrics_size is not None:
            self.metrics.cut(metrics_size)
        self._writers: list[Writer] = [self.metrics]
        if asked.tensorboard:
            self._writers.append(TensorBoardWriter(run / "tensorboard", first))
        if asked.wandb is not None:
            self._writers.append(WandbWriter(asked.wandb, run, config))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self._writers:
            writer.close()

    def write(self, update: int, figures: Mapping[str, float]) -> None:
        """The figures of an update, to all of them."""
        for writer in self._writers:
            writer.write(update, figures)
