"""Figures of credit: the steps that are compared, and the sum of both comparisons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from figures.drawing import Sheet, signed
from figures.pages import names_until

LEFT, COLUMN, LANE, TOP = 44, 92, 58, 70
CELL = (66, 36)
BARS = (148, 252, 356)
REACH, SCALE = 1.5, 30
BRACKET = 408
NOTES = (
    ("A_S", "compares the returns G within a violet frame"),
    ("A_E", "compares the scores at the right, for all steps alike"),
)


class Step(NamedTuple):
    """A step of the page's group with its credit."""

    episode: str
    state: str
    action: str
    score: float
    G: float
    A_E: float
    A_S: float
    A: float


def steps_of_page() -> list[Step]:
    """Return the steps of the page's group in order."""
    names = names_until("credit.md", "rows")
    scores = dict(zip("abc", names["scores"], strict=True))
    return [Step(row[0], row[1], row[2], scores[row[0]], *row[3:]) for row in names["rows"]]


def draw_anchors(path: Path) -> None:
    """Draw three episodes, a frame around steps in the same state, and a bar beside the scores."""
    steps = steps_of_page()
    sheet = Sheet(
        "Which steps are compared",
        "Three episodes of a group as lanes. The four steps taken in the hall are one anchor group, the three taken at "
        "the fork another: within each, returns G are compared. The three scores are compared for all steps alike.",
    )
    sheet.rect(LEFT - 10, TOP - 30, 2 * COLUMN - 6, 3 * LANE + 26, "frame")
    sheet.text(LEFT, TOP - 13, "anchor group “hall”", "bold small")
    sheet.rect(LEFT + 2 * COLUMN - 10, TOP - 30, COLUMN - 6, 3 * LANE + 26, "frame")
    sheet.text(LEFT + 2 * COLUMN - 4, TOP - 13, "“fork”", "bold small")
    sheet.lines(LEFT + 3 * COLUMN + 24, TOP - 28, ["score of the", "episode"], "bold small")
    for lane, episode in enumerate("abc"):
        _lane(sheet, TOP + lane * LANE, [step for step in steps if step.episode == episode])
    bottom = TOP + 3 * LANE
    sheet.path([(BRACKET, TOP + 2), (BRACKET + 8, TOP + 2), (BRACKET + 8, bottom - 24), (BRACKET, bottom - 24)])
    for row, (name, text) in enumerate(NOTES):
        sheet.text(LEFT - 10, bottom + 24 + 22 * row, name, "bold")
        sheet.text(LEFT + 26, bottom + 24 + 22 * row, text)
    sheet.write(path, bottom + 60)


def _lane(sheet: Sheet, y: float, steps: list[Step]) -> None:
    """Draw an episode: its steps, each in the column of its state, and its score."""
    start = 3 - len(steps)
    width, height = CELL
    sheet.text(22, y + 24, steps[0].episode, "bold", "middle")
    x = LEFT + start * COLUMN
    for place, step in enumerate(steps):
        at = x + place * COLUMN
        kind = "blue" if step.A_S > 0 else "orange"
        sheet.rect(at, y, width, height, kind)
        sheet.text(at + width / 2, y + 16, step.action, "", "middle")
        sheet.text(at + width / 2, y + 31, f"G {step.G:.2f}", "small soft", "middle")
        sheet.arrow((at + width, y + 18), (at + COLUMN - 1, y + 18))
    end = x + len(steps) * COLUMN
    won = steps[0].score > 0
    sheet.labelled((end, y, width, height), f"{'gold' if won else 'pit'}  {steps[0].score:g}", "gold" if won else "box")


def draw_sum(path: Path) -> None:
    """Draw A_E, A_S and A as bars for each step of the page's group."""
    steps = steps_of_page()
    sheet = Sheet(
        "What the two comparisons add up to",
        "For each of seven steps three bars: A_E, the same for all steps of an episode; A_S, which tells steps apart; "
        "and A, half of each. Waiting in the hall is praised less than going on.",
    )
    bottom = 58 + 28 * len(steps)
    heads = (("A_E", "episodes"), ("A_S", "steps"), ("A", "½ A_E + ½ A_S"))
    for x, (name, text) in zip(BARS, heads, strict=True):
        sheet.text(x + 14, 24, name, "bold", "middle")
        sheet.text(x + 14, 41, text, "soft small", "middle")
        sheet.path([(x, 50), (x, bottom)], "grid")
    for row, step in enumerate(steps):
        y = 58 + 28 * row
        if row and step.episode != steps[row - 1].episode:
            sheet.path([(12, y - 4), (428, y - 4)], "grid")
        sheet.text(14, y + 15, step.episode, "bold")
        sheet.text(32, y + 15, f"{step.state}, {step.action}")
        for x, value in zip(BARS, (step.A_E, step.A_S, step.A), strict=True):
            _bar(sheet, x, y, value)
    sheet.write(path, bottom + 10)


def _bar(sheet: Sheet, x: float, y: float, value: float) -> None:
    """Draw a bar from 0 at `x`, with its value on the opposite side."""
    length = SCALE * min(abs(value), REACH)
    kind = "blue strong" if value > 0 else "orange strong"
    sheet.rect(x if value > 0 else x - length, y + 2, length, 17, kind, 2)
    inside = x + length + 5 if value > 0 else x + 5
    sheet.text(inside, y + 15, signed(value), "small")


LAB_LEFT, LAB_WIDE, LAB_ROW = 206, 170, 22


def draw_credit_lab(path: Path) -> None:
    """Draw the rank correlation of each estimator with measured advantages, as a mean over the tasks."""
    file = Path(__file__).parents[1] / "data" / "credit_lab.jsonl"
    ranks: dict[str, list[float]] = {}
    for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        if not line["estimator"].startswith("hash: "):
            ranks.setdefault(line["estimator"], []).append(line["rank"])
    means = {label: sum(found) / len(found) for label, found in ranks.items()}
    sheet = Sheet(
        "Rank correlation of estimators with measured advantages",
        "A bar for each estimator: the mean rank correlation in a group, over five tasks. Values that were measured "
        "with 16 continuations and graphgpo are highest, and gigpo is close to grpo.",
    )
    largest = max(*means.values(), 0.1)
    for row, (label, rank) in enumerate(sorted(means.items(), key=lambda item: -item[1])):
        y, length = 14 + LAB_ROW * row, max(rank, 0.0) / largest * LAB_WIDE
        sheet.text(LAB_LEFT - 10, y + 12, label, "small", "end")
        sheet.rect(LAB_LEFT, y, length, 14, "orange strong" if label.startswith("vine") else "blue strong", 0)
        sheet.text(LAB_LEFT + length + 6, y + 12, f"{rank:.2f}", "soft small")
    sheet.write(path, 22 + LAB_ROW * len(means))
