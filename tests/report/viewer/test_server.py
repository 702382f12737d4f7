"""Pages and event streams that the viewer serves."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from reward_kit.runs.files import write_atomically
from reward_kit.runs.run_folder import RunHeader
from tests.report.run_factory import Parsed, episode, make_run, page_of, random_run, score
from tests.report.viewer.served_viewer import ViewerClient, visiting


def add(run: Path, kind: str, *lines: dict[str, Any]) -> None:
    with (run / f"{kind}.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def mark_in(page: str) -> str:
    return page.split('RK.mark = "')[1].split('"')[0]


async def next_of(events: asyncio.Queue[tuple[str, Any, str]], name: str) -> Any:
    """Return the data of the next event of this name."""
    while True:
        told, data, _ = await asyncio.wait_for(events.get(), 120)
        if told == name:
            return data


def ids(rows: list[list[Any]]) -> set[str]:
    return {row[0] for row in rows}


async def page_at(visitor: ViewerClient, path: str) -> Parsed:
    answer = await visitor.get(path)
    assert answer.status == 200, answer
    return Parsed(answer.body)


async def test_runs_page_contains_the_table_of_runs(tmp_path: Path) -> None:
    random_run(tmp_path, 40)
    async with visiting(tmp_path) as visitor:
        page = await page_at(visitor, "/")
        runs = page.tables["runs"]
        assert [column["key"] for column in runs["columns"]][:3] == ["run", "policy", "task"]
        assert sorted(row[:2] for row in runs["rows"]) == [[["run", "./run/"], "a"], [["run", "./run/"], "b"]]
        assert runs["key"] == 2


async def test_run_page_matches_its_report(tmp_path: Path) -> None:
    run = random_run(tmp_path, 40)
    async with visiting(tmp_path) as visitor:
        page = await page_at(visitor, "/run/")
        assert set(page.column("episodes", "rollout")) == {f"r{n:05}" for n in range(40)}
        assert page.figures["a"]["episodes"] == 20
        (policy,) = [given["content"] or "" for _, given in page.tags if given.get("http-equiv")]
        assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "'unsafe" not in policy
        assert not (run / "report.html").exists(), "nothing is written"
        figures = await page_at(visitor, "/run/figures")
        assert figures.figures == page.figures and figures.column("episodes", "rollout") == []


async def test_run_name_with_special_characters_is_served(tmp_path: Path) -> None:
    name = "a b%2f#?<i>é"
    make_run(tmp_path, [episode("a")], []).rename(tmp_path / name)
    async with visiting(tmp_path) as visitor:
        ((cell, *_),) = (await page_at(visitor, "/")).tables["runs"]["rows"]
        assert cell[0] == name
        answer = await visitor.get(cell[1].removeprefix(".").removesuffix("/"))
        assert answer.status == 303
        assert (await page_at(visitor, answer.headers["location"].removeprefix("."))).column("episodes", "rollout")


async def test_episode_and_group_are_served_as_stored(tmp_path: Path) -> None:
    strange = "half \ud800 / é"
    run = make_run(tmp_path, [episode("a"), episode(strange), episode("c", sample="y")], [score("a", 1.0)])
    stored = (run / "episodes.jsonl").read_text().splitlines()
    async with visiting(tmp_path) as visitor:
        answer = await visitor.get("/run/episode/a")
        told = answer.body.splitlines()
        assert told[0] == 'G{"size":2,"first":0}'
        assert [line[0] for line in told] == ["G", "E", "S", "E"]
        assert [json.loads(line[1:]) for line in told if line[0] == "E"] == [json.loads(line) for line in stored[:2]]
        assert (await visitor.get("/run/group/x-p")).body == answer.body
        encoded = "json:" + json.dumps(strange).replace("/", "%2F").replace(" ", "%20").replace('"', "%22")
        assert (await visitor.get(f"/run/episode/{encoded}")).body == answer.body
        for path in ("/run/episode/z", "/run/group/z", "/run/episode/json:x", "/nosuch/episode/a"):
            refused = await visitor.get(path)
            assert refused.status == 404 and refused.headers["content-type"].startswith("text/plain")


async def test_damaged_run_has_an_error_page(tmp_path: Path) -> None:
    run = make_run(tmp_path, [episode("a")], [])
    (run / "episodes.jsonl").write_text('{"rollout_id": "<b>"}\n')
    async with visiting(tmp_path) as visitor:
        for path in ("/run/", "/run/figures"):
            answer = await visitor.get(path)
            assert answer.status == 404 and "cannot be read as an episode" in answer.body
            assert "<b>" not in answer.body
        (run / "episodes.jsonl").write_text("")
        assert (await visitor.get("/run/")).status == 200


async def test_finished_episodes_of_a_running_run_are_streamed(tmp_path: Path) -> None:
    run = make_run(tmp_path, [episode("a")], [score("a", 1.0)], status="running", total=3)
    async with visiting(tmp_path) as visitor:
        mark = mark_in((await visitor.get("/run/")).body)
        async with visitor.events(f"/run/events?since={mark}") as events:
            add(run, "episodes", episode("b"))
            rows = await next_of(events, "rows")
            assert ids(rows["episodes"]) == {"b"} and rows["episodes"][0][3] is None
            assert [row[2] for row in rows["samples"]] == [2]
            add(run, "scores", score("b", 0.25))
            rows = await next_of(events, "rows")
            assert [(row[0], row[3]) for row in rows["episodes"]] == [("b", 0.25)]
            assert await next_of(events, "figures") == {}
            figures = await page_at(visitor, "/run/figures")
            assert figures.figures["p"]["mean"] == 0.625


async def test_reconnected_page_receives_missed_events(tmp_path: Path) -> None:
    run = make_run(tmp_path, [episode("a")], [], status="running")
    async with visiting(tmp_path) as visitor:
        mark = mark_in((await visitor.get("/run/")).body)
        add(run, "episodes", episode("b"), episode("c"))
        async with visitor.events(f"/run/events?since={mark}") as events:
            told, rows, later = await asyncio.wait_for(events.get(), 120)
            assert told == "rows" and ids(rows["episodes"]) == {"b", "c"}
        add(run, "episodes", episode("d"))
        async with visitor.events(f"/run/events?since={later}") as events:
            assert ids((await next_of(events, "rows"))["episodes"]) == {"d"}


@pytest.mark.parametrize("mark", ["", "x", "0-0", "-1", "deadbeef-3"])
async def test_unknown_event_position_reloads_the_page(tmp_path: Path, mark: str) -> None:
    make_run(tmp_path, [episode("a")], [])
    async with visiting(tmp_path) as visitor, visitor.events(f"/run/events?since={mark}") as events:
        assert await next_of(events, "reload") == {}


async def test_damaged_or_removed_run_is_reported_on_its_open_page(tmp_path: Path) -> None:
    run = make_run(tmp_path, [episode("a")], [])
    async with visiting(tmp_path) as visitor:
        mark = mark_in((await visitor.get("/run/")).body)
        async with visitor.events(f"/run/events?since={mark}") as events:
            with (run / "episodes.jsonl").open("a") as file:
                file.write("no\n")
            assert "episodes.jsonl:2: not JSON" in (await next_of(events, "trouble"))["message"]
        async with visitor.events(f"/run/events?since={mark}") as events:
            shutil.rmtree(run)
            assert (await next_of(events, "trouble"))["message"]


async def test_runs_page_receives_changed_rows(tmp_path: Path, tmp_path_factory: Any) -> None:
    aside = tmp_path_factory.mktemp("aside")
    make_run(tmp_path, [episode("a")], [])
    async with visiting(tmp_path) as visitor:
        mark = mark_in((await visitor.get("/")).body)
        async with visitor.events(f"/events?since={mark}") as events:
            shutil.copytree(tmp_path / "run", aside / "other")
            (aside / "other").rename(tmp_path / "other")  # at once, as a look in between would tell of a part
            output = await next_of(events, "rows")
            assert [row[0] for row in output["changed"]] == [["other", "./other/"]] and set(output["all"]) == {
                "run",
                "other",
            }
            (tmp_path / "run").rename(aside / "run")
            output = await next_of(events, "rows")
            assert (output["changed"], output["all"]) == ([], ["other"])
        async with visitor.events("/events?since=999") as events:
            assert await next_of(events, "reload") == {}


async def test_training_run_page_is_served_and_receives_updates(tmp_path: Path) -> None:
    run = make_run(tmp_path, [], [], task_name="<lake>", training={"train_path": "x", "updates": 1})
    async with visiting(tmp_path) as visitor:
        page = await visitor.get("/run/")
        assert page.status == 200 and "<lake>" in Parsed(page.body).text
        async with visitor.events(f"/run/events?since={mark_in(page.body)}") as events:
            (run / "metrics.jsonl").write_text('{"update": 1, "held_out/score": 0.8125, "learner/kl": null}\n')
            assert await next_of(events, "figures") == {}
        assert "0.8125" not in page.body
        assert "0.812" in Parsed((await visitor.get("/run/figures")).body).text
        (run / "metrics.jsonl").write_text("no\n")
        assert (await visitor.get("/run/")).status == 404


async def test_server_shutdown_ends_event_streams(tmp_path: Path) -> None:
    make_run(tmp_path, [episode("a")], [])
    async with asyncio.timeout(120):
        async with visiting(tmp_path) as visitor:
            stream = visitor.events("/events?since=0")
            events = await stream.__aenter__()
            await next_of(events, "rows")
        await stream.__aexit__(None, None, None)


async def test_run_page_shows_the_current_status(tmp_path: Path) -> None:
    run = make_run(tmp_path, [episode("a")], [], status="running")
    async with visiting(tmp_path) as visitor:
        mark = mark_in((await visitor.get("/run/")).body)
        async with visitor.events(f"/run/events?since={mark}") as events:
            write_atomically(run / "run.json", RunHeader.read(run).replace(status="complete").to_bytes())
            await next_of(events, "figures")
            assert 'class="status complete"' in (await visitor.get("/run/figures")).body


async def test_search_returns_the_ids_of_matching_episodes(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "one & two <three>"}]
    make_run(tmp_path, [episode("a", messages=messages), episode("b")], [])
    async with visiting(tmp_path) as visitor:
        answer = await visitor.get("/run/search?q=TWO%20%3Cthree")
        assert json.loads(answer.body) == {"ids": ["a"]} and answer.headers["content-type"].startswith(
            "application/json"
        )
        assert json.loads((await visitor.get("/run/search")).body) == {"ids": []}
        assert (await visitor.get("/nosuch/search?q=x")).status == 404


async def test_posted_label_is_stored_shown_and_sent_to_other_pages(tmp_path: Path) -> None:
    run = make_run(tmp_path, [episode("a"), episode("b \ud800")], [])
    async with visiting(tmp_path) as visitor, visitor.events(f"/run/events?since={await mark_of(visitor)}") as events:
        answer = await visitor.post("/run/labels", {"rollout_id": "a", "label": "pass", "note": "<b>good</b>"})
        assert json.loads(answer.body) == {"episode": {"value": "pass", "note": "<b>good</b>"}}
        rows = (await next_of(events, "rows"))["episodes"]
        assert [row[:1] + row[-2:] for row in rows] == [["a", "pass", "<b>good</b>"]]
        await visitor.post("/run/labels", {"rollout_id": "b \ud800", "step": 1, "label": 0.5})
        page = await page_at(visitor, "/run/")
        assert page.column("episodes", "label") == ["pass", "1 step"]
        assert json.loads((await visitor.get("/run/labels?rollout_id=a")).body)["episode"]["value"] == "pass"
        assert json.loads((await visitor.get("/run/labels?rollout_id=x")).body) == {}
    lines = [json.loads(line) for line in (run / "labels.jsonl").read_text().splitlines()]
    assert [(line["rollout_id"], line.get("step"), line["label"]) for line in lines] == [
        ("a", None, "pass"),
        ("b \ud800", 1, 0.5),
    ]
    assert (run / "labels.jsonl").stat().st_mode & 0o777 == 0o600
    static = page_of(run)
    assert static.column("episodes", "label") == ["pass", "1 step"]
    assert static.tables["labels"]["a"] == {"episode": {"value": "pass", "note": "<b>good</b>"}}


async def mark_of(visitor: ViewerClient) -> str:
    return mark_in((await visitor.get("/run/")).body)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "not JSON"),
        (b"\xff", 400, "not JSON"),
        (b"[" * 60_000, 400, "not JSON"),
        (b"[]", 400, "must be an object"),
        (b'{"rollout_id": "a", "label": NaN}', 400, "label must be"),
        (b'{"rollout_id": "nosuch", "label": "pass"}', 404, "no episode 'nosuch'"),
        (b'{"rollout_id": "a", "label": "pass", "step": 2}', 404, "has 2 steps"),
        (b'{"rollout_id": "a", "label": "pass", "note": "' + b"x" * 70_000 + b'"}', 413, ""),
    ],
)
async def test_invalid_label_is_rejected(tmp_path: Path, body: bytes, status: int, message: str) -> None:
    run = make_run(tmp_path, [episode("a")], [])
    async with visiting(tmp_path) as visitor:
        answer = await visitor.post("/run/labels", body)
        assert (answer.status, message in answer.body) == (status, True), answer
    assert not (run / "labels.jsonl").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_label_in_a_read_only_folder_is_a_clear_error(tmp_path: Path) -> None:
    run = make_run(tmp_path, [episode("a")], [])
    run.chmod(0o500)
    async with visiting(tmp_path) as visitor:
        answer = await visitor.post("/run/labels", {"rollout_id": "a", "label": "pass"})
        assert answer.status == 404 and "labels need a writable run directory" in answer.body
    run.chmod(0o700)
