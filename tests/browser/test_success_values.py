"""Test the success probabilities on the page of an episode, and their column in the table of episodes."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from reward_kit.report.run_page import write_report
from tests.browser.conftest import Opened
from tests.browser.test_hostile_texts import HOSTILE, assert_harmless, unfold
from tests.browser.test_viewer import until
from tests.browser.walks import walk, walks, write_walks
from tests.browser.window import PHONE, Window
from tests.cli.project import Project
from tests.cli.view_process import viewer
from tests.report.run_factory import success_values, write_values

pytestmark = pytest.mark.campaign
MEANS = [0.5, 0.875, 1.0, 0.125, 0.0]
POINTS = ".success a.point"
TAGS = ".step-title .tag"


def stored(folder: Path, *lines: dict[str, Any]) -> Path:
    """Write a run of walks of 5 steps; the score of each becomes 0."""
    return with_values(write_walks(folder, no_scores()), *lines)


def no_scores() -> Any:
    return ((line, score | {"score": 0.0}) for line, score in walks(4))


def with_values(run: Path, *lines: dict[str, Any]) -> Path:
    write_values(run, *lines)
    write_report(run)
    return run


def values(means: list[float] = MEANS, **changes: Any) -> dict[str, Any]:
    return success_values("r00001", means, continued_by="walker") | changes


def opened(window: Opened, run: Path, **options: Any) -> Window:
    shown = window(**options).open(run / "report.html", "#/episode/r00001")
    shown.page.locator(POINTS).first.wait_for()
    return shown


def test_curve_shows_values_intervals_and_the_outcome(window: Opened, tmp_path: Path) -> None:
    shown = opened(window, stored(tmp_path, values()))
    order = shown.page.evaluate(
        "() => [...document.querySelectorAll('.success, .prelude, .steps')].map((e) => e.className)"
    )
    assert order == ["success", "prelude", "steps"]
    marks = shown.page.locator(POINTS + " .mark").evaluate_all(
        "(all) => all.map((e) => e.getBBox().y + e.transform.baseVal[0].matrix.f)"
    )
    assert [marks[2] < marks[1] < marks[0] < marks[3] < marks[4], len(marks)] == [True, 5]
    end = shown.page.locator(".success .end").evaluate("(e) => e.transform.baseVal[0].matrix.e")
    last = shown.page.locator(POINTS + " .mark").last.evaluate("(e) => e.transform.baseVal[0].matrix.e")
    assert end > last
    shown.page.locator(POINTS).nth(1).hover()
    readout = shown.page.locator(".success .readout").inner_text()
    assert readout.startswith(
        "Before step 1: 7 of 8 continuations passed, 0.88 (95% interval 0.66 to 0.88). Action: go("
    )
    assert shown.texts(".success .change-told") == [
        "Success probability lost at step 2: 1.00 → 0.13\naction: act 2\n"
        "first actions of the continuations that passed:\n5 × go on\n3 × wait"
    ]
    assert shown.texts(TAGS) == ["success 1.00 → 0.13"]
    assert shown.page.locator(".step", has=shown.page.locator(TAGS)).get_attribute("value") == "2"
    shown.page.locator(".success summary").click()
    assert len(shown.texts(".success details li")) == 6
    assert shown.texts(".success details li")[-1] == "The episode failed after 5 steps."


def test_value_opens_its_step_by_mouse_and_by_keyboard(window: Opened, tmp_path: Path) -> None:
    shown = opened(window, stored(tmp_path, values()))
    current, now = shown.page.locator("li.step[aria-current=step]"), shown.page.locator(".success .now")
    assert not now.is_visible()
    for _ in range(2):  # the second click returns to the step that is already selected
        shown.page.evaluate("() => window.scrollTo(0, 0)")
        shown.page.locator(POINTS).nth(3).click()
        assert current.get_attribute("value") == "3"
        until(lambda: current.evaluate("(e) => Math.abs(e.getBoundingClientRect().top) < innerHeight / 2"), "the step")
    assert shown.page.url.endswith("/r00001/3") and now.is_visible()
    shown.page.mouse.move(0, 0)
    shown.page.locator(POINTS).nth(1).focus()
    assert "Before step 1" in shown.page.locator(".success .readout").inner_text()
    shown.page.keyboard.press("Enter")
    assert current.get_attribute("value") == "1"
    shown.page.get_by_role("link", name="2", exact=True).click()
    assert current.get_attribute("value") == "2"


def test_each_policy_has_a_curve_and_its_own_is_first(window: Opened, tmp_path: Path) -> None:
    gained = values([0.0, 0.0, 1.0, 1.0, 1.0], continued_by="expert", stopped="1.00 US dollars (--max-cost)")
    gained["changes"][0] |= {"step": 0, "next": 2, "action": None}
    gained["values"][1:2] = []
    shown = opened(window, stored(tmp_path, gained, values([0.0] * 5)))
    assert shown.texts(".success .legend li") == ["continued by walker", "continued by expert"]
    assert shown.page.locator(POINTS).count() == 5 + 4
    text = shown.page.locator(".success").inner_text()
    assert "walker: No step changed the success probability significantly." in text
    assert "expert: Success probability gained between steps 0 and 2: 0.00 → 1.00" in text
    assert "expert: The search stopped early: 1.00 US dollars (--max-cost)" in text
    assert shown.texts(TAGS) == ["success 0.00 → 1.00 by step 2 (expert)", "success 1.00 → 0.00 (expert)"]


def test_column_appears_only_with_the_file(window: Opened, tmp_path: Path) -> None:
    run = stored(tmp_path, values())
    lost = "[data-table=episodes] td[data-of=lost]"
    assert window().open(run / "report.html").texts(lost) == ["–", "2", "–", "–"]
    (run / "counterfactual.jsonl").unlink()
    write_report(run)
    shown = window().open(run / "report.html", "#/episode/r00001")
    shown.page.locator("li.step").first.wait_for()
    assert shown.page.locator(f"{lost}, .success").count() == 0


def test_viewer_shows_a_file_that_appears_later(window: Opened, tmp_path: Path) -> None:
    project = Project(tmp_path, rows=1)
    run = write_walks(tmp_path / "all", no_scores())
    with viewer(project, "all") as (_, address):
        shown = window().open(address.replace("/?", f"/{run.name}/?"))
        lost = "[data-table=episodes] td[data-of=lost]:visible"
        assert shown.texts(lost) == []
        write_values(run, values())
        until(lambda: shown.texts(lost) == ["–", "2", "–", "–"], "the column")
        shown.page.get_by_role("link", name="r00001").first.click()
        shown.page.locator(POINTS).first.wait_for()
        shown.page.keyboard.press("Escape")
        (run / "counterfactual.jsonl").write_text("{\n")
        until(lambda: "cannot be read" in shown.page.locator(".notes").inner_text(), "the notice")
        until(lambda: shown.texts(lost) == [], "that the column is hidden")


@pytest.mark.parametrize("name", HOSTILE)
def test_untrusted_texts_are_shown_as_text(window: Opened, tmp_path: Path, name: str) -> None:
    text = HOSTILE[name]
    line = values(continued_by=text, stopped=text)
    line["changes"][0] |= {"action": text, "instead": [{"action": text, "passed": 1}] * 9}
    shown = opened(window, stored(tmp_path, line, values()))
    unfold(shown)
    shown.page.locator(POINTS).first.hover()
    assert_harmless(shown)
    shown.page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    assert_harmless(shown)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, (1280, 800)])
def test_curves_are_accessible_in_every_size_and_scheme(
    window: Opened, tmp_path: Path, size: tuple[int, int], scheme: str
) -> None:
    run = stored(tmp_path, values(), values([0.0, 0.0, 1.0, 0.0, 0.0], continued_by="a" * 80), values(continued_by="b"))
    shown = opened(window, run, size=size, color_scheme=scheme)
    unfold(shown)
    assert (shown.sticking_out(), shown.pale(), shown.unreached()) == ([], [], [])


def test_long_episode_fits_the_page(window: Opened, tmp_path: Path) -> None:
    line, score = walk(1, random.Random(0), steps=300)
    run = write_walks(tmp_path, [(line, score | {"score": 0.0})], is_credited=False)
    with_values(run, values([0.5] * 300))
    shown = opened(window, run, size=PHONE)
    labels = shown.page.locator(".success svg > text").evaluate_all(
        "(all) => all.map((e) => e.getBoundingClientRect()).map((b) => [b.left, b.right, b.top])"
    )
    bottom = sorted((left, right) for left, right, top in labels if top == max(top for *_, top in labels))
    assert all(right < left for (_, right), (left, _) in pairwise(bottom)), "no labels overlap"
    shown.page.locator(POINTS).nth(280).focus()
    shown.page.keyboard.press("Enter")
    assert shown.page.locator("li.step[aria-current=step]").get_attribute("value") == "280"
    assert shown.sticking_out() == []
