"""`@reward_function`: a plain Python function as a reward whose number can be trusted.

The decorator reads the signature once, when the file loads, and refuses what could never be called. At each call it
passes only the parameters that the function names, shapes messages and ground truth to the resolved annotations, and
validates what comes back. The function stays an ordinary function: sync or async, callable by hand. A class with
`score` and, where it needs them, `setup` and `close` is a reward too.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, overload

import pydantic

from reward_kit.errors import ConfigError, InvalidResultError, kind_of
from reward_kit.models import Message
from reward_kit.returned import as_result, as_results
from reward_kit.task_parts import SandboxLevel
from reward_kit.validation import describe_validation_error

Mode = Literal["pointwise", "batch"]
Function = Callable[..., Any]
_SPEC = "__reward_spec__"


class Origin(NamedTuple):
    """Where a reward function was written: its file, and its name in it, dotted for what stands in a class."""

    file: Path
    qualname: str


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """What the decorator knows of a reward function.

    Attributes:
        function: the function, or the class with `score`, as it was written.
        mode: "pointwise": one rollout a call; "batch": all rollouts of a group in one call.
        id: names the reward in files; by default the function's name.
        requirements: packages it needs, as in a requirements file.
        resources: what it is given by name besides the rollout: plain values, factories, references to factories.
        parameters: the names it takes; None where it takes any (`**kwargs`).
        required: those of them that have no default.
        is_async: it is a coroutine function.
        sandbox: the level that its decorator asks for; None where it leaves that to the user.
        origin: where it was written; None where it exists in memory only.
        weakened_from: the level that it was to run at on a machine that has none; it runs in this process instead.
        options: keyword parameters that are fixed, as `reward_options.with_options` gives them.
    """

    function: Function
    mode: Mode
    id: str
    requirements: tuple[str, ...]
    resources: Mapping[str, Any]
    parameters: frozenset[str] | None
    required: frozenset[str]
    is_async: bool
    _shapes: Mapping[str, Callable[[Any], Any]]
    sandbox: SandboxLevel | None = None
    origin: Origin | None = None
    weakened_from: SandboxLevel | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Of `given`, what the function names, each shaped to its annotation.

        Raises:
            InvalidResultError: a value does not fit the annotation.
        """
        given = {**self.options, **given}
        named = {k: v for k, v in given.items() if self.parameters is None or k in self.parameters}
        for name, shape in self._shapes.items():
            if name in named:
                named[name] = shape(named[name])
        return named

    def check(self, returned: Any, count: int | None = None) -> Any:
        """`returned` as an `EvaluateResult`, or a list of `count` of them in batch mode.

        Raises:
            InvalidResultError: it is none; the message names the field and the value.
        """
        if self.mode == "pointwise":
            return as_result(returned, f"reward {self.id!r}")
        results = as_results(returned, count, f"reward {self.id!r}")
        if invalid := next((result for result in results if isinstance(result, InvalidResultError)), None):
            raise invalid
        return results


@overload
def reward_function(_func: Function, /) -> Function: ...


@overload
def reward_function(
    _func: None = None,
    /,
    *,
    mode: Mode = "pointwise",
    id: str | None = None,
    requirements: Sequence[str] | None = None,
    resources: Mapping[str, Any] | None = None,
    sandbox: SandboxLevel | None = None,
) -> Callable[[Function], Function]: ...


def reward_function(
    _func: Function | None = None,
    /,
    *,
    mode: Mode = "pointwise",
    id: str | None = None,
    requirements: Sequence[str] | None = None,
    resources: Mapping[str, Any] | None = None,
    sandbox: SandboxLevel | None = None,
) -> Any:
    """Make a function, or a class with a `score` method, a reward.

    A class is made without arguments once per worker; `setup()` is called before the first `score`, `close()` at the
    end.

    Args:
        mode: "pointwise" for `f(messages, ground_truth=None, **kwargs) -> EvaluateResult`, "batch" for
            `f(rollouts_messages, ground_truths, **kwargs) -> list[EvaluateResult]`: one call for the rollouts of a
            group that did not break, in their order, each of their values in a list, one result for each of them.
        id: names the reward in files.
        requirements: packages it needs.
        resources: what it is given by name: a plain value, a factory without arguments, or a text "file.py:factory".
            What a factory makes is opened once per worker and closed at its end.
        sandbox: the level it asks for. It can ask for thicker walls than the user chose, never for thinner ones.

    Raises:
        ConfigError: the mode or level is unknown, a resource is no parameter, or the signature cannot be called; found
            when the file loads.

    Example:
        ```python
        @reward_function
        def exact(messages: list[Message], ground_truth: str) -> EvaluateResult:
            return EvaluateResult(score=float(messages[-1].text == ground_truth))
        ```
    """

    def decorate(function: Function) -> Function:
        needed = _texts(requirements, function)
        try:
            spec = _read_signature(function, mode, id, needed, dict(resources or {}), sandbox)
        except ConfigError as error:
            raise ConfigError(f"{_line_of(function)}{error}") from error
        if isinstance(function, type):
            setattr(function, _SPEC, spec)
            return function
        return as_function(spec)

    return decorate if _func is None else decorate(_func)


def reward_spec(function: Function) -> RewardSpec:
    """The spec of a reward function or class; a plain one is read as a pointwise reward.

    Raises:
        ConfigError: it is no function, or its signature is wrong.
    """
    # A subclass of a reward is no reward yet: its `score` may take something else.
    spec = vars(function).get(_SPEC) if isinstance(function, type) else getattr(function, _SPEC, None)
    if isinstance(spec, RewardSpec):
        return spec
    if not callable(function):
        raise ConfigError(f"a reward is a function or a class, not {kind_of(function)}")
    return reward_spec(reward_function(function))


def as_function(spec: RewardSpec) -> Function:
    """A reward function, or class, that can be called by hand and carries this spec."""
    if isinstance(spec.function, type):
        return type(spec.function.__name__, (spec.function,), {_SPEC: spec})
    wrapper = _async_wrapper(spec) if spec.is_async else _sync_wrapper(spec)
    setattr(wrapper, _SPEC, spec)
    return wrapper


def code_of(function: Function) -> Function:
    """The function that carries a reward's signature: a class's `score`, that of a partial, an object's `__call__`."""
    if isinstance(function, type):
        score: Function = function.score  # type: ignore[attr-defined]
        return score
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _sync_wrapper(spec: RewardSpec) -> Function:
    @functools.wraps(spec.function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = _bind(spec, args, kwargs)
        return spec.check(spec.function(**spec.arguments(given)), _count(given))

    return call


def _async_wrapper(spec: RewardSpec) -> Function:
    @functools.wraps(spec.function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        given = _bind(spec, args, kwargs)
        returned: Awaitable[Any] = spec.function(**spec.arguments(given))
        return spec.check(await returned, _count(given))

    return call


def _bind(spec: RewardSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by hand, by name, as Python would bind them; unknown names may be dropped later."""
    parameters = inspect.signature(spec.function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    if len(args) > len(names):
        raise TypeError(f"{spec.id}() takes {len(names)} positional arguments but {len(args)} were given")
    placed = dict(zip(names, args, strict=False))
    if twice := placed.keys() & kwargs.keys():
        raise TypeError(f"{spec.id}() got several values for {sorted(twice)[0]!r}")
    return {**placed, **kwargs}


def _count(given: Mapping[str, Any]) -> int | None:
    rollouts = given.get("rollouts_messages")
    return len(rollouts) if isinstance(rollouts, Sequence) else None


_FIRST = {"pointwise": "messages", "batch": "rollouts_messages"}


def _texts(requirements: Any, function: Function) -> tuple[str, ...]:
    given = () if requirements is None else requirements
    if not isinstance(given, list | tuple) or not all(isinstance(text, str) for text in given):
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(f"reward {name!r}: requirements is a list of texts, such as ['sympy>=1'], not {given!r:.80}")
    return tuple(given)


def _read_signature(
    function: Function,
    mode: str,
    id: str | None,
    requirements: tuple[str, ...],
    resources: dict[str, Any],
    sandbox: SandboxLevel | None,
) -> RewardSpec:
    name = getattr(function, "__name__", type(function).__name__)
    if mode not in _FIRST:
        raise ConfigError(f"reward {name!r}: mode {mode!r} is unknown; it is 'pointwise' or 'batch'")
    if sandbox is not None and sandbox not in get_args(SandboxLevel):
        levels = " or ".join(map(repr, get_args(SandboxLevel)))
        raise ConfigError(f"reward {name!r}: sandbox {sandbox!r} is unknown; it is {levels}")
    code = _score_of(function, name) if isinstance(function, type) else code_of(function)
    parameters = _parameters(function, name)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    _check_parameters(parameters, name, _FIRST[mode], mode, takes_any)
    if (unknown := resources.keys() - parameters.keys()) and not takes_any:
        raise ConfigError(f"reward {name!r}: resources names {sorted(unknown)[0]!r}, and it has no such parameter")
    named = (p for p in parameters.values() if p.kind is not p.VAR_KEYWORD)
    return RewardSpec(
        function=function,
        mode="batch" if mode == "batch" else "pointwise",
        id=id or name,
        requirements=requirements,
        resources=resources,
        parameters=None if takes_any else frozenset(parameters),
        required=frozenset(p.name for p in named if p.default is p.empty),
        is_async=inspect.iscoroutinefunction(code),
        _shapes=_shapes_of(code, name),
        sandbox=sandbox,
        origin=_origin(function, code),
    )


def _line_of(function: Function) -> str:
    """Its file and line for the front of a message; "" where it has none."""
    plain = inspect.unwrap(getattr(function, "score", function) if isinstance(function, type) else function)
    code = getattr(plain, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}: " if code is not None else ""


def _parameters(function: Function, name: str) -> dict[str, inspect.Parameter]:
    if not isinstance(function, type):
        return dict(inspect.signature(function).parameters)
    parameters = dict(inspect.signature(vars(function).get("score") or function.score).parameters)  # type: ignore[attr-defined]
    parameters.pop(next(iter(parameters), ""), None)  # self
    return parameters


def _check_parameters(
    parameters: Mapping[str, inspect.Parameter], name: str, first: str, mode: str, takes_any: bool
) -> None:
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_ONLY or p.kind is p.VAR_POSITIONAL]
    if positional:
        raise ConfigError(f"reward {name!r}: parameters are passed by name; {positional[0]!r} cannot be")
    if first not in parameters and not takes_any:
        near = difflib.get_close_matches(first, parameters, n=1)
        mend = f"did you mean {first!r}, where it says {near[0]!r}?" if near else f"write def {name}({first}, …)"
        raise ConfigError(f"reward {name!r}: a {mode} reward takes {first!r}; {mend}")


def _score_of(kind: type, name: str) -> Function:
    """The `score` of a class, once it is sure that the class can be made, set up and closed without arguments.

    Raises:
        ConfigError: it cannot.
    """
    score = getattr(kind, "score", None)
    if not inspect.isfunction(score) or isinstance(inspect.getattr_static(kind, "score"), staticmethod | classmethod):
        raise ConfigError(f"reward {name!r}: a class that is a reward has a method score(self, messages, …)")
    for method in ("__init__", "setup", "close"):
        function = getattr(kind, method, None)
        if function is None or function is object.__init__:
            continue
        parameters = list(inspect.signature(function).parameters.values())[1:]
        optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [p.name for p in parameters if p.default is p.empty and p.kind not in optional]
        if needed:
            raise ConfigError(
                f"reward {name!r}: {method} is called without arguments; give {needed[0]!r} a default, "
                "or take it in score and declare it in resources="
            )
    return score


def _shapes_of(code: Function, name: str) -> dict[str, Callable[[Any], Any]]:
    try:
        hints = typing.get_type_hints(code, include_extras=True)
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise ConfigError(f"reward {name!r}: an annotation cannot be resolved: {error}") from error
    shaped = ("messages", "ground_truth", "rollouts_messages", "ground_truths")
    return {key: _shape(hints[key], f"reward {name!r}, {key}") for key in shaped if key in hints}


def _origin(function: Function, code: Function) -> Origin | None:
    """Where the function stands, if that is a file."""
    plain = inspect.unwrap(code)
    text = getattr(getattr(plain, "__code__", None), "co_filename", "")
    named = function if isinstance(function, type) else plain
    return Origin(Path(text), named.__qualname__) if text and Path(text).is_file() else None


def _shape(annotation: Any, what: str) -> Callable[[Any], Any]:
    """A function that shapes a value to `annotation`: dicts to `Message`s or `Message`s to dicts, as it says."""
    if not _mentions(annotation, Message):
        wants_dicts = _mentions(annotation, dict)
        return _dumped if wants_dicts else _unchanged
    try:
        adapter = _adapter(annotation)
    except TypeError:  # an annotation that has no hash
        adapter = pydantic.TypeAdapter(annotation)

    def validate(value: Any) -> Any:
        try:
            return adapter.validate_python(_listed(value))
        except pydantic.ValidationError as error:
            raise InvalidResultError(f"{what}: {'; '.join(describe_validation_error(error))}") from None

    return validate


@functools.lru_cache(maxsize=64)
def _adapter(annotation: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(annotation)


def _unchanged(value: Any) -> Any:
    return value


def _dumped(value: Any) -> Any:
    if isinstance(value, Message):
        return value.to_chat()
    value = _listed(value)
    return [_dumped(item) for item in value] if isinstance(value, list) else value


def _listed(value: Any) -> Any:
    """Sequences of any kind, such as a step's history, as the lists that annotations ask for."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_listed(item) for item in value]
    return value


def _mentions(annotation: Any, wanted: type) -> bool:
    if annotation is wanted or typing.get_origin(annotation) is wanted:
        return True
    return any(_mentions(part, wanted) for part in typing.get_args(annotation))
