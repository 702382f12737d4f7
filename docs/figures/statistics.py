"""Figures of statistics: coverage of intervals, and pass@k compared with pass^k."""

from __future__ import annotations

from pathlib import Path

from figures.drawing import Sheet
from figures.pages import names_until

EVALUATIONS = 30
LEFT, WIDE, FOOT, TALL = 46, 360, 236, 190


def draw_intervals(path: Path) -> None:
    """Draw intervals of thirty evaluations, clustered by sample and with rollouts assumed independent."""
    names = names_until("statistics.md", "evaluation")
    mean_interval, truth = names["mean_interval"], names["TRUTH"]
    sheet = Sheet(
        "Intervals of thirty evaluations",
        "Left, clustered by sample: nearly all intervals hold the true mean. Right, of the same evaluations as if "
        "rollouts were independent: half as wide, and about a third of them miss it.",
    )
    drawn = [names["evaluation"](50, 8) for _ in range(EVALUATIONS)]
    panels = (
        (16, "clustered by sample", [mean_interval(scores, by) for scores, by in drawn]),
        (232, "as if independent", [mean_interval(scores, range(len(scores))) for scores, _ in drawn]),
    )
    for left, title, intervals in panels:
        missed = 0
        x_true = left + _along(truth)
        sheet.path([(x_true, 46), (x_true, 52 + 8 * EVALUATIONS)], "line dash")
        for row, found in enumerate(intervals):
            holds = found.low <= truth <= found.high
            missed += not holds
            y = 54 + 8 * row
            ends = (left + _along(found.low), left + _along(found.high))
            sheet.path([(ends[0], y), (ends[1], y)], "blue curve" if holds else "orange curve thick")
        sheet.text(left, 22, title, "bold")
        sheet.text(left, 40, f"{missed} of {EVALUATIONS} miss the true mean", "soft small")
    y = 60 + 8 * EVALUATIONS
    for left, _, _ in panels:
        sheet.text(left + _along(truth), y + 8, f"true mean {truth:.3f}", "soft small", "middle")
    sheet.write(path, y + 22)


def _along(value: float) -> float:
    """Return the position of a mean in a panel from 0.2 to 0.65."""
    return (value - 0.2) / 0.45 * 192


def draw_passes(path: Path) -> None:
    """Draw the two curves of the page."""
    curves = names_until("statistics.md", "curves")["curves"]
    sheet = Sheet(
        "pass@k and pass^k",
        "From one figure at k = 1, pass@k rises with k to the share of samples solved at least once, and pass^k falls "
        "to the share of those solved every time.",
    )
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = FOOT - TALL * share
        sheet.path([(LEFT, y), (LEFT + WIDE, y)], "grid")
        sheet.text(LEFT - 8, y + 5, f"{share:g}", "soft small", "end")
    for k in curves:
        sheet.text(_at(k), FOOT + 20, str(k), "soft small", "middle")
    sheet.text(LEFT + WIDE / 2, FOOT + 40, "k", "soft", "middle")
    for which, (name, kind, lift) in enumerate((("pass@k", "blue", -12), ("pass^k", "orange", 22))):
        points = [(_at(k), FOOT - TALL * both[which]) for k, both in curves.items()]
        sheet.path(points, f"{kind} curve" + (" dash" if which else ""))
        for x, y in points:
            sheet.rect(x - 4, y - 4, 8, 8, f"{kind} strong", 0 if which else 4)
        sheet.text(_at(6), points[5][1] + lift, name, "bold", "middle")
    sheet.text(LEFT, 24, "share of samples, five samples with eight attempts each", "soft small")
    sheet.write(path, FOOT + 52)


def _at(k: int) -> float:
    return LEFT + WIDE * (k - 0.5) / 8
