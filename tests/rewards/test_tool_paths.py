"""Test assertions about tool calls on recorded steps, on transcripts, and in task files."""

from __future__ import annotations

import datetime
import json

import pytest
from click.testing import CliRunner

from reward_kit import Message, with_options
from reward_kit.cli.main import program
from reward_kit.errors import ConfigError
from reward_kit.rewards import no_tool_errors, tool_path
from reward_kit.rewards.combinators import weighted_result
from tests.rewards.test_trajectory import FAILED, SKIPPED, START, step


def score(assertions, *steps):
    """Score steps, each of which is a list of calls."""
    steps = [step(index, *calls) for index, calls in enumerate(steps)]
    actions = [next(m for m in reversed(s.resulting_messages_history) if m.role == "assistant") for s in steps]
    turns = list(range(len(START), len(START) + len(actions)))
    reward = with_options(tool_path, assertions=assertions)
    return reward(messages=[*START, *actions], step_data=steps, assistant_turns=turns)


def call(name, facts=None, **arguments):
    return (name, arguments, "done", facts or {})


SEARCH, BUY, DELETE = call("search", query="mug"), call("buy", item="mug", price=12.5), call("delete_all")
BUY_CHEAP = {"name": "buy", "args": {"price": {"max": 10}}}


@pytest.mark.parametrize(
    ("assertion", "steps", "violated_steps"),
    [
        ({"tool_used": "search"}, [[SEARCH]], None),
        ({"tool_used": "search"}, [[BUY], [BUY]], {1}),
        ({"tool_used": "search"}, [], set()),
        ({"tool_used": "search"}, [[call("search", FAILED)], [BUY]], {0}),
        ({"tool_used": "search"}, [[call("search", SKIPPED)], [BUY]], {1}),
        ({"tool_used": "sear*"}, [[SEARCH]], None),
        ({"tool_used": "Search"}, [[SEARCH]], {0}),
        ({"tool_used": {"name": "search", "min": 2}}, [[SEARCH], [BUY]], {1}),
        ({"tool_used": {"name": "search", "min": 2}}, [[SEARCH], [SEARCH]], None),
        ({"tool_used": {"name": "search", "max": 1}}, [[SEARCH], [BUY], [SEARCH], [SEARCH]], {2, 3}),
        ({"tool_used": {"name": "search", "max": 1}}, [[SEARCH], [call("search", FAILED)]], {1}),
        ({"tool_used": {"name": "search", "min": 0, "max": 1}}, [[BUY]], None),
        ({"tool_used": {"name": "*", "max": 2}}, [[SEARCH, BUY], [SEARCH]], {1}),
        ({"not_tool_used": "delete_*"}, [[SEARCH], [BUY]], None),
        ({"not_tool_used": "delete_*"}, [[SEARCH], [DELETE], [call("delete_one", FAILED)]], {1, 2}),
        ({"not_tool_used": "delete_*"}, [[SEARCH], [call("delete_all", SKIPPED)]], None),
        ({"not_tool_used": BUY_CHEAP}, [[BUY]], None),
        ({"not_tool_used": BUY_CHEAP}, [[BUY], [call("buy", price=3)]], {1}),
        ({"before": ["search", "buy"]}, [[SEARCH], [BUY]], None),
        ({"before": ["search", "buy"]}, [[SEARCH, BUY]], None),
        ({"before": ["search", "buy"]}, [[BUY, SEARCH], [BUY]], {0}),
        ({"before": ["search", "buy"]}, [[SEARCH]], None),
        ({"before": ["search", "buy"]}, [], None),
        ({"before": ["search", "buy"]}, [[call("search", FAILED)], [BUY]], {1}),
        ({"tool_sequence": ["search", "buy"]}, [[SEARCH], [DELETE], [BUY], [SEARCH]], None),
        ({"tool_sequence": ["search", "buy"]}, [[BUY], [SEARCH], [DELETE]], {0}),
        ({"tool_sequence": ["search", "buy"]}, [[DELETE], [SEARCH], [DELETE]], {2}),
        ({"tool_sequence": ["search", "search"]}, [[SEARCH], [DELETE]], {0}),
        ({"tool_sequence": {"steps": ["search", "buy"], "mode": "exact"}}, [[SEARCH], [BUY]], None),
        ({"tool_sequence": {"steps": ["search", "buy"], "mode": "exact"}}, [[SEARCH], [BUY], [BUY]], {2}),
        ({"tool_sequence": {"steps": ["search", "buy"], "mode": "exact"}}, [[SEARCH], [DELETE], [BUY]], {1}),
        ({"tool_sequence": {"steps": ["search", "buy"], "mode": "exact"}}, [[SEARCH]], {0}),
    ],
)
def test_violating_steps_are_marked(assertion, steps, violated_steps):
    result = score([assertion], *steps)
    assert result.score == float(violated_steps is None)
    outputs = result.step_outputs or []
    assert {output.step_index for output in outputs} == (violated_steps or set())
    (name,) = result.metrics
    for output in outputs:
        assert output.base_reward == -1
        assert output.reason.startswith(name)
        assert f"step {output.step_index}: " in result.metrics[name].reason


@pytest.mark.parametrize(
    ("condition", "values", "others"),
    [
        (12.5, [12.5], [12, "12.5", None]),
        (5, [5, 5.0], [True, "5"]),
        (True, [True], [1, "true"]),
        (None, [None], [0, ""]),
        ("mug", ["mug"], ["Mug", "mugs", ["mug"]]),
        ([1, 2], [[1, 2]], [[2, 1], [1], "12"]),
        ({"equals": {"a": 1}}, [{"a": 1}], [{"a": 1, "b": 2}, {}]),
        ({"equals": None}, [None], [False]),
        ({"one_of": ["red", 3]}, ["red", 3], ["blue", 4]),
        ({"contains": "ug"}, ["mug"], ["map", ["ug"], 3]),
        ({"min": 0}, [0, 7.5], [-1, "3", True]),
        ({"min": 1, "max": 3}, [1, 3], [0.5, 4]),
    ],
)
def test_arguments_match_by_json_value(condition, values, others):
    pattern = {"tool_used": {"name": "f", "args": {"x": condition}}}
    for value in values:
        assert score([pattern], [call("f", x=value, other=1)]).score == 1, value
    for value in others:
        result = score([pattern], [call("f", x=value)], [call("g", x=value)])
        assert result.score == 0, value
        assert [output.step_index for output in result.step_outputs] == [0]
        assert "argument x" in result.reason and "expected" in result.reason
    assert "argument x is missing" in score([pattern], [call("f", y=1)]).reason


def test_reason_names_each_violated_assertion_and_its_first_step():
    result = score(
        [{"before": ["search", "buy"]}, {"not_tool_used": "delete_*"}, {"not_tool_used": "delete_*"}, BUY_USED],
        [BUY],
        [DELETE, DELETE],
        [DELETE],
    )
    assert result.reason == (
        '3 of 4 assertions failed; before search, buy: step 0: call of "buy" without an earlier successful call of '
        'search; not_tool_used delete_*: step 1: call of "delete_all" (2 more); '
        'not_tool_used delete_* (2): step 1: call of "delete_all" (2 more)'
    )
    assert {name: metric.score for name, metric in result.metrics.items()} == {
        "before search, buy": 0,
        "not_tool_used delete_*": 0,
        "not_tool_used delete_* (2)": 0,
        "tool_used buy(price)": 1,
    }
    assert {output.step_index: output.base_reward for output in result.step_outputs} == {0: -0.25, 1: -0.5, 2: -0.5}


BUY_USED = {"tool_used": {"name": "buy", "args": {"price": {"equals": 12.5}}}}


@pytest.mark.parametrize("arguments", ['{"price": ', "[12.5]", '{"price": 1, "price": 12.5}', "[" * 100_000])
def test_invalid_arguments_do_not_match(arguments):
    action = {"id": "c", "type": "function", "function": {"name": "buy", "arguments": arguments}}
    messages = [*START, Message(role="assistant", tool_calls=[action])]
    result = with_options(tool_path, assertions=[BUY_USED, {"tool_used": "buy"}])(messages=messages)
    assert [metric.score for metric in result.metrics.values()] == [0, 1]


def test_calls_in_the_prompt_are_ignored():
    example = Message(role="assistant", tool_calls=[{"id": "c", "function": {"name": "delete", "arguments": "{}"}}])
    messages = [example, *START, Message(role="assistant", content="done")]
    reward = with_options(tool_path, assertions=[{"not_tool_used": "delete"}])
    assert reward(messages=messages, step_data=[], assistant_turns=[3]).score == 1
    assert reward(messages=messages, step_data=[]).score == 0


@pytest.mark.parametrize(
    ("assertions", "problem"),
    [
        ([], "must have at least one assertion"),
        ({"tool_used": "a"}, "expected a list"),
        ([{}], "0: an assertion must have exactly one of the keys tool_used, not_tool_used, tool_sequence, before"),
        ([{"tool_used": "a", "before": ["a", "b"]}], "exactly one of the keys"),
        ([{"tool_usd": "a"}], r"0.tool_usd: unknown key; did you mean 'tool_used'\?"),
        ([{"tool_used": {"nme": "a"}}], r"0.tool_used.nme: unknown key; did you mean 'name'\?"),
        ([{"tool_used": {"name": "a", "max": 0}}], "max, 0, is below min, 1; set min: 0"),
        ([{"before": ["a"]}], "0.before.1: missing"),
        ([{"tool_sequence": []}], "0.tool_sequence.steps: "),
        ([{"tool_sequence": {"steps": ["a"], "mode": "strict"}}], "expected 'in_order' or 'exact'"),
        ([{"tool_used": {"name": "a", "args": {"x": {"equls": 1}}}}], r"args.x.equls: unknown key; did you mean 'eq"),
        ([{"tool_used": {"name": "a", "args": {"x": {}}}}], r"no condition is set; .*write \{equals: \{…\}\}"),
        ([{"tool_used": {"name": "a", "args": {"x": datetime.date(2026, 1, 1)}}}], "date is not JSON"),
        ([{"tool_used": {"name": "a", "args": {"x": {"min": float("nan")}}}}], "expected a finite number"),
    ],
)
def test_invalid_assertions_are_rejected(assertions, problem):
    with pytest.raises(ConfigError, match=f"^reward 'tool_path', option 'assertions'.*{problem}"):
        with_options(tool_path, assertions=assertions)


def test_weighted_reward_keeps_the_reasons_of_steps():
    path = score([{"not_tool_used": "delete_*"}], [DELETE], [BUY])
    errors = no_tool_errors(messages=[], step_data=[step(0, DELETE), step(1, BUY)])
    first, second = weighted_result({"path": path, "errors": errors}, {"path": 0.5, "errors": 0.5}).step_outputs
    assert (first.base_reward, first.reason) == (0, 'path: not_tool_used delete_*: call of "delete_all"')
    assert (second.base_reward, second.reason) == (0.5, None)


TASK = """\
name: shop
initial_user_prompt: Buy a mug.
tools_module_path: tools.py
policy: {type: scripted, actions: [{type: tool_call, name: buy, arguments: {item: mug}}, {type: text, content: Done.}]}
reward_function_path: reward_kit.rewards:tool_path
reward_options:
  assertions:
    - %s
"""
TOOLS = '''\
from reward_kit import ToolRegistry

registry = ToolRegistry("shop")


@registry.tool
def buy(item: str) -> str:
    """Buy an item."""
    return f"bought {item}"
'''


def test_task_file_scores_a_run_and_names_the_line_of_an_invalid_assertion(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "task.yaml").write_text(TASK % "before: [search, buy]")
    done = CliRunner().invoke(program, ["run", "task.yaml", "--json"])
    assert done.exit_code == 0, done.output
    run = tmp_path / json.loads(done.stdout)["run"]
    (line,) = next(run.rglob("scores.jsonl")).read_text().splitlines()
    result = json.loads(line)["result"]
    assert result["score"] == 0
    assert [(output["step_index"], output["base_reward"]) for output in result["step_outputs"]] == [(0, -1)]

    (tmp_path / "task.yaml").write_text(TASK % "befor: [search, buy]")
    done = CliRunner().invoke(program, ["run", "task.yaml"])
    assert str(done.exception) == (
        "task.yaml:7: reward_options.assertions: reward 'tool_path', option 'assertions': 0.befor: unknown key; "
        "did you mean 'before'?"
    )
