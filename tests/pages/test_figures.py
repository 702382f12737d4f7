"""Committed figures match their script and are readable in light and dark mode."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = DOCS / "draw_figures.py"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the figures that the script draws, by name."""
    folder = tmp_path_factory.mktemp("figures")
    subprocess.run([sys.executable, str(SCRIPT), str(folder)], check=True, capture_output=True, text=True)
    return {path.name: path for path in sorted(folder.iterdir())}


def test_committed_figures_match_the_drawing_script(drawn: dict[str, Path]) -> None:
    stale = [
        name
        for name, path in drawn.items()
        if not (DOCS / "pictures" / name).exists() or (DOCS / "pictures" / name).read_bytes() != path.read_bytes()
    ]
    assert not stale, f"{', '.join(stale)}: redraw them with `python docs/draw_figures.py`"


def test_every_figure_is_on_a_page_and_has_a_text_description(drawn: dict[str, Path]) -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    for name, path in drawn.items():
        described = re.findall(rf"!\[([^\]]+)\]\([./]*pictures/{re.escape(name)}\)", pages)
        assert described and all(len(words) > 20 for words in described), f"{name} is shown nowhere, or without words"
        root = ElementTree.parse(path).getroot()
        assert (
            root.get("role") == "img" and root.find(f"{SVG}title") is not None and root.find(f"{SVG}desc") is not None
        )


def test_figures_fit_a_phone_screen_and_nothing_crosses_their_edges(drawn: dict[str, Path]) -> None:
    for name, path in drawn.items():
        root = ElementTree.parse(path).getroot()
        _, _, width, height = map(float, root.get("viewBox", "").split())
        assert width <= 440, f"{name}: text of 14 units is too small on a phone where the sheet is wider"
        words = [element for element in root.iter(f"{SVG}text") if "transform" not in element.attrib]
        assert words, f"{name} has no text"
        for element in words:
            x, y = float(element.get("x", "nan")), float(element.get("y", "nan"))
            assert 0 < x < width and 0 < y < height, f"{name}: {element.text!r} is at {x}, {y}"
        for element in root.iter(f"{SVG}rect"):
            right = float(element.get("x", "nan")) + float(element.get("width", "nan"))
            foot = float(element.get("y", "nan")) + float(element.get("height", "nan"))
            assert right <= width and foot <= height, f"{name}: a box ends at {right}, {foot}"


def test_figures_have_a_background_and_colors_for_dark_mode(drawn: dict[str, Path]) -> None:
    for path in drawn.values():
        text = path.read_text(encoding="utf-8")
        assert '<rect class="ground"' in text and "prefers-color-scheme:dark" in text
        assert "<script" not in text and "http" not in text.replace("http://www.w3.org/2000/svg", "")
        used = {kind for kinds in re.findall(r'class="([^"]+)"', text) for kind in kinds.split()}
        styled = set(re.findall(r"\.([a-z]+)\{", text))
        assert used <= styled, f"{path.name}: no style for {sorted(used - styled)}"
