"""`labels.jsonl`: the labels and notes that users give to episodes and steps in the viewer.

Each line has a `rollout_id`, a `label` ("pass", "fail", a number, or null), a `note`, and the time `labeled_at`. A line
about a step also has the index of the step as `step`. The last line for an episode or step counts; null with an empty
note removes the label. `reward-kit calibrate` reads the file.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from reward_kit.episodes.json_codec import compact_json
from reward_kit.errors import ConfigError, StoreError, type_name
from reward_kit.private_files import private_opener
from reward_kit.processes import lock_file
from reward_kit.runs.files import LABELS_FILE, append_line, cut_torn_line
from reward_kit.runs.run_folder import line_record, placed_lines

LABELED_AT = "labeled_at"
LONGEST_NOTE = 10_000
_LOCK_S = 5.0


class Label(NamedTuple):
    """A user's label of an episode or step; `value` is `None` if the user wrote only a note."""

    value: str | float | None
    note: str = ""


EpisodeLabels = dict[int | None, Label]
"""The labels of one episode, keyed by step; the episode itself has the key None."""


def read_run_labels(run: Path) -> dict[str, EpisodeLabels]:
    """Return the labels of each episode of a run; empty if there is no `labels.jsonl`."""
    labels: dict[str, EpisodeLabels] = {}
    for number, (_, line) in enumerate(placed_lines(run / LABELS_FILE), 1):
        add_label(labels, line_record(run / LABELS_FILE, number, line, check_label))
    return labels


def add_label(labels: dict[str, EpisodeLabels], record: Mapping[str, Any]) -> None:
    """Apply a line of the file to the labels read so far."""
    own = labels.setdefault(record["rollout_id"], {})
    own[record.get("step")] = Label(record["label"], record.get("note") or "")
    if own[record.get("step")] == Label(None):
        del own[record.get("step")]
    if not own:
        del labels[record["rollout_id"]]


def check_label(record: Mapping[str, Any]) -> None:
    """Check all fields of a line except its `rollout_id`.

    Raises:
        StoreError: a field is missing or has the wrong type.
    """
    step, value, note = record.get("step"), record.get("label", ...), record.get("note")
    if step is not None and (type(step) is not int or step < 0):
        raise StoreError(f"step must be the index of a step, got {step!r:.80}")
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and -1e9 <= value <= 1e9
    if not (value is None or value in ("pass", "fail") or is_number):
        got = "nothing" if value is ... else f"{value!r:.80}"
        raise StoreError(f'label must be "pass", "fail", a number from -1e9 to 1e9, or null, got {got}')
    if note is not None and (not isinstance(note, str) or len(note) > LONGEST_NOTE):
        raise StoreError(f"note must be a string of at most {LONGEST_NOTE:,} characters")


def parse_label(given: Any) -> dict[str, Any]:
    """Convert the label in a request to a line of the file.

    Raises:
        ConfigError: the request is not an object, a field is unknown, or a value is invalid.
    """
    if not isinstance(given, dict):
        raise ConfigError(f"a label must be an object, got {type_name(given)}")
    if unknown := given.keys() - {"rollout_id", "step", "label", "note"}:
        raise ConfigError(f"unknown field {min(unknown)!r:.80}")
    if not isinstance(given.get("rollout_id"), str):
        raise ConfigError("rollout_id must be a string")
    try:
        check_label(given)
    except StoreError as error:
        raise ConfigError(str(error)) from None
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    fields = {"rollout_id": given["rollout_id"], "step": given.get("step"), "label": given["label"]}
    if fields["step"] is None:
        del fields["step"]
    return {**fields, "note": given.get("note") or "", LABELED_AT: now}


def append_label(run: Path, record: Mapping[str, Any]) -> None:
    """Append a line while holding a lock; an incomplete last line is removed first.

    Raises:
        StoreError: the file cannot be written, or another process keeps it locked.
    """
    path, line = run / LABELS_FILE, compact_json(record).encode("ascii") + b"\n"
    try:
        descriptor = private_opener(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            _lock(descriptor)
            cut_torn_line(path)
            append_line(descriptor, path, line)
        finally:
            os.close(descriptor)
    except OSError as error:
        why = error.strerror or error
        raise StoreError(f"cannot write {path}: {why}; labels need a writable run directory") from error


def _lock(descriptor: int) -> None:
    end_s = time.monotonic() + _LOCK_S
    while True:
        try:
            return lock_file(descriptor)
        except OSError:
            if time.monotonic() >= end_s:
                raise
            time.sleep(0.01)


def display_label(labels: Mapping[int | None, Label]) -> tuple[str, str]:
    """Return a short description of an episode's labels, such as "pass" or "2 steps", and the text of its notes."""
    own, steps = labels.get(None, Label(None)), sorted(step for step in labels if step is not None)
    word = own.value if isinstance(own.value, str) else "" if own.value is None else f"{own.value:g}"
    if not word:
        word = f"{len(steps)} step{'' if len(steps) == 1 else 's'}" if steps else "note" if own.note else ""
    notes = [own.note, *(f"step {step}: {labels[step].note}" for step in steps if labels[step].note)]
    return word, "\n".join(note for note in notes if note)
