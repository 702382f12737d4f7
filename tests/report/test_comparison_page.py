"""The page of a comparison: content, determinism and escaping of untrusted text."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError
from reward_kit.report.comparison_page import draw_forest, samples_table, write_comparison
from reward_kit.report.run_page import write_report
from reward_kit.runs.comparison_table import comparison_notes, lines
from tests.report.run_factory import Parsed
from tests.runs.comparison.run_pairs import Scores, compared, make_run

BEFORE: Scores = {"a": [1.0], "b": [0.0], "c": [1.0, 0.0], "d": [0.0], "gone": [1.0]}
AFTER: Scores = {"a": [0.0], "b": [1.0], "c": [0.0, 0.0], "d": [0.0], "gone": [None]}
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\x1b[31m\ud800"


def page(path: Path) -> Parsed:
    return Parsed(path.read_text(encoding="utf-8"))


@pytest.fixture
def written(tmp_path: Path) -> Parsed:
    comparison = compared(make_run(tmp_path / "before", BEFORE), make_run(tmp_path / "after", AFTER))
    return page(write_comparison(comparison, tmp_path / "compare.html"))


def test_page_shows_the_cells_and_notes_of_the_terminal_table(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, scores) for name, scores in (("before", BEFORE), ("after", AFTER))]
    comparison = compared(*runs)
    text = page(write_comparison(comparison, tmp_path / "compare.html")).text
    for name, cells in lines(comparison):
        assert name in text
        for cell in cells:
            assert " ".join(cell.split()) in text
    for note in comparison_notes(comparison):
        assert note in text
    assert "the results do not show a difference between after and before" in text


def test_samples_table_lists_lost_samples_first(written: Parsed) -> None:
    assert written.column("samples", "change") == ["lost", "won", "worse", "same", "left out"]
    assert written.column("samples", "sample") == ["a", "b", "c", "d", "gone"]
    assert written.column("samples", "difference") == [-1.0, 1.0, -0.5, 0.0, None]
    assert written.column("samples", "after") == ["0 of 1", "1 of 1", "0 of 2", "0 of 1", ""]


def test_scores_link_to_the_transcripts_of_both_runs(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "runs" / n, scores) for n, scores in (("a b", BEFORE), ("after", AFTER))]
    for run in runs:
        write_report(run)
    (tmp_path / "pages").mkdir()
    parsed = page(write_comparison(compared(*runs), tmp_path / "pages" / "compare.html"))
    links = dict(zip(parsed.column("samples", "sample"), parsed.column("samples", "score"), strict=True))
    assert links["a"] == [0.0, "./../runs/after/report.html#/episode/a-p-0"]
    assert links["c"] == [0.0, "./../runs/after/report.html#/sample/c/p"], "two episodes"
    assert links["gone"] == [None, "./../runs/after/report.html#/episode/gone-p-0"], "an error has a transcript"
    assert parsed.column("samples", "baseline")[0] == [1.0, "./../runs/a%20b/report.html#/episode/a-p-0"]


def test_score_of_a_run_without_report_has_no_link(written: Parsed) -> None:
    assert written.column("samples", "baseline") == [1.0, 0.0, 0.5, 0.0, 1.0]


def test_samples_of_several_runs_have_a_policy_column(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, BEFORE, policy=name) for name in ("x", "y", "z")]
    table = samples_table(compared(*runs), tmp_path)
    assert {row[2] for row in table.rows} == {"y", "z"} and len(table.rows) == 10


def test_page_loads_nothing_and_allows_only_its_own_script(written: Parsed) -> None:
    sources = [value for _, given in written.tags for key, value in given.items() if key in ("src", "href", "action")]
    assert all(value and value.startswith(("#", "data:")) for value in sources)
    (policy,) = [given["content"] or "" for tag, given in written.tags if given.get("http-equiv")]
    for kind in ("script", "style"):
        text = written.blocks[kind][-1]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not [given for _, given in written.tags if any(key.startswith("on") or key == "style" for key in given)]


def test_untrusted_text_is_escaped(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / n, {HOSTILE: [1.0], "b": [v]}, policy=f"{n}{HOSTILE}") for n, v in (("x", 0.0), ("y", 1.0))
    ]
    target = write_comparison(compared(*runs), tmp_path / "compare.html")
    parsed = page(target)
    assert not [tag for tag, _ in parsed.tags if tag == "img"]
    assert len(parsed.blocks["script"]) == 2, "its data and its script"
    assert "\\u202e" in parsed.text and "\\x1b[31m" in parsed.text
    assert not re.search("[\u202e\x1b\ud800]", target.read_text(encoding="utf-8"))


def test_script_formats_every_number_kind(written: Parsed) -> None:
    kinds = {column["kind"] for column in written.tables["samples"]["columns"]} - {"id", "word"}
    assert kinds == {"score", "signed"}
    for kind in kinds:
        assert f"    {kind}: " in written.blocks["script"][-1]


def test_page_is_deterministic(tmp_path: Path) -> None:
    comparison = compared(make_run(tmp_path / "before", BEFORE), make_run(tmp_path / "after", AFTER))
    one, other = (write_comparison(comparison, tmp_path / name).read_bytes() for name in ("1.html", "2.html"))
    assert one == other


def test_forest_plot_contains_every_interval(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / name, scores, policy=name) for name, scores in (("x", BEFORE), ("y", AFTER), ("z", AFTER))
    ]
    drawing = draw_forest(compared(*runs))
    bars = [path for path in drawing.paths if path.kind.startswith("range")]
    assert len(bars) == 2
    for bar in bars:
        begin, _, end = map(float, re.findall(r"[\d.]+", bar.d))
        assert 0 <= begin < drawing.width / 2 < end <= drawing.width
    assert all(0 <= label.y <= drawing.height for label in drawing.labels)


def test_single_common_sample_is_drawn_without_an_interval(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, {"a": [value]}) for name, value in (("x", 0.0), ("y", 0.0))]
    assert not [path for path in draw_forest(compared(*runs)).paths if path.kind.startswith("range")]


def test_missing_target_folder_is_reported(tmp_path: Path) -> None:
    comparison = compared(make_run(tmp_path / "before", BEFORE), make_run(tmp_path / "after", AFTER))
    with pytest.raises(ConfigError, match=r"directory .*nowhere does not exist; create it first"):
        write_comparison(comparison, tmp_path / "nowhere" / "compare.html")
