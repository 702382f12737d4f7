"""Generate `cases.jsonl`: six untidy directories, each from a seed, with the expected files."""

from __future__ import annotations

import datetime
import json
import random
from pathlib import Path
from typing import Any

SENDERS = ("Acme Tools", "Blue River Press", "Carter & Sons", "Delta Freight", "Elm Street Cafe", "Foxglove Garden")
TITLES = (
    "Kitchen plan",
    "Books to read",
    "Call with Ana",
    "Garden in spring",
    "Questions for the bank",
    "Packing list",
)
SCENES = ("the harbour at dusk", "a red bicycle", "snow on the roof", "grandmother's cake", "the dog asleep")
CLUTTER = ("", "Desktop/", "Downloads/", "old stuff/")
NAMES = ("scan{}.txt", "document ({}).txt", "bill{}.txt", "new {}.txt")


def make_case(seed: int) -> dict[str, Any]:
    """Return a sample: twelve files, ten of them different, and the expected path of each."""
    rng = random.Random(seed)
    documents = [*invoices(rng), *photos(rng), *notes(rng)]
    files = {f"{rng.choice(CLUTTER)}{name}": text for name, _, text in documents}
    for name, _, text in (rng.choice(documents[:4]), rng.choice(documents[4:7])):
        stem, dot, ending = name.rpartition(".")
        files[f"{rng.choice(CLUTTER[1:])}{stem} copy{dot}{ending}"] = text
    shuffled = sorted(files, key=lambda path: (path.partition("/")[0], rng.random()))
    return {
        "id": f"desk-{seed}",
        "ground_truth": {target: text for _, target, text in documents},
        "resource_config": {"files": {path: files[path] for path in shuffled}},
    }


def invoices(rng: random.Random) -> list[tuple[str, str, str]]:
    """Return four invoices: name, expected path, text."""
    result = []
    for number, sender in enumerate(rng.sample(SENDERS, 4), 1):
        day = random_day(rng)
        text = (
            f"INVOICE\nFrom: {sender}\nDate: {day.day} {day:%B %Y}\nTotal: {rng.randrange(900, 90_000) / 100:.2f} EUR\n"
        )
        name = rng.choice(NAMES).format(rng.randrange(10) + 10 * number)
        result.append((name, f"invoices/{day.year}/{day}_{slug(sender)}.txt", text))
    return result


def photos(rng: random.Random) -> list[tuple[str, str, str]]:
    """Return three photos, with a line of text as content."""
    result = []
    for scene in rng.sample(SCENES, 3):
        day = random_day(rng)
        name = f"IMG_{day:%Y%m%d}_{rng.randrange(7, 22):02}{rng.randrange(60):02}.jpg"
        result.append((name, f"photos/{day:%Y-%m}/{name}", f"(picture: {scene})\n"))
    return result


def notes(rng: random.Random) -> list[tuple[str, str, str]]:
    """Return three notes, with the date in the text."""
    result = []
    for number, title in enumerate(rng.sample(TITLES, 3), 1):
        day = random_day(rng)
        result.append((f"untitled {number}.md", f"notes/{day}_{slug(title)}.md", f"# {title}\n\nWritten on {day}.\n"))
    return result


def random_day(rng: random.Random) -> datetime.date:
    """Return a day in 2023 or 2024."""
    return datetime.date(2023, 1, 1) + datetime.timedelta(days=rng.randrange(730))


def slug(text: str) -> str:
    """Return lower-case words joined by hyphens."""
    return "-".join("".join(char if char.isalnum() else " " for char in text.lower()).split())


if __name__ == "__main__":
    rows = [json.dumps(make_case(seed)) for seed in range(6)]
    (Path(__file__).parent / "cases.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
