"""Which episodes of a run are exported, and the lines of credit that belong to them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reward_kit.errors import ConfigError, StoreError, did_you_mean
from reward_kit.runs.files import told_of
from reward_kit.runs.results import Result, credit_places, read_results
from reward_kit.runs.run_folder import RunHeader


@dataclass(slots=True)
class Selection:
    """Which episodes.

    Attributes:
        pass_threshold: a score of at least this passes.
        min_score: those with a score of at least this; None takes the unscored too.
        only_passed: those that passed.
        policies: of these; all where it is empty.
        left_out: how many are not taken, and why; counted while they are read.
        seen: the policies that there are.
    """

    pass_threshold: float
    min_score: float | None = None
    only_passed: bool = False
    policies: Sequence[str] = ()
    left_out: Counter[str] = field(default_factory=Counter)
    seen: set[str] = field(default_factory=set)

    def of(self, results: Iterator[Result]) -> Iterator[Result]:
        """Those that are taken; the others are counted.

        Raises:
            ConfigError: after the last one, where no episode is of a policy that was named.
        """
        for result in results:
            self.seen.add(str(result.episode.get("policy")))
            if why := self._why_not(result):
                self.left_out[why] += 1
            else:
                yield result
        for policy in self.policies:
            if policy not in self.seen:
                raise ConfigError(f"--policy {policy}: no episode is of it{did_you_mean(policy, sorted(self.seen))}")

    def _why_not(self, result: Result) -> str | None:
        if self.policies and result.episode.get("policy") not in self.policies:
            return "of another policy"
        if self.min_score is None and not self.only_passed:
            return None
        score = result.row().score
        if score is None:
            return "unscored"
        if self.only_passed and score < self.pass_threshold:
            return f"below {self.pass_threshold:g}, which passes"
        return f"below {self.min_score:g}" if self.min_score is not None and score < self.min_score else None


def selected(run: Path, selection: Selection) -> Iterator[Result]:
    """The episodes of a run that are taken, one after the other."""
    return selection.of(read_results(run))


def header_of_run(run: Path) -> RunHeader:
    """The header of a run that has episodes.

    Raises:
        ConfigError: the folder is not that of a run, or of one that was trained.
        StoreError: it is damaged.
    """
    header = RunHeader.of_folder(run)
    if header.training is not None:
        raise ConfigError(f"{run} is a training run; its figures are in metrics.jsonl, one JSON object a line")
    return header


class CreditLines:
    """The lines of a run's `credit.jsonl` by episode, found again by their place in the file.

    Args:
        run: its folder; without the file no episode has any.

    Raises:
        StoreError: a line is damaged.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / "credit.jsonl"
        self._places = credit_places(run)

    def of(self, rollout_id: str) -> list[Mapping[str, Any]]:
        """Those of one episode, which stand one after the other.

        Raises:
            StoreError: the file cannot be read, or one of them is no JSON.
        """
        if (place := self._places.get(rollout_id)) is None:
            return []
        with told_of("read", self._path), self._path.open("rb") as lines:
            lines.seek(place.offset)
            block = lines.read(place.length)
        try:
            return [json.loads(line) for line in block.splitlines()]
        except ValueError as error:
            raise StoreError(f"{self._path}: the credit of {rollout_id} is not JSON: {error}") from None
