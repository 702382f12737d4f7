"""Figure of a training row: aligned tokens, masks, log-probabilities and advantages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from figures.drawing import Sheet, number
from figures.pages import names_until

LEFT, COLUMN, ROW, TOP = 132, 43, 27, 92
SPANS = ((0, 2, "prompt", "box"), (2, 4, "action 1", "blue"), (4, 6, "observed", "box"), (6, 7, "act. 2", "blue"))
DESCRIPTIONS = {
    "input_ids": "token ids",
    "attention_mask": "not padding",
    "completion_mask": "from action 1 on",
    "action_mask": "policy sampled",
    "loss_mask": "learned from",
    "logprobs": "as sampled",
    "advantages": "per action",
    "step_rewards": "on the last token",
}


def draw_tokens(path: Path) -> None:
    """Draw a row of the page's batch as a table with tokens as columns."""
    batch = names_until("tokens.md", "rows")["rows"].batch
    sheet = Sheet(
        "One row of tokens",
        "Seven tokens: two of the prompt, two of the first action, two that the world answered, one of the second "
        "action. Masks are 1 on the actions alone; log-probabilities and advantages stand on the actions' tokens.",
    )
    for begin, end, name, kind in SPANS:
        box = (LEFT + COLUMN * begin + 2, 14, COLUMN * (end - begin) - 4, 28)
        sheet.labelled(box, name, kind, "small" if end - begin == 1 else "")
    sheet.text(14, 34, "one episode", "bold")
    sheet.text(LEFT + COLUMN, 62, "given", "soft small", "middle")
    sheet.text(LEFT + 3 * COLUMN, 62, "sampled", "soft small", "middle")
    sheet.text(LEFT + 5 * COLUMN, 62, "given", "soft small", "middle")
    sheet.text(LEFT + 6.5 * COLUMN, 62, "sampled", "soft small", "middle")
    for index, (key, description) in enumerate(DESCRIPTIONS.items()):
        _row(sheet, TOP + index * (ROW + 11), key, description, batch[key][0].tolist())
    bottom = TOP + len(DESCRIPTIONS) * (ROW + 11)
    sheet.path([(LEFT + 2 * COLUMN, 48), (LEFT + 2 * COLUMN, bottom - 16)], "line dash")
    sheet.write(path, bottom - 6)


def _row(sheet: Sheet, y: float, key: str, description: str, values: list[Any]) -> None:
    """Draw an array: its name, its description, and a cell for each token, colored unless empty."""
    sheet.text(14, y, key, "code")
    sheet.text(14, y + 14, description, "soft small")
    for index, value in enumerate(values):
        x = LEFT + COLUMN * index
        kind = "box" if key == "input_ids" else "blue" if value > 0 else "orange" if value < 0 else "grid"
        if key == "logprobs" and value:
            kind = "violet"
        sheet.rect(x + 2, y - 12, COLUMN - 4, ROW, kind, 3)
        words = number(value).replace("-", "−")
        sheet.text(x + COLUMN / 2, y + 7, words, "" if value else "soft", "middle")
