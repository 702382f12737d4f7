"""How long one reward call takes, for the overlap simulator: a distribution by its figures, or the calls of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reward_kit.errors import ConfigError, did_you_mean, why_unreadable
from reward_kit.reward_agent.overlap.settings import MOST_SECONDS

Floats = npt.NDArray[np.float64]


class _Kind(NamedTuple):
    """One distribution: its parameters by name, and how numbers are drawn."""

    parameters: tuple[str, ...]
    draw: Callable[[np.random.Generator, Sequence[float], tuple[int, ...]], Floats]


def _lognormal(generator: np.random.Generator, given: Sequence[float], size: tuple[int, ...]) -> Floats:
    mean, sigma = given
    if mean == 0.0:
        return np.zeros(size)
    return generator.lognormal(math.log(mean) - sigma * sigma / 2, sigma, size)


_KINDS = {
    "constant": _Kind(("SECONDS",), lambda generator, given, size: np.full(size, given[0])),
    "uniform": _Kind(("LOW", "HIGH"), lambda generator, given, size: generator.uniform(given[0], given[1], size)),
    "exponential": _Kind(("MEAN",), lambda generator, given, size: generator.exponential(given[0], size)),
    "lognormal": _Kind(("MEAN", "SIGMA"), _lognormal),
    "empirical": _Kind((), lambda generator, given, size: generator.choice(np.asarray(given, np.float64), size)),
}


@dataclass(frozen=True, slots=True)
class Latency:
    """The distribution of the seconds that one reward call takes.

    Attributes:
        kind: "constant", "uniform", "exponential", "lognormal", or "empirical", which draws from what was measured.
        figures: of a constant, the seconds; of a uniform distribution, its lowest and highest; of an exponential one,
            its mean; of a log-normal one, its mean and the standard deviation of its logarithm; else what was measured.

    Raises:
        ConfigError: the kind is unknown, or a figure is no possible one.
    """

    kind: str
    figures: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigError(f"latency {self.kind!r} is unknown{did_you_mean(self.kind, _KINDS)}")
        names = _KINDS[self.kind].parameters
        if names and len(self.figures) != len(names):
            raise ConfigError(f"latency {self.kind} is written {form_of(self.kind)}, with {len(names)} numbers")
        if not self.figures:
            raise ConfigError("latency empirical has no measured call to draw from")
        for figure in self.figures:
            if not math.isfinite(figure) or figure < 0:
                raise ConfigError(f"latency {self.kind}: {figure:g} is no finite number from 0 on")
            if figure > MOST_SECONDS:
                raise ConfigError(
                    f"latency {self.kind}: {figure:g} is above {MOST_SECONDS:g}, the most that is simulated"
                )
        if self.kind == "uniform" and self.figures[0] > self.figures[1]:
            low, high = self.figures
            raise ConfigError(f"latency uniform: LOW is at most HIGH, not {low:g} and {high:g}")

    def draw(self, generator: np.random.Generator, size: tuple[int, ...]) -> Floats:
        """As many seconds as `size` asks for."""
        return _KINDS[self.kind].draw(generator, self.figures, size)

    def __str__(self) -> str:
        if self.kind == "empirical":
            return f"empirical, from {len(self.figures)} measured calls"
        return ":".join([self.kind, *(f"{figure:g}" for figure in self.figures)])


def form_of(kind: str) -> str:
    """How a kind of latency is written: "uniform:LOW:HIGH"."""
    return ":".join([kind, *_KINDS[kind].parameters])


def parse_latency(text: str) -> Latency:
    """The latency that a user wrote: `uniform:1:40`, `constant:3`, `exponential:8`, `lognormal:8:1.0`, `file:PATH`.

    PATH is the `scores.jsonl` of a run, or the run.

    Raises:
        ConfigError: it cannot be read.
    """
    kind, _, rest = text.partition(":")
    if kind == "file":
        path = Path(rest)
        return Latency("empirical", read_durations(path / "scores.jsonl" if path.is_dir() else path))
    written = {name for name in _KINDS if name != "empirical"}
    if kind not in written:
        raise ConfigError(f"latency {text!r}: no kind {kind!r}{did_you_mean(kind, {*written, 'file'})}")
    try:
        figures = tuple(float(part) for part in rest.split(":"))
    except ValueError:
        raise ConfigError(f"latency {text!r}: it is written {form_of(kind)}, with numbers") from None
    return Latency(kind, figures)


def read_durations(path: Path) -> tuple[float, ...]:
    """The seconds of each call in the `scores.jsonl` of a run; a last line that was cut off is left out.

    The episodes that a batch reward scored in one call are one call.

    Raises:
        ConfigError: the file cannot be read, a line of it is no score, or it has none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path}: {why_unreadable(path, error)}") from None
    found: list[float] = []
    groups: set[tuple[str, float]] = set()
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith("\n"):
            continue
        duration, group = _duration(line, f"{path}:{number}")
        if group is not None and (group, duration) in groups:
            continue
        groups.add((group or "", duration))
        found.append(duration)
    if not found:
        raise ConfigError(f"{path} holds no score to take a duration from")
    return tuple(found)


def _duration(line: str, where: str) -> tuple[float, str | None]:
    try:
        record: Any = json.loads(line)
        duration = float(record["timing"]["duration_s"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{where} has no number at timing.duration_s, as scores.jsonl of a run has") from None
    if not math.isfinite(duration) or duration < 0:
        raise ConfigError(f"{where}: timing.duration_s is {duration:g}, which is no duration")
    return duration, record.get("scored_group")
