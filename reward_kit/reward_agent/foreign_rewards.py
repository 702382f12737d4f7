"""Adapters for reward functions that were written for other libraries.

| Library | Signature |
|---|---|
| TRL | `f(completions, **columns) -> list[float]`, also with `prompts` |
| verifiers | `f(completion, answer, prompt, info, state, …) -> float`, or a `Rubric` that weights such functions |
| OpenEnv | a `Rubric` with `forward(action, observation) -> float`, or a function with these parameters |
| any | `f(answer, target) -> bool \\| float`, also with the names in `OUTPUT_NAMES` and `TRUTH_NAMES` |

`adapt` converts each of them to an ordinary reward. The sandboxed worker imports this file.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reward_kit.errors import ConfigError, RewardError
from reward_kit.models import Message
from reward_kit.typed_interface import RewardSpec, function_origin, source_location

OUTPUT_NAMES = (
    *("completion", "response", "prediction", "model_output", "output", "submission", "candidate", "hypothesis"),
    *("pred", "student_answer", "generated", "reply", "code", "text", "answer", "solution"),
)
"""The names of a parameter that receives the answer of the model. Earlier names take precedence."""
TRUTH_NAMES = (
    *("ground_truth", "target", "reference", "expected", "gold", "truth", "label", "answer", "solution", "tests"),
    *("ground_truths", "targets", "references", "labels", "answers", "solutions", "test_cases", "testcases"),
)
"""The names of a parameter that receives the ground truth. Earlier names take precedence."""
_OF_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
_OF_VERIFIERS = ("completion", "prompt", "state", "info", "task", "parser")
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_MESSAGE_KEYS = {"content", "role"}


class _Form(NamedTuple):
    """The signature of a foreign reward function."""

    style: str  # "trl", "verifiers", "openenv" or "pair"
    output: str  # the parameter that receives the answer
    truth: str  # the parameter that receives the ground truth; "" if absent
    columns: tuple[str, ...]  # the other parameters, which receive fields of the sample
    takes_any: bool
    reads_messages: bool  # whether a completion is a list of messages; otherwise, it is a string
    takes_truth: bool


def adapt(given: Any) -> RewardSpec | None:
    """Return the spec of a foreign reward function, class or object, or None if its form is unknown.

    Raises:
        ConfigError: If a parameter cannot be supplied.
    """
    parts = getattr(given, "funcs", None)
    if isinstance(parts, list) and isinstance(weights := getattr(given, "weights", None), list):
        return _rubric_spec(given, parts, weights)
    name = getattr(given, "__name__", type(given).__name__)
    target = given
    if hasattr(given, "forward") and not inspect.isroutine(given):
        target = (given() if isinstance(given, type) else given).forward
    elif isinstance(given, type) or not callable(given):
        return None
    form = _read_form(target, name)
    return None if form is None else _spec(name, _call_for(target, form, name), form, given, target)


def _read_form(function: Callable[..., Any], name: str) -> _Form | None:
    try:
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    except (TypeError, ValueError):
        return None
    names = [p.name for p in parameters if p.kind not in _VARIABLE]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if {"messages", "rollouts_messages"} & set(names):
        return None
    if {"action", "observation"} <= set(names):
        return _Form("openenv", "action", "observation", (), False, False, takes_truth=True)
    if "completions" in names:
        style, output, known = "trl", "completions", set(_OF_TRL)
    else:
        output = next((one for one in OUTPUT_NAMES if one in names), "")
        style = "verifiers" if output == "completion" else "pair"
        known = set(_OF_VERIFIERS) if style == "verifiers" else set()
    if not output:
        return None
    rest = [one for one in names if one != output and one not in known]
    required = [p.name for p in parameters if p.name in rest and p.default is p.empty]
    truth = next((one for one in TRUTH_NAMES if one in rest), "")
    truth = truth or (required[0] if len(required) == 1 else "")
    if style == "pair" and not truth and len(names) > 1 and required:
        where = source_location(function)
        raise ConfigError(f"{where}{name}: no parameter is known to receive the ground truth; name it 'ground_truth'")
    if "parser" in names and inspect.signature(function).parameters["parser"].default is inspect.Parameter.empty:
        raise ConfigError(f"{source_location(function)}{name} needs the parser of a rubric; check the rubric instead")
    words = _constants(function)
    uses_column = takes_any and bool(set(TRUTH_NAMES) & words)
    columns = tuple(one for one in rest if one != truth)
    return _Form(style, output, truth, columns, takes_any, bool(words & _MESSAGE_KEYS), bool(truth) or uses_column)


def _constants(function: Any) -> set[str]:
    """Return the string constants of a function and of the functions in its module that it uses."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    space, found = getattr(function, "__globals__", {}), set[str]()
    pending, seen = [getattr(function, "__code__", None)], set[types.CodeType]()
    for code in pending:  # grows during the loop
        if not isinstance(code, types.CodeType) or code in seen:
            continue
        seen.add(code)
        found |= {one for one in code.co_consts if isinstance(one, str)}
        pending += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        used = [space[one] for one in code.co_names if inspect.isfunction(space.get(one))]
        pending += [one.__code__ for one in used if one.__module__ == function.__module__]
    return found


class _Rollout(NamedTuple):
    """The values of a rollout in the forms that foreign functions expect."""

    prompt: Any
    completion: Any
    answer: str  # the text of the last assistant message
    truth: Any
    sample: Mapping[str, Any]

    @classmethod
    def read(cls, values: Mapping[str, Any], *, reads_messages: bool) -> _Rollout:
        messages: Sequence[Message] = values["messages"]
        begin = next((index for index, one in enumerate(messages) if one.role == "assistant"), len(messages))
        # A completion starts with the first message of the policy.
        prompt, completion = messages[:begin], messages[begin:]
        answer = next((one.text for one in reversed(completion) if one.role == "assistant"), "")
        sample, truth = values.get("sample") or {}, values.get("ground_truth")
        if not reads_messages:  # a string contains a single turn
            return cls("\n".join(one.text for one in prompt), answer, answer, truth, sample)
        chats = [[{**one.to_chat(), "content": one.text} for one in part] for part in (prompt, completion)]
        return cls(chats[0], chats[1] or [{"role": "assistant", "content": ""}], answer, truth, sample)

    def columns(self) -> dict[str, Any]:
        """Return the fields of the sample, with the ground truth under each of the usual names."""
        return {**dict.fromkeys(TRUTH_NAMES, self.truth), **self.sample}


def _call_for(function: Callable[..., Any], form: _Form, name: str) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that calls the foreign function with the values of a rollout."""
    hint = _hint(function, "action") if form.style == "openenv" else None
    parameters = set(inspect.signature(function).parameters)

    def call(values: Mapping[str, Any]) -> Any:
        rollout = _Rollout.read(values, reads_messages=form.reads_messages)
        if form.takes_truth and rollout.truth is None:
            raise RewardError(f"reward {name!r} requires a ground_truth, but the sample has none; add one")
        if form.style == "openenv":
            return function(_action(hint, rollout.answer), _Observation(rollout))
        named = {form.truth: rollout.truth} if form.truth else {}
        named |= {one: rollout.sample[one] for one in form.columns if one in rollout.sample}
        if form.takes_any:
            named = {**rollout.columns(), **named}
        if form.style == "trl":
            named = {one: [value] for one, value in named.items()}
            named |= {"prompts": [rollout.prompt], "completions": [rollout.completion], "completion_ids": [[]]}
            named |= {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore, "environments": None}
        elif form.style == "verifiers":
            named |= _verifiers_values(rollout)
        else:
            named[form.output] = rollout.answer
        return function(**{one: value for one, value in named.items() if form.takes_any or one in parameters})

    return call


def _ignore(*_: Any, **__: Any) -> None:
    """Ignore values that a trainer would log."""


def _verifiers_values(rollout: _Rollout) -> dict[str, Any]:
    state = {"prompt": rollout.prompt, "completion": rollout.completion, "answer": rollout.truth, "info": {}}
    state |= {"task": "default", **rollout.sample}
    return {**{one: state[one] for one in ("prompt", "completion", "info", "task")}, "state": state}


def _rubric_spec(rubric: Any, parts: Sequence[Callable[..., Any]], weights: Sequence[float]) -> RewardSpec:
    """Return the spec of a verifiers rubric: the weighted sum of its functions."""
    name = type(rubric).__name__
    objects = {"parser": getattr(rubric, "parser", None), **getattr(rubric, "class_objects", {})}
    calls = []
    for part, weight in zip(parts, weights, strict=False):
        if weight and isinstance(part, Callable):  # type: ignore[arg-type]
            calls.append((inspect.signature(part).parameters, part, weight))
    is_async = any(inspect.iscoroutinefunction(part) for _, part, _ in calls)

    def weighted(values: Mapping[str, Any]) -> Iterator[tuple[float, Any]]:
        rollout = _Rollout.read(values, reads_messages=True)
        if rollout.truth is None:
            raise RewardError(f"reward {name!r} requires a ground_truth, but the sample has none; add one")
        offered = {**objects, **_verifiers_values(rollout), "answer": rollout.truth}
        for parameters, part, weight in calls:
            takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            yield weight, part(**{one: offered[one] for one in offered if takes_any or one in parameters})

    def call(values: Mapping[str, Any]) -> float:
        return sum(weight * float(value) for weight, value in weighted(values))

    async def call_async(values: Mapping[str, Any]) -> float:
        total = 0.0
        for weight, value in weighted(values):
            total += weight * float(await value if inspect.isawaitable(value) else value)
        return total

    form = _Form("verifiers", "completion", "answer", (), True, True, takes_truth=True)
    return _spec(name, call_async if is_async else call, form, rubric, rubric, is_async=is_async)


def _spec(
    name: str, call: Callable[[Mapping[str, Any]], Any], form: _Form, given: Any, target: Any, *, is_async: bool = False
) -> RewardSpec:
    is_async = is_async or inspect.iscoroutinefunction(target)

    def score(**values: Any) -> Any:
        return _unpacked(call(values), name)

    async def score_async(**values: Any) -> Any:
        return _unpacked(await call(values), name)

    wrapped = score_async if is_async else score
    wrapped.__name__ = name
    origin = function_origin(given, target) if inspect.isroutine(target) and not inspect.ismethod(target) else None
    return RewardSpec(
        function=wrapped,
        mode="pointwise",
        id=name,
        requirements=(),
        resources={},
        parameters=frozenset({"messages", "sample"} | ({"ground_truth"} if form.takes_truth else set())),
        required=frozenset({"messages"}),
        is_async=is_async,
        _converters={},
        origin=origin,
    )


def _unpacked(returned: Any, name: str) -> Any:
    """Return the score in the return value of a foreign function."""
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if isinstance(returned, list):
        if len(returned) != 1:
            raise RewardError(f"reward {name!r} returned {len(returned)} scores for one completion")
        returned = returned[0]
    if returned is None:
        raise RewardError(f"reward {name!r} returned None, so the rollout is unscored")
    return returned


def _hint(function: Callable[..., Any], parameter: str) -> Any:
    try:
        return typing.get_type_hints(function).get(parameter)
    except (NameError, AttributeError, TypeError, SyntaxError):
        return None


def _action(kind: Any, text: str) -> Any:
    """Return an OpenEnv action: each text field of the annotated class, or any attribute, contains the answer."""
    fields = getattr(kind, "model_fields", None)
    if isinstance(kind, type) and isinstance(fields, dict):
        texts = {name: text for name, field in fields.items() if field.annotation in (str, str | None)}
        return kind(**texts)
    return _Action(text)


class _Action:
    """An OpenEnv action of an unknown class. Every attribute except `metadata` is the answer."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.metadata: dict[str, Any] = {}

    def __getattr__(self, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._text

    def __str__(self) -> str:
        return self._text


class _Observation:
    """An OpenEnv observation of an unknown class, with the ground truth and the fields of the sample."""

    def __init__(self, rollout: _Rollout) -> None:
        self.metadata = rollout.columns()
        self.done, self.reward = True, None

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["metadata"][name]
        except KeyError:
            raise AttributeError(f"the observation has no {name!r}; add it to the rows of --data") from None
