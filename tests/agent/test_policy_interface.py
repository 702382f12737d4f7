"""Test `check_output`, which validates the output of a policy."""

import numpy as np
import pytest

from reward_kit.agent.policy_interface import (
    AgentPolicy,
    EpisodeContext,
    PolicyOutput,
    check_output,
    get_tool_calls,
    next_action,
    open_session,
)
from reward_kit.errors import PolicyError
from tests.agent.resources import call, calls, text


class Fixed(AgentPolicy):
    async def get_action(self, observation, available_tools_specs=None):
        return PolicyOutput(text("x"))


async def test_stateless_policy_is_its_own_session():
    policy = Fixed()
    assert await policy.open(EpisodeContext("e", 0)) is policy
    await policy.close()
    await policy.close()


class NotAsync(AgentPolicy):
    def open(self, context):
        return self

    def get_action(self, observation, available_tools_specs=None):
        return PolicyOutput(text("x"))


class OpensNothing(Fixed):
    async def open(self, context):
        Fixed()


async def test_sync_policy_methods_are_rejected_with_the_fix():
    with pytest.raises(PolicyError, match=r"open must be a coroutine function.* `async def open`"):
        await open_session(NotAsync(), EpisodeContext("e", 0))
    with pytest.raises(PolicyError, match=r"get_action must be a coroutine function.* `async def get_action`"):
        await next_action(NotAsync(), [], None)


async def test_open_without_return_is_rejected():
    with pytest.raises(PolicyError, match=r"open must return an AgentPolicy.*got None"):
        await open_session(OpensNothing(), EpisodeContext("e", 0))


@pytest.mark.parametrize(
    "action",
    [text("x"), text(""), call(), calls(("a", {}), ("b", {})), {"type": "terminate"}, {**call(), "content": None}],
)
def test_four_kinds_of_action_are_accepted(action):
    assert check_output((action, None, None, None)) == PolicyOutput(action)


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_tokens_may_be_any_sequence(kind):
    known = {"prompt_ids": kind([1, 2]), "token_ids": kind([3]), "logprobs": kind([-0.5]), "policy_version": 1}
    assert check_output(PolicyOutput(text("x"), None, known)).log_probs is known


def test_policy_output_has_four_fields():
    assert PolicyOutput._fields == ("action_structured", "raw_policy_output", "log_probs", "value_estimate")


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ([text("x")], "get_action must return a PolicyOutput or a 4-tuple, got list"),
        ((text("x"),), "must return a PolicyOutput or a 4-tuple, got tuple"),
        (PolicyOutput({"type": "txt"}), "type must be one of text, tool_call, tool_calls, terminate"),
        (PolicyOutput({"type": "text"}), "needs a string 'content'"),
        (PolicyOutput({"type": "tool_calls", "calls": []}), "a non-empty list of calls"),
        (PolicyOutput({"type": "tool_call", "name": 3}), "a tool call needs a string 'name'"),
        (PolicyOutput({"type": "terminate", "content": 3}), "'content' of an action must be a string or None, got 3"),
        (PolicyOutput(text("x"), b"raw"), "raw_policy_output must be a string or None"),
        (PolicyOutput(text("x"), None, []), "log_probs and its usage must be mappings"),
        (PolicyOutput(text("x"), None, {"token_ids": [1], "logprobs": []}), "1 token_ids but 0 logprobs"),
        (PolicyOutput(text("x"), None, {"prompt_ids": [None]}), "prompt_ids and token_ids must be 32-bit integers"),
        (PolicyOutput(text("x"), None, {"token_ids": [2**40]}), "prompt_ids and token_ids must be 32-bit integers"),
        (PolicyOutput(text("x"), None, {"token_ids": [1], "logprobs": ["a"]}), "logprobs must be numbers"),
        (PolicyOutput(text("x"), None, {"policy_version": "a"}), "policy_version must be an integer, got 'a'"),
        (PolicyOutput(text("x"), None, None, "1"), "value_estimate must be a number or None, got '1'"),
    ],
)
def test_invalid_output_names_the_problem(output, why):
    with pytest.raises(PolicyError, match=why):
        check_output(output)


def test_get_tool_calls_keeps_the_order():
    assert get_tool_calls(text("x")) == []
    assert [c["name"] for c in get_tool_calls(calls(("a", {}), ("b", {})))] == ["a", "b"]
    assert get_tool_calls(call("a")) == [call("a")]
