"""HTML of a run or an episode for notebooks, without scripts or style sheets. All text is escaped and shortened.

Notebooks remove style sheets from untrusted output, and have light and dark themes. Each element therefore has an
inline style whose colors are derived from those of the surrounding text.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from reward_kit.display_text import escape_text, pluralize
from reward_kit.errors import safe_str

_LONGEST = 1_000
_MOST_ROWS = 20
_CELL_CHARS = 300
_LINE = "1px solid color-mix(in srgb, currentColor 25%, transparent)"
_FAINT = "color-mix(in srgb, currentColor 7%, transparent)"
_WRAPPED = "white-space:pre-wrap; overflow-wrap:anywhere;"
_CELL = f"padding:0.2em 1em 0.2em 0; vertical-align:top; text-align:left; background:transparent; border:0; {_WRAPPED}"


class Html(str):
    """HTML text that must not be escaped again."""

    __slots__ = ()


def escape(value: object, limit: int = _LONGEST) -> Html:
    """Return any value as HTML-escaped text of at most about `limit` characters."""
    if isinstance(value, Html):
        return value
    return Html(html.escape(escape_text(value if isinstance(value, str) else safe_str(value), limit)))


def element(name: str, *children: object, style: str = "", **attributes: str) -> Html:
    """Return an HTML element. Children that are not `Html` are escaped."""
    attributes = {**({"style": style} if style else {}), **attributes}
    pairs = "".join(f' {key}="{html.escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{pairs}>{''.join(map(escape, children))}</{name}>")


def root(*children: object) -> str:
    """Return the outermost element."""
    return element("div", *children, style="line-height:1.4; max-width:60em; text-align:left;")


def line(*children: object) -> Html:
    """Return one line of text."""
    return element("div", *children, style=f"margin:0.2em 0; {_WRAPPED}")


def faint(*children: object) -> Html:
    """Return secondary text."""
    return element("span", *children, style="opacity:0.7;")


def strong(*children: object) -> Html:
    """Return emphasized text."""
    return element("strong", *children)


def code(value: object, limit: int = _LONGEST) -> Html:
    """Return preformatted text."""
    style = f"margin:0.2em 0; padding:0.3em 0.6em; background:{_FAINT}; color:inherit; max-height:24em; overflow:auto;"
    return element("pre", escape(value, limit), style=f"{style} {_WRAPPED}")


def block(*children: object) -> Html:
    """Return a group of elements with a line on the left."""
    return element("div", *children, style=f"margin:0.5em 0; padding:0 0 0 0.8em; border-left:{_LINE};")


def details(summary: object, *children: object, is_open: bool = False) -> Html:
    """Return a collapsible section that expands when the summary is clicked."""
    opened = {"open": ""} if is_open else {}
    head = element("summary", summary, style="cursor:pointer;")
    return element("details", head, *children, style="margin:0.3em 0;", **opened)


def table(names: Sequence[str], rows: Sequence[Any], cells: Callable[[Any], Iterable[object]] = iter) -> Html:
    """Return a table. For a long table, only the first and last rows and the number of omitted rows are shown.

    Args:
        names: column names.
        rows: one object per row.
        cells: a function that returns the cells of a row and is called only for rows that are shown; by default, the
            row is used as its cells.
    """
    header = element("tr", *(element("th", name, style=f"{_CELL} opacity:0.7;") for name in names))
    body = [
        element("tr", *(element("td", escape(cell, _CELL_CHARS), style=_CELL) for cell in cells(row)))
        if row is not None
        else element("tr", element("td", left_out, colspan=str(len(names)), style=_CELL))
        for left_out, row in first_and_last(rows, "rows")
    ]
    style = "border-collapse:collapse; margin:0.4em 0; color:inherit; font-size:inherit;"
    return element("table", element("thead", header), element("tbody", *body), style=style)


def first_and_last(items: Sequence[Any], noun: str, most: int = _MOST_ROWS) -> Iterable[tuple[Html, Any]]:
    """Yield ("", item) for each item to show.

    If there are more than `most` items, yield only the first and the last ones, and (note, None) between them.
    """
    if len(items) <= most:
        yield from ((Html(""), item) for item in items)
        return
    yield from ((Html(""), item) for item in items[: most // 2])
    yield faint(f"… {len(items) - most:,} {noun} omitted …"), None
    yield from ((Html(""), item) for item in items[-(most // 2) :])


def link(path: Path) -> Html:
    """Return a link to a file.

    The link is relative if the file is below the working directory, as notebook servers require.
    """
    full = path.resolve()
    is_below = full.is_relative_to(Path.cwd())
    address = quote(full.relative_to(Path.cwd()).as_posix()) if is_below else full.as_uri()
    return element("a", str(path), href=address, target="_blank", style="color:inherit; text-decoration:underline;")


def result_html(result: Mapping[str, Any]) -> str:
    """Return the HTML of a reward function's result for one rollout.

    Args:
        result: an `EvaluateResult` as a dict.
    """
    is_valid = result["is_score_valid"] and result["error"] is None
    score = strong(f"{result['score']:g}") if is_valid else strong("unscored")
    parts = [line("score ", score, f" · {result['reason']}" if result["reason"] else "")]
    if result["error"] is not None:
        parts.append(line(strong("error "), result["error"]))
    if metrics := result["metrics"]:
        rows = [(name, _metric(metric), metric["reason"]) for name, metric in metrics.items()]
        parts.append(table(["metric", "score", "reason"], rows))
    if steps := result["step_outputs"]:
        rows = [(step["step_index"], f"{step['base_reward']:g}", step["reason"] or "") for step in steps]
        parts.append(
            details(f"{pluralize(len(steps), 'step')} with a reward", table(["step", "reward", "reason"], rows))
        )
    for name in ("query", "response"):
        if result[name] is not None:
            parts.append(details(f"the judge's {name}", code(result[name])))
    return root(*parts)


def _metric(metric: Mapping[str, Any]) -> str:
    return f"{metric['score']:g}" + ("" if metric["is_score_valid"] else " (not valid)")
