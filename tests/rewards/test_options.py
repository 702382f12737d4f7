"""Test that invalid options of built-in rewards are rejected at loading."""

from __future__ import annotations

import sys
import unicodedata

import pytest

from reward_kit import EvaluateResult, Message, rewards, with_options
from reward_kit.errors import ConfigError
from reward_kit.reward_agent.loading import SandboxChoice, load_reward
from reward_kit.reward_calls import checks_options, fix_options
from reward_kit.rewards.answers import normalize_text
from reward_kit.typed_interface import reward_function, reward_spec

REFUSED = [
    ("math_answer", {"absolute_tolerance": -1}, "option 'absolute_tolerance': must be 0 or more"),
    ("math_answer", {"relative_tolerance": float("nan")}, "option 'relative_tolerance'"),
    ("number_answer", {"absolute_tolerance": float("inf")}, "option 'absolute_tolerance': .*finite"),
    ("choice_answer", {"letters": "abc"}, "option 'letters' must be distinct capital letters.*'abc'"),
    ("choice_answer", {"letters": "AAB"}, "option 'letters'"),
    ("choice_answer", {"letters": ""}, "option 'letters'"),
    ("json_answer", {"tolerance": 1}, "option 'tolerance': must be below 1"),
    ("json_answer", {"tolerance": 0.1, "arrays": "any_order"}, "option 'tolerance' cannot be combined with arrays"),
    ("json_schema_answer", {"schema": {"type": "objct"}}, "option 'schema' is not a JSON schema: .*objct"),
    ("tool_calls_match", {"tools": [{"nme": "search"}]}, r"option 'tools': tools\[0\] is not a tool; write"),
    ("tool_calls_match", {"tools": [{"name": "search", "parameters": {1: 2}}]}, r"option 'tools': tools\[0\]"),
    ("python_code", {"time_s": 0}, "option 'time_s': must be above 0"),
    ("python_code", {"wall_s": 0}, "option 'wall_s'"),
    ("python_code", {"memory_mb": 1}, "option 'memory_mb': must be 16 or more"),
    ("python_code", {"tolerance": 0.1, "unordered": True}, "option 'unordered' cannot be combined with tolerance"),
    ("program_code", {"time_s": -1}, "option 'time_s'"),
    ("program_code", {"memory_mb": 1}, "option 'memory_mb'"),
    ("program_code", {"compile_s": 601}, "option 'compile_s'"),
    ("sql_result", {"time_s": 0}, "option 'time_s'"),
    ("sql_result", {"max_rows": 0}, "option 'max_rows'"),
    ("sql_result", {"tolerance": -1}, "option 'tolerance'"),
    ("final_state_matches", {"tolerance": 1}, "option 'tolerance'"),
    ("environment_score", {"low": 2}, "option 'low' must be less than 'high', got 2 and 1"),
    ("environment_score", {"high": float("inf")}, "option 'high': .*finite"),
    ("few_steps", {"best": 0}, "option 'best' must be at least 1"),
    ("few_steps", {"best": 50}, "option 'best' must be .*less than 'worst', got 50 and 50"),
    ("milestones", {}, "option 'reach' must have at least one"),
    ("milestones", {"reach": [{"name": "a", "tool": "x"}, {"name": "a", "tool": "y"}]}, "option 'reach': two"),
    ("milestones", {"reach": [{"nme": "a"}]}, r"option 'reach': .*0.nme: unknown key; did you mean 'name'\?"),
    ("tool_path", {}, "option 'assertions' must have at least one"),
    ("length_within", {}, "option 'at_most': no bound is set; set at_least"),
    ("length_within", {"at_least": 5, "at_most": 3}, "option 'at_least' must not be greater than 'at_most'"),
    ("tag_format", {"tags": ["<think>"]}, "option 'tags': '<think>' is not a name; write names without angle brackets"),
    ("tag_format", {"tags": ["a", "a"]}, "option 'tags'"),
    ("regex_format", {"pattern": "("}, "option 'pattern': .*not a regular expression"),
    ("contains_all", {"keywords": []}, "option 'keywords'"),
    ("contains_none", {"keywords": [" "]}, "option 'keywords'"),
    ("same_language", {"language": "xx"}, "option 'language': unknown language 'xx'"),
]


@pytest.mark.parametrize(("name", "options", "problem"), REFUSED, ids=[f"{name}-{given}" for name, given, _ in REFUSED])
def test_invalid_options_are_rejected_when_fixed(name, options, problem):
    with pytest.raises(ConfigError, match=f"^reward '{name}', {problem}") as caught:
        with_options(getattr(rewards, name), **options)
    assert str(caught.value).count(name) == 1
    assert "(top level)" not in str(caught.value)


@pytest.mark.parametrize(
    "name", [name for name in rewards.HOMES if name not in ("milestones", "length_within", "tool_path")]
)
def test_default_options_are_valid(name):
    kind = getattr(rewards, name)
    if hasattr(kind, "__reward_spec__"):
        spec = reward_spec(kind)
        assert fix_options(spec, {}) is spec


def test_invalid_options_of_a_task_are_rejected_at_loading():
    choice = SandboxChoice(level="in_process")
    with pytest.raises(ConfigError, match="option 'at_least' must not be greater than 'at_most', got 5 and 3"):
        load_reward("reward_kit.rewards:length_within", choice=choice, options={"at_least": 5, "at_most": 3})
    with pytest.raises(ConfigError, match="option 'reach' must have at least one"):
        load_reward("reward_kit.rewards:milestones", choice=choice)


def test_options_of_parts_are_checked_when_combined():
    with pytest.raises(ConfigError, match="reward 'length_within', option 'at_most'"):
        rewards.weighted(short=rewards.length_within)


def test_checks_options_validates_options_of_a_user_reward_together():
    def in_order(options):
        if options["low"] > options["high"]:
            raise ConfigError(f"option 'low': {options['low']} is above high, {options['high']}")

    @reward_function
    @checks_options(in_order)
    def between(messages: list[Message], *, low: int = 0, high: int = 9) -> EvaluateResult:
        return EvaluateResult(score=float(low <= len(messages) <= high))

    assert with_options(between, low="9")(messages=[]).score == 0.0
    with pytest.raises(ConfigError, match=r"^reward 'between', option 'low': 10 is above high, 9$"):
        with_options(between, low=10)


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("math_answer", "sympy", "math"),
        ("math_answer", "math_verify", "math"),
        ("json_schema_answer", "jsonschema", "json"),
        ("same_language", "py3langid", "languages"),
    ],
)
def test_missing_package_of_a_reward_is_reported_with_the_extra(monkeypatch, name, package, extra):
    choice = SandboxChoice(level="in_process")
    monkeypatch.setitem(sys.modules, package, None)  # as Python marks what cannot be imported
    with pytest.raises(
        ConfigError, match=rf"^reward '{name}', missing package: {package}; install the extra '{extra}'"
    ):
        load_reward(f"reward_kit.rewards:{name}", choice=choice)
    load_reward("reward_kit.rewards:number_answer", choice=choice)


def test_excess_combining_marks_are_dropped():
    """Canonical ordering is quadratic: 80,000 such marks took seconds, 30 are kept."""
    many = "a" + "\u0301\u0316" * 40_000
    assert len(normalize_text(many, ("nfkc",))) <= 31
    few = "a" + "\u0301\u0316" * 5 + "ﬁ"
    assert normalize_text(few, ("nfkc",)) == unicodedata.normalize("NFKC", few)
