"""Test that pages show untrusted text of a run as text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from reward_kit.report.run_page import write_report
from tests.browser.conftest import Opened
from tests.browser.walks import GROUP, walk, write_walks
from tests.browser.window import DESK, PHONE, Window

HOSTILE = {
    "script": "</script><script>window.pwned = 1; alert(1)</script>",
    "image": "<img src=x onerror='window.pwned = 2; alert(2)'>",
    "comment": "<!-- <script> --> ]]> <plaintext><style>*{display:none}</style>",
    "attribute": '" onmouseover="window.pwned = 3" autofocus onfocus=\'window.pwned = 4\' x="',
    "link": "javascript:window.pwned=5 [click](javascript:window.pwned=6)",
    "template": "{{ page }} ${window.pwned = 7} {% raw %} \\u003cscript>",
    "terminal": "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x00 \x08\x08 \r over",
    "surrogates": "half \ud800 and \udfff, whole \U0001f600",
    "direction": "\u202eright to left\u202c \u2066isolated \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "accents": "Z" + "\u0301" * 300 + " " + "\u20dd" * 50,
    "unbroken": "w" * 5_000,
    "lines": "\n" * 3_000 + "\u2028\u2029\u0085",
    "quotes": "'\\'\"\\\"`\n',RK.pwned=8,'",
    "names": "__proto__ constructor toString hasOwnProperty",
}
LONG = "0123456789<b>" * 400_000  # 5.2 million characters


def said_by(
    text: str, walks: tuple[dict[str, Any], dict[str, Any]], name: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a walk in which all untrusted text is this one."""
    line, score = walks
    line |= {
        "rollout_id": f"{name} {text[:300]}",
        "sample_id": text[:300],
        "group_id": text[:300],
        "policy": text[:100],
    }
    line["stop_reason"] = "error"
    line["failure"] = {"class": "crash", "where": text[:100], "message": text, "traceback": text}
    for message in line["messages"]:
        message["content"] = text if message["content"] is not None else None
        for call in message.get("tool_calls") or ():
            call["function"] = {
                "name": text[:100],
                "arguments": json.dumps({text[:50]: text}) if len(text) < 99 else text,
            }
    for step in line["steps"]:
        step |= {"state_key": text[:300], "action": {"type": "tool_call", "name": text[:100], "arguments": {"x": text}}}
        step["info"] = {"tools": [{"name": text[:100], "error": text}]}
    line["sample"] = {"text": text, text[:50]: [text]}
    line["ground_truth"] = text
    result = {"score": 0.5, "reason": text, "metrics": {text[:50]: {"score": 0.5, "reason": text}}, "query": text}
    return line, score | {"rollout_id": line["rollout_id"], "result": result, "score": 0.5}


def hostile_walks(texts: dict[str, str]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    draw = random.Random(0)
    for number, (name, text) in enumerate(texts.items()):
        for index in range(2):
            yield said_by(text, walk(GROUP * number + index, draw, steps=2), f"{name}{index}")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    title = HOSTILE["script"] + HOSTILE["direction"] + HOSTILE["surrogates"]
    return write_report(write_walks(folder, hostile_walks(HOSTILE), is_credited=False, task_name=title))


def assert_harmless(opened: Window) -> None:
    """Assert that no script ran, no markup was created, and nothing exceeds the page width."""
    found = opened.page.evaluate(
        """() => [window.pwned, RK.pwned, ...["img, iframe, plaintext, b", "script:not([type], [src])", "style"].map(
          (selector) => document.querySelectorAll(selector).length)]"""
    )
    assert found == [None, None, 0, 1, 1]
    assert opened.sticking_out() == []
    assert {url.split("#")[0].split("/report_data/")[0].removesuffix("/report.html") for url in opened.requests} == {
        opened.requests[0].split("/report.html")[0]
    }
    assert opened.wrong == []


def unfold(opened: Window) -> None:
    opened.page.evaluate("() => document.querySelectorAll('#view details').forEach((one) => { one.open = true; })")


@pytest.mark.parametrize("size", [DESK, pytest.param(PHONE, marks=pytest.mark.campaign)], ids=["desk", "phone"])
def test_overview_shows_untrusted_text_as_text(window: Opened, page: Path, size: tuple[int, int]) -> None:
    opened = window(size).open(page)
    assert_harmless(opened)
    assert any("</script><script>window.pwned" in text for text in opened.column("episodes", 0))
    opened.page.locator("[data-table=episodes]").get_by_label("search").fill("<img")
    assert len(opened.column("episodes", 0)) == 2
    opened.page.locator("[data-table=samples] tbody button").first.click()
    assert len(opened.column("episodes", 0)) == 2
    assert_harmless(opened)


@pytest.mark.campaign
@pytest.mark.parametrize("name", HOSTILE)
def test_episode_and_group_show_untrusted_text_as_text(window: Opened, page: Path, name: str) -> None:
    opened = window().open(page)
    opened.page.locator("[data-table=episodes]").get_by_label("search").fill(f"{name}1 ")
    link = opened.page.locator("[data-table=episodes] tbody a")
    assert link.count() == 1
    link.click()
    opened.page.locator("li.step").first.wait_for()
    unfold(opened)
    opened.page.keyboard.press("j")
    unfold(opened)
    assert_harmless(opened)
    opened.page.reload()  # the address holds the name
    opened.page.locator("li.step").first.wait_for()
    assert_harmless(opened)
    opened.page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    assert_harmless(opened)
    opened.page.locator("#view a[href^='#/group/']").first.click()
    opened.page.locator("#view table tbody tr").first.wait_for()
    assert_harmless(opened)


@pytest.mark.campaign
def test_huge_text_is_cut_and_its_length_shown(window: Opened, tmp_path: Path) -> None:
    page = write_report(write_walks(tmp_path, hostile_walks({"long": LONG}), is_credited=False))
    assert page.stat().st_size < 3_000_000
    opened = window().open(page, f"#/episode/{quote('long0 ' + LONG[:300], safe='')}/0")
    opened.page.locator("li.step").first.wait_for()
    unfold(opened)
    assert f"{len(LONG):,}" in opened.page.locator("#view").inner_text()
    assert_harmless(opened)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "hash", ["#/episode/%", "#/episode/%ff/1", "#/episode/json:{", "#/nosuch", "#/__proto__/1", "#x'"]
)
def test_invalid_fragment_is_harmless(window: Opened, page: Path, hash: str) -> None:
    opened = window().open(page, hash)
    opened.page.wait_for_timeout(100)
    assert_harmless(opened)
