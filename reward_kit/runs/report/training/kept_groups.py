"""The groups of the latest update whose episodes a training run kept, as the views of episodes and groups read them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reward_kit.runs.files import TRAINING, kept_files
from reward_kit.runs.report.chunks import Part, StoredLines, group_text
from reward_kit.runs.report.episodes_data import EpisodeData
from reward_kit.runs.report.fitting import LineFitter
from reward_kit.runs.report.reading import EpisodeOutline, episode_outline
from reward_kit.runs.report.training.samples import kept_records
from reward_kit.runs.run_folder import RunHeader

_MOST_BYTES = 1_500_000
_CREDIT = ("estimator", "step_rewards", "gamma", "omega", "combination", "step_weight", "default_step_reward")


class _Kept(NamedTuple):
    """One episode: its lines as a run would have stored them, and what is known of it."""

    lines: StoredLines
    facts: EpisodeOutline
    score: float | None


class KeptGroups(NamedTuple):
    """What a page shows of them.

    Attributes:
        update: whose episodes they are.
        data: for the page's script.
        groups: by id the names of its episodes, those first in which scores differ.
        left_out: groups that the page has no room for.
    """

    update: int
    data: EpisodeData
    groups: Mapping[str, Sequence[str]]
    left_out: int


def kept_groups(run: Path, header: RunHeader) -> KeptGroups | None:
    """The groups of the latest kept update, as many as fit a page; None where nothing was kept of them.

    Args:
        run: the folder of a training run.
        header: its `run.json`.

    Raises:
        StoreError: the file of the update is damaged.
    """
    files = kept_files(run)
    if not files:
        return None
    latest = max(files)
    groups: dict[str, list[_Kept]] = defaultdict(list)
    for record in kept_records(files[latest]):
        if TRAINING in record:  # an earlier release kept the episode alone
            kept = _kept(record, header)
            groups[kept.facts.group_id].append(kept)
    if not groups:
        return None
    ordered = [sorted(one, key=lambda kept: kept.facts.rollout_index) for one in groups.values()]
    ordered.sort(key=_spread, reverse=True)
    return _fitting(latest, ordered, header)


def _fitting(update: int, groups: Sequence[Sequence[_Kept]], header: RunHeader) -> KeptGroups:
    fitter, parts, texts, size = LineFitter(header), list[Part](), list[str](), 0
    for group in groups:
        text = group_text([kept.lines for kept in group], fitter).decode("ascii")
        if parts and size + len(text) > _MOST_BYTES:
            break
        facts = [kept.facts for kept in group]
        parts.append(Part(facts[0].group_id, len(facts), 0, facts))
        texts.append(text)
        size += len(text)
    data = EpisodeData("inline", _credit_of(header), chunks=[[part] for part in parts], texts=texts)
    names = {part.group_id: [facts.row.rollout_id for facts in part.episodes] for part in parts}
    return KeptGroups(update, data, names, len(groups) - len(parts))


def _kept(record: dict[str, Any], header: RunHeader) -> _Kept:
    made = record.get(TRAINING)
    made = dict(made) if isinstance(made, Mapping) else {}
    credit, score = made.pop("credit", None) or [], made.pop("score", None)
    told = _line({"rollout_id": record["rollout_id"], "attempt": record.get("attempt"), "score": score})
    lines = StoredLines(_line({**record, TRAINING: made}), told, b"".join(map(_line, credit)))
    return _Kept(lines, episode_outline(record, header, None), score)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"


def _spread(group: Sequence[_Kept]) -> float:
    scores = [kept.score for kept in group if kept.score is not None]
    return max(scores) - min(scores) if scores else 0.0


def _credit_of(header: RunHeader) -> Mapping[str, Any]:
    """By what its steps are credited, as far as the train file says."""
    told = ((header.training or {}).get("config") or {}).get("credit") or {}
    return {key: told[key] for key in _CREDIT if key in told} if isinstance(told, Mapping) else {"estimator": told}
