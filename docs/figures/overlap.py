"""Figure of asynchronous rewards: the timeline of the page's simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from figures.drawing import Sheet
from figures.pages import names_until

LEFT, RIGHT, TOP, LANE = 16, 424, 84, 96
KINDS = {
    "rollout": ("blue strong", "rollout"),
    "log_probs": ("violet strong", "log-probabilities"),
    "update": ("green strong", "update"),
    "publish": ("gold strong", "publish"),
}
PLACES = 180
STEPS = (1, 2)


def draw_overlap(path: Path) -> None:
    """Draw two steps of each schedule: the machine's work, its waits, and concurrent calls."""
    overlap = names_until("overlap.md", "overlap")["overlap"]
    sheet = Sheet(
        "What runs when, under four schedules",
        "Two steps of each schedule on one scale. Under sync the machine waits for all rewards of each batch; with "
        "mini-batches it trains in between; one step off it rolls out the next batch meanwhile; both wait least.",
    )
    _legend(sheet)
    spans = {schedule: _span(result) for schedule, result in overlap.results.items()}
    scale = (RIGHT - LEFT) / max(end - begin for begin, end in spans.values())
    for place, (schedule, result) in enumerate(overlap.results.items()):
        y = TOP + place * LANE
        begin, end = spans[schedule]
        text = f"{result.makespan_s / overlap.settings.steps:.1f} s a step"
        sheet.text(LEFT, y, schedule.value, "bold")
        sheet.text(RIGHT, y, text, "soft", "end")
        _machine(sheet, y + 8, result, (begin, end), scale)
        slots = min(overlap.settings.max_concurrency, overlap.settings.calls_per_step)
        _calls(sheet, y + 62, result, (begin, end), scale, slots)
    _seconds(sheet, TOP + len(spans) * LANE - 10, (RIGHT - LEFT) / scale, scale)
    sheet.write(path, TOP + len(spans) * LANE + 22)


def _legend(sheet: Sheet) -> None:
    for place, (kind, words) in enumerate(KINDS.values()):
        x, y = LEFT + (place % 2) * 120, 14 + (place // 2) * 22
        sheet.rect(x, y, 15, 15, kind, 2)
        sheet.text(x + 21, y + 13, words)
    sheet.rect(LEFT + 274, 14, 15, 15, "grid", 2)
    sheet.text(LEFT + 295, 27, "waits")
    sheet.shape([(LEFT + 274, 51), (LEFT + 281, 37), (LEFT + 289, 51)], "orange")
    sheet.text(LEFT + 295, 49, "calls in flight")


def _span(result: Any) -> tuple[float, float]:
    """Return the start of the first shown step and the end of the last."""
    ends = result.step_ends_s
    return ends[STEPS[0] - 1], ends[STEPS[-1]]


def _machine(sheet: Sheet, y: float, result: Any, span: tuple[float, float], scale: float) -> None:
    """Draw the machine's work, a box for each interval with the number of its step."""
    begin, end = span
    sheet.rect(LEFT, y, (end - begin) * scale, 24, "grid", 2)
    for item in result.intervals:
        if item.doing in KINDS and item.end_s > begin and item.begin_s < end:
            x, width = LEFT + (item.begin_s - begin) * scale, (item.end_s - item.begin_s) * scale
            sheet.rect(x, y, width, 24, KINDS[item.doing][0], 2)
            if width > 24:
                sheet.text(
                    x + width / 2, y + 17, f"step {item.step + 1}" if width > 50 else f"{item.step + 1}", "", "middle"
                )


def _calls(sheet: Sheet, foot: float, result: Any, span: tuple[float, float], scale: float, slots: int) -> None:
    """Draw the number of concurrent reward calls as an area."""
    begin, end = span
    times = np.linspace(begin, end, PLACES + 1)
    starts = np.concatenate([batch.begins_C for batch in result.batches])
    ends = np.concatenate([batch.ends_C for batch in result.batches])
    under_way = [int(((starts <= time) & (time < ends)).sum()) for time in times.tolist()]
    hill = [
        (LEFT + (time - begin) * scale, foot - 24 * count / slots)
        for time, count in zip(times.tolist(), under_way, strict=True)
    ]
    sheet.shape([(LEFT, foot), *hill, (LEFT + (end - begin) * scale, foot)], "orange")


def _seconds(sheet: Sheet, y: float, longest: float, scale: float) -> None:
    """Draw the axis."""
    sheet.path([(LEFT, y), (RIGHT, y)], "line")
    for second in range(0, int(longest) + 1, 50):
        x = LEFT + second * scale
        sheet.path([(x, y), (x, y + 5)], "line")
        sheet.text(x, y + 20, f"{second} s", "soft small", "middle" if second else "start")
