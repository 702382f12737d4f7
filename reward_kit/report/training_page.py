"""The page of a training run: learning curves with explanations, and the logged episodes."""

from __future__ import annotations

import datetime
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import yaml

from reward_kit.display_text import escape_text
from reward_kit.report.rendering import (
    NAME_LENGTH,
    RUN_SCRIPTS,
    RUN_STYLES,
    as_script_data,
    bundle,
    number,
    render,
    round_step,
    seconds,
    share,
    status_text,
)
from reward_kit.report.training_data import (
    ALARM,
    MOST_POINTS,
    STRETCHES,
    Curve,
    Series,
    TrainingFacts,
    build_curve,
    kept_groups,
    kept_updates,
    thinned,
)
from reward_kit.runs.files import HELD_OUT_SCORE
from reward_kit.runs.run_folder import current_status


class ChartLine(NamedTuple):
    """A figure in a chart, and its label in the legend."""

    name: str
    label: str


class ChartSpec(NamedTuple):
    """The specification of a chart."""

    title: str
    lines: tuple[ChartLine, ...]  # missing figures are skipped
    note: str  # the meaning of the figures, and warning signs
    has_zero: bool = True  # whether the scale includes 0
    is_log: bool = False  # whether the scale is logarithmic if values are far apart
    is_share: bool = False  # whether values are shown in percent
    hides_zeros: bool = False  # whether the chart is omitted if all values are 0


class ChartGroup(NamedTuple):
    """Charts under one heading."""

    anchor: str
    title: str
    pictures: tuple[ChartSpec, ...]


SCORE = ChartSpec(
    "Score",
    (ChartLine(HELD_OUT_SCORE, "held-out samples"), ChartLine("score/mean", "training batch")),
    "Mean score on the held-out samples with fixed seeds, ± 1.96 standard errors. The training batch changes with "
    "every update, so its score is noisier; if it rises away from the held-out score, the policy overfits.",
    has_zero=False,
)
POLICY = ChartGroup(
    "policy",
    "Policy",
    (
        ChartSpec(
            "KL",
            (ChartLine("learner/approx_kl", "within the update"), ChartLine("learner/kl", "to the reference")),
            "KL of one update (k3 estimator) and, if the run has a reference policy, KL to it. A jump "
            "indicates that updates are too large; lower ppo.lr.",
        ),
        ChartSpec(
            "Clip fraction",
            (
                ChartLine("learner/clip_fraction", "all"),
                ChartLine("learner/clip_fraction_low", "lower bound"),
                ChartLine("learner/clip_fraction_high", "upper bound"),
            ),
            "Share of tokens whose ratio is clipped and which therefore have no gradient. A few percent is usual.",
            is_share=True,
        ),
        ChartSpec(
            "Entropy",
            (ChartLine("learner/entropy", "nats per token"),),
            "Entropy of the policy. Near 0, exploration stops and the episodes of a group become identical.",
        ),
        ChartSpec(
            "Gradient norm",
            (ChartLine("learner/grad_norm", "mean of the update"), ChartLine("learner/grad_norm_max", "greatest")),
            "The norm before clipping to ppo.max_grad_norm. Single peaks are clipped; a steady rise is a warning.",
            is_log=True,
            has_zero=False,
        ),
        ChartSpec("Learning rate", (ChartLine("learner/lr", "learning rate"),), "The learning rate schedule."),
        ChartSpec(
            "Loss",
            (
                ChartLine("learner/policy_loss", "policy"),
                ChartLine("learner/value_loss", "value"),
                ChartLine("learner/kl_loss", "KL"),
                ChartLine("learner/entropy_loss", "entropy"),
            ),
            "The terms of the loss. The policy loss is measured on new episodes in each update and need not decrease.",
            has_zero=False,
        ),
        ChartSpec(
            "Critic",
            (ChartLine("learner/explained_variance", "explained variance"),),
            "1 means perfect predictions, 0 means no better than the mean, and below 0 means worse than the mean.",
            has_zero=False,
        ),
    ),
)
OFF_POLICY = ChartGroup(
    "off-policy",
    "Off-policy",
    (
        ChartSpec(
            "Policy lag",
            (ChartLine("learner/lag_mean", "mean"), ChartLine("learner/lag_max", "greatest")),
            "Number of versions between the weights that sampled a token and the weights in training: 0 for sync and "
            "minibatch, 1 for one_step_off and both.",
        ),
        ChartSpec(
            "Effective sample size",
            (ChartLine("learner/effective_share", "share of tokens"),),
            "Effective sample size of the importance ratios, as a share. If it falls, few tokens dominate.",
            is_share=True,
        ),
        ChartSpec(
            "Sampler-learner gap",
            (ChartLine("learner/logprob_gap_mean", "mean difference"), ChartLine("learner/logprob_gap", "greatest")),
            "Difference between the recorded log-probability of a token and the log-probability that the learner "
            "computes before the update. It is about 1e-6 in float32 at lag 0; a larger difference indicates that "
            "sampler and learner differ.",
            is_log=True,
            has_zero=False,
        ),
        ChartSpec(
            "Probability ratio",
            (
                ChartLine("learner/ratio_min", "least"),
                ChartLine("learner/ratio_mean", "mean"),
                ChartLine("learner/ratio_max", "greatest"),
            ),
            "A token's current probability divided by its probability when it was sampled.",
            is_log=True,
            has_zero=False,
        ),
    ),
)
EPISODES = ChartGroup(
    "figures-episodes",
    "Episodes",
    (
        ChartSpec(
            "Episode length",
            (ChartLine("held_out/steps_mean", "held-out"), ChartLine("episode/steps_mean", "in training")),
            "Mean number of steps. It often falls as the score rises.",
        ),
        ChartSpec(
            "Tokens per episode",
            (ChartLine("held_out/tokens_mean", "held-out"), ChartLine("episode/tokens_mean", "in training")),
            "Mean number of sampled tokens per episode. If it rises but the score does not, the policy is verbose.",
        ),
        ChartSpec(
            "Invalid actions",
            (
                ChartLine("held_out/invalid_action_share", "held-out"),
                ChartLine("episode/invalid_action_share", "in training"),
            ),
            "Share of actions that the environment rejected.",
            is_share=True,
            hides_zeros=True,
        ),
        ChartSpec(
            "Stop reasons",
            (),
            "Share of the batch for each stop reason. Truncated episodes carry little learning signal.",
            is_share=True,
        ),
        ChartSpec(
            "Unscored",
            (ChartLine("held_out/unscored", "held-out"), ChartLine("score/unscored", "in training")),
            "Episodes without a score, which are excluded from training and from means.",
            hides_zeros=True,
        ),
        ChartSpec(
            "Group signal",
            (
                ChartLine("credit/tied_groups_share", "groups with equal scores"),
                ChartLine("credit/zero_advantage_share", "steps with advantage 0"),
                ChartLine("credit/other_peer_share", "steps in a state shared with another episode"),
            ),
            "Groups with equal scores have no group advantage: their samples are too easy or too hard. GiGPO's step "
            "advantage compares steps in shared states.",
            is_share=True,
        ),
    ),
)
TIME = ChartGroup(
    "time",
    "Time",
    (
        ChartSpec(
            "Throughput",
            (
                ChartLine("speed/sampled_tokens_per_s", "tokens sampled per second"),
                ChartLine("speed/trained_tokens_per_s", "tokens trained per second"),
            ),
            "Mean over the whole update, excluding evaluation.",
        ),
        ChartSpec(
            "Environment steps per second",
            (ChartLine("speed/env_steps_per_s", "steps per second"),),
            "Mean over the whole update.",
        ),
        ChartSpec(
            "Time per update",
            (
                ChartLine("time/total_s", "total"),
                ChartLine("time/collect_s", "rollouts"),
                ChartLine("time/update_s", "learner"),
                ChartLine("time/wait_for_scores_s", "waiting for scores"),
            ),
            "Phases that run concurrently are each counted in full.",
        ),
        ChartSpec(
            "Hidden scoring time",
            (ChartLine("overlap/hidden_share", "share of scoring time"),),
            "1 − waiting / scoring: the share of scoring time that overlapped with other work.",
            is_share=True,
        ),
    ),
)
PARTS = (POLICY, OFF_POLICY, EPISODES, TIME)
STOPS = "episode/stop/"
STOPS_TITLE = "Stop reasons"


# Drawing


_Z = 1.96  # the half-width of a 95% normal interval in standard errors
_MOST_DOTS = 40
_FAR_APART = 30.0  # the ratio of values above which a logarithmic scale is used
_Y_TICKS, _X_TICKS = 4, 6


class Box(NamedTuple):
    """The plot area within its chart: left, top, right and bottom, and the size of the chart."""

    left: float
    top: float
    right: float
    bottom: float
    width: float
    height: float


SMALL = Box(54.0, 12.0, 432.0, 176.0, 460.0, 202.0)
LARGE = Box(54.0, 14.0, 1050.0, 296.0, 1080.0, 324.0)


@dataclass(frozen=True, slots=True)
class Axes:
    """The mapping from values and updates to positions in a box."""

    box: Box
    low: float
    high: float
    is_log: bool
    first: int
    last: int

    def x(self, update: float) -> float:
        """Return the x coordinate of an update."""
        share = (update - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return round(self.box.left + share * (self.box.right - self.box.left), 1)

    def y(self, value: float) -> float:
        """Return the y coordinate of a value."""
        low, high, value = (math.log10(n) if self.is_log else n for n in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.box.bottom - min(1.0, max(0.0, share)) * (self.box.bottom - self.box.top), 1)


class CurvePath(NamedTuple):
    """A curve: its label, latest value, path, area of extremes, and dots if it has few points."""

    label: str
    latest: str
    d: str
    extremes: str
    dots: Sequence[tuple[float, float]]


class Tick(NamedTuple):
    """A position on an axis, and its label."""

    at: float
    text: str


class Mark(NamedTuple):
    """An event after an update: "best" or "resumed"."""

    x: float
    update: int
    kind: str


@dataclass(slots=True)
class Chart:
    """A drawn chart."""

    key: str
    picture: ChartSpec
    box: Box
    aloud: str  # a description for screen readers
    data: dict[str, Any]  # for the script: box, scale, and the points of each line
    lines: list[CurvePath] = field(default_factory=list)
    band: str = ""  # an SVG path
    y_ticks: list[Tick] = field(default_factory=list)
    x_ticks: list[Tick] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


def draw(key: str, picture: ChartSpec, run: TrainingFacts, box: Box = SMALL) -> Chart | None:
    """Draw a chart, or return None if the run has no data for the chart."""
    curves = [(line, build_curve(run.series[line.name])) for line in picture.lines if line.name in run.series]
    curves = [(line, curve) for line, curve in curves if np.isfinite(curve.values_M).any()]
    values = np.concatenate([curve.all_values for _, curve in curves]) if curves else np.empty(0)
    if not len(values) or (picture.hides_zeros and not values.any()):
        return None
    band = _band(run, curves)
    scale = _scale(picture, values, band, run, box)
    extents = []
    for line, _ in curves:
        own = run.series[line.name].finite.values_N
        first, last, least, most = (value_text(float(n), picture) for n in (own[0], own[-1], own.min(), own.max()))
        extents.append(f"{line.label}: from {first} to {last}, at least {least}, at most {most}")
    aloud = f"{picture.title}. {'; '.join(extents)}"
    chart = Chart(key, picture, box, aloud, _data(scale, picture, curves, band))
    chart.lines = [
        _picture(line, curve, scale, value_text(run.last(line.name) or 0.0, picture)) for line, curve in curves
    ]
    chart.band = area_path(band, scale)
    chart.y_ticks = [Tick(scale.y(value), value_text(value, picture)) for value in y_ticks(scale)]
    chart.x_ticks = [Tick(scale.x(tick), f"{tick:,}") for tick in whole_ticks(scale.first, scale.last, _X_TICKS)]
    chart.marks = [Mark(scale.x(update), update, "resumed") for update in run.resumed_at]
    if run.best is not None:
        chart.marks.append(Mark(scale.x(run.best[0]), run.best[0], "best"))
    return chart


Band = Sequence[tuple[float, float, float]]
"""Updates, each with a lower and an upper value."""


def _band(run: TrainingFacts, curves: Iterable[tuple[ChartLine, Curve]]) -> Band:
    """Return the mean ± 1.96 standard errors of the held-out score.

    The band is clipped to [0, 1] if all scores are in [0, 1].
    """
    error = run.series.get("held_out/standard_error")
    curve = next((curve for line, curve in curves if line.name == HELD_OUT_SCORE), None)
    if error is None or curve is None:
        return ()
    extremes = [run.series[name].finite.values_N for name in ("held_out/min", "held_out/max") if name in run.series]
    is_share = bool(extremes) and all((of >= 0.0).all() and (of <= 1.0).all() for of in extremes)
    band = []
    for update, value in zip(curve.updates_M.tolist(), curve.values_M.tolist(), strict=True):
        half = error.at(update)
        if half is not None and math.isfinite(value):
            low, high = value - _Z * half, value + _Z * half
            band.append((update, max(0.0, low), min(1.0, high)) if is_share else (update, low, high))
    return band


def _scale(picture: ChartSpec, values: np.ndarray, band: Band, run: TrainingFacts, box: Box) -> Axes:
    low, high = float(values.min()), float(values.max())
    if band:
        low, high = min(low, *(bottom for _, bottom, _ in band)), max(high, *(top for _, _, top in band))
    first, last = 0, run.updates
    is_log = picture.is_log and low > 0.0 and high / low > _FAR_APART
    if is_log:
        return Axes(box, low / 1.15, high * 1.15, True, first, last)
    if picture.title == "Score" and low >= 0.0 and high <= 1.0:
        return Axes(box, 0.0, 1.0, False, first, last)
    low, high = (min(0.0, low), max(0.0, high)) if picture.has_zero else (low, high)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    # There is no margin at 0.
    low, high = low if low == 0.0 else low - room, high if high == 0.0 > low else high + room
    return Axes(box, low, high, False, first, last)


def _picture(line: ChartLine, curve: Curve, scale: Axes, latest: str) -> CurvePath:
    pairs = list(zip(curve.updates_M.tolist(), curve.values_M.tolist(), strict=True))
    points = [(scale.x(update), scale.y(value)) if math.isfinite(value) else None for update, value in pairs]
    parts, is_begin = [], True
    for point in points:
        if point is not None:
            parts.append(f"{'M' if is_begin else 'L'}{point[0]:g} {point[1]:g}")
        is_begin = point is None
    dots = [point for point in points if point is not None] if len(points) <= _MOST_DOTS else []
    extremes: Band = ()
    if curve.low_M is not None and curve.high_M is not None:
        rows = zip(curve.updates_M.tolist(), curve.low_M.tolist(), curve.high_M.tolist(), strict=True)
        extremes = [row for row in rows if math.isfinite(row[1])]
    return CurvePath(line.label, latest, "".join(parts), area_path(extremes, scale), dots)


def area_path(band: Band, scale: Axes) -> str:
    """Return the SVG path of a band, or "" if it has fewer than two points."""
    if len(band) < 2:
        return ""
    above = [f"{scale.x(update):g} {scale.y(top):g}" for update, _, top in band]
    below = [f"{scale.x(update):g} {scale.y(bottom):g}" for update, bottom, _ in reversed(band)]
    return f"M{'L'.join([*above, *below])}Z"


def _data(scale: Axes, picture: ChartSpec, curves: Iterable[tuple[ChartLine, Curve]], band: Band) -> dict[str, Any]:
    """Return the points for the page's script. The script shows the values at the pointer and can change the x axis."""
    return {
        "box": list(scale.box[:4]),
        "scale": [scale.low, scale.high, int(scale.is_log)],
        "updates": [scale.first, scale.last],
        "share": int(picture.is_share),
        "lines": [
            {"label": line.label, "u": curve.updates_M.tolist()}
            | {
                key: list(map(_digits, column.tolist()))
                for key, column in (("v", curve.values_M), ("low", curve.low_M), ("high", curve.high_M))
                if column is not None
            }
            for line, curve in curves
        ],
        "band": [[update, _digits(low), _digits(high)] for update, low, high in band],
    }


def _digits(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


# Numbers


def value_text(value: float, picture: ChartSpec) -> str:
    """Format a value in the unit of the chart."""
    if not picture.is_share:
        return short(value)
    return f"{100.0 * value:.2g}%" if 0.0 < abs(value) < 0.001 else f"{value:.1%}"


def short(value: float) -> str:
    """Format a number with three significant digits, thousands separators, and an exponent for small values."""
    size = abs(value)
    if size >= 10_000:
        return f"{value:,.0f}"
    if size >= 100 or value == int(value):
        return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
    return f"{value:.3g}"


def y_ticks(scale: Axes) -> list[float]:
    """Return round values on the scale of an axis.

    On a logarithmic scale, return powers of ten or, if there are too few, both ends of the scale.
    """
    if not scale.is_log:
        return _round_ticks(scale.low, scale.high, _Y_TICKS)
    powers = range(math.ceil(math.log10(scale.low)), math.floor(math.log10(scale.high)) + 1)
    every = max(1, math.ceil(len(powers) / _Y_TICKS))
    ticks = [10.0**power for power in powers[::every]]
    return ticks if len(ticks) > 1 else [scale.low * 1.15, scale.high / 1.15]


def whole_ticks(first: int, last: int, most: int) -> list[int]:
    """Return round integers from `first` to `last`."""
    return sorted({int(tick) for tick in _round_ticks(float(first), float(last), most) if tick == int(tick)})


def _round_ticks(low: float, high: float, most: int) -> list[float]:
    wanted = (high - low) / most
    if not wanted > 0.0:
        return [low]
    step = round_step(wanted, (1, 2, 2.5, 5, 10))
    first = math.ceil(low / step - 1e-9)
    return [round(place * step, 12) for place in range(first, math.floor(high / step + 1e-9) + 1)]


_CONFIG_LENGTH = 60_000
_MOST_STOPS = 4


def training_page(run: TrainingFacts, extra_script: str = "", *, is_served: bool = False) -> str:
    """Return the page of a training run as HTML."""
    header, groups, score = run.header, kept_groups(run.path, run.header), draw("score", SCORE, run, LARGE)
    parts = [(part.anchor, part.title, drawn) for part in PARTS if (drawn := _drawn(part, run))]
    charts = [*([score] if score else []), *(chart for _, _, drawn in parts for chart in drawn)]
    data = as_script_data({"charts": {chart.key: chart.data for chart in charts}, "axes": _axes(run)})
    status = current_status(run.path, header)
    page = {
        "title": escape_text(header.task_name, NAME_LENGTH),
        "run_id": escape_text(header.run_id or run.path.name, NAME_LENGTH),
        "status": status_text(status),
        "version": header.versions.get("reward_kit", ""),
        "facts": _facts(run),
        "notes": _notes(run, status),
        "cards": _cards(run),
        "totals": _totals(run),
        "score": score,
        "stretch": f"about {run.updates / STRETCHES:,.0f}" if run.updates > MOST_POINTS else "",
        "parts": parts,
        "alarms": _alarms(run),
        "kept": kept_updates(run.path),
        "groups": groups,
        "figures": [_figure_row(name, run.series[name]) for name in sorted(run.series)],
        "config": escape_text(yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True), _CONFIG_LENGTH),
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


def _update_limit(run: TrainingFacts) -> int | None:
    limit = run.config.get("updates")
    return limit if isinstance(limit, int) else None


def _is_finished(run: TrainingFacts) -> bool:
    """Return whether the updates or the environment steps that the train file requires are reached."""
    limit, steps = _update_limit(run), run.config.get("max_env_steps")
    return (limit is not None and run.updates >= limit) or (
        isinstance(steps, int) and (run.last("progress/env_steps") or 0) >= steps
    )


def _facts(run: TrainingFacts) -> list[str]:
    header, limit, steps = run.header, _update_limit(run), run.config.get("max_env_steps")
    return [
        escape_text(header.run_id or run.path.name, NAME_LENGTH),
        f"began {header.timing.started_at:%Y-%m-%d %H:%M} UTC",
        f"{run.updates:,}{f' of {limit:,}' if limit is not None else ''} updates",
        *([f"up to {steps:,} environment steps"] if isinstance(steps, int) else []),
        f"took {seconds(run.last('time/worked_s') or header.timing.worked_s)}",
        f"seed {header.seed}",
    ]


def _notes(run: TrainingFacts, status: str) -> list[str]:
    """Return the notes that are shown before the curves."""
    notes = []
    if status in ("killed", "interrupted") or (status == "failed" and run.updates):
        again = shlex.join(["reward-kit", "train", "--resume", str(run.path)])
        notes.append(f"Training ended before the last update. Resume with: {escape_text(again, 400)}")
    elif run.stopped and not _is_finished(run):
        notes.append(f"Training ended early: {escape_text(run.stopped, 400)}.")
    broken = [
        f"{escape_text(name, NAME_LENGTH)} (update {series.updates_N[bad[0]]:,})"
        for name, series in run.series.items()
        if len(bad := np.flatnonzero(~np.isfinite(series.values_N)))
    ]
    if broken:
        more = " and more" if len(broken) > 5 else ""
        notes.append(f"First non-finite values: {', '.join(broken[:5])}{more}.")
    if HELD_OUT_SCORE not in run.series and "score/mean" in run.series:
        notes.append("No samples are held out, so the score is measured on the training batch.")
    if unscored := run.last("held_out/unscored"):
        notes.append(
            f"{unscored:,.0f} held-out episodes of the latest evaluation are unscored and are excluded from the means."
        )
    if run.resumed_at:
        where = ", ".join(f"{update:,}" for update in run.resumed_at[:10])
        notes.append(f"Training was resumed {len(run.resumed_at):,} times, at update {where} (dotted lines).")
    return notes


def _cards(run: TrainingFacts) -> list[tuple[str, str, str]]:
    """Return the first, best and last scores, which are shown at the top of the page."""
    series = run.series[run.metric].finite if run.metric in run.series else None
    if series is None or not len(series.values_N) or run.best is None:
        return []
    is_held_out = run.metric == HELD_OUT_SCORE
    errors, cards = run.series.get("held_out/standard_error") if is_held_out else None, []
    first, last = ((int(series.updates_N[at]), float(series.values_N[at])) for at in (0, -1))
    for name, (update, value) in (("first", first), ("best", run.best), ("last", last)):
        error = errors.at(update) if errors is not None else None
        sure = f", ± {number(1.96 * error)}" if error is not None else ""
        title = f"{name} {'held-out score' if is_held_out else 'training batch score'}"
        cards.append((title, number(value), f"after update {update:,}{sure}"))
    return cards


def _totals(run: TrainingFacts) -> list[tuple[str, str]]:
    names = {
        "episodes": "progress/episodes",
        "environment steps": "progress/env_steps",
        "sampled tokens": "progress/sampled_tokens",
    }
    totals = [(title, f"{value:,.0f}") for title, name in names.items() if (value := run.last(name)) is not None]
    if worked := run.last("time/worked_s"):
        totals.append(("updates per hour", short(run.updates / worked * 3600)))
    if (passed := run.last("held_out/passed_share")) is not None:
        totals.append(("latest held-out pass rate", share(passed)))
    if run.last_at is not None:
        totals.append(("last update", f"{run.last_at.astimezone(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"))
    return totals


def _drawn(part: ChartGroup, run: TrainingFacts) -> list[Chart]:
    charts = []
    for index, picture in enumerate(part.pictures):
        if picture.title == STOPS_TITLE:  # draw one line for each frequent reason
            stops = {name: series.finite.values_N for name, series in run.series.items() if name.startswith(STOPS)}
            most = sorted((name for name in stops if len(stops[name])), key=lambda name: -float(stops[name].sum()))
            labels = [(name, name.removeprefix(STOPS).removesuffix("_share")) for name in most[:_MOST_STOPS]]
            picture = picture._replace(
                lines=tuple(ChartLine(name, escape_text(label, NAME_LENGTH)) for name, label in labels)
            )
        charts.append(draw(f"{part.anchor}-{index}", picture, run))
    return [chart for chart in charts if chart is not None]


def _alarms(run: TrainingFacts) -> list[tuple[str, int, int, int, str]]:
    """Return the off-policy limits that were exceeded: name, count, first and last update, and worst value."""
    alarms = []
    for name, series in run.series.items():
        if name.startswith(ALARM):
            finite, bare = series.finite.values_N, name.removeprefix(ALARM)
            worst = float(finite.min() if bare == "effective_share" else finite.max()) if len(finite) else math.nan
            text = short(worst) if math.isfinite(worst) else "not finite"
            first, last = int(series.updates_N[0]), int(series.updates_N[-1])
            alarms.append((escape_text(bare, NAME_LENGTH), len(series.values_N), first, last, text))
    return sorted(alarms, key=lambda alarm: -alarm[1])


def _figure_row(name: str, series: Series) -> tuple[str, int, list[str]]:
    """Return the name of a figure, its number of values, and its first, last, smallest and largest values."""
    values = series.finite.values_N
    if not len(values):
        return escape_text(name, NAME_LENGTH), 0, ["not finite"] * 4
    texts = [short(float(value)) for value in (values[0], values[-1], values.min(), values.max())]
    return escape_text(name, NAME_LENGTH), len(series.values_N), texts


def _axes(run: TrainingFacts) -> dict[str, Any]:
    """Return the alternatives to updates on the x axis, and their values after each update."""
    axes = {}
    for name, figure, unit in (
        ("environment steps", "progress/env_steps", 1.0),
        ("sampled tokens", "progress/sampled_tokens", 1.0),
        ("hours of work", "time/worked_s", 3600.0),
        ("CPU hours", "time/cpu_s", 3600.0),
    ):
        if figure in run.series and len((series := thinned(run.series[figure].finite)).values_N):
            values = [float(f"{value / unit:.6g}") for value in series.values_N.tolist()]
            axes[name] = {"u": [0, *series.updates_N.tolist()], "v": [0.0, *values]}
    return axes
