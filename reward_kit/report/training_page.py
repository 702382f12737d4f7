"""The page of a training run: how it learned, what the figures mean, and episodes along the way."""

from __future__ import annotations

import datetime
import math
import shlex
from typing import Any

import numpy as np
import yaml

from reward_kit.display_text import shown
from reward_kit.report.rendering import (
    NAME_LENGTH,
    RUN_SCRIPTS,
    RUN_STYLES,
    as_script_data,
    bundle,
    number,
    render,
    seconds,
    share,
    status_text,
)
from reward_kit.report.training_data import (
    ALARM,
    MOST_POINTS,
    STRETCHES,
    Series,
    TrainingFacts,
    kept_groups,
    kept_updates,
    thinned,
)
from reward_kit.report.training_pictures import (
    LARGE,
    PARTS,
    SCORE,
    STOPS,
    STOPS_TITLE,
    Chart,
    Line,
    Picture,
    PictureGroup,
    draw,
    short,
)
from reward_kit.runs.files import HELD_OUT_SCORE

_CONFIG_LENGTH = 60_000
_MOST_STOPS = 4


def training_page(run: TrainingFacts, extra_script: str = "", *, is_served: bool = False) -> str:
    """The page of a training run as HTML.

    Args:
        run: the run.
        extra_script: put behind its own script.
        is_served: it may ask the server that it came from.
    """
    header, groups, score = run.header, kept_groups(run.path, run.header), draw("score", SCORE, run, LARGE)
    parts = [(part.anchor, part.title, drawn) for part in PARTS if (drawn := _drawn(part, run))]
    charts = [*([score] if score else []), *(chart for _, _, drawn in parts for chart in drawn)]
    data = as_script_data({"charts": {chart.key: chart.data for chart in charts}, "axes": _axes(run)})
    page = {
        "title": shown(header.task_name, NAME_LENGTH),
        "run_id": shown(header.run_id or run.path.name, NAME_LENGTH),
        "status": status_text(header.status),
        "version": header.versions.get("reward_kit", ""),
        "facts": _facts(run),
        "notes": _notes(run),
        "cards": _cards(run),
        "totals": _totals(run),
        "score": score,
        "stretch": f"about {run.updates / STRETCHES:,.0f}" if run.updates > MOST_POINTS else "",
        "parts": parts,
        "alarms": _alarms(run),
        "kept": kept_updates(run.path),
        "groups": groups,
        "figures": [_figure_row(name, run.series[name]) for name in sorted(run.series) if name != "update"],
        "config": shown(yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True), _CONFIG_LENGTH),
    }
    styles, scripts = (RUN_STYLES, RUN_SCRIPTS) if groups is not None else (("page.css",), ("base.js",))
    return render(
        "training.html.j2",
        page,
        styles=(*styles, "training.css"),
        script=bundle((*scripts, "training.js")) + extra_script,
        trusted={"data": data}
        | ({"index": groups.data.index, "chunks": groups.data.texts} if groups is not None else {}),
        may_connect=is_served,
    )


def _updates_asked(run: TrainingFacts) -> int | None:
    asked = run.config.get("updates")
    return asked if isinstance(asked, int) else None


def _facts(run: TrainingFacts) -> list[str]:
    header, asked = run.header, _updates_asked(run)
    return [
        shown(header.run_id or run.path.name, NAME_LENGTH),
        f"began {header.timing.started_at:%Y-%m-%d %H:%M} UTC",
        f"{run.updates:,}{f' of {asked:,}' if asked is not None else ''} updates",
        f"took {seconds(run.last('time/worked_s') or header.timing.worked_s)}",
        f"seed {header.seed}",
    ]


def _notes(run: TrainingFacts) -> list[str]:
    """The limits of the curves, shown before them."""
    notes, asked = [], _updates_asked(run)
    if run.header.status == "interrupted" or (run.header.status == "failed" and run.updates):
        again = shlex.join(["reward-kit", "train", "--resume", str(run.path)])
        notes.append(f"It ended before its last update. Go on with: {shown(again, 400)}")
    elif run.stopped and asked is not None and run.updates < asked:
        notes.append(f"It ended early: {shown(run.stopped, 400)}.")
    broken = [
        f"{shown(name, NAME_LENGTH)} (update {series.updates_N[bad[0]]:,})"
        for name, series in run.series.items()
        if len(bad := np.flatnonzero(~np.isfinite(series.values_N)))
    ]
    if broken:
        more = " and more" if len(broken) > 5 else ""
        notes.append(f"Not finite, for the first time: {', '.join(broken[:5])}{more}.")
    if HELD_OUT_SCORE not in run.series and "score/mean" in run.series:
        notes.append("No samples are held out: the score is that of the batch in training, another one each time.")
    if unscored := run.last("held_out/unscored"):
        notes.append(f"{unscored:,.0f} held-out episodes of the latest evaluation are unscored, and in no mean.")
    if run.resumed_at:
        where = ", ".join(f"{update:,}" for update in run.resumed_at[:10])
        notes.append(f"It was resumed {len(run.resumed_at):,} times, at update {where}: the dotted lines.")
    return notes


def _cards(run: TrainingFacts) -> list[tuple[str, str, str]]:
    """The headline: the first, the best and the last score."""
    series = run.series[run.metric].finite if run.metric in run.series else None
    if series is None or not len(series.values_N) or run.best is None:
        return []
    is_held_out = run.metric == HELD_OUT_SCORE
    errors, cards = run.series.get("held_out/standard_error") if is_held_out else None, []
    first, last = ((int(series.updates_N[at]), float(series.values_N[at])) for at in (0, -1))
    for name, (update, value) in (("first", first), ("best", run.best), ("last", last)):
        error = errors.at(update) if errors is not None else None
        sure = f", ± {number(1.96 * error)}" if error is not None else ""
        title = f"{name} {'held-out score' if is_held_out else 'score of the batch'}"
        cards.append((title, number(value), f"after update {update:,}{sure}"))
    return cards


def _totals(run: TrainingFacts) -> list[tuple[str, str]]:
    names = {
        "episodes": "progress/episodes",
        "environment steps": "progress/env_steps",
        "sampled tokens": "progress/sampled_tokens",
    }
    totals = [(told, f"{value:,.0f}") for told, name in names.items() if (value := run.last(name)) is not None]
    if worked := run.last("time/worked_s"):
        totals.append(("updates per hour", short(run.updates / worked * 3600)))
    if (passed := run.last("held_out/passed_share")) is not None:
        totals.append(("held-out samples passed at last", share(passed)))
    if run.last_at is not None:
        totals.append(("last line", f"{run.last_at.astimezone(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"))
    return totals


def _drawn(part: PictureGroup, run: TrainingFacts) -> list[Chart]:
    pictures = [_with_stops(picture, run) for picture in part.pictures]
    drawn = [draw(f"{part.anchor}-{index}", picture, run) for index, picture in enumerate(pictures)]
    return [chart for chart in drawn if chart is not None]


def _with_stops(picture: Picture, run: TrainingFacts) -> Picture:
    """The picture of how episodes end has a line for each of the most frequent reasons."""
    if picture.title != STOPS_TITLE:
        return picture
    found = {name: series.finite.values_N for name, series in run.series.items() if name.startswith(STOPS)}
    most = sorted((name for name in found if len(found[name])), key=lambda name: -float(found[name].sum()))
    labels = [(name, name.removeprefix(STOPS).removesuffix("_share")) for name in most[:_MOST_STOPS]]
    return picture._replace(lines=tuple(Line(name, shown(label, NAME_LENGTH)) for name, label in labels))


def _alarms(run: TrainingFacts) -> list[tuple[str, int, int, int, str]]:
    """The limits of the off-policy ledger that were passed: name, times, first and last update, worst value."""
    alarms = []
    for name, series in run.series.items():
        if name.startswith(ALARM):
            finite, bare = series.finite.values_N, name.removeprefix(ALARM)
            worst = float(finite.min() if bare == "effective_share" else finite.max()) if len(finite) else math.nan
            told = short(worst) if math.isfinite(worst) else "not finite"
            first, last = int(series.updates_N[0]), int(series.updates_N[-1])
            alarms.append((shown(bare, NAME_LENGTH), len(series.values_N), first, last, told))
    return sorted(alarms, key=lambda alarm: -alarm[1])


def _figure_row(name: str, series: Series) -> tuple[str, int, list[str]]:
    """A figure in numbers: its name, how often it was measured, and its first, last, least and greatest value."""
    values = series.finite.values_N
    if not len(values):
        return shown(name, NAME_LENGTH), 0, ["not finite"] * 4
    told = [short(float(value)) for value in (values[0], values[-1], values.min(), values.max())]
    return shown(name, NAME_LENGTH), len(series.values_N), told


def _axes(run: TrainingFacts) -> dict[str, Any]:
    """Other quantities than updates to draw the curves over: how far each was after an update."""
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
