"""What a `compute_score` returned, as a result; and what a post-processing made of the scores of a group."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import inspect
import json
import logging
import math
import typing
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from reward_kit.errors import ConfigError, InvalidResultError, RewardKitError, kind_of, safe_str
from reward_kit.models import EvaluateResult
from reward_kit.reward_calls import BATCH_NAMES
from reward_kit.typed_interface import Mode, Origin, RewardSpec, code_of, reward_spec

_SHOWN = 4_000

_NONE = "it gave no score"


class Answer(EvaluateResult):
    """The result that an answer of verl's form stands for.

    Attributes:
        told: what a mapping held besides the score, as it was; not kept in files, where `reason` has it as text.
    """

    told: dict[Any, Any] = Field(default_factory=dict, exclude=True, repr=False)


def read_answer(returned: Any, what: str) -> EvaluateResult:
    """The result that an answer stands for; without a valid score where the score is None or NaN.

    Args:
        returned: a number, None, `(score, query, response)`, a mapping with `score`, or a result.
        what: whose answer it is, for the message.

    Raises:
        InvalidResultError: it is something else, or the score is infinite.
    """
    if isinstance(returned, EvaluateResult):
        return returned
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise InvalidResultError(f"{what} returned a coroutine; declare compute_score with `async def`")
    if isinstance(returned, tuple | list):
        if len(returned) != 3:
            raise InvalidResultError(f"{what} returned {len(returned)} values; return (score, query, response)")
        score, query, response = returned
        return _result(score, what, query, response)
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise InvalidResultError(f"{what} returned a mapping without 'score'; it has {sorted(map(str, returned))}")
        rest = {key: value for key, value in returned.items() if key not in ("score", "query", "response")}
        result = _result(
            returned["score"], what, returned.get("query"), returned.get("response"), _text(rest) if rest else None
        )
        result.told = {key: value for key, value in returned.items() if key != "score"}
        return result
    return _result(returned, what)


def _result(score: Any, what: str, query: Any = None, response: Any = None, reason: str | None = None) -> Answer:
    number = _number(score, what)
    kept = {"query": _text(query), "response": _text(response), "reason": reason}
    if math.isnan(number):
        return failed(f"{_NONE} ({'None' if score is None else 'NaN'})", **kept)
    return Answer(score=number, **kept)


def failed(why: str, **kept: str | None) -> Answer:
    """A result that leaves its rollout unscored; the number in it is not used."""
    return Answer(score=0.0, is_score_valid=False, error=_plain(why), **kept)


_FORMS = "return a number, (score, query, response), or a mapping with 'score'"


def _number(score: Any, what: str, forms: str = _FORMS) -> float:
    """A score as a number, NaN where there is none; also one of NumPy, or a tensor of one item."""
    if score is None:
        return math.nan
    if not isinstance(score, int | float) and callable(item := getattr(score, "item", None)):
        try:
            score = item()
        except (TypeError, ValueError, RuntimeError):  # an array of several, which is no number
            raise InvalidResultError(f"{what} gave {kind_of(score)} of several items for a score") from None
    if not isinstance(score, int | float):
        raise InvalidResultError(f"{what} gave {kind_of(score)} for a score; {forms}")
    try:
        number = float(score)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise InvalidResultError(f"{what} gave {number} for a score; a score is finite, or None where there is none")
    return number


def _text(value: Any) -> str | None:
    """A query or a response as it is kept."""
    if value is None or isinstance(value, str):
        return None if value is None else _plain(value)
    try:
        return _plain(json.dumps(value, ensure_ascii=False, default=safe_str))
    except (TypeError, ValueError, RecursionError):
        return _plain(safe_str(value))


def _plain(text: str) -> str:
    """Text that every file can hold; lone surrogates, which a model may write, become escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def scores_of(results: Sequence[EvaluateResult]) -> list[float]:
    """The scores as a post-processing gets them: NaN where there is none."""
    return [result.score if result.error is None and result.is_score_valid else math.nan for result in results]


def finished(results: Sequence[EvaluateResult], processed: Any, what: str) -> list[EvaluateResult]:
    """The results of a group with the scores that its post-processing gave.

    A score where there was none is marked as imputed; where it changed one, the score before is kept in `raw_score`;
    where it took one away, the rollout is unscored.

    Raises:
        InvalidResultError: it gave no list, one of another length, or one that holds something else than numbers.
    """
    given = processed.tolist() if hasattr(processed, "tolist") else processed
    name = f"post_process_scores of {what}"
    if not isinstance(given, list | tuple):
        raise InvalidResultError(f"{name} returned {kind_of(given)}; return a list of scores")
    if len(given) != len(results):
        raise InvalidResultError(f"{name} returned {len(given)} scores for {len(results)}")
    forms = "return a list of numbers, with None where there is no score"
    after = [_number(score, f"{name}, [{place}],", forms) for place, score in enumerate(given)]
    return [_with_score(*each) for each in zip(results, scores_of(results), after, strict=True)]


def _with_score(result: EvaluateResult, before: float, after: float) -> EvaluateResult:
    if math.isnan(after):
        return result if math.isnan(before) else result.model_copy(update=_TAKEN_AWAY | {"raw_score": before})
    if math.isnan(before):
        why = result.error or result.reason or _NONE
        changed = {"score": after, "is_score_valid": True, "error": None, "is_imputed": True}
        return result.model_copy(update={**changed, "reason": f"imputed by post_process_scores: {why}"[:_SHOWN]})
    return result if after == before else result.model_copy(update={"score": after, "raw_score": before})


_TAKEN_AWAY = {"is_score_valid": False, "error": "post_process_scores left it without a score"}

GIVEN = ("data_source", "solution_str", "ground_truth", "extra_info")

GIVEN_TO_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")

WANTED = ("messages", "assistant_turns", "sample", "task_name", *GIVEN)

"""What is asked for of a rollout; the first three of `GIVEN` may be a trainer's own."""

VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

_NO_EXTRA = {"data_source", "ground_truth", "reward_model", "extra_info"}

_FORM = "compute_score(data_source, solution_str, ground_truth, extra_info)"


@dataclass(frozen=True, slots=True)
class Form:
    """What the signatures of a `compute_score` say.

    Attributes:
        id: names it in files and messages.
        names: the parameters of the form that it takes.
        own: its further parameters, which options fix.
        required: those of all that have no default.
        hints: the annotations of its own parameters and of the ground truth.
        is_batch: it takes the plural names, and scores a group in one call.
        is_async: it is a coroutine function.
    """

    id: str
    names: frozenset[str]
    own: frozenset[str]
    required: frozenset[str]
    hints: Mapping[str, Any]
    is_batch: bool
    is_async: bool

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What one call is given of a rollout's values and of options."""
        offered = _offered(values)
        named = {name: offered[name] for name in GIVEN if name in self.names}
        return {**named, **{name: values[name] for name in self.own if name in values}}

    def batch_arguments(self, rollouts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """As `arguments`, for all rollouts of a group in one call."""
        offered = [_offered(values) for values in rollouts]
        pairs = zip(GIVEN, GIVEN_TO_BATCH, strict=True)
        named = {many: [each[one] for each in offered] for one, many in pairs if many in self.names}
        return {**named, **{name: rollouts[0][name] for name in self.own if name in rollouts[0]}}


def _offered(values: Mapping[str, Any]) -> dict[str, Any]:
    """The four values of the form, from those of a rollout; what a trainer gave by their names goes first."""
    sample = values.get("sample") or {}
    source = values.get("data_source")
    if source is None:
        source = sample.get("data_source", values.get("task_name"))
    solution = values.get("solution_str")
    if solution is None:
        solution = solution_of(values["messages"], values.get("assistant_turns") or ())
    extra_info = values.get("extra_info")
    return {
        "data_source": source,
        "solution_str": solution,
        "ground_truth": values.get("ground_truth"),
        "extra_info": _extra_info(sample) if extra_info is None else extra_info,
    }


def solution_of(messages: Sequence[Any], turns: Sequence[int]) -> str:
    """What the policy wrote: the texts of its messages, joined by newlines; without tools' answers and calls."""
    written = [messages[turn] for turn in turns] or [each for each in messages if each.role == "assistant"]
    return "\n".join(message.text for message in written if message.text)


def _extra_info(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The row's other fields, so that a judge can see the question; those of its own `extra_info` go first."""
    own = sample.get("extra_info")
    row = {key: value for key, value in sample.items() if key not in _NO_EXTRA}
    return {**row, **own} if isinstance(own, Mapping) else row


def form_of(code: Callable[..., Any], id: str, *, has_self: bool) -> Form:
    """Read a signature.

    Raises:
        ConfigError: it is not that of the form.
    """
    parameters = list(inspect.signature(code).parameters.values())
    code = code.func if isinstance(code, functools.partial) else code
    if has_self and parameters and (first := parameters[0].name) in (*GIVEN, *GIVEN_TO_BATCH):
        raise ConfigError(f"{line_of(code)}{id}: its first parameter is {first!r}; a method begins with self")
    parameters = parameters[has_self:]
    names = {each.name for each in parameters if each.kind not in VARIABLE}
    is_batch = "solution_strs" in names
    form = GIVEN_TO_BATCH if is_batch else GIVEN
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    if form[1] not in names and not takes_any:
        near = next((name for name in names if nearly(name, form[1:2])), None)
        told = f"takes {near!r} in the place of" if near else "does not take"
        raise ConfigError(f"{line_of(code)}{id} {told} 'solution_str'; write {_FORM}")
    if positional := next((each.name for each in parameters if each.kind is each.POSITIONAL_ONLY), None):
        raise ConfigError(f"{line_of(code)}{id}: parameters are passed by name; {positional!r} cannot be")
    try:
        hints = typing.get_type_hints(code, include_extras=True)
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise ConfigError(f"{line_of(code)}{id}: an annotation cannot be resolved: {error}") from error
    own = frozenset(names - set(form))
    _refuse_slips(f"{line_of(code)}{id}", own, names, is_batch)
    needed = {each.name for each in parameters if each.default is each.empty and each.kind not in VARIABLE}
    return Form(
        id=id,
        names=frozenset(form if takes_any else names & set(form)),
        own=own,
        required=frozenset(needed),
        hints={name: hint for name, hint in hints.items() if name in own or name == form[2]},
        is_batch=is_batch,
        is_async=inspect.iscoroutinefunction(code),
    )


def _refuse_slips(where: str, own: Iterable[str], names: Iterable[str], is_batch: bool) -> None:
    """Refuse a further parameter that is one of the form, misspelt: with a default, it would always have that."""
    form, other = (GIVEN_TO_BATCH, GIVEN) if is_batch else (GIVEN, GIVEN_TO_BATCH)
    for name in sorted(own):
        if name in other:
            meant = form[other.index(name)]
            raise ConfigError(f"{where}: {name!r} does not go with {form[1]!r}; write {meant!r}")
        if meant_by := nearly(name, set(form) - set(names)):
            raise ConfigError(f"{where} takes {name!r}, which nobody gives; did you mean {meant_by!r}?")


def nearly(name: str, known: Iterable[str]) -> str | None:
    """The known name of which this one is a slip; names that are only alike are not."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.85)), None)


def line_of(code: Any) -> str:
    plain = getattr(inspect.unwrap(code), "__code__", None)
    return f"{plain.co_filename}:{plain.co_firstlineno}: " if plain is not None else ""


_LOGGED = (*GIVEN, "score", "query", "response")

logger = logging.getLogger("reward_kit.reward_agent")


class Calls:
    """Calls a user's `compute_score`, and what belongs to it.

    Args:
        owner: the function, or the object that has the methods.
        form: what its signatures say.
    """

    def __init__(self, owner: Any, form: Form) -> None:
        self.form = form
        self._compute = getattr(owner, "compute_score", owner)
        self._log = _taken_log(getattr(owner, "log", None)) if self._compute is not owner else None
        self.post: Callable[[list[float]], Any] | None = getattr(owner, "post_process_scores", None)

    def one(self, values: Mapping[str, Any]) -> EvaluateResult:
        """The result for one rollout."""
        named = self.form.arguments(values)
        result = read_answer(self._compute(**named), self.form.id)
        if self._log is not None:
            with self._warning():
                self._log(named, result)
        return result

    async def one_awaited(self, values: Mapping[str, Any]) -> EvaluateResult:
        """As `one`, of a coroutine function."""
        named = self.form.arguments(values)
        result = read_answer(await self._compute(**named), self.form.id)
        if self._log is not None:
            with self._warning():
                told = self._log(named, result)
                if inspect.isawaitable(told):
                    await told
        return result

    def all(self, lists: Mapping[str, Any]) -> list[EvaluateResult]:
        """The results for a group, where its calls cannot be made apart."""
        rollouts = _apart(lists)
        if self.form.is_batch:
            results = self._read_all(self._compute(**self.form.batch_arguments(rollouts)), len(rollouts))
        else:
            results = []
            for values in rollouts:
                try:
                    results.append(self.one(values))
                except Exception as error:  # noqa: BLE001 - its own rollout is unscored, and the others are not
                    results.append(failed(_why(error)))
        if self.post is None:
            return results
        return finished(results, self.post(scores_of(results)), self.form.id)

    async def all_awaited(self, lists: Mapping[str, Any]) -> list[EvaluateResult]:
        """As `all`, of a coroutine function; the calls of a group run beside one another."""
        rollouts = _apart(lists)
        if self.form.is_batch:
            results = self._read_all(await self._compute(**self.form.batch_arguments(rollouts)), len(rollouts))
        else:
            results = list(await asyncio.gather(*map(self._one_or_why_not, rollouts)))
        if self.post is None:
            return results
        processed = self.post(scores_of(results))
        return finished(results, await processed if inspect.isawaitable(processed) else processed, self.form.id)

    async def _one_or_why_not(self, values: Mapping[str, Any]) -> EvaluateResult:
        try:
            return await self.one_awaited(values)
        except Exception as error:  # noqa: BLE001 - its own rollout is unscored, and the others are not
            return failed(_why(error))

    def _read_all(self, returned: Any, count: int) -> list[EvaluateResult]:
        answers = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(answers, list | tuple):
            raise InvalidResultError(f"{self.form.id}: for several solutions it returns a list, not {kind_of(answers)}")
        if len(answers) != count:
            raise InvalidResultError(f"{self.form.id}: {len(answers)} scores for {count} solutions")
        results = []
        for index, answer in enumerate(answers):
            try:
                results.append(read_answer(answer, f"{self.form.id}[{index}]"))
            except InvalidResultError as error:
                results.append(failed(str(error)))
        return results

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Around the user's own log: that it fails says nothing of the score, which stands."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - hostile code may raise anything here
            logger.warning("log of %s: %s: %s", self.form.id, type(error).__name__, safe_str(error))


def _why(error: Exception) -> str:
    if isinstance(error, MemoryError):
        raise error  # a limit, which the walls name
    return safe_str(error) if isinstance(error, RewardKitError) else f"{type(error).__name__}: {safe_str(error)}"


def _apart(lists: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The values of each rollout of a group; an option is one for all of them."""
    count = len(lists["rollouts_messages"])
    singular = {many: one for one, many in BATCH_NAMES.items()}
    per_rollout = {*singular, *WANTED}
    return [
        {
            singular.get(name, name): value[i] if name in per_rollout and isinstance(value, list) else value
            for name, value in lists.items()
        }
        for i in range(count)
    ]


def _taken_log(log: Any) -> Callable[[Mapping[str, Any], EvaluateResult], Any] | None:
    """A user's `log` where it takes what a score has; one that takes something else is a helper of their own."""
    if not callable(log):
        return None
    parameters = inspect.signature(log).parameters.values()
    needed = {each.name for each in parameters if each.default is each.empty and each.kind not in VARIABLE}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    names = set(_LOGGED) if takes_any else {each.name for each in parameters} & set(_LOGGED)
    if not names or needed - names:
        return None

    def call(named: Mapping[str, Any], result: EvaluateResult) -> Any:
        score = result.score if result.is_score_valid else float("nan")
        told = {**named, "score": score, "query": result.query, "response": result.response}
        return log(**{name: told.get(name) for name in names})

    return call


def spec_of(given: Any) -> RewardSpec:
    """The spec of a reward in any of its forms: `@reward_function`, a plain function, or a `compute_score`.

    Raises:
        ConfigError: it is none of them, or its signature is wrong.
    """
    if isinstance(given, type) and not hasattr(given, "score") and hasattr(given, "compute_score"):
        return _class_spec(given)
    if isinstance(given, type) and not hasattr(given, "score") and (near := _slip(given, "compute_score")):
        raise ConfigError(f"{given.__name__} has a method {near!r}; the one that is called is 'compute_score'")
    if not isinstance(given, type) and callable(given) and not hasattr(given, "__reward_spec__"):
        try:
            names = inspect.signature(given).parameters
        except (TypeError, ValueError):
            return reward_spec(given)
        # Under the name that verl looks for, a slip in a parameter is told as one of that form.
        is_called_so = getattr(given, "__name__", "") == "compute_score"
        if not {"messages", "rollouts_messages"} & set(names) and (is_called_so or _is_form(names)):
            return _function_spec(given)
    return reward_spec(given)


def _is_form(names: Iterable[str]) -> bool:
    """It takes a solution, under that name or one that is a slip of it."""
    return any(nearly(name, ("solution_str", "solution_strs")) for name in names)


def _slip(kind: type, method: str) -> str | None:
    """A method of a class that was meant to be this one, to judge by its name."""
    written = [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]
    return next((name for name in written if nearly(name, (method,))), None)


def _function_spec(function: Callable[..., Any]) -> RewardSpec:
    name = getattr(function, "__name__", type(function).__name__)
    is_partial = isinstance(function, functools.partial)
    code = code_of(function)
    form = form_of(function if is_partial else code, name, has_self=not is_partial and code is not function)
    calls = Calls(function, form)
    return _spec(form, _adapted(calls, "all" if form.is_batch else "one", code), code, function)


def _adapted(calls: Calls, method: str, code: Any) -> Callable[..., Any]:
    """A plain function that takes a rollout's values by name, or a group's."""
    awaited: Callable[..., Awaitable[Any]] = getattr(calls, f"{method}_awaited")
    direct: Callable[..., Any] = getattr(calls, method)

    async def score_awaited(**values: Any) -> Any:
        return await awaited(values)

    def score(**values: Any) -> Any:
        return direct(values)

    adapted: Callable[..., Any] = score_awaited if calls.form.is_async else score
    adapted.__name__, adapted.__module__ = calls.form.id, code.__module__
    adapted.__annotations__ = dict(calls.form.hints)
    adapted.custom_form = calls.form  # type: ignore[attr-defined]
    return adapted


def _class_spec(kind: type) -> RewardSpec:
    compute = kind.compute_score  # type: ignore[attr-defined]
    is_bound = isinstance(inspect.getattr_static(kind, "compute_score"), staticmethod | classmethod)
    form = form_of(compute, kind.__name__, has_self=not is_bound)
    _check_methods(kind, form)
    each = _spec(form, _adapted_class(kind, form, "one"), compute, kind)
    if not form.is_batch and not hasattr(kind, "post_process_scores"):
        return each
    group = _adapted_class(kind, form, "all")
    if not form.is_batch:
        group.each = each  # type: ignore[attr-defined]
    return _spec(form, group, compute, kind, mode="batch")


def _check_methods(kind: type, form: Form) -> None:
    """That the class can be made, set up and closed without arguments, and is async as a whole or not at all.

    Raises:
        ConfigError: it cannot, or is half async.
    """
    for method in ("__init__", "setup", "close"):
        function = getattr(kind, method, None)
        if function is None or function is object.__init__:
            continue
        parameters = list(inspect.signature(function).parameters.values())[1:]
        for each in parameters:
            if each.default is each.empty and each.kind not in VARIABLE:
                raise ConfigError(
                    f"{line_of(function)}{kind.__name__}.{method} is called without arguments; give {each.name!r} a "
                    "default, or take it in compute_score, where reward_options fix it"
                )
    _check_post(kind)
    for method in ("post_process_scores", "log"):
        if inspect.iscoroutinefunction(getattr(kind, method, None)) and not form.is_async:
            raise ConfigError(f"{kind.__name__}: {method} is async and compute_score is not; make both the same")


def _check_post(kind: type) -> None:
    """That `post_process_scores`, where there is one, has that name and takes the scores.

    Raises:
        ConfigError: it would not be called, or could not be.
    """
    name = "post_process_scores"
    if not hasattr(kind, name):
        if near := _slip(kind, name):
            raise ConfigError(f"{kind.__name__} has a method {near!r}, which nobody calls; did you mean {name!r}?")
        return
    post = getattr(kind, name)
    if not callable(post):
        raise ConfigError(f"{kind.__name__}.{name} is {kind_of(post)}; write def {name}(self, scores)")
    is_bound = isinstance(inspect.getattr_static(kind, name), staticmethod | classmethod)
    try:
        inspect.signature(post).bind(*(() if is_bound else (None,)), [])
    except TypeError as error:
        raise ConfigError(f"{line_of(post)}{kind.__name__}.{name}(self, scores) takes the scores: {error}") from None


def _adapted_class(kind: type, form: Form, method: str) -> type:
    """A reward class whose instance holds the user's own; it is set up and closed as that one is."""

    def start(self: Any) -> None:
        self.user = kind()
        self.calls = Calls(self.user, form)

    def score(self: Any, **values: Any) -> Any:
        return getattr(self.calls, f"{method}_awaited" if form.is_async else method)(values)

    score.__annotations__ = dict(form.hints)
    space: dict[str, Any] = {
        "__init__": start,
        "score": score,
        "__module__": kind.__module__,
        "user_class": kind,
        "custom_form": form,
    }
    for end in ("setup", "close"):
        if callable(getattr(kind, end, None)):
            space[end] = _forwarded(end)
    return type(kind.__name__, (), space)


def _forwarded(method: str) -> Callable[[Any], Any]:
    def call(self: Any) -> Any:
        return getattr(self.user, method)()

    return call


def _spec(form: Form, function: Any, code: Any, given: Any, mode: Mode | None = None) -> RewardSpec:
    mode = mode or ("batch" if form.is_batch else "pointwise")
    wanted = frozenset(BATCH_NAMES.get(name, name) if mode == "batch" else name for name in WANTED)
    truth = GIVEN_TO_BATCH[2] if form.is_batch else GIVEN[2]
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
        origin=_origin(given, code),
    )


def _origin(given: Any, code: Any) -> Origin | None:
    plain = inspect.unwrap(code)
    text = getattr(getattr(plain, "__code__", None), "co_filename", "")
    named = given if isinstance(given, type) else plain
    return Origin(Path(text), named.__qualname__) if text and Path(text).is_file() else None
