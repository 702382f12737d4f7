"""Test `reward-kit view` in a browser: the table of runs, their pages, and a run in progress."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reward_kit.runs.run_folder import RunFolder
from tests.browser.conftest import Opened
from tests.browser.walks import walk, walks, write_walks
from tests.browser.window import PHONE, Window
from tests.cli.project import Project
from tests.cli.view_process import viewer

pytestmark = pytest.mark.campaign
PATIENT_TOOLS = """
import asyncio
from pathlib import Path
from reward_kit import ToolRegistry

registry = ToolRegistry("clock")
calls = []

@registry.tool
async def wait() -> str:
    "From the sixth call on, wait until the test creates the file `looked`."
    calls.append(1)
    while len(calls) > 5 and not Path(__file__).with_name("looked").exists():
        await asyncio.sleep(0.02)
    return "waited"
"""
ROWS = "[data-table=runs] tbody tr"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path, rows=12)


def until(holds: Callable[[], Any], what: str, seconds: float = 60) -> None:
    """Wait for something that a page shows eventually."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.05)


def requests_to_other_hosts(opened: Window, address: str) -> list[str]:
    base = address.split("/?")[0]
    return [url for url in opened.requests if not url.startswith(f"{base}/")]


def test_running_run_is_updated_live(window: Opened, project: Project) -> None:
    (project.folder / "tools.py").write_text(PATIENT_TOOLS)
    (project.folder / "runs").mkdir()
    with viewer(project) as (_, address):
        opened = window().open(address)
        assert opened.texts(ROWS) == [] and "token" not in opened.page.url
        with project.start("run", "task.yaml", "--max-concurrency", "1", "--display", "none") as running:
            try:
                look_at(opened)
                (project.folder / "looked").touch()
                assert running.wait(60) == 0
            finally:
                running.kill()
        until(lambda: opened.page.locator("header .status").inner_text() == "complete", "the status of now")
        assert opened.page.locator("li.step[aria-current=step]").is_visible(), "what was looked at stays"
        opened.page.keyboard.press("Escape")
        until(lambda: opened.texts("data[data-figure=episodes]") == ["24"], "all figures")
        assert opened.texts("[data-table=episodes] [role=status]") == ["1–24 of 24"]
        assert opened.texts("data[data-figure=mean]") == ["0.500"]
        assert re.search(r"Live: \d+ episodes", opened.page.locator("nav.live").inner_text())
        opened.page.get_by_role("link", name="All runs").click()
        assert opened.page.locator(ROWS, has_text="complete").count() == 1
        assert requests_to_other_hosts(opened, address) == []


def look_at(opened: Window) -> None:
    """Find the running run in the table, and its first episodes."""
    opened.page.locator(ROWS, has_text="running").get_by_role("link").first.click()
    until(lambda: opened.texts("data[data-figure=episodes]") == ["5"], "figures of the first episodes")
    opened.page.locator("[data-table=episodes] tbody a").first.click()
    opened.page.locator("li.step").first.wait_for()
    opened.page.keyboard.press("j")


@pytest.fixture
def two_runs(tmp_path: Path) -> Path:
    write_walks(tmp_path, walks(40), is_credited=False).rename(tmp_path / "first")
    write_walks(tmp_path, walks(8), is_credited=False, status="running").rename(tmp_path / "second")
    (tmp_path / "third").mkdir()
    (tmp_path / "third" / "run.json").write_text("{")
    return tmp_path


@pytest.fixture
def address(project: Project, two_runs: Path) -> Iterator[str]:
    with viewer(project, ".") as (_, address):
        yield address


def test_runs_are_sorted_filtered_and_searched(window: Opened, address: str) -> None:
    opened = window().open(address)
    assert [text.split()[0] for text in opened.texts(ROWS)][-1] == "third"
    table = opened.page.locator("[data-table=runs]")
    table.get_by_label("status").select_option("killed")
    assert [text.split()[0] for text in opened.texts(ROWS)] == ["second"]
    table.get_by_role("button", name="clear").click()
    table.get_by_label("search").fill("THIRD")
    assert "unreadable" in opened.texts(ROWS)[0] and "cannot read" in opened.texts(ROWS)[0]
    opened.page.locator(ROWS).get_by_role("link").click()
    opened.page.get_by_role("heading", name="This page cannot be shown").wait_for()
    opened.page.get_by_role("link", name="All runs").click()
    table.locator("th", has_text="episodes").get_by_role("button").click()
    assert [text.split()[0] for text in opened.texts(ROWS)] == ["first", "second", "third"]
    opened.wrong = [one for one in opened.wrong if "404" not in one]  # of the page that says what is damaged


def test_deep_link_with_the_token_opens_the_step(window: Opened, address: str) -> None:
    link = address.replace("/?", "/first/?") + "#/episode/r00013/3"
    opened = window().open(link)
    current = opened.page.locator("li.step[aria-current=step]")
    current.wait_for()
    assert current.locator("a").first.inner_text() == "Step 3"
    assert opened.page.url.endswith("/first/#/episode/r00013/3")
    opened.page.goto("about:blank")
    opened.open(address.split("/?")[0] + "/first/#/group/s0002%2Fwalker")
    opened.page.get_by_role("heading", name="s0002/walker").wait_for()


def test_user_selection_is_kept_when_episodes_arrive(window: Opened, address: str, two_runs: Path) -> None:
    opened = window().open(address.replace("/?", "/second/?"))
    table = opened.page.locator("[data-table=episodes]")
    table.locator("th", has_text="score").first.get_by_role("button").click()
    table.get_by_label("search").fill("r0000")
    link = table.get_by_role("link", name="r00003")
    link.focus()
    line, score = walk(9, random.Random(1))
    with RunFolder(two_runs / "second") as store:
        store._append("episodes.jsonl", line)
        store.append_score(score)
        until(lambda: "r00009" in opened.column("episodes", 0), "the new episode")
        assert link.evaluate("(one) => one === document.activeElement"), "the focus is where it was"
        assert table.get_by_label("search").input_value() == "r0000"
        shown = [float(text) for text in opened.column("episodes", 3)]
        assert shown == sorted(shown, reverse=True), "it is sorted as before"
        until(lambda: "running" in opened.texts("header .status"), "the status of a run that is open")


def test_page_reports_a_stopped_server_and_reconnects(window: Opened, project: Project, two_runs: Path) -> None:
    with viewer(project, ".") as (process, address):
        opened = window().open(address.replace("/?", "/first/?"))
        opened.page.wait_for_timeout(500)
        process.terminate()
        element = opened.page.locator("nav.live")
        until(lambda: "No connection" in element.inner_text(), "that the connection is lost")
    assert opened.page.locator("#scores").is_visible(), "what was shown stays"
    assert all("ERR_CONNECTION_REFUSED" in one or "ERR_INCOMPLETE" in one for one in opened.wrong), opened.wrong
    opened.wrong.clear()


def test_page_without_the_token_shows_how_to_open_it(window: Opened, address: str) -> None:
    opened = window().open(address.split("/?")[0] + "/")
    assert "reward-kit view" in opened.page.inner_text("body")
    assert [one for one in opened.wrong if "403" not in one] == []
    opened.wrong.clear()


def test_task_links_to_its_trend_and_back_to_a_run(window: Opened, address: str) -> None:
    opened = window().open(address)
    opened.page.locator(ROWS, has_text="first").get_by_role("link", name="walk").click()
    opened.page.get_by_role("heading", name="Trend of walk").wait_for()
    assert opened.texts("main tbody tr td:first-child") == ["first", "second"]
    opened.page.get_by_role("link", name="second").click()
    opened.page.locator("#scores").wait_for()
    assert opened.page.url.endswith("/second/")


@pytest.mark.parametrize("path", ["/", "/second/", "/third/", "/-/trend"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_viewer_is_legible_on_a_phone_and_reachable_by_tab(
    window: Opened, address: str, path: str, scheme: str
) -> None:
    opened = window(PHONE, color_scheme=scheme).open(address.replace("/?", f"{path}?task=walk&"))
    assert opened.sticking_out() == []
    assert opened.pale() == []
    assert opened.unreached() == []
    opened.wrong = [one for one in opened.wrong if "404" not in one]
