"""Writes `cases.jsonl`: six untidy directories, each from a seed, with the files as they should be in the end."""

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
    """One sample: twelve files, ten of them different, and where each of the ten belongs."""
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
    """Four invoices: name, place in the end, text."""
    found = []
    for number, sender in enumerate(rng.sample(SENDERS, 4), 1):
        day = some_day(rng)
        text = (
            f"INVOICE\nFrom: {sender}\nDate: {day.day} {day:%B %Y}\nTotal: {rng.randrange(900, 90_000) / 100:.2f} EUR\n"
        )
        name = rng.choice(NAMES).format(rng.randrange(10) + 10 * number)
        found.append((name, f"invoices/{day.year}/{day}_{slug(sender)}.txt", text))
    return found


def photos(rng: random.Random) -> list[tuple[str, str, str]]:
    """Three photos; a line of text stands for each picture."""
    found = []
    for scene in rng.sample(SCENES, 3):
        day = some_day(rng)
        name = f"IMG_{day:%Y%m%d}_{rng.randrange(7, 22):02}{rng.randrange(60):02}.jpg"
        found.append((name, f"photos/{day:%Y-%m}/{name}", f"(picture: {scene})\n"))
    return found


def notes(rng: random.Random) -> list[tuple[str, str, str]]:
    """Three notes; the date stands in the text."""
    found = []
    for number, title in enumerate(rng.sample(TITLES, 3), 1):
        day = some_day(rng)
        found.append((f"untitled {number}.md", f"notes/{day}_{slug(title)}.md", f"# {title}\n\nWritten on {day}.\n"))
    return found


def some_day(rng: random.Random) -> datetime.date:
    """A day of 2023 or 2024."""
    return datetime.date(2023, 1, 1) + datetime.timedelta(days=rng.randrange(730))


def slug(text: str) -> str:
    """Lower case, with a hyphen in the place of everything that is no letter or digit."""
    return "-".join("".join(sign if sign.isalnum() else " " for sign in text.lower()).split())


if __name__ == "__main__":
    rows = [json.dumps(make_case(seed)) for seed in range(6)]
    (Path(__file__).parent / "cases.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
