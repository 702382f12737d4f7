"""Adapters for verl's `compute_score`, which can be a function or a method of a class that keeps a client.

    def compute_score(data_source, solution_str, ground_truth, extra_info) -> (score, query, response)

    class RewardAgent:
        def compute_score(self, data_source, solution_str, ground_truth, extra_info): ...
        def post_process_scores(self, scores): ...  # optional, once per group

`build_spec` converts both to ordinary rewards with options, deadlines and sandbox levels. The file contains, in this
order, the signatures (`ScoreForm`), the calls (`Calls`), and the conversion of return values. The sandboxed worker
imports this file, so this file has few imports.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
import json
import logging
import math
import typing
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from reward_kit.errors import ConfigError, InvalidResultError, RewardKitError, safe_str, type_name
from reward_kit.models import EvaluateResult
from reward_kit.reward_agent.foreign_rewards import adapt
from reward_kit.reward_calls import BATCH_NAMES
from reward_kit.typed_interface import (
    EvaluationMode,
    RewardSpec,
    argument_without_default,
    function_origin,
    reward_spec,
    scoring_function,
    source_location,
)

_GIVEN = ("data_source", "solution_str", "ground_truth", "extra_info")
_GIVEN_TO_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_WANTED = ("messages", "assistant_turns", "sample", "task_name", *_GIVEN)
"""The values of a rollout that are requested. A trainer may supply the first three of `_GIVEN`."""
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NO_EXTRA = {"data_source", "ground_truth", "reward_model", "extra_info"}
_LOGGED = (*_GIVEN, "score", "query", "response")
_MOST_REASON_CHARS = 4_000
NO_SCORE = "no score"
_FORMS = "return a number, (score, query, response), or a mapping with 'score'"
logger = logging.getLogger("reward_kit.reward_agent")


def build_spec(given: Any) -> RewardSpec:
    """Return the spec of a reward: a `@reward_function`, a plain or foreign function, or a `compute_score`."""
    if isinstance(given, type):
        if hasattr(given, "score"):
            return reward_spec(given)
        if hasattr(given, "compute_score"):
            return _class_spec(given)
        if (adapted := adapt(given)) is not None:
            return adapted
        if near := _misspelled_method(given, "compute_score"):
            raise ConfigError(f"{given.__name__} has a method {near!r}; did you mean 'compute_score'?")
        return reward_spec(given)
    if callable(given) and not hasattr(given, "__reward_spec__"):
        try:
            names = inspect.signature(given).parameters
        except (TypeError, ValueError):
            return reward_spec(given)
        # A function that has verl's name is always checked as a `compute_score`.
        is_called_so = getattr(given, "__name__", "") == "compute_score"
        takes_solution = any(_nearly(name, ("solution_str", "solution_strs")) for name in names)
        if not {"messages", "rollouts_messages"} & set(names) and (is_called_so or takes_solution):
            return _function_spec(given)
    if not hasattr(given, "__reward_spec__") and (adapted := adapt(given)) is not None:
        return adapted
    return reward_spec(given)


def _function_spec(function: Callable[..., Any]) -> RewardSpec:
    name = getattr(function, "__name__", type(function).__name__)
    is_partial = isinstance(function, functools.partial)
    code = scoring_function(function)
    form = ScoreForm.read(function if is_partial else code, name, has_self=not is_partial and code is not function)
    calls = Calls(function, form)
    call = calls.all if form.is_batch else calls.one

    def score(**values: Any) -> Any:
        return call(values) if form.is_async else _run_sync(call(values))

    score.__name__, score.__module__ = form.id, code.__module__
    score.__annotations__ = dict(form.hints)
    score.custom_form = form  # type: ignore[attr-defined]
    return _spec(form, score, code, function)


def _class_spec(kind: type) -> RewardSpec:
    name, post_name = kind.__name__, "post_process_scores"
    compute = kind.compute_score  # type: ignore[attr-defined]
    is_bound = isinstance(inspect.getattr_static(kind, "compute_score"), staticmethod | classmethod)
    form = ScoreForm.read(compute, name, has_self=not is_bound)
    for method in ("__init__", "setup", "close"):
        if argument := argument_without_default(kind, method):
            raise ConfigError(
                f"{source_location(getattr(kind, method))}{name}.{method} is called without arguments; give "
                f"{argument!r} a default, or make it a parameter of compute_score, which reward_options can "
                "set"
            )
    post = getattr(kind, post_name, None)
    if not hasattr(kind, post_name):
        if near := _misspelled_method(kind, post_name):
            raise ConfigError(f"{name} has an unused method {near!r}; did you mean {post_name!r}?")
    elif not callable(post):
        raise ConfigError(
            f"{name}.{post_name} must be a method, not {type_name(post)}; write def {post_name}(self, scores)"
        )
    else:
        is_bound = isinstance(inspect.getattr_static(kind, post_name), staticmethod | classmethod)
        try:
            inspect.signature(post).bind(*(() if is_bound else (None,)), [])
        except TypeError as error:
            raise ConfigError(
                f"{source_location(post)}{name}.{post_name}(self, scores) must accept the scores: {error}"
            ) from None
    for method in (post_name, "log"):
        if inspect.iscoroutinefunction(getattr(kind, method, None)) and not form.is_async:
            raise ConfigError(
                f"{name}: {method} is async but compute_score is not; make both of them async, or neither"
            )
    each = _spec(form, _adapted_class(kind, form, "one"), compute, kind)
    if not form.is_batch and post is None:
        return each
    group = _adapted_class(kind, form, "all")
    if not form.is_batch:
        group.each = each  # type: ignore[attr-defined]
    return _spec(form, group, compute, kind, mode="batch")


def _adapted_class(kind: type, form: ScoreForm, method: str) -> type:
    """Return a reward class that wraps an instance of the user's class."""

    def start(self: Any) -> None:
        self.user = kind()
        self.calls = Calls(self.user, form)

    def score(self: Any, **values: Any) -> Any:
        result = getattr(self.calls, method)(values)
        return result if form.is_async else _run_sync(result)

    def forwarded(name: str) -> Callable[[Any], Any]:
        return lambda self: getattr(self.user, name)()

    score.__annotations__ = dict(form.hints)
    space: dict[str, Any] = {
        "__init__": start,
        "score": score,
        "__module__": kind.__module__,
        "user_class": kind,
        "custom_form": form,
        **{name: forwarded(name) for name in ("setup", "close") if callable(getattr(kind, name, None))},
    }
    return type(kind.__name__, (), space)


def _run_sync(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine of `Calls` without an event loop.

    The coroutine never waits, because the reward is synchronous.
    """
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("only the calls of an asynchronous reward wait")


def _spec(form: ScoreForm, function: Any, code: Any, given: Any, mode: EvaluationMode | None = None) -> RewardSpec:
    mode = mode or ("batch" if form.is_batch else "pointwise")
    wanted = frozenset(BATCH_NAMES.get(name, name) if mode == "batch" else name for name in _WANTED)
    truth = _GIVEN_TO_BATCH[2] if form.is_batch else _GIVEN[2]
    named_truth = BATCH_NAMES["ground_truth"] if mode == "batch" else "ground_truth"
    return RewardSpec(
        function=function,
        mode=mode,
        id=form.id,
        requirements=(),
        resources={},
        parameters=wanted | form.own,
        required=(form.required & form.own) | ({named_truth} if truth in form.required else set()),
        is_async=form.is_async,
        _converters={},
        origin=function_origin(given, code),
    )


def _nearly(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` probably misspells, or None."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.85)), None)


def _misspelled_method(kind: type, method: str) -> str | None:
    """Return the name of the class's method that probably misspells `method`, or None."""
    written = [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]
    return next((name for name in written if _nearly(name, (method,))), None)


@dataclass(frozen=True, slots=True)
class ScoreForm:
    """The signature of a `compute_score`."""

    id: str
    names: frozenset[str]  # the standard parameters that the function has
    own: frozenset[str]  # further parameters, which options set
    required: frozenset[str]  # all parameters without a default
    hints: Mapping[str, Any]  # the annotations of its further parameters and of the ground truth
    is_batch: bool  # whether the function takes plural names and scores a group in one call
    is_async: bool

    @classmethod
    def read(cls, code: Callable[..., Any], id: str, *, has_self: bool) -> ScoreForm:
        """Parse the signature of a `compute_score`.

        Args:
            code: the function.
            id: the name of the reward, for messages.
            has_self: whether the first parameter is `self`.

        Raises:
            ConfigError: If `solution_str` is missing, or if a parameter or an annotation is invalid.
        """
        parameters = list(inspect.signature(code).parameters.values())
        code = code.func if isinstance(code, functools.partial) else code
        where = f"{source_location(code)}{id}"
        if has_self and parameters and (first := parameters[0].name) in (*_GIVEN, *_GIVEN_TO_BATCH):
            raise ConfigError(
                f"{where}: the first parameter is {first!r}; the first parameter of a method must be self"
            )
        parameters = parameters[has_self:]
        names = {each.name for each in parameters if each.kind not in _VARIABLE}
        is_batch = "solution_strs" in names
        form, other = (_GIVEN_TO_BATCH, _GIVEN) if is_batch else (_GIVEN, _GIVEN_TO_BATCH)
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
        if form[1] not in names and not takes_any:
            near = next((name for name in names if _nearly(name, form[1:2])), None)
            problem = f"has the parameter {near!r} instead of" if near else "has no parameter"
            example = "compute_score(data_source, solution_str, ground_truth, extra_info)"
            raise ConfigError(f"{where} {problem} 'solution_str'; declare it as {example}")
        if positional := next((each.name for each in parameters if each.kind is each.POSITIONAL_ONLY), None):
            raise ConfigError(f"{where}: parameters are passed by name, so {positional!r} must not be positional-only")
        try:
            hints = typing.get_type_hints(code, include_extras=True)
        except (NameError, AttributeError, TypeError, SyntaxError) as error:
            raise ConfigError(f"{where}: an annotation cannot be resolved: {error}") from error
        own = frozenset(names - set(form))
        for name in sorted(own):  # A misspelled parameter would always have its default value.
            if name in other:
                meant = form[other.index(name)]
                raise ConfigError(f"{where}: {name!r} cannot be combined with {form[1]!r}; write {meant!r}")
            if near := _nearly(name, set(form) - names):
                raise ConfigError(f"{where}: unknown parameter {name!r}; did you mean {near!r}?")
        return cls(
            id=id,
            names=frozenset(form if takes_any else names & set(form)),
            own=own,
            required=frozenset(p.name for p in parameters if p.default is p.empty and p.kind not in _VARIABLE),
            hints={name: hint for name, hint in hints.items() if name in own or name == form[2]},
            is_batch=is_batch,
            is_async=inspect.iscoroutinefunction(code),
        )

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for a call, given the values of a rollout and the options."""
        offered = _offered(values)
        named = {name: offered[name] for name in _GIVEN if name in self.names}
        return {**named, **{name: values[name] for name in self.own if name in values}}

    def batch_arguments(self, rollouts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        offered = [_offered(values) for values in rollouts]
        pairs = zip(_GIVEN, _GIVEN_TO_BATCH, strict=True)
        named = {many: [each[one] for each in offered] for one, many in pairs if many in self.names}
        return {**named, **{name: rollouts[0][name] for name in self.own if name in rollouts[0]}}


def _offered(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the four standard arguments for a rollout.

    If a trainer supplies values with these names, the trainer's values take precedence.
    """
    sample = values.get("sample") or {}
    source = values.get("data_source")
    solution = values.get("solution_str")
    if solution is None:  # the text of the policy's messages, without tool results and calls
        messages, turns = values["messages"], values.get("assistant_turns") or ()
        written = [messages[turn] for turn in turns] or [each for each in messages if each.role == "assistant"]
        solution = "\n".join(message.text for message in written if message.text)
    extra_info = values.get("extra_info")
    if (
        extra_info is None
    ):  # the other fields of the row, so a judge can see the question; `extra_info` takes precedence
        own = sample.get("extra_info")
        row = {key: value for key, value in sample.items() if key not in _NO_EXTRA}
        extra_info = {**row, **own} if isinstance(own, Mapping) else row
    return {
        "data_source": sample.get("data_source", values.get("task_name")) if source is None else source,
        "solution_str": solution,
        "ground_truth": values.get("ground_truth"),
        "extra_info": extra_info,
    }


class Calls:
    """Calls the user's `compute_score`, `log` and post-processing. Only async functions are awaited."""

    def __init__(self, owner: Any, form: ScoreForm) -> None:
        self.form = form
        self._compute = getattr(owner, "compute_score", owner)
        self._log = _log_of(getattr(owner, "log", None)) if self._compute is not owner else None
        self.post: Callable[[list[float]], Any] | None = getattr(owner, "post_process_scores", None)

    async def one(self, values: Mapping[str, Any]) -> EvaluateResult:
        """Score one rollout."""
        named = self.form.arguments(values)
        returned = self._compute(**named)
        result = read_answer(await returned if self.form.is_async else returned, self.form.id)
        if self._log is not None:
            try:
                logged = self._log(named, result)
                if self.form.is_async and inspect.isawaitable(logged):
                    await logged
            except Exception as error:  # noqa: BLE001 - the user's log does not concern the score
                logger.warning("log of %s: %s: %s", self.form.id, type(error).__name__, safe_str(error))
        return result

    async def all(self, lists: Mapping[str, Any]) -> list[EvaluateResult]:
        """Score a group. Asynchronous calls run concurrently."""
        singular = {many: one for one, many in BATCH_NAMES.items()}
        per_rollout = {*singular, *_WANTED}
        rollouts = [
            {
                singular.get(name, name): value[i] if name in per_rollout and isinstance(value, list) else value
                for name, value in lists.items()
            }
            for i in range(len(lists["rollouts_messages"]))
        ]
        if self.form.is_batch:
            returned = self._compute(**self.form.batch_arguments(rollouts))
            results = self._read_all(await returned if self.form.is_async else returned, len(rollouts))
        elif self.form.is_async:
            results = list(await asyncio.gather(*map(self._one_or_failed, rollouts)))
        else:
            results = [await self._one_or_failed(values) for values in rollouts]
        if self.post is None:
            return results
        processed = self.post(_scores(results))
        if self.form.is_async and inspect.isawaitable(processed):
            processed = await processed
        return finished(results, processed, self.form.id)

    async def _one_or_failed(self, values: Mapping[str, Any]) -> EvaluateResult:
        try:
            return await self.one(values)
        except MemoryError:
            raise  # the sandbox describes this limit
        except RewardKitError as error:
            return failed(safe_str(error))
        except Exception as error:  # noqa: BLE001 - its own rollout is unscored, and the others are not
            return failed(f"{type(error).__name__}: {safe_str(error)}")

    def _read_all(self, returned: Any, count: int) -> list[EvaluateResult]:
        answers = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(answers, list | tuple):
            raise InvalidResultError(
                f"{self.form.id}: must return a list for multiple solutions, got {type_name(answers)}"
            )
        if len(answers) != count:
            raise InvalidResultError(f"{self.form.id}: returned {len(answers)} scores for {count} solutions")
        results = []
        for index, answer in enumerate(answers):
            try:
                results.append(read_answer(answer, f"{self.form.id}[{index}]"))
            except InvalidResultError as error:
                results.append(failed(str(error)))
        return results


def _log_of(log: Any) -> Callable[[Mapping[str, Any], EvaluateResult], Any] | None:
    """Return the user's `log` if it takes the values of a score.

    A function with different parameters is not called, because it is probably an unrelated helper.
    """
    if not callable(log):
        return None
    parameters = inspect.signature(log).parameters.values()
    needed = {each.name for each in parameters if each.default is each.empty and each.kind not in _VARIABLE}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    names = set(_LOGGED) if takes_any else {each.name for each in parameters} & set(_LOGGED)
    if not names or needed - names:
        return None

    def call(named: Mapping[str, Any], result: EvaluateResult) -> Any:
        score = result.score if result.is_score_valid else math.nan
        values = {**named, "score": score, "query": result.query, "response": result.response}
        return log(**{name: values.get(name) for name in names})

    return call


class CustomAnswer(EvaluateResult):
    """A result that was created from the return value of a `compute_score`."""

    # The other values of a returned mapping, unchanged. Files contain them as text in `reason`.
    mapping_values: dict[Any, Any] = Field(default_factory=dict, exclude=True, repr=False)


def read_answer(returned: Any, what: str) -> EvaluateResult:
    """Convert a return value to a result. If the value is `None` or NaN, the result's score is invalid."""
    if isinstance(returned, EvaluateResult):
        return returned
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise InvalidResultError(f"{what} returned a coroutine; declare compute_score with `async def`")
    score, query, response, mapping = returned, None, None, {}
    reason = None
    if isinstance(returned, tuple | list):
        if len(returned) != 3:
            raise InvalidResultError(f"{what} returned {len(returned)} values; return (score, query, response)")
        score, query, response = returned
    elif isinstance(returned, Mapping):
        if "score" not in returned:
            raise InvalidResultError(f"{what} returned a mapping without 'score'; it has {sorted(map(str, returned))}")
        score, query, response = (returned.get(name) for name in ("score", "query", "response"))
        mapping = {key: value for key, value in returned.items() if key != "score"}
        rest = {key: value for key, value in mapping.items() if key not in ("query", "response")}
        reason = _text(rest) if rest else None
    number = _number(score, what)
    kept = {"query": _text(query), "response": _text(response), "reason": reason}
    if math.isnan(number):
        result = failed(f"{NO_SCORE} ({'None' if score is None else 'NaN'})", **kept)
    else:
        result = CustomAnswer(score=number, **kept)
    result.mapping_values = mapping
    return result


def failed(why: str, **kept: str | None) -> CustomAnswer:
    """Return a result without a valid score. The score 0.0 is only a placeholder."""
    return CustomAnswer(score=0.0, is_score_valid=False, error=_plain(why), **kept)


def _number(score: Any, what: str, forms: str = _FORMS) -> float:
    """Convert a score to a float. A missing score becomes NaN.

    NumPy scalars and tensors with one element are accepted.
    """
    if score is None:
        return math.nan
    if not isinstance(score, int | float) and callable(item := getattr(score, "item", None)):
        try:
            score = item()
        except (TypeError, ValueError, RuntimeError):  # an array with multiple items
            raise InvalidResultError(f"{what} returned {type_name(score)} with multiple items as the score") from None
    if not isinstance(score, int | float):
        raise InvalidResultError(f"{what} returned {type_name(score)} as the score; {forms}")
    try:
        number = float(score)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise InvalidResultError(f"{what} returned {number} as the score; return a finite number, or None if unscored")
    return number


def _text(value: Any) -> str | None:
    """Convert a query or a response to the string that is stored in files."""
    if value is None or isinstance(value, str):
        return None if value is None else _plain(value)
    try:
        return _plain(json.dumps(value, ensure_ascii=False, default=safe_str))
    except (TypeError, ValueError, RecursionError):
        return _plain(safe_str(value))


def _plain(text: str) -> str:
    """Escape lone surrogates, which a model may write but a file cannot store."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _scores(results: Sequence[EvaluateResult]) -> list[float]:
    """Return the scores for post-processing. A missing score is NaN."""
    return [result.score if result.error is None and result.is_score_valid else math.nan for result in results]


def finished(results: Sequence[EvaluateResult], processed: Any, what: str) -> list[EvaluateResult]:
    """Return a group's results with the scores that post-processing returned.

    If an unscored rollout gets a score, the result is marked as imputed. If a score changes, the result keeps the
    original score in `raw_score`. If a score is removed, the rollout is unscored.
    """
    given = processed.tolist() if hasattr(processed, "tolist") else processed
    name = f"post_process_scores of {what}"
    if not isinstance(given, list | tuple):
        raise InvalidResultError(f"{name} returned {type_name(given)}; return a list of scores")
    if len(given) != len(results):
        raise InvalidResultError(f"{name} returned {len(given)} scores for {len(results)} rollouts")
    forms = "return a list of numbers, with None for unscored rollouts"
    done: list[EvaluateResult] = []
    for index, (result, before) in enumerate(zip(results, _scores(results), strict=True)):
        after = _number(given[index], f"{name}, for rollout {index},", forms)
        changes: dict[str, Any] = {}
        if math.isnan(after) and not math.isnan(before):
            error = "post_process_scores returned no score for this rollout"
            changes = {"is_score_valid": False, "error": error, "raw_score": before}
        elif math.isnan(before) and not math.isnan(after):
            why = result.error or result.reason or NO_SCORE
            reason = f"imputed by post_process_scores: {why}"[:_MOST_REASON_CHARS]
            changes = {"score": after, "is_score_valid": True, "error": None, "is_imputed": True, "reason": reason}
        elif after != before and not math.isnan(after):
            changes = {"score": after, "raw_score": before}
        done.append(result.model_copy(update=changes) if changes else result)
    return done
