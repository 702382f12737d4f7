"""The page of a training run: what it says, and the file that it becomes."""

from __future__ import annotations

import datetime
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from reward_kit.display_text import shown
from reward_kit.runs.files import HELD_OUT_SCORE, write_atomically
from reward_kit.runs.report.bundling import SCRIPTS, STYLES, bundle, digest
from reward_kit.runs.report.page import page_file
from reward_kit.runs.report.training.captions import PARTS, SCORE, STOPS, STOPS_TITLE, Line, Part, Picture
from reward_kit.runs.report.training.drawing import LARGE, Chart, draw, short
from reward_kit.runs.report.training.kept_groups import KeptGroups, kept_groups
from reward_kit.runs.report.training.reading import ALARM, Series, TrainingFacts, read_training
from reward_kit.runs.report.training.samples import ShownUpdate, kept_updates
from reward_kit.runs.report.training.thinning import MOST_POINTS, STRETCHES, thinned
from reward_kit.runs.report.wording import href, number, seconds, share

_STYLES, _SCRIPTS = ("page.css", "training.css"), ("base.js", "training.js")
_WITH_GROUPS = (*STYLES, "training.css"), (*SCRIPTS, "training.js")
_TEMPLATES = files("reward_kit.runs.report")
_NAME, _CONFIG = 120, 60_000
_MOST_STOPS = 4
_CONNECTIONS = "connect-src 'self'; "
_STATUSES = ("complete", "failed", "interrupted", "running")


class Alarm(NamedTuple):
    """A limit of the off-policy ledger that was passed: how often, when, and how far at worst."""

    name: str
    times: int
    first: int
    last: int
    worst: str


class FigureRow(NamedTuple):
    """One figure in numbers."""

    name: str
    measured: int
    first: str
    last: str
    least: str
    most: str


class DrawnPart(NamedTuple):
    """Pictures under one heading."""

    anchor: str
    title: str
    charts: Sequence[Chart]


@dataclass(frozen=True, slots=True)
class TrainingPage:
    """What the template shows; texts of strangers went through `shown`."""

    title: str
    run_id: str
    status: str
    version: str
    facts: Sequence[str]
    notes: Sequence[str]
    cards: Sequence[tuple[str, str, str]]
    totals: Sequence[tuple[str, str]]
    score: Chart | None
    parts: Sequence[DrawnPart]
    alarms: Sequence[Alarm]
    kept: Sequence[ShownUpdate]
    groups: KeptGroups | None
    figures: Sequence[FigureRow]
    config: str
    axes: dict[str, Any]
    stretch: str

    @property
    def is_thinned(self) -> bool:
        """Whether a curve has more points than are drawn."""
        return bool(self.stretch)

    @property
    def data(self) -> str:
        """The points of all pictures, as data of the script."""
        charts = [*([self.score] if self.score else []), *(chart for part in self.parts for chart in part.charts)]
        document = {"charts": {chart.key: chart.data for chart in charts}, "axes": self.axes}
        text = json.dumps(document, separators=(",", ":"), allow_nan=False)
        return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def write_training_report(run: Path, target: Path | None = None) -> Path:
    """Write the page of a training run.

    Args:
        run: its folder.
        target: the file; `report.html` in the folder by default.

    Returns:
        The file.

    Raises:
        ConfigError: the folder is not that of a training run, or the file's folder is missing.
        StoreError: a file of the run is damaged, or the page cannot be written.
    """
    is_private, target = target is None, page_file(run, target)
    page = rendered_training(training_page(read_training(run)))
    write_atomically(target, page.encode("utf-8"), is_private=is_private)
    return target


def rendered_training(page: TrainingPage, extra_scripts: Sequence[str] = (), *, is_served: bool = False) -> str:
    """The page as HTML.

    Args:
        page: what it says.
        extra_scripts: put behind its own script.
        is_served: it may ask the server that it came from.
    """
    import jinja2
    import markupsafe

    loader = jinja2.FunctionLoader(lambda name: (_TEMPLATES / name).read_text(encoding="utf-8"))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, loader=loader)
    environment.globals.update(href=href, shown=lambda text: shown(text, _NAME))
    styles, scripts = (_STYLES, _SCRIPTS) if page.groups is None else _WITH_GROUPS
    style, script = bundle(styles), bundle(scripts) + "".join(extra_scripts)
    policy = (
        f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'; "
        f"{_CONNECTIONS if is_served else ''}img-src data:; base-uri 'none'; form-action 'none'"
    )
    as_is = markupsafe.Markup
    own: dict[str, Any] = {"policy": as_is(policy), "style": as_is(style), "script": as_is(script)}
    own["data"] = as_is(page.data)
    if page.groups is not None:
        own |= {"index": as_is(page.groups.data.index), "chunks": list(map(as_is, page.groups.data.texts))}
    return environment.get_template("training/training.html.j2").render(page=page, **own)


def training_page(run: TrainingFacts) -> TrainingPage:
    """What the page of a training run says."""
    header = run.header
    return TrainingPage(
        title=shown(header.task_name, _NAME),
        run_id=shown(header.run_id or run.path.name, _NAME),
        status=header.status if header.status in _STATUSES else "unknown",
        version=header.versions.get("reward_kit", ""),
        facts=_facts(run),
        notes=_notes(run),
        cards=_cards(run),
        totals=_totals(run),
        score=draw("score", SCORE, run, LARGE),
        parts=[part for part in (_part(part, run) for part in PARTS) if part.charts],
        alarms=_alarms(run),
        kept=kept_updates(run.path),
        groups=kept_groups(run.path, header),
        figures=[_figure_row(name, run.series[name]) for name in sorted(run.series) if name != "update"],
        config=shown(yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True), _CONFIG),
        axes=_axes(run),
        stretch=f"about {run.updates / STRETCHES:,.0f}" if run.updates > MOST_POINTS else "",
    )


def _updates_asked(run: TrainingFacts) -> int | None:
    asked = run.config.get("updates")
    return asked if isinstance(asked, int) else None


def _facts(run: TrainingFacts) -> list[str]:
    asked = _updates_asked(run)
    of = f" of {asked:,}" if asked is not None else ""
    header = run.header
    return [
        shown(header.run_id or run.path.name, _NAME),
        f"began {header.timing.started_at:%Y-%m-%d %H:%M} UTC",
        f"{run.updates:,}{of} updates",
        f"worked {seconds(run.last('time/worked_s') or header.timing.worked_s)}",
        f"seed {header.seed}",
    ]


def _notes(run: TrainingFacts) -> list[str]:
    """What a reader must know before believing the curves."""
    notes = []
    asked = _updates_asked(run)
    if run.header.status == "interrupted" or (run.header.status == "failed" and run.updates):
        again = shlex.join(["reward-kit", "train", "--resume", str(run.path)])
        notes.append(f"It ended before its last update. Go on with: {shown(again, 400)}")
    elif run.stopped and asked is not None and run.updates < asked:
        notes.append(f"It ended early: {shown(run.stopped, 400)}.")
    broken = [name for name, series in run.series.items() if not _is_finite(series)]
    if broken:
        where = ", ".join(f"{shown(name, _NAME)} (update {_first_broken(run.series[name]):,})" for name in broken[:5])
        notes.append(f"Not finite, for the first time: {where}{' and more' if len(broken) > 5 else ''}.")
    if HELD_OUT_SCORE not in run.series and "score/mean" in run.series:
        notes.append("No samples are held out: the score is that of the batch in training, another one each time.")
    unscored = run.last("held_out/unscored")
    if unscored:
        notes.append(f"{unscored:,.0f} held-out episodes of the latest evaluation are unscored, and in no mean.")
    if run.resumed_at:
        where = ", ".join(f"{update:,}" for update in run.resumed_at[:10])
        notes.append(f"It was resumed {len(run.resumed_at):,} times, at update {where}: the dotted lines.")
    return notes


def _is_finite(series: Series) -> bool:
    return len(series.finite.values_N) == len(series.values_N)


def _first_broken(series: Series) -> int:
    return next(
        int(update) for update, value in zip(series.updates_N, series.values_N, strict=True) if not math.isfinite(value)
    )


def _cards(run: TrainingFacts) -> list[tuple[str, str, str]]:
    """The headline: where it began, its best, and where it is."""
    series = run.series[run.metric].finite if run.metric in run.series else None
    if series is None or not len(series.values_N):
        return []
    what = "held-out score" if run.metric == HELD_OUT_SCORE else "score of the batch"
    places = [("first", 0), ("last", len(series.values_N) - 1)]
    told = {name: (float(series.values_N[place]), int(series.updates_N[place])) for name, place in places}
    assert run.best is not None
    told["best"] = (run.best[1], run.best[0])
    return [
        (f"{name} {what}", number(told[name][0]), f"after update {told[name][1]:,}{_sure(run, told[name][1])}")
        for name in ("first", "best", "last")
    ]


def _sure(run: TrainingFacts, update: int) -> str:
    error = run.series["held_out/standard_error"].at(update) if "held_out/standard_error" in run.series else None
    return f", ± {number(1.96 * error)}" if error is not None and run.metric == HELD_OUT_SCORE else ""


def _totals(run: TrainingFacts) -> list[tuple[str, str]]:
    names = {
        "episodes": "progress/episodes",
        "environment steps": "progress/env_steps",
        "sampled tokens": "progress/sampled_tokens",
    }
    totals = [(told, f"{value:,.0f}") for told, name in names.items() if (value := run.last(name)) is not None]
    worked = run.last("time/worked_s")
    if worked:
        totals.append(("updates per hour", short(run.updates / worked * 3600)))
    if (passed := run.last("held_out/passed_share")) is not None:
        totals.append(("held-out samples passed at last", share(passed)))
    if run.last_at is not None:
        totals.append(("last line", f"{run.last_at.astimezone(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"))
    return totals


def _part(part: Part, run: TrainingFacts) -> DrawnPart:
    pictures = [_with_stops(picture, run) for picture in part.pictures]
    drawn = [draw(f"{part.anchor}-{place}", picture, run) for place, picture in enumerate(pictures)]
    return DrawnPart(part.anchor, part.title, [chart for chart in drawn if chart is not None])


def _with_stops(picture: Picture, run: TrainingFacts) -> Picture:
    """The picture of how episodes end has a line for each of the most frequent reasons."""
    if picture.title != STOPS_TITLE:
        return picture
    found = {name: series.finite.values_N for name, series in run.series.items() if name.startswith(STOPS)}
    most = sorted((name for name in found if len(found[name])), key=lambda name: -float(found[name].sum()))
    lines = [Line(name, shown(name.removeprefix(STOPS).removesuffix("_share"), _NAME)) for name in most[:_MOST_STOPS]]
    return picture._replace(lines=tuple(lines))


def _alarms(run: TrainingFacts) -> list[Alarm]:
    alarms = []
    for name, series in run.series.items():
        if name.startswith(ALARM):
            finite = series.finite.values_N
            bare = name.removeprefix(ALARM)
            worst = (finite.min() if bare == "effective_share" else finite.max()) if len(finite) else math.nan
            told = short(float(worst)) if math.isfinite(worst) else "not finite"
            first, last = int(series.updates_N[0]), int(series.updates_N[-1])
            alarms.append(Alarm(shown(bare, _NAME), len(series.values_N), first, last, told))
    return sorted(alarms, key=lambda alarm: -alarm.times)


def _figure_row(name: str, series: Series) -> FigureRow:
    values = series.finite.values_N
    if not len(values):
        return FigureRow(shown(name, _NAME), 0, *["not finite"] * 4)
    told = [short(float(value)) for value in (values[0], values[-1], values.min(), values.max())]
    return FigureRow(shown(name, _NAME), len(series.values_N), *told)


def _axes(run: TrainingFacts) -> dict[str, Any]:
    """Other things than updates to draw the curves over: how far each was after an update."""
    axes = {}
    for name, figure, unit in (
        ("environment steps", "progress/env_steps", 1.0),
        ("sampled tokens", "progress/sampled_tokens", 1.0),
        ("hours of work", "time/worked_s", 3600.0),
    ):
        if figure in run.series and len((series := thinned(run.series[figure].finite)).values_N):
            values = [float(f"{value / unit:.6g}") for value in series.values_N.tolist()]
            axes[name] = {"u": [0, *series.updates_N.tolist()], "v": [0.0, *values]}
    return axes
