"""SVG images with selectable text, a background, and colors for light and dark mode.

An image is 440 units wide, so that text of 14 units is readable on a phone with 360 pixels. Text, background and fills
follow the reader's color scheme; viewers without support show the light colors. Colors are from the Okabe–Ito palette,
which is safe for color-blind readers, and no information is in color alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

WIDTH = 440
STYLE = """
svg{font:14px system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",Arial,sans-serif}
text{fill:#1c2430}.ground{fill:#fff;stroke:#d5dae1}.soft{fill:#5a6472}.small{font-size:12px}.tiny{font-size:11px}
.bold{font-weight:600}.code{font-family:ui-monospace,SFMono-Regular,Menlo,"Liberation Mono",monospace;font-size:12px}
.line{fill:none;stroke:#5a6472;stroke-width:1.4}.head{fill:#5a6472}.dash{stroke-dasharray:4 3}
.grid{stroke:#d5dae1;fill:none}.box{fill:#8a94a6;fill-opacity:.1;stroke:#8a94a6}.blue{fill:#0072b2;fill-opacity:.16;stroke:#0072b2}
.orange{fill:#d55e00;fill-opacity:.16;stroke:#d55e00}.green{fill:#009e73;fill-opacity:.16;stroke:#009e73}
.violet{fill:#9467bd;fill-opacity:.16;stroke:#9467bd}.gold{fill:#e69f00;fill-opacity:.22;stroke:#c98a00}
.frame{fill:#9467bd;fill-opacity:.05;stroke:#9467bd;stroke-width:1.6}.strong{fill-opacity:.75}.curve{fill:none;stroke-width:2.4}.thick{stroke-width:3.6}
@media (prefers-color-scheme:dark){text{fill:#e8ebf0}.ground{fill:#1d222b;stroke:#3b4350}.soft{fill:#a9b3c1}
.line{stroke:#a9b3c1}.head{fill:#a9b3c1}.grid{stroke:#3b4350}.blue{fill:#4db2ec;stroke:#4db2ec}
.orange{fill:#ff8a3d;stroke:#ff8a3d}.green{fill:#2fc79a;stroke:#2fc79a}.violet{fill:#b794e0;stroke:#b794e0}
.gold{fill:#f3bd45;stroke:#f3bd45}.frame{stroke:#b794e0}.strong{fill-opacity:.55}.curve{fill:none}}
"""


def number(value: float) -> str:
    """Format a coordinate with at most one decimal."""
    return f"{round(value, 1) + 0.0:g}"


def signed(value: float, digits: int = 2) -> str:
    """Format a number with its sign; zero has none."""
    rounded = round(value, digits)
    return f"{rounded:+.{digits}f}".replace("-", "−") if rounded else "0"


class Sheet:
    """An SVG image that collects drawn elements.

    Args:
        title: what it shows, in a few words.
        description: the same in sentences, for who does not see it.
    """

    def __init__(self, title: str, description: str) -> None:
        self.title, self.description = title, description
        self.parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, kind: str = "box", radius: float = 5) -> None:
        """Draw a box; `kind` is its color."""
        place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        self.parts.append(f'<rect class="{kind}" {place} rx="{number(radius)}"/>')

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Draw text with its baseline at `y`."""
        looks = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
        self.parts.append(f'<text x="{number(x)}" y="{number(y)}"{looks}>{escape(words, quote=False)}</text>')

    def lines(self, x: float, y: float, texts: Iterable[str], kind: str = "", anchor: str = "start") -> None:
        """Draw several lines of text."""
        for place, words in enumerate(texts):
            self.text(x, y + 17 * place, words, kind, anchor)

    def labelled(self, box: Sequence[float], words: str, kind: str = "box", text: str = "") -> None:
        """Draw a box with centered text; a line break separates two lines."""
        x, y, width, height = box
        self.rect(x, y, width, height, kind)
        rows = words.split("\n")
        foot = y + height / 2 + 5 - 8.5 * (len(rows) - 1)
        self.lines(x + width / 2, foot, rows, text, "middle")

    def path(self, points: Sequence[tuple[float, float]], kind: str = "line") -> None:
        """Draw a line through these points."""
        coordinates = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self.parts.append(f'<polyline class="{kind}" points="{coordinates}"/>')

    def shape(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Draw the polygon of these points."""
        coordinates = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self.parts.append(f'<polygon class="{kind}" points="{coordinates}"/>')

    def arrow(self, *points: tuple[float, float], kind: str = "line") -> None:
        """Draw an arrow through these points; its last segment is vertical or horizontal."""
        (x0, y0), (x, y) = points[-2:]
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        self.path([*points[:-1], (x - 6 * dx, y - 6 * dy)], kind)
        wing_x, wing_y = 4 * dy, 4 * dx
        foot_x, foot_y = x - 8 * dx, y - 8 * dy
        self.shape([(x, y), (foot_x + wing_x, foot_y + wing_y), (foot_x - wing_x, foot_y - wing_y)], "head")

    def write(self, path: Path, height: float) -> None:
        """Write the image with this height."""
        size = f'viewBox="0 0 {WIDTH} {number(height)}" width="{WIDTH}" height="{number(height)}"'
        texts = f"<title>{escape(self.title)}</title><desc>{escape(self.description)}</desc>"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">{texts}<style>{STYLE}</style>'
        ground = f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{number(height - 1)}" rx="8"/>'
        path.write_text("\n".join([head, ground, *self.parts, "</svg>"]) + "\n", encoding="utf-8")
