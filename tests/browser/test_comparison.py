"""Test the page of a comparison in a browser: several runs, phones, dark mode and untrusted names."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from reward_kit.report.comparison_page import write_comparison
from reward_kit.report.run_page import write_report
from tests.browser.conftest import Opened
from tests.browser.window import PHONE
from tests.runs.comparison.run_pairs import Scores, compared, make_run

pytestmark = pytest.mark.campaign
CHANGE, SAMPLE, RUN, DIFFERENCE = 0, 1, 2, 5
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\x1b[31m"


def drawn(seed: int, chance: float, count: int = 120) -> Scores:
    """Return two episodes of each sample, passed with this probability."""
    draw = random.Random(seed)
    return {f"s{number:03d}": [float(draw.random() < chance) for _ in range(2)] for number in range(count)}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    runs = [make_run(folder / f"run{seed}", drawn(seed, chance)) for seed, chance in ((1, 0.5), (2, 0.3), (3, 0.8))]
    return write_comparison(compared(*runs), folder / "compare.html")


def test_comparison_loads_one_file_and_shows_an_interval_per_run(window: Opened, page: Path) -> None:
    opened = window().open(page)
    assert opened.requests == [page.resolve().as_uri()]
    assert opened.page.locator("svg circle, svg rect, svg path, svg line").count() >= 2
    assert opened.page.get_by_text("run3").count() > 0


def test_samples_are_sorted_filtered_and_searched(window: Opened, page: Path) -> None:
    opened = window().open(page)
    table = opened.page.locator("[data-table=samples]")
    table.get_by_label("change").select_option("lost")
    assert set(opened.column("samples", CHANGE)) == {"lost"}
    table.locator("select[data-column=run]").select_option("run3")
    assert set(opened.column("samples", RUN)) == {"run3"}
    table.get_by_role("button", name="clear").click()
    head = table.locator("th", has_text="difference").first
    head.get_by_role("button").click()
    first = opened.column("samples", DIFFERENCE)
    head.get_by_role("button").click()
    assert opened.column("samples", DIFFERENCE) != first and head.get_attribute("aria-sort") == "ascending"
    table.get_by_label("search").fill("s007")
    assert opened.column("samples", SAMPLE) == ["s007", "s007"]


@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark"}], ids=["light", "dark"])
def test_comparison_is_accessible_on_desktop_and_phone(window: Opened, page: Path, options: dict[str, str]) -> None:
    for size in ((1280, 800), PHONE):
        opened = window(size, **options).open(page)
        assert opened.sticking_out() == []
        assert opened.pale() == []
        assert opened.unreached() == []


def test_scores_open_the_transcripts_of_both_runs(window: Opened, tmp_path: Path) -> None:
    scores: Scores = {HOSTILE: [1.0], "two": [0.0, 1.0]}
    runs = [make_run(tmp_path / name, scores, policy=f"{name} {HOSTILE}") for name in ("a", "b")]
    for run in runs:
        write_report(run)
    target = write_comparison(compared(*runs), tmp_path / "compare.html")
    for row, column, run, name in ((0, 0, "a", HOSTILE), (0, 1, "b", HOSTILE), (1, 0, "a", "two"), (1, 1, "b", "two")):
        opened = window().open(target)
        links = opened.page.locator("[data-table=samples] tbody tr").nth(row).get_by_role("link")
        assert links.count() == 2
        links.nth(column).focus()
        opened.page.keyboard.press("Enter")
        opened.page.locator("#view h2").wait_for()
        assert f"/{run}/report.html#/" in opened.page.url
        assert opened.page.inner_text("#view h2").startswith(name[:9])


def test_untrusted_names_are_escaped(window: Opened, tmp_path: Path) -> None:
    scores: Scores = {HOSTILE: [1.0], "x" * 5000: [0.0], "plain": [1.0]}
    runs = [make_run(tmp_path / name, scores, policy=HOSTILE, task_name=HOSTILE) for name in ("a", "b")]
    opened = window(PHONE).open(write_comparison(compared(*runs), tmp_path / "compare.html"))
    assert opened.sticking_out() == [] and len(opened.requests) == 1
    assert opened.page.locator("img").count() == 0
