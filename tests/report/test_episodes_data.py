"""Storage of a page's episodes: in the page itself or in files beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import reward_kit.report.run_page as page_module
from reward_kit.errors import StoreError
from reward_kit.report.episode_chunks import chunk_script, credit_facts, served
from reward_kit.report.run_data import read_run
from reward_kit.report.run_page import run_page, write_report
from tests.report.run_factory import Parsed, episode, make_run, page_of, random_run, score
from tests.report.test_page import HOSTILE

LONG = [{"role": "user", "content": "x" * 90_000}]


def long_run(folder: Path, count: int = 40, **changes: object) -> Path:
    """Write a run whose episodes are too long to be in the page."""
    episodes = [episode(f"r{n:02}", rollout_index=n % 4, group_id=f"g{n // 4}", messages=LONG) for n in range(count)]
    return make_run(folder, episodes, [score(f"r{n:02}", n % 2) for n in range(count)], **changes)


def index_of(page: Parsed) -> dict:
    (index,) = [block for block in page.blocks["script"] if block.startswith('{"mode"')]
    return json.loads(index)


def policy_of(page: Parsed) -> dict[str, str]:
    (policy,) = [given["content"] or "" for _, given in page.tags if given.get("http-equiv")]
    return dict(rule.strip().split(" ", 1) for rule in policy.split(";"))


def written(run: Path) -> dict[str, str]:
    """Return the chunks beside the page by their relative paths."""
    return {str(file.relative_to(run)): file.read_text() for file in sorted(run.glob("report_data/*/*"))}


def test_small_run_is_written_as_a_single_file(tmp_path: Path) -> None:
    run = random_run(tmp_path, 60)
    page = page_of(run)
    index = index_of(page)
    names = [name for groups in index["chunks"] for _, _, _, ids in groups for name in ids]
    assert index["mode"] == "inline" and sorted(names) == sorted(page.column("episodes", "rollout"))
    chunks = [block for block in page.blocks["script"] if block.startswith("E{")]
    assert len(chunks) == len(index["chunks"])
    assert not (run / "report_data").exists()
    assert policy_of(page)["script-src"].count(" ") == 0, "its own script alone"


def test_large_run_has_its_episodes_in_files_beside_the_page(tmp_path: Path) -> None:
    run = long_run(tmp_path)
    page = page_of(run)
    index, files = index_of(page), written(run)
    assert index["mode"] == "files"
    assert sorted(files) == sorted(f"{index['folder']}/{n}.js" for n in range(len(index["chunks"])))
    assert (run / "report.html").stat().st_size < 300_000
    assert not [block for block in page.blocks["script"] if block.startswith("E{")]
    assert policy_of(page)["script-src"].endswith(" 'self' file:")


def test_rewriting_a_page_removes_its_earlier_chunks(tmp_path: Path) -> None:
    run = long_run(tmp_path)
    first = index_of(page_of(run))["folder"]
    second = index_of(page_of(run))["folder"]
    assert first != second
    assert {name.rsplit("/", 1)[0] for name in written(run)} == {second}


def test_unneeded_data_folder_is_removed_unless_it_holds_other_files(tmp_path: Path) -> None:
    run = long_run(tmp_path)
    write_report(run)
    (run / "episodes.jsonl").write_text(json.dumps(episode("r00")) + "\n")
    write_report(run)
    assert not (run / "report_data").exists()
    (run / "report_data").mkdir()
    (run / "report_data" / "mine.txt").write_text("mine")
    write_report(run)
    assert (run / "report_data" / "mine.txt").read_text() == "mine"


def test_two_pages_in_the_same_folder_have_separate_episode_data(tmp_path: Path) -> None:
    run = long_run(tmp_path)
    for name in ("one.html", "other.html"):
        write_report(run, tmp_path / name)
    assert len(list(tmp_path.glob("one_data/*"))) == len(list(tmp_path.glob("other_data/*"))) == 1


def test_failed_write_keeps_the_earlier_page_and_its_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = long_run(tmp_path)
    before = index_of(page_of(run))["folder"]

    def full(*_: object, **__: object) -> None:
        raise StoreError("cannot write: no space left on device")

    monkeypatch.setattr(page_module, "write_atomically", full)
    with pytest.raises(StoreError, match="no space left"):
        write_report(run)
    assert index_of(Parsed((run / "report.html").read_text()))["folder"] == before
    assert [name for name in written(run) if name.startswith(f"{before}/")]


def template_text(script: str) -> str:
    """Return the text that a browser parses from the raw template in a chunk's script."""
    found = re.fullmatch(r"RK\.take\(7,String\.raw`([^`]*)`\)\n", script)
    assert found is not None and "${" not in found[1]
    return found[1]


@pytest.mark.parametrize("text", [*HOSTILE, "`", "${alert(1)}", "$", "\\`", "\\\\`${", "'", "\\"])
def test_chunk_script_preserves_lines_exactly(text: str) -> None:
    line = json.dumps({"content": text, text: [text]}).encode("ascii")
    lines = template_text(chunk_script(7, b"E" + line + b"\nS" + line + b"\n").decode("ascii")).splitlines()
    assert [json.loads(found[1:]) for found in lines] == [json.loads(line)] * 2


def test_served_page_connects_to_its_own_server_only(tmp_path: Path) -> None:
    run = random_run(tmp_path, 20)
    page = Parsed(run_page(read_run(run), served(run), "/* more */", has_rows=False))
    assert index_of(page) == {"mode": "server", "credit": None, "folder": "", "chunks": []}
    policy = policy_of(page)
    assert policy["connect-src"] == "'self'" and "self" not in policy["script-src"]
    assert page.blocks["script"][-1].endswith("/* more */")
    assert page.column("episodes", "rollout") == []


def test_page_contains_the_estimator_and_its_options(tmp_path: Path) -> None:
    run = make_run(tmp_path, [], [])
    assert credit_facts(run) is None
    section = {"estimator": "gigpo", "step_rewards": "environment", "options": {"omega": 0.5, "gamma": 0.9, "x": 1}}
    (run / "summary.json").write_text(json.dumps({"credit": section}))
    told = credit_facts(run)
    assert told is not None and (told["estimator"], told["gamma"], told["step_rewards"]) == (
        "gigpo",
        0.9,
        "environment",
    )
    assert "x" not in told
    assert json.loads(served(run).index)["credit"] == told


@pytest.mark.parametrize("text", ["{", "[]", '{"credit": null}', '{"credit": {"options": 3}}'])
def test_damaged_summary_only_omits_credit_facts(tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path, [episode("r")], [])
    (run / "summary.json").write_text(text)
    assert index_of(page_of(run))["credit"] is None


def test_episode_links_encode_the_stored_rollout_id(tmp_path: Path) -> None:
    names = ["a b", "a/b#c?d%", "half \ud83d", "json:x", "x" * 300]
    run = make_run(tmp_path, [episode(name) for name in names], [score(name, 0.0) for name in names])
    links = {given["href"] for tag, given in page_of(run).tags if tag == "a" and "#/" in (given.get("href") or "")}
    assert links == {
        "#/episode/a%20b",
        "#/episode/a%2Fb%23c%3Fd%25",
        "#/episode/json%3A%22half%20%5Cud83d%22",
        "#/episode/json%3A%22json%3Ax%22",
        f"#/episode/{'x' * 300}",
    }


def test_shortened_rollout_id_keeps_the_full_id(tmp_path: Path) -> None:
    name = "x" * 300
    page = page_of(make_run(tmp_path, [episode(name), episode("short")], []))
    assert page.column("episodes", "rollout") == ["short", ["x" * 120 + "… (300 characters)", name]]


def test_groups_are_listed_by_descending_score_spread(tmp_path: Path) -> None:
    episodes = [episode(name, group_id=name[0]) for name in ("a1", "a2", "b1", "b2", "c1", "d1", "d2")]
    scores = [score("a1", 1.0), score("a2", 1.0), score("b1", 1.0), score("b2", 0.25), score("c1", 1.0)]
    page = page_of(make_run(tmp_path, episodes, scores))
    assert page.column("groups", "group") == ["b", "a", "d"]
    assert page.column("groups", "spread") == [0.75, 0.0, None]
    assert page.column("groups", "scored") == [2, 2, 0]


def test_page_of_a_run_is_deterministic(tmp_path: Path) -> None:
    run = random_run(tmp_path, 40)
    assert write_report(run).read_bytes() == write_report(run).read_bytes()
    facts = read_run(run)
    assert run_page(facts, served(run)) == run_page(facts, served(run))
