"""Test labels and notes of episodes and steps in the viewer in a browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from reward_kit.report.run_page import write_report
from tests.browser.conftest import Opened
from tests.browser.test_hostile_texts import HOSTILE
from tests.browser.test_viewer import until
from tests.browser.walks import compared_walks, write_walks
from tests.browser.window import PHONE
from tests.cli.project import Project
from tests.cli.view_process import viewer

pytestmark = pytest.mark.campaign


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_walks(tmp_path, compared_walks(6), is_credited=False)


@pytest.fixture
def address(tmp_path: Path, run: Path) -> Iterator[str]:
    with viewer(Project(tmp_path), ".") as (_, address):
        yield address.replace("/?", "/walks/?")


def labels(run: Path) -> list[tuple[str, int | None, object]]:
    lines = [json.loads(line) for line in (run / "labels.jsonl").read_text().splitlines()]
    return [(line["rollout_id"], line.get("step"), line["label"]) for line in lines]


def test_labels_survive_a_reload_and_reach_other_tabs(window: Opened, address: str, run: Path) -> None:
    first, second = window().open(address, "#/episode/r00003"), window().open(address)
    box = first.page.get_by_label("Label of this episode")
    box.get_by_role("button", name="fail").click()
    until(lambda: box.get_by_role("status").inner_text() == "saved", "that the label is saved")
    box.get_by_label("note").fill(HOSTILE["script"])
    box.get_by_label("note").press("Tab")
    until(lambda: len(labels(run)) == 2, "the note")
    first.page.keyboard.press("Escape")
    until(lambda: "fail" in second.column("episodes", 14), "the label in the other tab")
    second.page.get_by_role("combobox", name="label").select_option("fail")
    assert second.column("episodes", 0) == ["r00003"]
    assert HOSTILE["script"] in second.column("episodes", 15)[0]
    second.page.get_by_role("combobox", name="label").select_option("(none)")
    assert "r00003" not in second.column("episodes", 0)
    second.page.goto(second.page.url + "#/episode/r00003/1")
    step = second.page.get_by_label("Label of step 1")
    step.get_by_label("score").fill("0.25")
    step.get_by_label("score").press("Enter")
    until(lambda: labels(run)[-1] == ("r00003", 1, 0.25), "the label of a step")
    second.page.reload()
    assert second.page.get_by_label("Label of step 1").get_by_label("score").input_value() == "0.25"
    box = second.page.get_by_label("Label of this episode")
    assert box.get_by_role("button", name="fail").get_attribute("aria-pressed") == "true"
    assert box.get_by_label("note").input_value() == HOSTILE["script"]
    box.get_by_role("button", name="fail").click()
    until(lambda: labels(run)[-1] == ("r00003", None, None), "the label is removed, and the note stays")
    assert second.page.evaluate("() => window.pwned") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_labels_are_legible_and_reachable_and_shown_in_the_report(
    window: Opened, address: str, run: Path, scheme: str
) -> None:
    opened = window(PHONE, color_scheme=scheme).open(address, "#/episode/r00003/1")
    box = opened.page.get_by_label("Label of this episode")
    box.get_by_role("button", name="pass").click()
    until(lambda: box.get_by_role("status").inner_text() == "saved", "that the label is saved")
    assert opened.pale() == []
    assert opened.sticking_out() == []
    assert opened.unreached() == []
    report = window(PHONE, color_scheme=scheme).open(write_report(run), "#/episode/r00003")
    assert report.page.get_by_label("Label of this episode").inner_text() == "label: pass"
    assert report.page.get_by_role("textbox", name="note").count() == 0, "a file cannot be labeled"
    assert report.pale() == []


def test_label_that_cannot_be_saved_shows_the_error(window: Opened, address: str, run: Path) -> None:
    opened = window().open(address, "#/episode/r00003")
    box = opened.page.get_by_label("Label of this episode")
    box.get_by_role("button", name="pass").wait_for()
    (run / "labels.jsonl").symlink_to("/nonexistent/labels")
    box.get_by_role("button", name="pass").click()
    until(lambda: "not saved" in box.get_by_role("status").inner_text(), "the error")
    opened.wrong = [one for one in opened.wrong if "404" not in one]
