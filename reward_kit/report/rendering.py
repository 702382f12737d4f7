"""Functions that all pages share: formatting of numbers and links, SVG shapes, and HTML templates."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from reward_kit.display_text import escape_text
from reward_kit.runs.display import figure

if TYPE_CHECKING:
    from jinja2 import Environment

NAME_LENGTH = 120
"""The maximum length of a displayed name, in characters."""
DASH = "–"
RUN_STYLES = ("page.css", "episode.css", "tokens.css", "tree.css", "matrix.css")
RUN_SCRIPTS = (
    *("base.js", "tables.js", "matrix.js", "objects.js", "data.js", "chat.js", "worth.js", "head.js", "labels.js"),
    *("episode.js", "group.js", "sample.js", "search.js"),
    *("tokens.js", "tree_layout.js", "tree_panel.js", "tree.js"),
)
"""Styles of pages with episodes."""
_FILES = files("reward_kit.report")
_HALVES = re.compile(r"[\ud800-\udfff]")  # lone surrogates, which no URL can contain
_MARKED = "json:"
_UNRESERVED = "!'()*-._~"  # characters that encodeURIComponent does not escape
_MINUTE, _HOUR = 60, 3600


# Words, numbers and links


def status_text(status: str) -> str:
    """Return the status of a run, or "unknown" for any other text, since the run's file is untrusted."""
    return status if status in ("complete", "failed", "interrupted", "running", "killed") else "unknown"


def href(view: str, *names: str) -> str:
    """Return the link to an episode, group or sample from stored names, in the same way as `RK.href` in the script."""
    plain = (
        name if not name.startswith(_MARKED) and not _HALVES.search(name) else _MARKED + json.dumps(name)
        for name in names
    )
    return "/".join([f"#/{view}", *(quote(name, safe=_UNRESERVED) for name in plain)])


def name_from_link(name: str) -> str:
    """Return the stored name for a name in an address. The name may be encoded as JSON."""
    return str(json.loads(name.removeprefix(_MARKED))) if name.startswith(_MARKED) else name


def number(value: float | None) -> str:
    """Format a score, or return a dash if it is absent."""
    return DASH if value is None else figure(value)


def share(value: float | None) -> str:
    """Format a share as a percentage, or return a dash if it is absent."""
    return DASH if value is None else f"{value:.1%}"


def dollars(value: float | None) -> str:
    """Format an amount of money, or return "unknown" without a price."""
    if value is None:
        return "unknown"
    if 0 < value < 0.001:  # with two significant digits
        return f"${value:.{min(12, 1 - math.floor(math.log10(value)))}f}"
    return f"${value:,.2f}" if value >= 100 else f"${value:.4f}"


def seconds(value: float | None) -> str:
    """Format a duration in a suitable unit, or return a dash if it is absent."""
    if value is None:
        return DASH
    if value < 0.0005:
        return "0 s" if value == 0 else "<1 ms"
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 99.95:
        return f"{value:.3g} s"
    if value < _HOUR:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, rest = divmod(round(value / _MINUTE), 60)
    return f"{hours:,} h {rest} min" if rest else f"{hours:,} h"


# Shapes


class Rect(NamedTuple):
    """A bar; `note` is the text of its tooltip."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    note: str = ""


class Stroke(NamedTuple):
    """A line, or an area if closed, as an SVG path."""

    d: str
    kind: str


class ChartLabel(NamedTuple):
    """A piece of text; `anchor` is start, middle or end."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    kind: str = ""


@dataclass(slots=True)
class Drawing:
    """An SVG drawing."""

    description: str  # for screen readers
    width: float
    height: float = 0.0
    rects: list[Rect] = field(default_factory=list)
    paths: list[Stroke] = field(default_factory=list)
    labels: list[ChartLabel] = field(default_factory=list)
    legend: dict[str, str] = field(default_factory=dict)

    def rect(self, x: float, y: float, width: float, height: float, kind: str, note: str = "") -> None:
        """Add a bar."""
        self.rects.append(Rect(r2(x), r2(y), r2(width), r2(height), kind, note))

    def path(self, d: str, kind: str) -> None:
        """Add a line or an area."""
        self.paths.append(Stroke(d, kind))

    def label(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> None:
        """Add a piece of text."""
        self.labels.append(ChartLabel(r2(x), r2(y), text, anchor, kind))


def r2(value: float) -> float:
    """Round a coordinate to two decimals."""
    return round(value, 2)


def round_step(rough: float, factors: Sequence[float] = (1, 2, 5, 10)) -> float:
    """Return the smallest round step for axis ticks that is at least `rough` > 0."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in factors if power * factor >= rough * 0.999)


# Pages


def as_script_data(document: Any) -> str:
    """Return JSON that HTML parsers do not interpret as markup, even if it contains untrusted text."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@functools.cache
def asset(name: str) -> str:
    """Return a style or script of this package."""
    return (_FILES / "assets" / name).read_text(encoding="utf-8")


def bundle(names: Iterable[str]) -> str:
    """Concatenate files in `assets/`."""
    return "".join(map(asset, names))


def digest(text: str) -> str:
    """Return the Content-Security-Policy source that allows a script or style: `sha256-…` of its UTF-8 bytes.

    Source: https://www.w3.org/TR/CSP3/#grammardef-hash-source
    """
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def render(
    template: str,
    page: object,
    *,
    styles: Iterable[str],
    script: str,
    trusted: Mapping[str, str | Sequence[str]],
    script_sources: str = "",
    may_connect: bool = False,
    **values: Any,
) -> str:
    """Return a page as HTML. The page allows only its inline style and script and loads nothing else.

    Args:
        template: a file in `templates/`. All its values are escaped except `trusted`.
        page: the content of the page. Pass untrusted text through `escape_text` first.
        styles: files in `assets/`.
        script: the text of the script, or "" for none.
        trusted: strings from this package that are inserted without escaping.
        script_sources: other sources from which scripts may be loaded.
        may_connect: whether to allow requests to the server of the page.
        **values: additional values for the template.
    """
    from markupsafe import Markup

    style, own_script = bundle(styles), f"'{digest(script)}'" if script else "'none'"
    connections = "connect-src 'self'; " if may_connect else ""
    policy = (
        f"default-src 'none'; style-src '{digest(style)}'; script-src {own_script}{script_sources}; "
        f"{connections}img-src data:; base-uri 'none'; form-action 'none'"
    )
    raw = {"policy": policy, "style": style, "script": script, **trusted}
    marked = {name: Markup(text) if isinstance(text, str) else list(map(Markup, text)) for name, text in raw.items()}
    return _environment().get_template(template).render(page=page, **values, **marked)


@functools.cache
def _environment() -> Environment:
    """Return the cached environment. It is cached because compiling a template takes as long as rendering it."""
    import jinja2

    loader = jinja2.FunctionLoader(lambda name: (_FILES / "templates" / name).read_text(encoding="utf-8"))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, loader=loader)
    name_text = functools.partial(escape_text, limit=NAME_LENGTH)
    environment.globals.update(number=number, share=share, seconds=seconds, href=href, shown=name_text)
    return environment
