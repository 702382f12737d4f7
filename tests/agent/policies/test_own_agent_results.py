"""Test that tool results of an agent are inferred from its next request or its calls."""

from __future__ import annotations

import pytest

from reward_kit.agent.policies.own_agent_policy import (
    CallMade,
    read_results,
    results_of_calls,
    same_conversation,
)

USER = {"role": "user", "content": "Add."}


def said(text=None, *calls, **rest):
    made = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {}), **rest}


def result(call_id, text):
    return {"role": "tool", "tool_call_id": call_id, "content": text}


ANSWER = said(None, ("c1", "add", '{"x": 1}'))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (USER, {"role": "user", "content": [{"type": "text", "text": "Ad"}, {"type": "text", "text": "d."}]}, True),
        (USER, {"role": "user", "content": "Add. "}, False),
        (USER, {"role": "system", "content": "Add."}, False),
        (USER, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, False),
        (said("3"), said("3\n", refusal=None, reasoning_content="hm"), True),
        (said(None), said(""), True),
        (ANSWER, said("", ("c1", "add", '{"x":1}')), True),
        (ANSWER, said("", ("c2", "add", '{"x":1}')), False),
        (ANSWER, said("", ("c1", "add", '{"x":2}')), False),
        (said("", ("c1", "add", "{")), said("", ("c1", "add", "{")), True),
        (result("c1", "3"), result("c2", "3"), False),
    ],
)
def test_same_conversation_compares_the_content(one, other, same):
    assert same_conversation([USER, one], [USER, other]) is same
    assert not same_conversation([one], [one, other])


def test_results_follow_the_position_of_the_answer():
    later = [USER, said("rephrased"), result("c1", "3"), USER]
    assert read_results([USER], ANSWER, later) == [result("c1", "3"), USER]
    assert read_results([USER], ANSWER, [USER, ANSWER]) == []


def test_results_in_a_rewritten_context_are_matched_by_call_id():
    summary = {"role": "user", "content": "So far: nothing."}
    assert read_results([USER], ANSWER, [summary, ANSWER, result("c1", "3"), USER]) == [result("c1", "3")]
    assert read_results([USER], ANSWER, [summary]) is None
    assert read_results([USER], ANSWER, [USER]) is None
    assert read_results([USER], said("3"), [USER, USER]) is None


def test_made_calls_are_matched_by_name_and_order():
    calls = [{"name": "add", "id": "c1"}, {"name": "mul", "id": "c2"}, {"name": "add", "id": "c3"}]
    action = {"type": "tool_calls", "calls": calls}
    made = [CallMade("mul", "6"), CallMade("add", "3"), CallMade("look", "a wall"), CallMade("add", "4")]
    shown = [(m["role"], m.get("tool_call_id"), m["content"]) for m in results_of_calls(action, made, is_over=False)]
    assert shown == [("tool", "c1", "3"), ("tool", "c2", "6"), ("tool", "c3", "4"), ("user", None, "a wall")]


@pytest.mark.parametrize(("is_over", "expected"), [(False, []), (True, ["Not executed: the episode is over."])])
def test_unmade_call_is_answered_only_if_the_episode_is_over(is_over, expected):
    action = {"type": "tool_call", "name": "add", "id": "c1", "arguments": {}}
    assert [message["content"] for message in results_of_calls(action, [], is_over)] == expected
