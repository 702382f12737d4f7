"""Test that the success probabilities of `counterfactual.jsonl` reach the page of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reward_kit.report.episode_chunks import ChunkReader
from reward_kit.report.run_data import read_run
from reward_kit.report.run_page import write_report
from reward_kit.report.viewer_runs import WatchedRun
from reward_kit.runs.counterfactual import Continuation, Counterfactual
from reward_kit.runs.counterfactual_file import read_curves
from reward_kit.runs.step_search import StepSearch, StepValue
from tests.report.run_factory import Parsed, episode, make_run, page_of, score, success_values, write_values

LOST = success_values("a", [1.0, 0.0])


def stored(folder: Path) -> Path:
    return make_run(folder, [episode("a"), episode("b")], [score("a", 0.0), score("b", 1.0)])


def lines_in(text: bytes, letter: bytes) -> list[Any]:
    return [json.loads(line[1:]) for line in text.splitlines() if line[:1] == letter]


def notes_of(page: Parsed) -> str:
    return page.text.partition("Parts of the page")[0]


def test_line_of_the_writer_can_be_read(tmp_path: Path) -> None:
    search = StepSearch(2, False, 32)
    for step, passed in ((0, 8), (1, 0)):
        search.add(StepValue(step, passed, 8))
    found = [Continuation(0, index, 1.0, True, "answered", 2, "go \ud800") for index in range(8)]
    result = Counterfactual("a", "x", "p", "q", 0.0, False, ["act", "wait"], 3, search, found)
    write_values(tmp_path, result.to_json())
    (curve,) = read_curves(tmp_path).curves["a"]
    assert (curve.continued_by, curve.lost_at, curve.changes[0].action) == ("q", (1.0, 0), "act")
    assert [(one.action, one.passed) for one in curve.changes[0].instead] == [("go \ud800", 8)]


def test_values_are_in_the_chunk_of_their_episode_without_the_continuations(tmp_path: Path) -> None:
    run = stored(tmp_path)
    other = LOST | {"continued_by": "</script>expert"}
    write_values(run, other, LOST | {"continuations": [{"step": 0}] * 100})
    with ChunkReader(read_run(run)) as reader:
        (text,) = reader.texts()
    (values,) = lines_in(text, b"V")
    assert [line["continued_by"] for line in values] == ["p", "</script>expert"], "the episode's own policy is first"
    assert values[0]["changes"][0]["instead"] == LOST["changes"][0]["instead"] and "continuations" not in values[0]
    assert text.splitlines()[2][:1] == b"V" and b"<" not in text


def test_table_has_the_step_of_the_largest_loss(tmp_path: Path) -> None:
    run = stored(tmp_path)
    lines = [success_values("a", [0.0, 0.75]), LOST | {"continued_by": "expert"}]
    write_values(run, *lines, success_values("b", [0.25, 1.0], passed=True))
    page = page_of(run)
    assert page.column("episodes", "lost") == [0, None], "the expert lost more, at step 0; b only gained"
    assert "not shown" not in page.text


def test_page_without_the_file_has_no_code_for_it(tmp_path: Path) -> None:
    run = stored(tmp_path)
    before = write_report(run).read_text()
    assert "RK.successCurves = (episode" not in before and ".success {" not in before and '"lost"' not in before
    write_values(run, LOST)
    after = write_report(run).read_text()
    assert "RK.successCurves = (episode" in after and ".success {" in after


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{nonsense", "counterfactual.jsonl:2: not JSON"),
        ('{"a": 1}', "counterfactual.jsonl:2: expected an object with a string rollout_id"),
        ('{"rollout_id": "a"}', "counterfactual.jsonl:2: schema_version: missing"),
        (json.dumps(LOST | {"schema_version": 2}), "counterfactual.jsonl:2: schema_version"),
        (json.dumps(LOST | {"steps": 1}), "values must be sorted by step"),
        (json.dumps(LOST | {"confidence": float("nan")}), "counterfactual.jsonl:2: confidence"),
        (json.dumps(LOST | {"continued_by": 3}), "counterfactual.jsonl:2: continued_by"),
        (json.dumps(LOST).replace('"passed": 8', '"passed": 9'), "passed must be at most scored"),
        (json.dumps(LOST).replace('"next": 1', '"next": 7'), "must be measured steps"),
        ('{"rollout_id": "a", "x": ' + "[" * 100_000 + "}", "counterfactual.jsonl"),
        ("\udcff".encode("utf-8", "surrogateescape").decode("latin-1"), "counterfactual.jsonl:2: not JSON"),
        ('{"rollout_id": "<img src=x>\\u001b[31m", "schema_version": "<b>"}', "(got '<b>')"),
    ],
)
def test_damaged_file_is_reported_and_the_page_is_complete(tmp_path: Path, text: str, message: str) -> None:
    run = stored(tmp_path)
    (run / "counterfactual.jsonl").write_text(f"{json.dumps(LOST)}\n{text}\n")
    page = page_of(run)
    assert "The success probabilities cannot be read: " in page.text and message in page.text
    assert page.column("episodes", "score") == [0.0, 1.0] and "lost" not in json.dumps(page.tables)
    assert not {"img", "b"} & {tag for tag, _ in page.tags}


def test_lines_of_other_runs_attempts_and_scores_are_counted_but_not_shown(tmp_path: Path) -> None:
    run = stored(tmp_path)
    foreign = success_values("elsewhere", [1.0, 0.0])
    longer, rescored = LOST | {"continued_by": "q", **success_values("a", [1.0, 0.0, 0.0])}, LOST | {"score": 0.5}
    write_values(run, foreign, longer | {"continued_by": "q"}, rescored | {"continued_by": "r"}, LOST)
    page = page_of(run)
    assert "3 of 4 lines of counterfactual.jsonl are not shown" in page.text
    assert page.column("episodes", "lost") == [0, None]
    with ChunkReader(read_run(run)) as reader:
        assert [
            [line["continued_by"] for line in found] for text in reader.texts() for found in lines_in(text, b"V")
        ] == [["p"]]


def test_watched_run_reads_the_file_when_it_changes(tmp_path: Path) -> None:
    run = stored(tmp_path)
    watch = WatchedRun(run)

    def changed(since: int) -> list[str]:
        watch.poll_all()
        return [facts.row.rollout_id for facts in watch.changed_since(since)]

    assert changed(0) == ["a", "b"] and watch.episode_lines("a").lines[0].curves == b""
    before = watch.change
    assert changed(before) == [] and watch.change == before
    write_values(run, LOST)
    assert changed(before) == ["a"]
    assert json.loads(watch.episode_lines("b").lines[0].curves)[0]["values"][0]["passed"] == 8
    assert watch.facts() == read_run(run)
    before = watch.change
    (run / "counterfactual.jsonl").write_text("{\n")
    assert changed(before) == ["a"] and watch.facts().curves.problem is not None
    assert watch.episode_lines("a").lines[0].curves == b""
    (run / "counterfactual.jsonl").unlink()
    assert changed(watch.change) == [] and watch.facts() == read_run(run)
