"""Test the figures of a run by tag and dataset column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reward_kit.report.run_data import read_run
from reward_kit.report.run_slices import slice_columns, slice_names, slice_rows
from tests.report.run_factory import episode, make_run, page_of, score
from tests.report.viewer.served_viewer import visiting


def tagged(number: int, **sample: Any) -> dict[str, Any]:
    line = episode(f"r{number}", sample=f"s{number // 2}", policy="ab"[number % 2])
    timing = line.pop("timing")  # the last key of a line, after the sample
    return line | {"sample": {"id": "x", "question": f"q{number}", **sample}, "ground_truth": 1, "timing": timing}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    levels = ["easy", "easy", "hard", "hard", "easy", "easy", "hard", "hard"]
    lines = [tagged(n, level=level, tags=["sql", "<b>"] if n < 2 else []) for n, level in enumerate(levels)]
    lines.append(tagged(8, level={"nested": 1}, tags=7, text="x" * 50, many=10**4200, none=float("nan")))
    scores = [score(f"r{n}", 0.5 if n % 4 else None) for n in range(9)]
    return make_run(tmp_path, lines, scores, task={"pass_threshold": 0.5})


def test_columns_with_few_values_and_tags_are_slices(run: Path) -> None:
    episodes = read_run(run).episodes
    columns = slice_columns(episodes)
    assert columns == {"level"}, "every question is different"
    assert [slice_names(facts, columns) for facts in episodes][:3] == [
        ["sql", "<b>", "level: easy"],
        ["sql", "<b>", "level: easy"],
        ["level: hard"],
    ]
    rows = {row.name: row for row in slice_rows(episodes, columns, ["a", "b"], 0.5)}
    assert list(rows) == ["<b>", "sql", "level: easy", "level: hard"], "tags are first"
    unscored, scored = rows["sql"].by_policy
    assert unscored is not None and unscored.score is None, "unscored is not 0"
    assert scored is not None and scored.score is not None and (scored.score.mean, scored.passed) == (0.5, 1)
    easy = rows["level: easy"].by_policy[0]
    assert easy is not None and (easy.samples, easy.episodes, easy.scored) == (2, 2, 0)


def test_page_has_slices_and_a_filter_by_tag(run: Path) -> None:
    page = page_of(run)
    assert page.column("episodes", "tags")[0] == "sql · <b> · level: easy"
    named = [given["data-value"] for _, given in page.tags if given.get("data-key") == "tags"]
    assert named == ["<b>", "sql", "level: easy", "level: hard"]
    assert not [tag for tag, _ in page.tags if tag == "b"]


def test_page_without_tags_has_no_slices(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, [episode("a"), episode("b")], []))
    assert "tags" not in [column["key"] for column in page.tables["episodes"]["columns"]]
    assert "By tag" not in page.text


async def test_viewer_has_the_slices_of_the_report(run: Path) -> None:
    async with visiting(run.parent) as visitor:
        body = (await visitor.get("/run/")).body
        assert "level: hard" in body and "By tag and dataset column" in body
