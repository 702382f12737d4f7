"""`FinishedRun`: the result of a run in Python and in notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from reward_kit.display_text import pluralize
from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.notebook_html import Html, details, element, escape, faint, line, link, root, strong, table
from reward_kit.runs.display import as_text, cost_text, figure, interval_text, judge_cost_text, metric_rows
from reward_kit.runs.files import REPORT_FILE
from reward_kit.runs.results import Result, read_results
from reward_kit.runs.summary import EpisodeRow, PolicySummary


@dataclass(frozen=True, slots=True, repr=False)
class FinishedRun:
    """The result of a run.

    `str()` returns the summary table that the command prints; notebooks show an HTML table.

    Attributes:
        path: the run's directory.
        title: the title of the table.
        status: "complete", or "interrupted" if a run limit stopped the run.
        why_stopped: the reason why the run was stopped, or None if the run is complete.
        rows: one row per episode, in no particular order.
        policies: the summary of each policy.
        pass_threshold: the lowest passing score.
        notes: notes for the user, such as a note that the reward ran without a sandbox.
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
        """The mean score of the only policy, or None if no episode is scored.

        Raises:
            ConfigError: there is more than one policy.
        """
        if len(self.policies) > 1:
            raise ConfigError(f"{self.path} has {len(self.policies)} policies; read their scores from `policies`")
        return self.policies[0].score.mean if self.policies and self.policies[0].score else None

    @property
    def errors(self) -> list[EpisodeRow]:
        """The episodes that are unscored because they or their scoring ended with an error."""
        return [row for row in self.rows if row.is_error]

    @property
    def failed(self) -> list[EpisodeRow]:
        """The scored episodes that did not pass; those with the lowest scores come first."""
        below = [row for row in self.rows if row.score is not None and row.score < self.pass_threshold]
        return sorted(below, key=lambda row: (row.score, row.rollout_id))

    @property
    def page(self) -> Path:
        """The path of the HTML report."""
        return self.path / REPORT_FILE

    def results(self) -> Iterator[Result]:
        """Yield all episodes and their scores from the files of the run.

        Raises:
            StoreError: a file is damaged.
        """
        return read_results(self.path)

    def result(self, which: EpisodeRow | str) -> Result:
        """Return an episode and its score. A notebook shows the conversation of the episode.

        Args:
            which: the row of the episode, or its `rollout_id`.

        Raises:
            ConfigError: the run has no such episode.
            StoreError: a file is damaged.
        """
        rollout_id = which if isinstance(which, str) else which.rollout_id
        result = next((item for item in self.results() if item.episode["rollout_id"] == rollout_id), None)
        if result is None:
            near = did_you_mean(rollout_id, (row.rollout_id for row in self.rows))
            raise ConfigError(f"{self.path} has no episode {rollout_id!r}{near if near.endswith('?') else ''}")
        return result

    def __str__(self) -> str:
        return as_text(self.policies, self.title)

    def __repr__(self) -> str:
        scores = [f"{one.policy} {one.score.mean:.3f}" if one.score else f"{one.policy} –" for one in self.policies]
        parts = [repr(str(self.path)), self.status, pluralize(len(self.rows), "episode"), *scores]
        return f"FinishedRun({', '.join(parts)})"

    def _repr_html_(self) -> str:
        parts = [line(strong(self.title))]
        if self.why_stopped:
            parts.append(line(strong("Stopped: "), self.why_stopped))
        columns = _columns(self.policies)
        parts.append(table(columns, self.policies, lambda one: [_cells(one)[name] for name in columns]))
        names, metrics = metric_rows(self.policies)
        if metrics:
            parts.append(details("metrics", table(names, metrics)))
        if self.errors:
            parts.append(details(f"{pluralize(len(self.errors), 'episode')} with errors", _rows(self.errors, "error")))
        if self.failed:
            parts.append(details(f"{pluralize(len(self.failed), 'episode')} did not pass", _rows(self.failed, "score")))
        parts += [line(faint(note)) for note in self.notes]
        page = self.page
        parts.append(
            line(link(page)) if page.is_file() else line(faint(f"no report was written; the run is in {page.parent}"))
        )
        return root(*parts)


_BAR = "color-mix(in srgb, currentColor {0}, transparent)"


def _columns(policies: Sequence[PolicySummary]) -> list[str]:
    errors, cost = any(one.errors for one in policies), any(one.cost is not None for one in policies)
    names = ["policy", "mean score", "", "pass rate", "episodes", "not passed"]
    judge = any(one.judge_calls for one in policies)
    optional = {"errors": errors, "cost": cost, "judge cost": judge}
    return [*names, *(name for name, is_shown in optional.items() if is_shown)]


def _cells(one: PolicySummary) -> dict[str, object]:
    return {
        "policy": one.policy,
        "mean score": strong(interval_text(one.score)),
        "": _bar(one),
        "pass rate": "–" if one.pass_at_1 is None else f"{one.pass_at_1:.1%}",
        "episodes": str(one.episodes) if one.scored == one.episodes else f"{one.scored} of {one.episodes} scored",
        "not passed": str(one.failures),
        "errors": ", ".join(f"{count} {name}" for name, count in one.errors.items()) or "0",
        "cost": cost_text(one),
        "judge cost": judge_cost_text(one),
    }


def _bar(one: PolicySummary) -> Html:
    """Draw a mean within [0, 1] as a bar above its interval."""
    interval = one.score
    if interval is None or not 0.0 <= interval.mean <= 1.0:
        return escape("")
    full = _BAR.format("75%")
    track = element("div", element("div", "", style=f"width:{interval.mean:.1%}; height:100%; background:{full};"),
                    style=f"width:7em; height:0.5em; margin-top:0.45em; background:{_BAR.format('15%')};")  # fmt: skip
    if interval.low is None or interval.high is None or not 0.0 <= interval.low <= interval.high <= 1.0:
        return track
    span = f"margin-left:{interval.low:.1%}; width:{interval.high - interval.low:.1%}; height:0.15em;"
    whisker = element("div", element("div", "", style=f"{span} background:{full};"), style="width:7em; margin-top:1px;")
    return Html(track + whisker)


def _rows(rows: Sequence[EpisodeRow], what: str) -> Html:
    def cells(row: EpisodeRow) -> list[object]:
        is_scored = row.score is not None and what == "score"
        text = figure(row.score or 0.0) if is_scored else (row.error_message or row.score_error or "")
        return [row.sample_id, row.rollout_id, text]

    return table(["sample", "episode", what], rows, cells)
