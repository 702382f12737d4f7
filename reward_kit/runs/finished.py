"""`FinishedRun`: what a run from Python came to, for code and for a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from reward_kit.display_text import counted
from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.runs.display import as_text
from reward_kit.runs.results import Result, read_results
from reward_kit.runs.run_html import run_html
from reward_kit.runs.summary import EpisodeRow, PolicySummary


@dataclass(frozen=True, slots=True, repr=False)
class FinishedRun:
    """What a run came to. `str()` is the table that the command shows; a notebook shows one of its own.

    Attributes:
        path: the run's folder.
        title: of the table.
        status: "complete", or "interrupted" where a limit of the run stopped it.
        why_stopped: in words; None where it is complete.
        rows: one for each episode, in no order.
        policies: what each policy came to.
        pass_threshold: a score of at least this passes.
        notes: lines for the user, such as that the reward ran without walls.
    """

    path: Path
    title: str
    status: str
    why_stopped: str | None
    rows: Sequence[EpisodeRow]
    policies: Sequence[PolicySummary]
    pass_threshold: float
    notes: Sequence[str] = ()

    @property
    def score(self) -> float | None:
        """The mean score of the only policy; None where nothing is scored.

        Raises:
            ConfigError: there are several policies.
        """
        if len(self.policies) > 1:
            raise ConfigError(f"{self.path} has {len(self.policies)} policies; see `policies`, one score for each")
        return self.policies[0].score.mean if self.policies and self.policies[0].score else None

    @property
    def broken(self) -> list[EpisodeRow]:
        """The episodes that have no score because something broke, in the episode or in its scoring."""
        return [row for row in self.rows if row.is_error]

    @property
    def failed(self) -> list[EpisodeRow]:
        """The episodes that were scored and did not pass, the worst first."""
        below = [row for row in self.rows if row.score is not None and row.score < self.pass_threshold]
        return sorted(below, key=lambda row: (row.score, row.rollout_id))

    @property
    def page(self) -> Path:
        """The report, for a browser."""
        return self.path / "report.html"

    def results(self) -> Iterator[Result]:
        """Every episode with its score, read from the run's files.

        Raises:
            StoreError: a file is damaged.
        """
        return read_results(self.path)

    def result(self, which: EpisodeRow | str) -> Result:
        """One episode with its score, read from the run's files; a notebook shows its conversation.

        Args:
            which: the episode, as one of `rows`, `failed` and `broken`, or its `rollout_id`.

        Raises:
            ConfigError: the run has no such episode.
            StoreError: a file is damaged.
        """
        rollout_id = which if isinstance(which, str) else which.rollout_id
        found = next((one for one in self.results() if one.episode["rollout_id"] == rollout_id), None)
        if found is None:
            near = did_you_mean(rollout_id, (row.rollout_id for row in self.rows))
            raise ConfigError(f"{self.path} has no episode {rollout_id!r}{near if near.endswith('?') else ''}")
        return found

    def __str__(self) -> str:
        return as_text(self.policies, self.title)

    def __repr__(self) -> str:
        scores = [f"{one.policy} {one.score.mean:.3f}" if one.score else f"{one.policy} –" for one in self.policies]
        told = [repr(str(self.path)), self.status, counted(len(self.rows), "episode"), *scores]
        return f"FinishedRun({', '.join(told)})"

    def _repr_html_(self) -> str:
        return run_html(
            self.title, self.policies, self.broken, self.failed, self.why_stopped, self.page, self.notes
        )  # fmt: skip
