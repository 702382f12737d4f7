"""Helpers that write runs with known times and parse their pages."""

from __future__ import annotations

import datetime
import json
import random
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

from reward_kit.report.run_data import RunFacts, read_run
from reward_kit.report.run_page import write_report
from reward_kit.runs.run_folder import RunFolder, RunHeader, RunTiming

BEGAN = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


def episode(
    name: str, begin_s: float = 0.0, took_s: float = 1.0, *, sample: str = "x", policy: str = "p", **changes: Any
) -> dict[str, Any]:
    """Return a line of `episodes.jsonl`; the group is that of the sample and the policy."""
    began = (BEGAN + datetime.timedelta(seconds=begin_s)).isoformat()
    line = {"schema_version": 1, "rollout_id": name, "sample_id": sample, "group_id": f"{sample}-{policy}"}
    line |= {"rollout_index": 0, "attempt": 0, "policy": policy, "stop_reason": "answered", "failure": None}
    line |= {"environment_return": None, "num_steps": 2, "usage": {}, "messages": [], "steps": [{}]}
    return line | {"timing": {"started_at": began, "duration_s": took_s}} | changes


def score(name: str, value: float | None, *spans: tuple[float, float], asked_s: float = 0.0, **changes: Any) -> dict:
    """Return a line of `scores.jsonl` with these calls, or without times if there are none."""
    failure = {"class": "crash", "where": "RewardError", "message": "it broke"} if value is None else None
    result = {"score": value, "reason": f"reason of {name}"} if value is not None else None
    timing: dict[str, Any] = {"duration_s": spans[-1][1] - spans[-1][0] if spans else 0.5}
    if spans:
        timing |= {"submitted_s": asked_s, "attempts": [list(span) for span in spans], "done_s": spans[-1][1]}
    line = {"rollout_id": name, "attempt": 0, "score": value, "result": result, "failure": failure, "timing": timing}
    return line | changes


def make_run(folder: Path, episodes: list[dict], scores: list[dict], **header: Any) -> Path:
    """Write the folder `run` with these lines."""
    timing = RunTiming(started_at=BEGAN, worked_s=9.0)
    full_header = {"task_name": "t", "total": len(episodes), "status": "complete", "timing": timing, **header}
    path = RunFolder.create(folder / "run", RunHeader(**full_header)).path
    for name, lines in (("episodes", episodes), ("scores", scores)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def facts(folder: Path, episodes: list[dict], scores: list[dict], **header: Any) -> RunFacts:
    """Return the page's facts of such a run."""
    return read_run(make_run(folder, episodes, scores, **header))


def random_run(folder: Path, size: int, *, width: int = 8) -> Path:
    """Write a run of two policies in groups of four, with some failures; calls overlap with episodes."""
    draw, episodes, scores = random.Random(size), [], []
    free = [0.0] * width
    for number in range(size):
        begin_s, took_s = min(free), draw.uniform(1.0, 3.0)
        free[free.index(begin_s)] = end_s = begin_s + took_s
        name, sample, policy = f"r{number:05d}", f"s{number // 8}", "ab"[number // 4 % 2]
        broke = draw.random() < 0.05
        failure = {"class": "timeout", "where": "ToolError", "message": "too slow"} if broke else None
        told = {"stop_reason": "error" if broke else draw.choice(["answered", "max_steps"]), "failure": failure}
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "cost": 0.001}
        episodes.append(episode(name, begin_s, took_s, sample=sample, policy=policy, usage=usage, **told))
        if not broke:
            spans = [(end_s + 0.5, end_s + 1.0), (end_s + 2.0, end_s + 3.0)][draw.random() < 0.9 :]
            value = round(draw.random(), 3) if draw.random() < 0.95 else None
            scores.append(score(name, value, *spans, asked_s=end_s))
    return make_run(folder, episodes, scores, task={"pass_threshold": 0.5})


class Parsed(HTMLParser):
    """A page as parsed by a browser.

    Attributes:
        tags: each start tag with its attributes, in order.
        texts: what stands between tags, scripts and styles excepted.
        blocks: the content of scripts and styles, by tag.
        figures: the values of `data-figure`, by policy.
        counts: of each table of counts, the number for all policies by name.
    """

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.blocks: dict[str, list[str]] = {"script": [], "style": []}
        self.figures: dict[str, dict[str, float]] = {}
        self.counts: dict[str, dict[str, int]] = {}
        self._raw = self._policy = self._table = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        self._raw = tag if tag in self.blocks else ""
        if "data-policy" in given:
            self._policy = given["data-policy"] or ""
        if figure := given.get("data-figure"):
            self.figures.setdefault(self._policy, {})[figure] = float(given["value"] or "nan")
        if tag == "table":
            self._table = given.get("data-counts") or ""
        if tag == "button" and "data-value" in given and "aria-label" in given:
            number = (given["aria-label"] or "").split(":")[0]
            self.counts.setdefault(self._table, {})[given["data-value"] or ""] = int(number)

    def handle_endtag(self, tag: str) -> None:
        self._raw = ""

    def handle_data(self, data: str) -> None:
        (self.blocks[self._raw] if self._raw else self.texts).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def tables(self) -> dict[str, Any]:
        """Return the data of the two tables."""
        found: dict[str, Any] = json.loads(self.blocks["script"][0])
        return found

    def column(self, table: str, key: str) -> list[Any]:
        keys = [column["key"] for column in self.tables[table]["columns"]]
        return [row[keys.index(key)] for row in self.tables[table]["rows"]]


def page_of(run: Path) -> Parsed:
    """Return the parsed page of a run."""
    return Parsed(write_report(run).read_text(encoding="utf-8"))


def success_values(name: str, means: list[float], *, passed: bool = False, **changes: Any) -> dict[str, Any]:
    """Return a line of `counterfactual.jsonl` with the success probability before each step; 8 continuations each."""
    points = [*means, float(passed)]
    values = [
        {"step": step, "passed": round(8 * mean), "scored": 8, "mean": mean, "low": mean * 0.75, "high": mean}
        for step, mean in enumerate(means)
    ]
    found = [
        {"step": step, "next": step + 1, "before": before, "after": after, "p_value": 0.01, "action": f"act {step}"}
        | {"instead": [{"action": "go on", "passed": 5}, {"action": "wait", "passed": 3}]}
        for step, (before, after) in enumerate(pairwise(points))
        if abs(after - before) > 0.5
    ]
    line = {"schema_version": 1, "rollout_id": name, "sample_id": "x", "policy": "p", "continued_by": "p", "seed": 0}
    line |= {"score": float(passed), "passed": passed, "steps": len(means), "per_step": 8, "confidence": 0.95}
    line |= {"values": values, "changes": found, "continuations": [], "cost": None, "stopped": None}
    return line | changes


def write_values(run: Path, *lines: dict[str, Any]) -> None:
    (run / "counterfactual.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
