"""`compute_score`, as verl's users write it, made a reward: a function, or a class that keeps a client between calls.

    def compute_score(data_source, solution_str, ground_truth, extra_info) -> (score, query, response)

    class RewardAgent:
        def compute_score(self, data_source, solution_str, ground_truth, extra_info): ...
        def post_process_scores(self, scores): ...  # optional, once for each group

From here on both are rewards like any other: options, deadlines, levels, files. The confined worker imports this
module, so it imports next to nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from reward_kit.errors import ConfigError, kind_of
from reward_kit.reward_agent.custom.calls import Calls
from reward_kit.reward_agent.custom.forms import GIVEN, GIVEN_TO_BATCH, VARIABLE, WANTED, Form, form_of, line_of, nearly
from reward_kit.reward_calls import BATCH_NAMES
from reward_kit.typed_interface import Mode, Origin, RewardSpec, code_of, reward_spec


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
        _shapes={},
        origin=_origin(given, code),
    )


def _origin(given: Any, code: Any) -> Origin | None:
    plain = inspect.unwrap(code)
    text = getattr(getattr(plain, "__code__", None), "co_filename", "")
    named = given if isinstance(given, type) else plain
    return Origin(Path(text), named.__qualname__) if text and Path(text).is_file() else None
