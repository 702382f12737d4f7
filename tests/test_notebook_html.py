"""HTML of results in notebooks is escaped and bounded in size."""

from __future__ import annotations

import html.parser
from pathlib import Path
from typing import Any

import pytest

from reward_kit.models import EvaluateResult, MetricResult, StepOutput
from reward_kit.notebook_html import code, escape, link, root, table

HOSTILE = "</td></pre></summary><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b[31m\u202e"
OURS = {"div", "span", "strong", "code", "pre", "details", "summary", "table", "thead", "tbody", "tr", "th", "td", "a"}
ATTRIBUTES = {"style", "open", "href", "target", "colspan"}


class Seen(html.parser.HTMLParser):
    """The elements of a page with their attributes, and whether tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.depth: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.depth.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.depth.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def harmless(text: str) -> Seen:
    seen = Seen(text)
    assert seen.names <= OURS and seen.attributes <= ATTRIBUTES and seen.depth == []
    assert "\x1b" not in text and "\u202e" not in text
    return seen


class Unspeakable:
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("value", [HOSTILE, b"<b>", None, 3, Unspeakable(), "\ud800<i>"])
def test_any_value_is_escaped(value: Any) -> None:
    seen = harmless(root(escape(value), code(value), table([HOSTILE], [(value,)])))
    assert "script" not in seen.names
    seen.text.encode("utf-8")


def test_long_text_is_truncated_with_its_length() -> None:
    told = escape("<" * 100_000)
    assert len(told) < 6_000 and "… (100,000 characters)" in told


def test_long_table_shows_first_and_last_rows() -> None:
    asked: list[int] = []

    def cells(row: int) -> list[str]:
        asked.append(row)
        return [f"row {row}"]

    told = table(["n"], range(1_000_000), cells)
    assert asked == [*range(10), *range(999_990, 1_000_000)]
    assert "999,980 rows omitted" in told and "row 999999" in told


def test_link_is_relative_below_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'a "b').mkdir()
    assert 'href="a%20%22b/report.html"' in link(Path('a "b') / "report.html")
    assert f'href="file://{tmp_path.parent}/report.html"' in link(tmp_path.parent / "report.html")


def test_result_html_shows_its_parts() -> None:
    result = EvaluateResult(
        score=0.25,
        reason=HOSTILE,
        metrics={HOSTILE: MetricResult(score=0.5, reason=HOSTILE, is_score_valid=False)},
        step_outputs=[StepOutput(step_index=i, base_reward=i / 4, reason=HOSTILE) for i in range(300)],
        query=HOSTILE,
        response="fine",
    )
    seen = harmless(result._repr_html_())
    for told in ("score 0.25", "0.5 (not valid)", "300 steps with a reward", "74.75", "the judge's response", "fine"):
        assert told in seen.text, told
    assert len(result._repr_html_()) < 60_000


@pytest.mark.parametrize("keys", [{"is_score_valid": False}, {"error": HOSTILE}])
def test_unscored_result_html_shows_no_score(keys: dict[str, Any]) -> None:
    seen = harmless(EvaluateResult(score=0.0, **keys)._repr_html_())
    assert "unscored" in seen.text and "score 0" not in seen.text
