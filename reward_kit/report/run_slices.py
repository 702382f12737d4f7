"""Figures of a run for each tag, and for each value of dataset columns that have few values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from reward_kit.report.run_data import EpisodeOutline
from reward_kit.runs.summary import MOST_TAGS, EpisodeRow, SliceSummary, summarize_slice

_MOST_VALUES = 12  # the maximum number of different values in a column
SEPARATOR = " · "
"""The text between the slices of an episode in the table of episodes."""


def slice_columns(episodes: Iterable[EpisodeOutline]) -> frozenset[str]:
    """Return the dataset columns that have few distinct values.

    A column qualifies if it has 2 to 12 distinct values, and at most half as many as there are samples.
    """
    values: dict[str, set[str]] = defaultdict(set)
    samples: dict[str, set[str]] = defaultdict(set)
    for facts in episodes:
        for name, value in facts.columns.items():
            if len(values[name]) <= _MOST_VALUES:
                values[name].add(value)
                samples[name].add(facts.row.sample_id)
    return frozenset(
        name
        for name, found in values.items()
        if 2 <= len(found) <= _MOST_VALUES and 2 * len(found) <= len(samples[name])
    )


def slice_names(facts: EpisodeOutline, columns: Collection[str]) -> list[str]:
    """Return the names of the slices to which an episode belongs: its first `MOST_TAGS` tags, and `column: value`."""
    return [
        *facts.row.tags[:MOST_TAGS],
        *(f"{name}: {value}" for name, value in facts.columns.items() if name in columns),
    ]


class SliceRow(NamedTuple):
    """The figures of a slice, keyed by policy; None for a policy that has no episodes in the slice."""

    name: str
    by_policy: Sequence[SliceSummary | None]

    @property
    def samples(self) -> int:
        """The largest number of samples of any policy."""
        return max(summary.samples for summary in self.by_policy if summary is not None)


def slice_rows(
    episodes: Iterable[EpisodeOutline], columns: Collection[str], policies: Sequence[str], threshold: float
) -> list[SliceRow]:
    """Return the figures of at most `MOST_TAGS` slices; tags come first."""
    rows: dict[tuple[bool, str], dict[str, list[EpisodeRow]]] = defaultdict(lambda: defaultdict(list))
    for facts in episodes:
        for name in slice_names(facts, columns):
            rows[name not in facts.row.tags, name][facts.row.policy].append(facts.row)
    return [
        SliceRow(name, [summarize_slice(own[policy], threshold) if policy in own else None for policy in policies])
        for (_, name), own in sorted(rows.items())[:MOST_TAGS]
    ]
