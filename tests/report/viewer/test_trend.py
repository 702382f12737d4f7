"""The page of a task: its runs, oldest first, with score, cost and latency."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from reward_kit.report.trend_page import LatencyReader, read_latencies
from reward_kit.report.viewer_runs import RunCatalog
from reward_kit.runs.run_folder import RunTiming
from tests.report.run_factory import Parsed, episode, make_run, score
from tests.report.viewer.served_viewer import visiting

HOSTILE = '</title><script>alert(1)</script>" onload="x \ud800 \u202e'


def add_run(folder: Path, name: str, day: int, value: float | None, **header: Any) -> Path:
    timing = RunTiming(started_at=datetime.datetime(2026, 1, day, tzinfo=datetime.UTC), worked_s=9.0)
    lines = [
        episode(f"{policy}{n}", took_s=n + day, policy=policy, usage={"cost": 0.5})
        for policy in "pq"
        for n in (0, 1, 5)
    ]
    scores = [score(line["rollout_id"], value) for line in lines]
    return make_run(folder, lines, scores, timing=timing, **header).rename(folder / name)


def texts_after(page: str, heading: str) -> str:
    return " ".join(Parsed(page).text.split(heading)[1].split())


async def test_trend_lists_the_runs_of_a_task_newest_last(tmp_path: Path) -> None:
    add_run(tmp_path, "late", 3, 1.0)
    add_run(tmp_path, "early", 1, 0.25)
    add_run(tmp_path, "unscored", 2, None)
    add_run(tmp_path, "other", 2, 0.5, task_name="other")
    async with visiting(tmp_path) as visitor:
        page = (await visitor.get("/-/trend?task=t")).body
        parsed = Parsed(page)
        links = [given["href"] for tag, given in parsed.tags if tag == "a" and "stranger" in (given.get("class") or "")]
        assert links == ["../early/", "../early/", "../unscored/", "../unscored/", "../late/", "../late/"]
        rows = texts_after(page, "cost per episode episode (median)")
        assert "early p 2026-01-01 00:00" in rows and "3 0.250 – $1.5000 $0.5000 2 s" in rows
        assert "3 – – $1.5000 $0.5000 3 s" in rows, "unscored is not 0"
        assert sum(tag == "svg" for tag, _ in parsed.tags) == 2, "one for each policy"
        index = Parsed((await visitor.get("/")).body)
        assert ["t", "./-/trend?task=t"] in index.column("runs", "task")
        empty = await visitor.get("/-/trend?task=nosuch")
        assert empty.status == 200 and "No run of this task" in empty.body
        assert (await visitor.get("/-/trend?task=t", Cookie=None)).status == 403


async def test_untrusted_task_name_is_text(tmp_path: Path) -> None:
    add_run(tmp_path, "run <b>", 1, 0.5, task_name=HOSTILE)
    async with visiting(tmp_path) as visitor:
        (target,) = {cell[1] for cell in Parsed((await visitor.get("/")).body).column("runs", "task")}
        page = Parsed((await visitor.get(target.removeprefix("."))).body)
        assert not [tag for tag, _ in page.tags if tag in ("script", "b")] and "<script>alert(1)" in page.text
        links = [given["href"] for tag, given in page.tags if tag == "a" and given.get("class")]
        assert links == ["../run%20%3Cb%3E/"] * 2


def test_latency_is_the_median_of_the_latest_attempts_and_follows_the_file(tmp_path: Path) -> None:
    run = add_run(tmp_path, "run", 1, 0.5)
    reader = LatencyReader()
    assert reader.read([run]) == {run: {"p": 2.0, "q": 2.0}}
    with (run / "episodes.jsonl").open("a") as file:
        file.write(json.dumps(episode("p1", took_s=9.0, policy="p", attempt=1)) + "\n")
    assert reader.read([run])[run]["p"] == pytest.approx(6.0)
    (run / "episodes.jsonl").write_text("{\n")
    assert reader.read([run, tmp_path / "missing"]) == {}


def test_trend_of_a_run_without_times_has_no_latency(tmp_path: Path) -> None:
    run = make_run(tmp_path, [episode("a", timing=None)], [])
    catalog = RunCatalog(tmp_path)
    catalog.poll()
    assert read_latencies(run) == {} and catalog.rows
