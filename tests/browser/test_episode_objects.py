"""Test the data that the page's script builds from stored lines: credit, returns and untrusted texts."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from reward_kit.report.rendering import href
from reward_kit.report.run_page import write_report
from reward_kit.runs.credit import assign_credit, write_section
from reward_kit.runs.run_folder import read_credit
from reward_kit.task_parts import CreditModel
from tests.browser.conftest import Opened
from tests.browser.walks import walks, write_walks
from tests.browser.window import PHONE
from tests.report import run_factory
from tests.report.test_page import HOSTILE
from tests.runs import stored_run

pytestmark = pytest.mark.campaign
LONG = "x" * 1_000_000


def group_of(window: Opened, run: Path, rollout_id: str) -> dict[str, Any]:
    """Return the group of an episode as the page has it."""
    opened = window().open(write_report(run))
    found: dict[str, Any] = opened.page.evaluate("(id) => RK.groupWith(id)", rollout_id)
    return found


def two_episodes(folder: Path, *scores: dict[str, Any]) -> Path:
    """Write two episodes that differ in their second state and meet in the last."""
    episodes = [stored_run.episode(name, ["1", middle, "9"], index=i) for i, (name, middle) in enumerate(["a2", "b3"])]
    return stored_run.make_run(folder, episodes, list(scores))


def test_reason_of_a_step_whose_index_is_text_is_shown_at_the_step(window: Opened, tmp_path: Path) -> None:
    scored = stored_run.score("a", 0.0)
    scored["result"]["step_outputs"] = [{"step_index": "1", "base_reward": -1.0, "reason": "deleted a file"}]
    group = group_of(window, two_episodes(tmp_path, scored), "a")
    (steps,) = (one["steps"] for one in group["episodes"] if one["id"] == "a")
    assert [(step["reward"], step["reward_reason"]) for step in steps] == [
        (None, None),
        (-1, "deleted a file"),
        (None, None),
    ]


def test_step_values_equal_the_credit_file(window: Opened, tmp_path: Path) -> None:
    run = write_walks(tmp_path, walks(8))
    lines = [line for line in read_credit(run) if line["group_id"] == "s0001/walker"]
    group = group_of(window, run, lines[0]["rollout_id"])
    steps = {(one["id"], step["index"]): step for one in group["episodes"] for step in one["steps"]}
    assert len(steps) == len(lines) > 0
    for line in lines:
        step = steps[line["rollout_id"], line["step"]]
        names = {
            "reward": "base_reward",
            "ret": "return_to_go",
            "key": "state_key",
            "A": "A",
            "A_E": "A_E",
            "A_S": "A_S",
        }
        assert {key: step[key] for key in names} == {key: line[name] for key, name in names.items()}
        assert len(step["peers"]) == line["peers"]
    assert group["baseline"] == pytest.approx(sum(one["score"] for one in group["episodes"]) / 4)


def test_anchors_are_the_states_shared_by_steps(window: Opened, tmp_path: Path) -> None:
    run = write_walks(tmp_path, walks(8))
    lines = [line for line in read_credit(run) if line["group_id"] == "s0000/walker"]
    group = group_of(window, run, lines[0]["rollout_id"])
    places = {one["id"]: place for place, one in enumerate(group["episodes"])}
    shared: dict[int, list[list[int]]] = defaultdict(list)
    for line in lines:
        shared[line["anchor"]].append([places[line["rollout_id"]], line["step"]])
    assert {tuple(map(tuple, anchor["members"])) for anchor in group["anchors"]} == {
        tuple(map(tuple, members)) for members in shared.values() if len(members) > 1
    }
    for anchor in group["anchors"]:
        done = [group["episodes"][e]["steps"][t] for e, t in anchor["members"]]
        assert sum(len(action["members"]) for action in anchor["actions"]) == len(done)
        assert anchor["mean_return"] == pytest.approx(sum(step["ret"] for step in done) / len(done))


def test_run_without_credit_uses_summed_rewards_and_recorded_states(window: Opened, tmp_path: Path) -> None:
    run = two_episodes(tmp_path, stored_run.score("a", 1.0, s0=0.5, s1=-1.0, s2=2.0), stored_run.score("b", 0.25))
    group = group_of(window, run, "a")
    one, other = group["episodes"]
    assert [step["reward"] for step in one["steps"]] == [0.5, -1.0, 2.0]
    assert [step["ret"] for step in one["steps"]] == [1.5, 1.0, 2.0]
    assert [step["reward"] for step in other["steps"]] == [0.0] * 3, "the environment's"
    assert [step["ret"] for step in other["steps"]] == [0.25] * 3, "the score stands at the last step"
    assert [step["A"] for step in one["steps"]] == [None] * 3
    assert [anchor["key"] for anchor in group["anchors"]] == ["1", "9"]
    assert "undiscounted" in one["credit"]["told"] and not one["credit"]["is_credited"]


def test_unscored_episode_has_no_return(window: Opened, tmp_path: Path) -> None:
    run = two_episodes(tmp_path, stored_run.score("a", None))
    group = group_of(window, run, "a")
    assert [[step["ret"] for step in one["steps"]] for one in group["episodes"]] == [[None] * 3] * 2
    assert (group["baseline"], group["scored"], group["episodes"][0]["score"]) == (None, 0, None)
    assert group["episodes"][0]["error"] == "crash"


def test_episode_without_credit_uses_the_discount_of_the_run(window: Opened, tmp_path: Path) -> None:
    run = two_episodes(tmp_path, stored_run.score("a", 1.0, s0=0.0, s1=0.0, s2=1.0), stored_run.score("b", 0.0))
    write_section(run, assign_credit(run, CreditModel.model_validate({"estimator": "gigpo", "gamma": 0.5})))
    (run / "credit.jsonl").write_text("")
    one, _ = group_of(window, run, "a")["episodes"]
    assert [step["ret"] for step in one["steps"]] == [0.25, 0.5, 1.0]
    assert "the γ of the credit, 0.5" in one["credit"]["told"]


def test_messages_are_assigned_to_steps(window: Opened, tmp_path: Path) -> None:
    one, _ = group_of(window, two_episodes(tmp_path), "a")["episodes"]
    told = [(message["role"], message["step"]) for message in one["messages"]]
    assert told == [
        ("user", 0),
        ("assistant", 0),
        ("user", 1),
        ("assistant", 1),
        ("user", 2),
        ("assistant", 2),
        ("user", None),
    ]
    assert [step["message"] for step in one["steps"]] == [1, 3, 5]
    assert [step["is_valid"] for step in one["steps"]] == [False, True, True]


def hostile(text: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return two episodes in which every untrusted text is this one."""
    call = {"id": "c", "type": "function", "function": {"name": text[:80], "arguments": json.dumps({text[:80]: text})}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": text}]},
        {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": text},
    ]
    step = {"state_key": text[:500], "assistant_turn": 1, "action": {"type": "text", "content": text}, "reward": 0.0}
    broke = {"info": {"tools": [{"name": "f", "error": text}], "is_action_valid": False}}
    facts = {"ground_truth": text, "messages": messages, "steps": [step], "final": broke}
    episodes = [
        run_factory.episode(
            name, sample=text[:500], policy=text[:500], group_id=f"g{text[:500]}", rollout_index=i, **facts
        )
        | {"sample": {"id": 1, text[:80]: text}}
        for i, name in enumerate([text[:500], "other"])
    ]
    metrics = {text[:80]: {"score": 0.5, "reason": text}}
    result = {"score": 0.5, "reason": text, "metrics": metrics, "query": text, "response": text}
    return episodes, [run_factory.score("other", 0.5, result=result), run_factory.score(text[:500], 0.5, result=result)]


@pytest.mark.parametrize("text", [*HOSTILE, LONG], ids=[*"abcdefgh", "million letters"])
def test_untrusted_texts_execute_nothing_and_keep_the_layout(window: Opened, tmp_path: Path, text: str) -> None:
    run = run_factory.make_run(tmp_path, *hostile(text), task_name="calm")
    opened = window(PHONE).open(write_report(run), href("episode", "other") + "/0")
    opened.page.wait_for_selector(".step.current")
    for fold in opened.page.locator("#view details:not([open]) > summary").all():
        if fold.is_visible():
            fold.click()
    assert opened.page.title() == "other · reward-kit", "no untrusted script ran"
    assert opened.page.locator("#view img, #view script, #view iframe").count() == 0
    assert opened.sticking_out() == []
    assert opened.page.evaluate("document.getElementById('view').textContent.length") < 1_000_000
    shown = opened.page.evaluate("document.body.innerText")
    assert not any(ord(letter) in {0x1B, 0x07, 0x00, 0x9B, 0x202E} for letter in shown)
    opened.open(run / "report.html", href("episode", text[:500]))
    opened.page.wait_for_selector(".step")
    opened.open(run / "report.html", href("group", f"g{text[:500]}"))
    opened.page.wait_for_selector("#view table")
