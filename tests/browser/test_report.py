"""Test the page of a run in a browser, with 200 episodes and with 10,000."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from reward_kit.report.run_page import write_report
from tests.browser.conftest import Opened
from tests.browser.walks import GROUP, compared_walks, walks_page, write_walks
from tests.browser.window import PHONE, Window

SCORE = 3  # its column in the table of episodes
pytestmark = pytest.mark.campaign
SLACK = 5  # a busy machine is slower than the aim; what is measured is printed


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return walks_page(tmp_path_factory.mktemp("small"), 200)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = walks_page(tmp_path_factory.mktemp("large"), 10_000, steps=3)
    assert list(page.parent.glob("report_data/*/*.js")), "its episodes are beside the page"
    return page


def assert_alone(opened: Window, page: Path) -> None:
    """Assert that only the page and its opened data were requested."""
    own = page.parent.resolve().as_uri()
    asked = [url.split("#")[0] for url in opened.requests]
    assert asked[0] == page.resolve().as_uri()
    assert all(url.startswith(f"{own}/report_data/") for url in asked[1:]), asked


def scores(opened: Window) -> list[float]:
    return [float(text) for text in opened.column("episodes", SCORE)]


@pytest.mark.parametrize(("size", "aim_s"), [("small", 1.0), ("large", 2.0)])
def test_report_renders_fast_and_loads_no_other_resource(
    window: Opened, request: pytest.FixtureRequest, size: str, aim_s: float
) -> None:
    page: Path = request.getfixturevalue(size)
    opened = window().open(page)
    painted_s = opened.first_paint_s()
    print(f"\nfirst paint of the {size} page: {painted_s:.2f} s (aim {aim_s} s), {page.stat().st_size:,} bytes")
    assert painted_s < aim_s * SLACK
    assert_alone(opened, page)
    assert opened.sticking_out() == []


@pytest.mark.parametrize("size", ["small", "large"])
def test_episodes_are_sorted_filtered_searched_and_paged(
    window: Opened, request: pytest.FixtureRequest, size: str
) -> None:
    opened = window().open(request.getfixturevalue(size))
    head = opened.page.locator("[data-table=episodes] th", has_text="score").first
    head.get_by_role("button").click()
    assert scores(opened) == sorted(scores(opened), reverse=True) and head.get_attribute("aria-sort") == "descending"
    best = scores(opened)[0]
    head.get_by_role("button").click()
    assert scores(opened) == sorted(scores(opened)) and scores(opened)[0] < best
    table = opened.page.locator("[data-table=episodes]")
    table.get_by_label("outcome").select_option("passed")
    assert min(scores(opened)) >= 0.4
    table.get_by_label("search").fill("R00013")
    status = table.get_by_role("status")
    assert re.fullmatch(r"(1–\d of \d|nothing found) \(of [\d,]+\)", status.inner_text())
    table.get_by_role("button", name="clear").click()
    first = opened.column("episodes", 0)
    table.get_by_role("button", name="next").click()
    assert not set(first) & set(opened.column("episodes", 0))
    assert status.inner_text().startswith("51–100 of ")


def test_sample_and_count_link_to_their_episodes(window: Opened, small: Path) -> None:
    opened = window().open(small)
    opened.page.get_by_role("button", name="s0002", exact=True).first.click()
    assert opened.column("episodes", 0) == [f"r{n:05d}" for n in range(2 * GROUP, 3 * GROUP)]
    opened.page.get_by_role("button", name=re.compile("200: show episodes with max_steps")).click()
    assert opened.page.locator("[data-table=episodes]").get_by_role("status").inner_text() == "1–50 of 200"


@pytest.mark.parametrize("size", ["small", "large"])
def test_episode_is_opened_and_stepped_through(window: Opened, request: pytest.FixtureRequest, size: str) -> None:
    page: Path = request.getfixturevalue(size)
    opened = window().open(page)
    row = opened.page.locator("[data-table=episodes] tbody tr").nth(6)
    row.get_by_role("link").click()
    opened.page.get_by_role("heading", name="r00006").wait_for()
    assert opened.page.url.endswith("#/episode/r00006")
    assert opened.page.locator("#main").is_hidden()
    cards = opened.page.locator("ol.steps > li.step")
    assert cards.count() == opened.page.locator("nav.strip a").count() > 2
    assert re.search(r"[+−]\d\.\d{3}", cards.first.locator(".step-side").inner_text()), "advantages have a sign"
    opened.page.keyboard.press("j")
    opened.page.keyboard.press("j")
    assert opened.page.url.endswith("#/episode/r00006/1")
    current = opened.page.locator("li.step[aria-current=step]")
    assert current.locator("a").first.inner_text() == "Step 1"
    assert current.evaluate("(one) => one === document.activeElement")
    opened.page.keyboard.press("k")
    assert opened.page.url.endswith("#/episode/r00006/0")
    assert opened.page.locator("li.step[aria-current=step] .step-more").inner_text(), "what peers did in this state"
    opened.page.keyboard.press("Escape")
    opened.page.locator("#main").wait_for(state="visible")
    assert opened.page.locator("#view").is_hidden()
    assert_alone(opened, page)


@pytest.mark.parametrize("size", ["small", "large"])
def test_deep_link_opens_the_step(window: Opened, request: pytest.FixtureRequest, size: str) -> None:
    page: Path = request.getfixturevalue(size)
    opened = window().open(page, "#/episode/r00101/2")
    current = opened.page.locator("li.step[aria-current=step]")
    current.wait_for()
    assert current.locator("a").first.inner_text() == "Step 2"
    assert current.evaluate("(one) => one === document.activeElement")
    box = current.bounding_box()
    assert box is not None and 0 <= box["y"] < 800, "it is in sight"
    assert_alone(opened, page)
    opened.page.reload()
    current.wait_for()
    assert opened.page.url.endswith("#/episode/r00101/2")


def test_step_links_to_a_peer_in_the_same_state(window: Opened, small: Path) -> None:
    opened = window().open(small, "#/episode/r00008/0")
    link = opened.page.locator(".step-more a").first
    link.wait_for()
    target = link.get_attribute("href")
    link.click()
    opened.page.wait_for_url(f"**/*{target}")
    opened.page.locator("li.step[aria-current=step]").wait_for()
    opened.page.go_back()
    opened.page.get_by_role("heading", name="r00008").wait_for()


def test_group_view_links_cells_to_steps(window: Opened, small: Path) -> None:
    opened = window().open(small, "#/group/s0002%2Fwalker")
    opened.page.get_by_role("heading", name="s0002/walker").wait_for()
    rows = opened.page.locator("#view table").last.locator("tbody tr")
    assert rows.count() == GROUP
    opened.page.locator("#view a[href*='#/episode/r00009']").first.click()
    opened.page.get_by_role("heading", name="r00009").wait_for()


def test_unknown_episode_shows_an_error_with_a_way_back(window: Opened, small: Path) -> None:
    opened = window().open(small, "#/episode/nosuch/1")
    opened.page.get_by_role("heading", name="This page cannot be shown").wait_for()
    opened.page.get_by_role("link", name="Back to overview").click()
    opened.page.locator("#main").wait_for(state="visible")


@pytest.mark.parametrize("view", ["", "#/episode/r00006/1", "#/group/s0002%2Fwalker"])
def test_every_control_is_reachable_by_tab(window: Opened, small: Path, view: str) -> None:
    opened = window().open(small, view)
    opened.page.locator("h2:visible").first.wait_for()
    if not view:  # what takes long is the number of rows
        opened.page.locator("[data-table=episodes]").get_by_label("search").fill("r0000")
        opened.page.locator("[data-table=samples]").get_by_label("search").fill("s000")
        opened.page.locator("[data-table=groups]").get_by_label("search").fill("s000")
    assert opened.unreached() == []


@pytest.mark.parametrize("view", ["", "#/episode/r00006/1", "#/group/s0002%2Fwalker"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_report_is_legible_on_a_phone_in_both_color_schemes(
    window: Opened, small: Path, view: str, scheme: str
) -> None:
    opened = window(PHONE, color_scheme=scheme).open(small, view)
    opened.page.locator("h2:visible").first.wait_for()
    opened.page.wait_for_timeout(100)
    assert opened.sticking_out() == []
    assert opened.pale() == []
    ground = opened.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 300) == (scheme == "dark")


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with long names, tags, costs, errors and long reasons."""
    long = [
        (episode | {"sample": {"tags": ["channel:mail", "customer:returning", "difficulty:hard"]}}, score)
        for episode, score in compared_walks(9, policies=("a-policy-with-a-long-name-1", "a-policy-with-a-long-name-2"))
    ]
    for number, (episode, score) in enumerate(long):
        episode["rollout_id"] = score["rollout_id"] = f"breakfast-order-for-the-first-customer-{number:010}"
        episode["sample_id"] = f"breakfast-order-for-the-first-customer-{number // 2}"
        episode["usage"] = {"prompt_tokens": 123_456, "completion_tokens": 12, "cost": 0.0000123}
        score["result"] = score["result"] | {"reason": "refunded ['A-1002'], wanted [] " * 10}
    labels = [{"rollout_id": long[0][0]["rollout_id"], "label": "pass", "note": "a note that is long " * 5}]
    run = write_walks(tmp_path_factory.mktemp("tagged"), long, is_credited=False)
    (run / "labels.jsonl").write_text("".join(json.dumps(label) + "\n" for label in labels))
    return write_report(run)


def test_list_shows_all_columns_in_rows_of_two_lines(window: Opened, tagged: Path) -> None:
    opened = window().open(tagged)
    table = opened.page.locator("[data-table=episodes] table")
    width = opened.page.locator("[data-table=episodes] .scroll:has(table)").evaluate("(one) => one.clientWidth")
    assert table.evaluate("(one) => one.scrollWidth") <= width, "no column is out of sight"
    rows = table.locator("tbody tr")
    assert max(rows.nth(at).bounding_box()["height"] for at in range(rows.count())) < 60  # type: ignore[index]
    tags = table.locator(".below", has_text="channel:mail").first
    assert tags.get_attribute("title") == "channel:mail · customer:returning · difficulty:hard"
    assert table.locator("td[data-of=outcome]", has_text="error").inner_text().split() == ["error", "timeout"]
    ends = table.locator(".ends > :last-child").all_inner_texts()
    assert ends[0] == "000000" and "name-2" in ends


def test_list_has_cards_with_the_score_first_on_a_phone(window: Opened, tagged: Path) -> None:
    opened = window(PHONE).open(tagged)
    row = opened.page.locator("[data-table=episodes] tbody tr").first
    tops = {
        key: row.locator(f"td[data-of={key}]").bounding_box()["y"]  # type: ignore[index]
        for key in ("rollout", "score", "sample", "reason", "steps")
    }
    assert sorted(tops, key=tops.__getitem__) == ["rollout", "score", "sample", "reason", "steps"]
    assert opened.sticking_out() == []


def test_number_of_matches_is_next_to_the_search(window: Opened, small: Path) -> None:
    opened = window().open(small)
    matches = opened.page.locator("[data-table=episodes] [data-matches]")
    assert matches.inner_text() == ""
    opened.page.locator("[data-table=episodes]").get_by_label("search").fill("r0000")
    opened.page.get_by_text("10 of 200 match").wait_for()
