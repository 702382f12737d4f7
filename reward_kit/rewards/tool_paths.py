"""The reward `tool_path`, which checks assertions about the tool calls of an episode.

The assertions `tool_used` and `tool_sequence` have the names and defaults of promptfoo's `trajectory:tool-used` and
`trajectory:tool-sequence`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain, count
from typing import Annotated, Any, Literal, NamedTuple

import pydantic

from reward_kit.agent.models import StepData
from reward_kit.display_text import pluralize
from reward_kit.errors import ConfigError
from reward_kit.models import EvaluateResult, Message, MetricResult, StepOutput
from reward_kit.reward_calls import checks_options
from reward_kit.rewards.json_answers import ComparisonRules, abbreviate, as_json, difference, is_number, read_json
from reward_kit.rewards.option_types import Finite
from reward_kit.rewards.replies import agent_messages, quoted
from reward_kit.typed_interface import reward_function


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")


def _json_value(value: Any) -> Any:
    """Check a value of a task file, in which an unquoted date is not a string."""
    return as_json(value)


_Json = Annotated[Any, pydantic.AfterValidator(_json_value)]


class ArgumentMatch(_Strict):
    """Conditions on the value of one argument. All conditions that are set must hold.

    In a specification, a value that is not an object stands for `{equals: value}`.

    Attributes:
        equals: the JSON value. 5 equals 5.0, but true does not equal 1, and strings are compared exactly.
        one_of: the allowed JSON values.
        contains: a string that the argument, which must be a string, contains.
        min: the lower bound of a number.
        max: the upper bound of a number.
    """

    equals: _Json = None
    one_of: list[_Json] = pydantic.Field(default_factory=list)
    contains: str = ""
    min: Finite = 0.0
    max: Finite = 0.0

    @pydantic.model_validator(mode="before")
    @classmethod
    def _from_value(cls, value: Any) -> Any:
        return value if isinstance(value, Mapping | ArgumentMatch) else {"equals": value}

    @pydantic.model_validator(mode="after")
    def _has_conditions(self) -> ArgumentMatch:
        if not self.model_fields_set:
            raise ValueError("no condition is set; to expect an object, write {equals: {…}}")
        return self

    def mismatch(self, value: Any) -> str:
        """Describe the first condition that a value violates, or return "" if it matches."""
        conditions, found = self.model_fields_set, f", found {abbreviate(value)}"
        if "equals" in conditions and (differs := difference(self.equals, value, ComparisonRules())):
            return differs
        if "one_of" in conditions and all(difference(one, value, ComparisonRules()) for one in self.one_of):
            return f": expected one of {', '.join(map(abbreviate, self.one_of))}{found}"
        if "contains" in conditions and not (isinstance(value, str) and self.contains in value):
            return f": expected a string that contains {quoted(self.contains)}{found}"
        if "min" in conditions and not (is_number(value) and value >= self.min):
            return f": expected at least {self.min:g}{found}"
        if "max" in conditions and not (is_number(value) and value <= self.max):
            return f": expected at most {self.max:g}{found}"
        return ""


class CallPattern(_Strict):
    """A description of tool calls. In a specification, a string stands for `{name: string}`.

    Attributes:
        name: the tool's name, in which `*` matches any characters and `?` matches one character.
        args: conditions on arguments. A call may contain other arguments as well.
    """

    name: str = pydantic.Field(min_length=1)
    args: dict[str, ArgumentMatch] = pydantic.Field(default_factory=dict)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    def mismatch(self, call: ToolPathCall) -> str | None:
        """Describe the first argument that does not match, or return "" for a match and None for another tool."""
        if not fnmatchcase(call.name, self.name):
            return None
        for name, condition in self.args.items():
            if name not in call.arguments:
                return f"argument {name} is missing"
            if differs := condition.mismatch(call.arguments[name]):
                return f"argument {name}{differs}"
        return ""

    def matches(self, call: ToolPathCall) -> bool:
        return self.mismatch(call) == ""

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.args)})" if self.args else self.name


class ToolUsed(CallPattern):
    """The assertion that successful calls match a pattern at least `min` times and, if set, at most `max` times.

    Failed calls count toward `max`, but not toward `min`.
    """

    min: int = pydantic.Field(default=1, ge=0)
    max: int | None = pydantic.Field(default=None, ge=0)

    @pydantic.model_validator(mode="after")
    def _bounds_are_ordered(self) -> ToolUsed:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max, {self.max}, is below min, {self.min}; set min: 0 if no call is required")
        return self

    def violations(self, calls: Sequence[ToolPathCall]) -> Iterator[Violation]:
        matching = [call for call in calls if self.matches(call)]
        done = sum(not call.is_failed for call in matching)
        if done < self.min:
            step, hint = _near_miss(self, [call for call in calls if call.is_failed or not self.matches(call)])
            yield step, f"{pluralize(done, 'successful call')}, expected at least {self.min}{hint}"
        if self.max is not None:
            for number, call in enumerate(matching[self.max :], self.max + 1):
                yield call.step, f"call {number}, expected at most {self.max}"


class ToolSequence(_Strict):
    """The assertion that successful calls match patterns in this order.

    In a specification, a list stands for `{steps: list}`.

    Attributes:
        steps: the patterns.
        mode: "in_order" to allow other calls before, between and after, or "exact" to allow no other calls.
    """

    steps: list[CallPattern] = pydantic.Field(min_length=1)
    mode: Literal["in_order", "exact"] = "in_order"

    @pydantic.model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        return {"steps": value} if isinstance(value, list | tuple) else value

    def violations(self, calls: Sequence[ToolPathCall]) -> Iterator[Violation]:
        at, after = 0, ""
        for call in calls:
            expected = self.steps[at] if at < len(self.steps) else None
            if expected is not None and expected.matches(call) and not call.is_failed:
                at, after = at + 1, f" after {expected}"
            elif self.mode == "exact":
                yield call.step, f"{_describe(call)}, expected {expected or 'no more calls'}"
                return
        if at < len(self.steps):
            step, hint = _near_miss(self.steps[at], calls)
            yield step, f"no successful call of {self.steps[at]}{after}{hint}"

    def __str__(self) -> str:
        return ", ".join(map(str, self.steps))


class ToolAssertion(_Strict):
    """An assertion about the tool calls of an episode. Exactly one key is set.

    Attributes:
        tool_used: a pattern that successful calls match, with the optional keys `min` (default 1) and `max`.
        not_tool_used: a pattern that no call matches, not even a failed one.
        tool_sequence: patterns that successful calls match in this order.
        before: two patterns. Before each call that matches the second one, a successful call matches the first one.
            Without a call that matches the second one, the assertion holds.
    """

    tool_used: ToolUsed | None = None
    not_tool_used: CallPattern | None = None
    tool_sequence: ToolSequence | None = None
    before: tuple[CallPattern, CallPattern] | None = None

    @pydantic.model_validator(mode="after")
    def _has_one_key(self) -> ToolAssertion:
        given = [name for name in self.model_fields_set if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"an assertion must have exactly one of the keys {', '.join(type(self).model_fields)}")
        return self

    def violations(self, calls: Sequence[ToolPathCall]) -> Iterator[Violation]:
        """Yield the step and the description of each violation. The step is None if the assertion has no step."""
        if self.tool_used is not None:
            yield from self.tool_used.violations(calls)
        if self.tool_sequence is not None:
            yield from self.tool_sequence.violations(calls)
        if self.not_tool_used is not None:
            for call in calls:
                if self.not_tool_used.matches(call):
                    yield call.step, _describe(call)
        if self.before is not None:
            first, second = self.before
            is_ready = False
            for call in calls:
                if second.matches(call) and not is_ready:
                    yield call.step, f"{_describe(call)} without an earlier successful call of {first}"
                is_ready = is_ready or (first.matches(call) and not call.is_failed)

    def __str__(self) -> str:
        (name,) = (name for name in self.model_fields_set if getattr(self, name) is not None)
        value = getattr(self, name)
        return f"{name} {', '.join(map(str, value)) if isinstance(value, tuple) else value}"


class ToolPathCall(NamedTuple):
    """A tool call of the agent. Calls that were not executed because the episode had ended are excluded."""

    step: int
    name: str
    arguments: Mapping[str, Any]
    is_failed: bool


Violation = tuple[int | None, str]
"""The step that violates an assertion, or None for the last step, and a description."""


def _describe(call: ToolPathCall) -> str:
    return f"{'failed call' if call.is_failed else 'call'} of {quoted(call.name)}"


def _near_miss(pattern: CallPattern, calls: Sequence[ToolPathCall]) -> Violation:
    """Return the last call of the tool, with the reason why it did not match or did not count."""
    for call in reversed(calls):
        if (problem := pattern.mismatch(call)) is not None:
            return call.step, f"; {problem or ('the call failed' if call.is_failed else 'the call came too early')}"
    return None, ""


def _check_assertions(options: Mapping[str, Any]) -> None:
    if not options["assertions"]:
        raise ConfigError("option 'assertions' must have at least one assertion")


@reward_function
@checks_options(_check_assertions)
def tool_path(
    messages: list[Message],
    step_data: list[StepData] | None = None,
    assistant_turns: list[int] | None = None,
    *,
    assertions: tuple[ToolAssertion, ...] = (),
) -> EvaluateResult:
    """Score 1 if all assertions about the agent's tool calls hold, and 0 otherwise.

    Each assertion is also a metric. The reason names each violated assertion and the step. The steps that violate an
    assertion get a negative step reward, the number of assertions violated there divided by the number of assertions.
    A missing call is assigned to the last call of that tool or, without one, to the last step.

    Required calls must succeed; forbidden and limited calls count even if they failed. The calls of one action are
    executed in order. In a transcript, failures are unknown, so every call counts as successful. An agent without tool
    calls satisfies assertions that forbid calls, so combine those with a `gate` or with `tool_used`.

    Options:
        assertions: the assertions, each with one of the keys `tool_used`, `not_tool_used`, `tool_sequence` and
            `before`.

    Example, in a task file:
        reward_function_path: reward_kit.rewards:tool_path
        reward_options:
          assertions:
            - tool_used: {name: search, max: 3}
            - not_tool_used: "delete_*"
            - tool_sequence: [search, buy]
            - before: [find_customer, refund]
            - tool_used: {name: refund, args: {amount: 12.5, reason: {contains: broken}}}
    """
    _check_assertions({"assertions": assertions})
    turns = agent_messages(messages, assistant_turns)
    calls = list(_calls(turns, step_data or ()))
    metrics: dict[str, MetricResult] = {}
    problems: dict[int, dict[str, str]] = {}  # the first problem of each assertion, by step
    reasons = []
    for assertion in assertions:
        label = str(assertion)
        name = next(name for name in chain([label], (f"{label} ({n})" for n in count(2))) if name not in metrics)
        found = [(len(turns) - 1 if step is None else step, text) for step, text in assertion.violations(calls)]
        texts = [f"step {step}: {text}" if step >= 0 else text for step, text in found]
        metrics[name] = MetricResult(score=float(not found), reason="; ".join(texts) or "holds")
        if texts:
            reasons.append(f"{name}: {texts[0]}" + (f" ({len(texts) - 1} more)" if len(texts) > 1 else ""))
        for step, text in found:
            problems.setdefault(step, {}).setdefault(name, f"{name}: {text}")
    steps = [
        StepOutput(step_index=step, base_reward=-len(texts) / len(assertions), reason="; ".join(texts.values()))
        for step, texts in sorted(problems.items())
        if step >= 0
    ]
    summary = f"{len(reasons)} of {pluralize(len(assertions), 'assertion')} failed"
    return EvaluateResult(
        score=float(not reasons), reason="; ".join([summary, *reasons]), metrics=metrics, step_outputs=steps or None
    )


def _calls(turns: Sequence[Message], steps: Sequence[StepData]) -> Iterator[ToolPathCall]:
    """Yield the calls of the agent. Without steps, every call counts as successful."""
    for index, message in enumerate(turns):
        recorded = steps[index].step_info.get("tools") if index < len(steps) else None
        outcomes: list[Any] = recorded if isinstance(recorded, list) else []
        for place, call in enumerate(message.tool_calls or ()):
            outcome = outcomes[place] if place < len(outcomes) and isinstance(outcomes[place], dict) else {}
            if outcome.get("skipped"):
                continue
            try:
                arguments = read_json(call.function.arguments)
            except ValueError:
                arguments = None  # the tool rejects the call
            yield ToolPathCall(
                index, call.function.name, arguments if isinstance(arguments, Mapping) else {}, "error" in outcome
            )
