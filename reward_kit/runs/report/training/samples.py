"""Episodes along the way: of the updates whose episodes were kept, a few, each with a few, as short texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reward_kit.display_text import shown
from reward_kit.episodes.json_codec import from_json_value
from reward_kit.errors import StoreError
from reward_kit.runs.files import kept_files, told_of
from reward_kit.runs.report.wording import number
from reward_kit.runs.run_folder import line_record

_MOST_UPDATES, _MOST_EPISODES, _MOST_MESSAGES = 8, 2, 24
_TEXT, _NAME = 700, 120


class Said(NamedTuple):
    """One message, in words that are harmless."""

    role: str
    text: str


class KeptEpisode(NamedTuple):
    """One episode: its name, how it ended, what its environment gave, and what was said."""

    rollout_id: str
    facts: str
    messages: Sequence[Said]


class ShownUpdate(NamedTuple):
    """The episodes of one update: how many there are, and a few of them."""

    update: int
    total: int
    episodes: Sequence[KeptEpisode]


def kept_updates(run: Path) -> list[ShownUpdate]:
    """Some of the updates whose episodes were kept, the first and the last among them.

    Args:
        run: the folder of a training run.

    Raises:
        StoreError: a file of them is damaged.
    """
    files = list(kept_files(run).items())
    last = len(files) - 1
    chosen = (
        sorted({round(place * last / max(1, _MOST_UPDATES - 1)) for place in range(_MOST_UPDATES)}) if files else []
    )
    return [_update(*files[place]) for place in chosen]


def _update(update: int, file: Path) -> ShownUpdate:
    total, episodes = 0, list[KeptEpisode]()
    for record in kept_records(file):
        total += 1
        if len(episodes) < _MOST_EPISODES:
            episodes.append(_episode(record, file))
    return ShownUpdate(update, total, episodes)


def kept_records(file: Path) -> Iterator[dict[str, Any]]:
    """The episodes that a training run kept of one update.

    Raises:
        StoreError: a line is none; the message says where.
    """
    with told_of("read", file), file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            yield line_record(file, number, line, _has_messages)


def _has_messages(record: Mapping[str, Any]) -> None:
    if not isinstance(record.get("messages"), list):
        raise StoreError("a line is an episode, an object with messages; edited by hand?")


def _episode(record: Mapping[str, Any], file: Path) -> KeptEpisode:
    messages = record["messages"]
    # Where it is long, the beginning says what was asked, and the end how it came out.
    half = _MOST_MESSAGES // 2
    cut = len(messages) - 2 * half if len(messages) > _MOST_MESSAGES else 0
    said = [_said(message) for message in (messages[:half] if cut else messages)]
    if cut:
        said += [Said("…", f"{cut:,} messages are left out"), *map(_said, messages[-half:])]
    steps, reason = record.get("num_steps"), shown(record.get("stop_reason") or "", _NAME)
    facts = [f"{steps} steps", reason] if isinstance(steps, int) else [reason]
    gave = record.get("environment_return")
    facts += [f"return {number(gave)}"] if isinstance(gave, int | float) else []
    return KeptEpisode(shown(record.get("rollout_id") or file.stem, _NAME), ", ".join(facts), said)


def _said(message: Mapping[str, Any]) -> Said:
    return Said(shown(message.get("role") or "", _NAME), _text(message))


def _text(message: Mapping[str, Any]) -> str:
    """What a message says, with its calls as they were written."""
    content = from_json_value(message.get("content"))
    text = content if isinstance(content, str) else "" if content is None else json.dumps(message["content"])
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    parts = [text, *(f"{call.get('name')}({call.get('arguments')})" for call in calls)]
    return shown("\n".join(part for part in parts if part), _TEXT)
