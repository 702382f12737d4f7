"""Test the page of a training run in a browser: readouts, axes, phones and dark mode."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from reward_kit.report.run_page import write_report
from tests.browser.conftest import Opened
from tests.browser.window import DESK, PHONE
from tests.report.training.training_run_factory import make_training, update

pytestmark = pytest.mark.campaign
PLOT, READOUT = 'svg[data-chart="score"]', '[data-readout="score"]'


def training(folder: Path, updates: int) -> Path:
    """Write a run that learned, was resumed once, and raised an alarm."""
    draw, lines = random.Random(updates), []
    for number in range(1, updates + 1):
        figures = {"score__mean": 0.2 + 0.6 * number / updates + draw.uniform(-0.1, 0.1)}
        figures |= {"learner__grad_norm": 10 ** draw.uniform(-2, 1), "learner__clip_fraction": draw.random() / 10}
        figures["reward_agent__done"] = float(number if number < updates // 2 else number - updates // 2)
        if number == updates // 3:
            figures["learner__alarm__ratio_max"] = 2e4
        lines.append((number, update(number, **figures)))
    return write_report(make_training(folder, lines, config={"updates": updates}))


@pytest.fixture(scope="module", params=[30, 10_000])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training(tmp_path_factory.mktemp("training"), request.param)


def test_training_page_renders_fast_and_loads_no_other_resource(window: Opened, page: Path) -> None:
    opened = window().open(page)
    print(f"\nfirst paint: {opened.first_paint_s():.2f} s, {page.stat().st_size:,} bytes")
    assert opened.requests == [page.resolve().as_uri()]


def test_values_are_shown_by_pointer_and_keyboard(window: Opened, page: Path) -> None:
    opened = window().open(page)
    plot = opened.page.locator(PLOT)
    box = plot.bounding_box()
    assert box is not None
    plot.hover(position={"x": box["width"] / 2, "y": box["height"] / 2})
    (said,) = opened.texts(READOUT)
    assert said.startswith("Update ") and "training batch 0." in said
    plot.focus()
    opened.page.keyboard.press("ArrowRight")
    (next_one,) = opened.texts(READOUT)
    assert _update(next_one) > _update(said)
    opened.page.locator("h1").hover()
    plot.blur()
    assert opened.texts(READOUT) == [""]


def _update(said: str) -> int:
    return int(said.removeprefix("Update ").split(":")[0].split(" ")[0].rstrip(",").replace(",", ""))


def test_curves_can_switch_axes_and_back(window: Opened, page: Path) -> None:
    opened = window().open(page)
    line = opened.page.locator(f'{PLOT} [data-line="0"]')
    select = opened.page.get_by_label("x axis")
    assert opened.page.locator("[data-axis] option").all_inner_texts() == [
        "updates",
        "environment steps",
        "hours of work",
    ]
    over_updates = line.get_attribute("d")
    ticks = opened.page.locator(f"{PLOT} [data-ticks] text").all_text_contents()
    select.select_option("environment steps")
    # Each update takes as many steps here: the curve begins further from 0 on its own axis, and looks alike.
    assert opened.page.locator(f"{PLOT} [data-ticks] text").all_text_contents() != ticks
    select.select_option("updates")
    again = line.get_attribute("d")
    assert over_updates is not None and again is not None
    assert _points(again) == pytest.approx(_points(over_updates), abs=0.11)
    assert opened.page.locator(f"{PLOT} [data-ticks] text").all_text_contents() == ticks


def _points(d: str) -> list[float]:
    return [float(number) for number in d.replace("M", " ").replace("L", " ").split()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE])
def test_training_page_is_legible_and_fits(window: Opened, page: Path, size: tuple[int, int], scheme: str) -> None:
    opened = window(size, color_scheme=scheme).open(page)
    assert opened.sticking_out() == [] and opened.pale() == []


def test_every_control_is_reachable_by_tab(window: Opened, page: Path) -> None:
    assert window().open(page).unreached() == []


def test_live_parts_can_be_replaced(window: Opened, tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    old, new = training(tmp_path / "old", 20), training(tmp_path / "new", 30)
    opened = window().open(old)
    opened.page.get_by_label("x axis").select_option("environment steps")
    opened.page.evaluate(
        """(text) => {
          const fresh = new DOMParser().parseFromString(text, "text/html");
          for (const part of document.querySelectorAll("[data-live]")) {
            part.replaceChildren(...fresh.querySelector(`[data-live="${part.dataset.live}"]`).cloneNode(true).childNodes);
          }
          RK.swapped(fresh);
        }""",
        new.read_text(encoding="utf-8"),
    )
    plot = opened.page.locator(PLOT)
    plot.focus()
    opened.page.keyboard.press("ArrowLeft")
    assert opened.texts(READOUT)[0].startswith("Update 30, 960 environment steps: ")
    assert opened.page.get_by_label("x axis").input_value() == "environment steps"
