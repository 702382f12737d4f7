"""What an agent did after an answer, read from its next request or from its calls."""

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
def test_conversations_are_the_same_where_they_say_the_same(one, other, same):
    assert same_conversation([USER, one], [USER, other]) is same
    assert not same_conversation([one], [one, other])


def test_results_follow_the_place_of_the_answer_whatever_its_shape():
    later = [USER, said("rephrased"), result("c1", "3"), USER]
    assert read_results([USER], ANSWER, later) == [result("c1", "3"), USER]
    assert read_results([USER], ANSWER, [USER, ANSWER]) == []


def test_in_a_rewritten_context_results_are_known_by_the_ids_of_their_calls():
    summary = {"role": "user", "content": "So far: nothing."}
    assert read_results([USER], ANSWER, [summary, ANSWER, result("c1", "3"), USER]) == [result("c1", "3")]
    assert read_results([USER], ANSWER, [summary]) is None
    assert read_results([USER], ANSWER, [USER]) is None
    assert read_results([USER], said("3"), [USER, USER]) is None


def test_calls_that_were_made_answer_the_models_calls_by_name_and_order():
    calls = [{"name": "add", "id": "c1"}, {"name": "mul", "id": "c2"}, {"name": "add", "id": "c3"}]
    action = {"type": "tool_calls", "calls": calls}
    made = [CallMade("mul", "6"), CallMade("add", "3"), CallMade("look", "a wall"), CallMade("add", "4")]
    shown = [(m["role"], m.get("tool_call_id"), m["content"]) for m in results_of_calls(action, made, is_over=False)]
    assert shown == [("tool", "c1", "3"), ("tool", "c2", "6"), ("tool", "c3", "4"), ("user", None, "a wall")]


@pytest.mark.parametrize(("is_over", "expected"), [(False, []), (True, ["Not executed: the episode is over."])])
def test_a_call_that_nobody_made_has_an_answer_only_where_the_world_is_over(is_over, expected):
    action = {"type": "tool_call", "name": "add", "id": "c1", "arguments": {}}
    assert [message["content"] for message in results_of_calls(action, [], is_over)] == expected
