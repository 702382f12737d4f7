"""Live progress of a run."""

from __future__ import annotations

import re
import time
from io import StringIO
from typing import Any

import pytest

from reward_kit.console import SafeConsole
from reward_kit.reward_agent.stats import Tally
from reward_kit.runs.display import Display, DisplayKind, duration_text, summary_table
from reward_kit.runs.summary import EpisodeRow, summarize
from tests.runs.test_summary import broken, row, unscored


def console() -> SafeConsole:
    return SafeConsole(width=80, file=StringIO(), record=True)


class Progress:
    """A progress display, its notifications, and its current text."""

    def __init__(self, total: int = 10, kind: DisplayKind = "none") -> None:
        self.console = console()
        self.display = Display(kind, total, self.console)

    def tell(self, *rows: EpisodeRow) -> Progress:
        """Report an episode as a run does: first without a score, then with its score."""
        for told in rows:
            self.display.episode_stopped(
                EpisodeRow(
                    **{name: getattr(told, name) for name in told.__slots__} | {"score": None, "score_error": None}
                )
            )
            if told.error_class is None:
                self.display.episode_scored(told)
        return self

    def stop(self, *rows: EpisodeRow) -> Progress:
        for told in rows:
            self.display.episode_stopped(told)
        return self

    def shown(self) -> str:
        self.console.print(self.display)
        return " ".join(self.console.export_text().split())


def test_progress_shows_count_and_running_score() -> None:
    text = Progress().tell(row("a", 0, 1.0), row("b", 0, 0.0)).shown()
    assert "2/10" in text and "score 0.500" in text
    assert re.search(r"\d+\.\d/s", text) and "left" in text
    assert "broken" not in text and "waiting" not in text


def test_an_interval_is_shown_once_there_are_five_samples() -> None:
    four = [row(sample, 0, float(sample < "c")) for sample in "abcd"]
    assert "[" not in Progress().tell(*four).shown()
    twice = [row(sample, 1, 1.0) for sample in "abcd"]
    assert "[" not in Progress().tell(*four, *twice).shown(), "rollouts are not samples"
    shown = Progress().tell(*four, row("e", 0, 1.0)).shown()
    (low, high) = re.findall(r"score 0\.600 \[(\d\.\d{3}), (\d\.\d{3})\]", shown)[0]
    assert float(low) < 0.6 < float(high)


def test_progress_names_the_slowest_wait() -> None:
    progress = Progress().tell(row("a", 0, 1.0))
    assert "slowest" not in progress.shown()
    progress.display.slowest = lambda: "an answer of gpt, 12s"
    assert "slowest: an answer of gpt, 12s" in progress.shown()


def test_policies_are_rows_if_they_are_too_wide_for_columns() -> None:
    names = ["openai/a-long-model", "anthropic/another-model", "reader.py:Reader"]
    summaries = summarize([row(sample, 0, 1.0, policy=name) for name in names for sample in "abcde"], 1.0)
    figures = {"mean score": "1.000  [0.478, 1.000]", "reasons": "answered 5", "steps": "2.0"}
    for width, is_stacked in ((80, True), (120, False)):
        narrow = SafeConsole(width=width, record=True, file=StringIO())
        narrow.print(summary_table(summaries, "orders"))
        lines = narrow.export_text().splitlines()
        assert all(len(line) <= width for line in lines) and not any("…" in line for line in lines)
        rows = [line for line in lines if figures["mean score"] in line]
        assert len(rows) == (3 if is_stacked else 1)
        assert all(name in "\n".join(rows if is_stacked else lines) for name in names)
        text = "\n".join(lines)
        assert all(title in text and text.count(value) >= 3 for title, value in figures.items())


def test_scores_of_several_policies_are_shown_separately() -> None:
    text = Progress().tell(row("a", 0, 1.0, policy="expert"), row("a", 1, 0.0, policy="random")).shown()
    assert "expert 1.000" in text and "random 0.000" in text and "score" not in text


def test_name_in_brackets_is_shown_literally() -> None:
    progress = Progress(2, "plain").tell(row("a", 0, 1.0, policy="[bold]"), row("a", 1, 1.0, policy="[/b]"))
    with progress.display:
        progress.display.notify("note of [/b]")
    text = progress.console.export_text()
    assert "[bold] 1.000" in text and "[/b] 1.000" in text and "note of [/b]" in text


@pytest.mark.parametrize("rows", [[broken("a", 0)], [unscored("a", 0)]], ids=["an episode", "a score"])
def test_errors_are_counted_and_not_scored_zero(rows: list[EpisodeRow]) -> None:
    text = Progress().tell(*rows, row("b", 0, 1.0)).shown()
    assert "2/10" in text and "1 errors" in text and "score 1.000" in text
    assert "waiting" not in text


def test_unscored_episodes_wait_despite_errors() -> None:
    progress = Progress().tell(row("a", 0, 1.0), unscored("b", 0), broken("c", 0))
    assert "3 waiting for a score" in progress.stop(*(row("d", index) for index in range(3))).shown()


def test_reward_agent_stats_are_shown_before_the_first_score() -> None:
    progress, tally = Progress().stop(*(row("a", index) for index in range(5))), Tally()
    progress.display.scoring = lambda: tally.stats(pending=5)
    tally.begin_call(1)
    assert "5 waiting for a score (1 in flight)" in progress.shown()
    for seconds in (0.5, 1.25, 30.0):
        tally.latencies.add(seconds)
    assert "5 waiting for a score (1 in flight, p50 1.25s)" in progress.shown()


def test_no_episode_waits_without_a_reward() -> None:
    assert "waiting" not in Progress().stop(row("a", 0), row("b", 0)).shown()


def test_finished_progress_shows_no_time_left() -> None:
    text = Progress(1).tell(row("a", 0, 1.0)).shown()
    assert "1/1" in text and "left" not in text


@pytest.mark.parametrize("total", [0, 3])
def test_progress_without_episodes_is_shown(total: int) -> None:
    assert f"0/{total}" in Progress(total).shown()


def test_resumed_episodes_do_not_count_towards_the_rate() -> None:
    progress = Progress(10).tell(*(row("a", index, 1.0) for index in range(9)))
    with progress.display:
        text = progress.shown()
    assert "9/10" in text and "/s" not in text and "left" not in text


def test_rate_of_a_scoring_run_counts_scores() -> None:
    progress = Progress(3).stop(*(row("a", index) for index in range(3)))
    with progress.display:
        assert "/s" not in progress.shown()
        progress.display.episode_scored(row("a", 0, 0.5))
        text = progress.shown()
        assert re.search(r"3/3 score 0.500 [1-9]\d*\.\d/s", text) and "2 waiting for a score" in text and "left" in text
        for index in (1, 2):
            progress.display.episode_scored(row("a", index, 0.5))
        assert "left" not in progress.shown()


@pytest.mark.parametrize(
    ("score", "shown"),
    [(0.25, "0.250"), (-1e308, "-1e+308"), (1234.5678, "1234.57"), (-999.5, "-999.500"), (12345678.0, "1.23457e+07")],
)
def test_score_has_at_most_six_digits(score: float, shown: str) -> None:
    assert f"score {shown} " in Progress().tell(row("a", 0, score)).shown()


class TestKinds:
    def test_display_none_is_silent(self) -> None:
        progress = Progress(1, "none")
        with progress.display:
            progress.tell(row("a", 0, 1.0))
            progress.display.notify("a note")
        assert progress.console.export_text() == ""

    def test_plain_ends_with_the_last_line_and_shows_notes(self) -> None:
        progress = Progress(1, "plain")
        with progress.display:
            progress.display.notify("a note")
            progress.tell(row("a", 0, 1.0))
        first, last = progress.console.export_text().splitlines()
        assert first == "a note" and last.startswith("1/1  score 1.000  ")

    def test_plain_shows_the_wait_while_no_episode_stops(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("reward_kit.runs.display._QUIET_S", 0.05)
        progress = Progress(1, "plain")
        progress.display.slowest = lambda: "an answer of gpt, 40s"
        with progress.display:
            deadline = time.monotonic() + 20
            while not (text := progress.console.export_text(clear=False)) and time.monotonic() < deadline:
                time.sleep(0.02)
        assert "0/1  slowest: an answer of gpt, 40s" in " ".join(text.splitlines())

    def test_rich_display_leaves_only_notes(self) -> None:
        file = StringIO()
        display = Display("rich", 1, SafeConsole(width=80, file=file, force_terminal=True))
        with display:
            display.episode_stopped(row("a", 0))
            display.notify("a note")
        assert "a note" in file.getvalue() and "1/1" in file.getvalue()
        assert file.getvalue().endswith("\x1b[2K"), "the last thing is that the line is erased"

    def test_error_in_the_run_propagates(self) -> None:
        with pytest.raises(KeyError), Display("rich", 1, console()):
            raise KeyError


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (61, "1m01s"), (3_599.7, "1h00m"), (7_384, "2h03m")],
)
def test_durations(seconds: Any, shown: str) -> None:
    assert duration_text(seconds) == shown


def test_mean_score_of_each_tag_is_shown_for_each_policy() -> None:
    rows = [row("a", 0, 1.0, policy=name, tags=("easy",)) for name in "pq"]
    rows += [row("b", 0, 0.25, policy="q", tags=("hard",)), row("c", 0, policy="q", tags=("odd",))]
    shown = SafeConsole(width=80, record=True, file=StringIO())
    shown.print(summary_table(summarize(rows, 1.0), "orders"))
    _, _, tags = shown.export_text().partition("Tags")
    found = [line.split() for line in tags.splitlines() if line.split()[:1] in (["easy"], ["hard"], ["odd"])]
    assert [cells[:3] for cells in found] == [
        ["easy", "p", "1.000"],
        ["easy", "q", "1.000"],
        ["hard", "q", "0.250"],
        ["odd", "q", "unscored"],
    ]
