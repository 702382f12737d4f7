"""Draw the figures of the docs into `docs/pictures/`: `python docs/draw_figures.py [FOLDER]`.

Figures show results of the code on their page, or the structure of the package. The output is deterministic, and a test
compares it with the committed files. `take_pictures.py` takes the screenshots.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from figures.credit import draw_anchors, draw_credit_lab, draw_sum
from figures.flow import draw_architecture, draw_choosing, draw_episode, draw_layers, draw_lookback
from figures.overlap import draw_overlap
from figures.statistics import draw_intervals, draw_passes
from figures.tokens import draw_tokens

PICTURES = Path(__file__).parent / "pictures"
FIGURES: dict[str, Callable[[Path], None]] = {
    "anchors": draw_anchors,
    "architecture": draw_architecture,
    "choosing": draw_choosing,
    "credit_lab": draw_credit_lab,
    "credit_sum": draw_sum,
    "episode": draw_episode,
    "intervals": draw_intervals,
    "layers": draw_layers,
    "lookback": draw_lookback,
    "overlap": draw_overlap,
    "passes": draw_passes,
    "token_row": draw_tokens,
}


def main() -> None:
    """Draw all figures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        draw(folder / f"{name}.svg")
        sys.stdout.write(f"{folder / name}.svg\n")


if __name__ == "__main__":
    main()
