"""Test the grid of samples by policy and the transcripts side by side in a browser."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from reward_kit.report.run_page import write_report
from tests.browser.conftest import Opened
from tests.browser.test_hostile_texts import HOSTILE, assert_harmless, hostile_walks
from tests.browser.walks import compared_walks, write_walks
from tests.browser.window import PHONE, Window
from tests.cli.project import Project
from tests.cli.view_process import viewer

pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    return write_report(write_walks(folder, compared_walks(60, rollouts=3), is_credited=False))


def expected_cells(run: Path) -> dict[tuple[str, str], list[float | None]]:
    """Return the scores of each sample and policy; None for an error."""
    lines = {name: (run / f"{name}.jsonl").read_text().splitlines() for name in ("episodes", "scores")}
    scores = {line["rollout_id"]: line["score"] for line in map(json.loads, lines["scores"])}
    cells: dict[tuple[str, str], list[float | None]] = {}
    for line in map(json.loads, lines["episodes"]):
        cells.setdefault((line["sample_id"], line["policy"]), []).append(scores[line["rollout_id"]])
    return cells


def rows(opened: Window) -> list[list[str]]:
    """Return the rendered rows of the grid in order: the sample and its cells."""
    found: list[list[Any]] = opened.page.evaluate(
        """() => [...document.querySelectorAll(".matrix-space > [role=row]")].map((row) =>
          [Number(row.ariaRowIndex), ...[...row.children].map((cell) => cell.textContent)])"""
    )
    return [row[1:] for row in sorted(found)]


def test_cells_show_means_passes_and_errors(window: Opened, page: Path) -> None:
    opened, cells = window().open(page), expected_cells(page.parent)
    grid = opened.page.get_by_role("grid", name="Samples by policy")
    assert grid.get_attribute("aria-rowcount") == "61"
    for sample, *shown, difference in rows(opened):
        means = []
        for policy, text in zip(("runner", "walker"), shown, strict=True):
            scores = [score for score in cells[sample, policy] if score is not None]
            errors = len(cells[sample, policy]) - len(scores)
            means.append(sum(scores) / len(scores))
            passed = sum(score >= 0.4 for score in scores)
            assert text.startswith(f"{means[-1]:.3f} · {passed}/{len(scores)}"), (sample, policy)
            assert ("error" in text) == bool(errors), "an error is not a score of 0"
        assert float(difference.replace("−", "-")) == pytest.approx(means[1] - means[0], abs=6e-4)
        assert difference[0] in "+−" or float(difference) == 0.0


def test_sample_without_a_score_is_shown_as_error(window: Opened, tmp_path: Path) -> None:
    opened = window().open(write_report(write_walks(tmp_path, compared_walks(20), is_credited=False)))
    assert [rows(opened)[8][0], rows(opened)[8][1]] == ["s00008", "error"]
    opened.page.locator(".cell-plain").first.click()
    opened.page.get_by_role("heading", name="s00000").wait_for()
    opened.page.go_back()
    opened.page.get_by_role("button", name="difference").click()
    assert rows(opened)[0][3][1:] >= rows(opened)[1][3][1:] and rows(opened)[-1][3] == "–", "unknown values are last"


def test_grid_is_used_with_the_keyboard_alone(window: Opened, page: Path) -> None:
    opened = window().open(page)
    grid = opened.page.get_by_role("grid")
    opened.page.locator(".matrix-space a[tabindex='0']").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        opened.page.keyboard.press(key)
    focused = "() => document.activeElement.ariaLabel"
    assert opened.page.evaluate(focused).startswith("s00002, runner: mean score")
    opened.page.keyboard.press("End")
    assert opened.page.evaluate(focused).startswith("s00059, runner"), "rows out of sight are rendered on demand"
    assert grid.evaluate("(one) => one.scrollTop") > 0
    opened.page.keyboard.press("Enter")
    opened.page.get_by_role("heading", name="s00059").wait_for()
    assert opened.page.locator(".versus-column").count() == 3, "the three episodes of the policy"
    opened.page.locator(".versus-column .message").first.wait_for()
    opened.page.keyboard.press("p")
    opened.page.get_by_role("heading", name="s00058").wait_for()
    opened.page.keyboard.press("Escape")
    grid.wait_for()


@pytest.mark.parametrize("size", [(1280, 800), PHONE], ids=["desk", "phone"])
def test_row_opens_the_transcripts_of_all_policies(window: Opened, page: Path, size: tuple[int, int]) -> None:
    opened = window(size).open(page)
    opened.page.locator(".matrix").get_by_role("link", name="s00003", exact=True).click()
    columns = opened.page.locator(".versus-column")
    assert opened.texts(".versus-column h3") == ["runner", "walker"]
    columns.nth(1).get_by_text("go").first.wait_for()
    columns.nth(0).get_by_label("episode").select_option("2")
    id_ = columns.nth(0).get_by_role("link", name="steps").get_attribute("href") or ""
    boxes = [columns.nth(place).bounding_box() for place in (0, 1)]
    assert boxes[0] and boxes[1]
    assert (boxes[0]["y"] == boxes[1]["y"]) == (size != PHONE), "side by side, or stacked on a phone"
    assert opened.sticking_out() == []
    columns.nth(0).get_by_role("link", name="steps").click()
    opened.page.get_by_role("heading", name=re.sub(".*/", "", id_)).wait_for()


@pytest.mark.parametrize("view", ["", "#/sample/s00003", "#/sample/s00003/runner"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_grid_and_transcripts_are_legible_and_reachable(window: Opened, page: Path, view: str, scheme: str) -> None:
    opened = window(PHONE, color_scheme=scheme).open(page, view)
    opened.page.locator(".message:visible, .matrix:visible").first.wait_for()
    assert opened.sticking_out() == []
    assert opened.pale() == []
    if not view:
        opened.page.locator("[data-table=episodes]").get_by_label("search").fill("s0000")
        opened.page.locator("[data-table=samples]").get_by_label("search").fill("s0000")
        opened.page.locator("[data-table=groups]").get_by_label("search").fill("s0000")
    assert opened.unreached() == []


def test_untrusted_names_in_the_grid_are_text(window: Opened, tmp_path: Path) -> None:
    opened = window().open(write_report(write_walks(tmp_path, hostile_walks(HOSTILE), is_credited=False)))
    count = len(rows(opened))
    assert count == len({text[:300] for text in HOSTILE.values()}), "samples with the same beginning stay apart"
    assert_harmless(opened)
    for place in range(count):
        opened.page.locator(".matrix-space [role=rowheader] a").nth(place).click()
        opened.page.locator(".versus-column .the-end").first.wait_for()
        assert_harmless(opened)
        opened.page.go_back()
        opened.page.locator(".matrix").wait_for()


def test_score_range_and_full_text_filter_grid_and_list(window: Opened, page: Path) -> None:
    opened = window().open(page)
    table, grid = opened.page.locator("[data-table=episodes]"), opened.page.get_by_role("grid")
    status = table.get_by_role("status")
    table.get_by_label("score from").fill("0.3")
    table.get_by_label("score to").fill("0.4")
    listed = [float(text) for text in opened.column("episodes", 3)]
    assert listed and all(0.3 <= score <= 0.4 for score in listed), "unscored episodes are not in a range"
    table.get_by_role("button", name="clear").click()
    assert status.inner_text() == "1–50 of 360"
    table.get_by_label("search").fill("You are at -3.")
    opened.page.wait_for_function("() => !document.querySelector('[role=status]').textContent.includes('searching')")
    lines = map(json.loads, (page.parent / "episodes.jsonl").read_text().splitlines())
    samples = [line["sample_id"] for line in lines if "You are at -3." in json.dumps(line["messages"])]
    assert status.inner_text().startswith(f"1–{min(50, len(samples))} of {len(samples)} (of 360)")
    assert grid.get_attribute("aria-rowcount") == str(len(set(samples)) + 1)
    table.get_by_role("combobox", name="policy").select_option("walker")
    assert opened.texts(".matrix [role=columnheader]") == ["sample", "walker"]


def test_grid_and_range_show_a_chosen_metric(window: Opened, page: Path, tmp_path: Path) -> None:
    """Each metric has a column, and the grid and the range use the chosen one."""
    run = tmp_path / "run"
    shutil.copytree(page.parent, run)
    lines = [json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines()]
    for place, line in enumerate(lines):
        if line["result"]:
            metrics = {"state": place % 4 / 4, "<b>tone</b>": 1.0} if place % 5 else {"state": place % 4 / 4}
            line["result"]["metrics"] = {name: {"score": score, "reason": ""} for name, score in metrics.items()}
    (run / "scores.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    opened = window().open(write_report(run))
    assert_harmless(opened)
    table = opened.page.locator("[data-table=episodes]")
    assert opened.texts("[data-grid-figure] option") == ["score", "state", "<b>tone</b>"]
    assert "state" not in opened.texts("[data-table=episodes] th:visible")
    scores = {
        line["rollout_id"]: None if line["score"] is None else line["result"]["metrics"]["state"]["score"]
        for line in lines
    }
    table.get_by_role("combobox", name="show").select_option(label="state")
    assert opened.texts("[data-table=episodes] th:visible")[3:5] == ["score", "state"]
    cells: dict[tuple[str, str], list[float]] = {}
    for episode in map(json.loads, (run / "episodes.jsonl").read_text().splitlines()):
        if (score := scores[episode["rollout_id"]]) is not None:
            cells.setdefault((episode["sample_id"], episode["policy"]), []).append(score)
    for sample, *shown, _ in rows(opened):
        for policy, text in zip(("runner", "walker"), shown, strict=True):
            own = cells[sample, policy]
            assert float(text.partition(" ")[0]) == pytest.approx(sum(own) / len(own), abs=6e-4), "not the score"
    table.get_by_label("state from").fill("0.5")
    table.get_by_label("state to").fill("0.5")
    assert {float(text) for text in opened.column("episodes", 4)} == {0.5}


def test_tags_filter_the_grid_and_the_list(window: Opened, tmp_path: Path) -> None:
    tags = [["sql"], ["sql", HOSTILE["script"]], []]
    walked = [
        (line | {"sample": {"id": "x", "tags": tags[n // 2 % 3], "level": "ab"[n // 2 % 2]}}, score)
        for n, (line, score) in enumerate(compared_walks(12))
    ]
    opened = window().open(write_report(write_walks(tmp_path, walked, is_credited=False)))
    table = opened.page.locator("[data-table=episodes]")
    opened.page.get_by_role("button", name="level: b").click()
    assert opened.page.get_by_role("grid").get_attribute("aria-rowcount") == "7"
    assert table.get_by_role("combobox", name="tags").input_value() == "level: b"
    opened.page.locator("[data-live=slices]").get_by_role("button", name="sql").click()
    assert table.get_by_role("status").inner_text() == "1–16 of 16 (of 24)"
    assert opened.page.locator("[data-live=slices]").get_by_role("button").count() == 4
    assert_harmless(opened)


@pytest.mark.parametrize("is_served", [False, True], ids=["report", "viewer"])
def test_times_with_10000_samples_and_two_policies(window: Opened, tmp_path: Path, is_served: bool) -> None:
    run = write_walks(tmp_path, compared_walks(10_000), is_credited=False)
    if is_served:
        with viewer(Project(tmp_path), ".") as (_, address):
            measure(window().open(address.replace("/?", "/walks/?")), is_served=True)
    else:
        measure(window().open(write_report(run)), is_served=False)


def measure(opened: Window, *, is_served: bool) -> None:
    """Print the times of the grid, a filter and a search with 20,000 episodes."""
    opened.page.wait_for_timeout(3000 if is_served else 0)  # the texts are read in the background
    assert opened.page.get_by_role("grid").get_attribute("aria-rowcount") == "10001"
    assert opened.page.locator(".matrix-space > [role=row]").count() < 60, "only the visible rows are rendered"
    measured = opened.page.evaluate(
        """async () => {
          const table = RK.tables.episodes;
          const timed = async (act) => {
            const began = performance.now();
            await act();
            await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
            return performance.now() - began;
          };
          return {
            matrix: await timed(() => { RK.matrix.version = -1; table.show(0); }),
            filter: await timed(() => table.filter("outcome", "failed")),
            clear: await timed(() => table.clear()),
            "sort by difference": await timed(() => RK.matrix.by("difference")),
            scroll: await timed(() => { document.querySelector("[data-matrix]").scrollTop = 100000; }),
            clear2: await timed(() => table.clear()),
            "score range": await timed(() => { table.bounds[0].value = "0.3"; table.show(0); }),
            clear3: await timed(() => table.clear()),
            search: await timed(async () => { table.search.value = "you are at 3"; await table.searchTexts(); }),
            "search again": await timed(async () => { table.search.value = "s0777"; await table.searchTexts(); }),
          };
        }"""
    )
    print("\n20,000 episodes: " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in measured.items()))
    assert opened.page.get_by_role("grid").get_attribute("aria-rowcount") == "11"


@pytest.mark.parametrize("way", ["key", "cell", "row"])
def test_escape_returns_the_focus_to_the_cell(window: Opened, page: Path, way: str) -> None:
    opened = window().open(page)
    rendered = opened.page.locator(".matrix-space > [role=row]", has_text="s00033")
    opened.page.locator(".matrix-space a[tabindex='0']").focus()
    for _ in range(33):
        opened.page.keyboard.press("ArrowDown")
    rendered.wait_for()
    if way == "key":
        opened.page.keyboard.press("Enter")
    elif way == "cell":
        rendered.get_by_role("link").nth(1).click()
    else:
        rendered.locator(".cell-plain").click()
    opened.page.get_by_role("heading", name="s00033").wait_for()
    before = opened.page.evaluate("() => document.activeElement.tagName")
    assert before == "H2"
    opened.page.keyboard.press("Escape")
    opened.page.locator("#main").wait_for(state="visible")
    opened.page.wait_for_timeout(100)  # the grid is rendered again after a resize
    focused = "() => [document.activeElement.dataset.row, document.activeElement.dataset.column]"
    assert opened.page.evaluate(focused) == ["33", "1" if way == "cell" else "0"]
    box, grid = rendered.bounding_box(), opened.page.locator("[data-matrix]").bounding_box()
    assert box is not None and grid is not None
    assert grid["y"] <= box["y"] <= grid["y"] + grid["height"] - box["height"], "the row is in sight"
