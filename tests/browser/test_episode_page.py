"""Test the page of an episode: the conversation first, then the score, with usage, errors and credit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reward_kit.report.run_page import write_report
from tests.browser.conftest import Opened
from tests.browser.test_credit_picture import SCORES, WALKS, stored
from tests.browser.walks import compared_walks, write_walks
from tests.browser.window import PHONE, Window

pytestmark = pytest.mark.campaign
ORDER = """() => [...document.querySelectorAll(".steps, .episode-result, .group-part")].map((one) => one.className)"""


def rewrite(run: Path, changes: dict[str, Any]) -> None:
    """Change the first stored episode, and write the page again."""
    first, *others = (run / "episodes.jsonl").read_text().splitlines()
    record = json.loads(first) | changes
    (run / "episodes.jsonl").write_text("\n".join([json.dumps(record, separators=(",", ":")), *others]) + "\n")
    write_report(run)


def opened(window: Opened, run: Path, **options: Any) -> Window:
    shown = window(**options).open(run / "report.html", "#/episode/a")
    shown.page.locator(".group-part").wait_for(state="attached")
    return shown


@pytest.mark.parametrize("credit", [True, False])
def test_conversation_comes_first_and_credit_is_open_only_if_assigned(
    window: Opened, tmp_path: Path, credit: bool
) -> None:
    shown = opened(window, stored(tmp_path, WALKS, dict(SCORES), credit=credit))
    assert shown.page.evaluate(ORDER) == ["steps", "episode-result", "group-part"]
    assert shown.page.locator(".group-part").evaluate("(one) => one.open") is credit
    assert (shown.page.locator(".step-side").count() > 0) is credit
    assert shown.page.locator(".strip").is_visible() is credit
    if not credit:
        shown.page.locator(".group-part > summary").focus()
        shown.page.keyboard.press("Enter")
    shown.page.locator(".tree-view .cell").first.wait_for()
    assert ("state hash state_key" in shown.page.locator(".credit-told").inner_text()) is credit


def test_each_step_shows_its_usage_and_missing_figures_are_dashes(window: Opened, tmp_path: Path) -> None:
    run = stored(tmp_path, WALKS, dict(SCORES), credit=False)
    record = json.loads((run / "episodes.jsonl").read_text().splitlines()[0])
    kinds = {"cached_tokens": 1000, "cache_write_tokens": 150, "reasoning_tokens": 30}
    record["steps"][1]["info"] = {"usage": {"prompt_tokens": 1200, "completion_tokens": 34, **kinds, "cost": 0.0021}}
    record["steps"][2]["info"] = {"usage": {"prompt_tokens": 1300, "completion_tokens": 0}}
    record["usage"] = {"prompt_tokens": 2500, "completion_tokens": 34, **kinds, "cost": 0.0021}
    record["timing"] = {"steps_policy_s": [0.25, 1.5]}
    rewrite(run, record)
    shown = opened(window, run)
    assert shown.texts(".usage") == [
        "reward 0.000\n1,200 → 34 tokens\n1,000 cached\n150 cache write\n30 reasoning\nlatency 250 ms\n$0.0021",
        "reward 0.000\n1,300 → 0 tokens\nlatency 1.5 s\ncost –",
        "reward +1.000\n– → – tokens\nlatency –\ncost –",
    ]
    facts = shown.texts(".episode-head .facts li")
    totals = ["prompt tokens 2,500", "completion tokens 34", "1,000 cached", "150 cache write", "30 reasoning"]
    assert facts[-6:] == [*totals, "cost at least $0.0021"]


def test_episode_without_usage_has_dashes_for_totals_only(window: Opened, tmp_path: Path) -> None:
    shown = opened(window, stored(tmp_path, WALKS, dict(SCORES)))
    assert shown.texts(".episode-head .facts li")[-3:] == ["prompt tokens –", "completion tokens –", "cost –"]
    assert shown.texts(".usage") == [""] * 3


def test_changes_of_the_state_are_listed(window: Opened, tmp_path: Path) -> None:
    run = stored(tmp_path, WALKS, dict(SCORES), credit=False)
    changes = [
        {"at": "/a/<b>", "old": "1", "new": "2"},
        {"at": "new.txt", "new": "</script><img src=x onerror=alert(1)>\u202e"},
        {"at": "x.txt", "to": "y.txt"},
    ]
    rewrite(run, {"custom_data": {"state_changes": {"changes": changes, "more": 7}}})
    shown = opened(window, run)
    assert shown.texts(".state-changes > summary") == ["Changes of the state: 10"]
    assert shown.texts(".state-changes li") == [
        "/a/<b>\n−\n1\n+\n2",
        "new.txt\n+\n</script><img src=x onerror=alert(1)>\\u202e",
        "x.txt moved to y.txt",
    ]
    assert "and 7 more" in shown.page.inner_text(".state-changes") and not shown.page.locator("img").count()
    assert (shown.sticking_out(), shown.pale()) == ([], [])


@pytest.mark.parametrize(("facts", "shown"), [({"changes": [], "more": 0}, 1), (None, 0), ({"changes": 3}, 0)])
def test_unchanged_and_unrecorded_states(window: Opened, tmp_path: Path, facts: Any, shown: int) -> None:
    run = stored(tmp_path, WALKS, dict(SCORES), credit=False)
    rewrite(run, {"custom_data": {"state_changes": facts}})
    page = opened(window, run).page
    assert page.locator(".state-changes").count() == shown
    if shown:
        assert page.inner_text(".state-changes") == "The final state equals the initial state."


def test_traceback_of_an_error_is_readable(window: Opened, tmp_path: Path) -> None:
    run = stored(tmp_path, WALKS, dict(SCORES), credit=False)
    traceback = (
        'Traceback (most recent call last):\n  File "tools.py", line 3, in pay\n    1 / 0 <b>\nZeroDivisionError'
    )
    failure = {"class": "crash", "where": "EnvironmentFailure", "message": "tool 'pay': boom", "traceback": traceback}
    rewrite(run, {"failure": failure, "stop_reason": "error"})
    shown = opened(window, run)
    element = shown.page.locator(".failure")
    assert element.inner_text().split("\n")[:2] == ["error in tool pay", "tool 'pay': boom"]
    assert traceback in element.inner_text() and element.locator("b").count() == 0


def test_judge_usage_is_not_a_metric(window: Opened, tmp_path: Path) -> None:
    run = stored(tmp_path, WALKS, dict(SCORES), credit=False)
    usage = "calls=1 cached=0 prompt_tokens=231 completion_tokens=12 reasoning_tokens=8 cost_usd=0.000042"
    lines = [json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines()]
    for line in lines:
        metrics = {"tone": {"score": 0.5, "reason": "curt"}, "judge_usage": {"score": 0.0, "reason": usage}}
        line["result"] = (line["result"] or {}) | {"metrics": metrics}
    (run / "scores.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(run)
    shown = opened(window, run).page
    assert shown.locator(".metrics dt").all_inner_texts() == ["tone"]
    assert "judge: 1 call, 243 tokens (8 reasoning), $0.000042" in shown.locator(".episode-result").inner_text().split(
        "\n"
    )
    assert shown.locator("nav a[href='#metrics']").count() == 1


def test_failed_tool_call_is_marked_in_the_episode_and_side_by_side(window: Opened, tmp_path: Path) -> None:
    walks = [*compared_walks(1)]
    for episode, _ in walks[:1]:
        episode["steps"][2]["info"] = {"tools": [{"name": "go", "error": "blocked", "is_valid": False}]}
    run = write_report(write_walks(tmp_path, walks, is_credited=False))
    name = walks[0][0]["rollout_id"]
    for view in (f"#/episode/{name}", "#/sample/s00000"):
        page = window().open(run, view).page
        page.locator(".result").first.wait_for()
        failed = page.locator(".result.failed")
        assert failed.count() == 1 and "tool error" in failed.inner_text()
        assert walks[0][0]["messages"][5]["content"] in failed.inner_text(), "the result of the second call"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, (1280, 800)])
def test_page_is_accessible_in_every_size_and_scheme(
    window: Opened, tmp_path: Path, size: tuple[int, int], scheme: str
) -> None:
    run = stored(tmp_path, WALKS, dict.fromkeys(WALKS, 1.0), credit=False)
    failure = {"class": "crash", "where": "EnvironmentFailure", "message": "boom", "traceback": "x" * 2000}
    usage = {"prompt_tokens": 10**7, "completion_tokens": 10**6, "cost": 12.5}
    rewrite(run, {"failure": failure, "usage": usage})
    shown = opened(window, run, size=size, color_scheme=scheme)
    for summary in shown.page.locator("summary").all():
        summary.click()
    assert (shown.sticking_out(), shown.pale(), shown.unreached()) == ([], [], [])
