"""`@reward_function`, the decorator that turns a plain Python function into a validated reward.

The decorator reads the signature once, when the file is loaded, and rejects a signature that cannot be called. Each
call passes only the parameters that the function declares, converts them to their annotations, and validates the
returned value. The function stays an ordinary function, sync or async, and can be called directly. A class that has a
`score` method and, optionally, `setup` and `close` can also be a reward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import json
import numbers
import operator
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, overload

import pydantic
import typing_extensions

from reward_kit.errors import ConfigError, InvalidResultError, type_name
from reward_kit.models import EvaluateResult, Message
from reward_kit.task_parts import SandboxLevel
from reward_kit.validation import describe_validation_error

EvaluationMode = Literal["pointwise", "batch"]
Function = Callable[..., Any]
_SPEC = "__reward_spec__"
_FIRST: dict[str, str] = {"pointwise": "messages", "batch": "rollouts_messages"}
_DATA = frozenset({"ground_truth", "ground_truths", "sample", "state", "evaluation_criteria", *_FIRST.values()})
"""Parameters whose values are converted in each call; options are converted when they are fixed."""


class Origin(NamedTuple):
    """The file and qualified name of a reward function."""

    file: Path
    qualname: str


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """The data that the decorator reads from a reward function.

    Attributes:
        function: the undecorated function, or the class that has a `score` method.
        mode: "pointwise": one rollout per call; "batch": all rollouts of a group in one call.
        id: the reward's name in files; by default the function's name.
        requirements: the packages that the reward needs, in the syntax of a requirements file.
        resources: plain values, factories, or references to factories. They are passed by name together with the
            rollout.
        parameters: the accepted parameter names; None if the function accepts any (`**kwargs`).
        required: the parameters without a default.
        is_async: True for a coroutine function.
        sandbox: the level required by the decorator; None leaves the choice to the user.
        origin: the file and name; None if the function exists only in memory.
        weakened_from: the requested level, if the machine has no sandbox and the reward runs in this process.
        options: the fixed keyword parameters. See `reward_calls.with_options`.
    """

    function: Function
    mode: EvaluationMode
    id: str
    requirements: tuple[str, ...]
    resources: Mapping[str, Any]
    parameters: frozenset[str] | None
    required: frozenset[str]
    is_async: bool
    _converters: Mapping[str, Callable[[Any], Any]]
    sandbox: SandboxLevel | None = None
    origin: Origin | None = None
    weakened_from: SandboxLevel | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that the function accepts, each converted to the annotation of its parameter.

        Raises:
            InvalidResultError: a value cannot be converted.
        """
        values = {**self.options, **values}
        arguments = {k: v for k, v in values.items() if self.parameters is None or k in self.parameters}
        for name, convert in self._converters.items():
            if name in arguments:
                arguments[name] = convert(arguments[name])
        return arguments

    def check(self, returned: Any, count: int | None = None) -> Any:
        """Validate `returned` as an `EvaluateResult`, or as a list of `count` results in batch mode.

        Raises:
            InvalidResultError: the value is not a valid result; the message names the field and its value.
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
    mode: EvaluationMode = "pointwise",
    id: str | None = None,
    requirements: Sequence[str] | None = None,
    resources: Mapping[str, Any] | None = None,
    sandbox: SandboxLevel | None = None,
) -> Callable[[Function], Function]: ...


def reward_function(
    _func: Function | None = None,
    /,
    *,
    mode: EvaluationMode = "pointwise",
    id: str | None = None,
    requirements: Sequence[str] | None = None,
    resources: Mapping[str, Any] | None = None,
    sandbox: SandboxLevel | None = None,
) -> Any:
    """Turn a function, or a class that has a `score` method, into a reward.

    Values are converted to the annotations of their parameters: for example, a ground truth to a pydantic model, a
    dataclass or a TypedDict, "45" to `int`, and JSON text to `list[str]`. A value that cannot be converted leaves the
    rollout unscored.

    A class is instantiated without arguments once per worker. `setup()` runs before the first `score`, and `close()`
    runs at the end.

    Args:
        mode: "pointwise" for `f(messages, ground_truth=None, **kwargs) -> EvaluateResult`; "batch" for
            `f(rollouts_messages, ground_truths, **kwargs) -> list[EvaluateResult]`. A batch reward is called once with
            all rollouts of a group that ended without an error, in order; each parameter is a list, and the function
            returns one result per rollout. Instead of an `EvaluateResult`, a function may return its fields as a dict,
            a number, a bool, or a tuple (score, reason).
        id: the reward's name in files.
        requirements: the packages that the reward needs.
        resources: values that are passed by name: a plain value, a factory without arguments, or a string
            "file.py:factory". The object that a factory returns is opened once per worker and closed when the worker
            ends.
        sandbox: the minimum sandbox level; the user can only choose a stricter level.

    Raises:
        ConfigError: raised when the file is loaded: the mode or level is unknown, a resource is not a parameter, or the
            signature cannot be called.

    Example:
        ```python
        @reward_function
        def exact(messages: list[Message], ground_truth: str) -> EvaluateResult:
            return EvaluateResult(score=float(messages[-1].text == ground_truth))
        ```
    """

    def decorate(function: Function) -> Function:
        try:
            spec = _read_signature(function, mode, id, requirements, dict(resources or {}), sandbox)
        except ConfigError as error:
            plain = inspect.unwrap(getattr(function, "score", function) if isinstance(function, type) else function)
            raise ConfigError(f"{source_location(plain)}{error}") from error
        if isinstance(function, type):
            setattr(function, _SPEC, spec)
            return function
        return as_function(spec)

    return decorate if _func is None else decorate(_func)


def reward_spec(function: Function) -> RewardSpec:
    """Return the spec of a reward function or class. An undecorated function becomes a pointwise reward.

    Raises:
        ConfigError: the object is not a function or class, or its signature is invalid.
    """
    # A subclass does not inherit the spec, because its `score` may have a different signature.
    spec = vars(function).get(_SPEC) if isinstance(function, type) else getattr(function, _SPEC, None)
    if isinstance(spec, RewardSpec):
        return spec
    if not callable(function):
        raise ConfigError(f"a reward must be a function or a class, got {type_name(function)}")
    return reward_spec(reward_function(function))


def as_function(spec: RewardSpec) -> Function:
    """Return a callable reward function or class that carries this spec."""
    if isinstance(spec.function, type):
        return type(spec.function.__name__, (spec.function,), {_SPEC: spec})

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Bind the arguments of a direct call by name, in the same way as Python.

        Unknown names may be dropped later.
        """
        parameters = inspect.signature(spec.function).parameters.values()
        names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        if len(args) > len(names):
            raise TypeError(f"{spec.id}() takes {len(names)} positional arguments but {len(args)} were given")
        positional = dict(zip(names, args, strict=False))
        if duplicates := positional.keys() & kwargs.keys():
            raise TypeError(f"{spec.id}() got multiple values for argument {sorted(duplicates)[0]!r}")
        return {**positional, **kwargs}

    def count(arguments: Mapping[str, Any]) -> int | None:
        rollouts = arguments.get("rollouts_messages")
        return len(rollouts) if isinstance(rollouts, Sequence) else None

    @functools.wraps(spec.function)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(args, kwargs)
        return spec.check(spec.function(**spec.arguments(arguments)), count(arguments))

    @functools.wraps(spec.function)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(args, kwargs)
        returned: Awaitable[Any] = spec.function(**spec.arguments(arguments))
        return spec.check(await returned, count(arguments))

    wrapper = call_async if spec.is_async else call
    setattr(wrapper, _SPEC, spec)
    return wrapper


def scoring_function(function: Function) -> Function:
    """Return the function whose signature the reward has: a class's `score`, a partial's function, or `__call__`."""
    if isinstance(function, type):
        score: Function = function.score  # type: ignore[attr-defined]
        return score
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def source_location(code: Any) -> str:
    """Return "file:line: " of a function as the prefix of a message, or "" if it has no Python code."""
    plain = getattr(inspect.unwrap(code), "__code__", None)
    return f"{plain.co_filename}:{plain.co_firstlineno}: " if plain is not None else ""


def function_origin(function: Function, code: Function) -> Origin | None:
    """Return the file and name of a function or class, located by `code`, or None if it is not in a file."""
    plain = inspect.unwrap(code)
    text = getattr(getattr(plain, "__code__", None), "co_filename", "")
    target = function if isinstance(function, type) else plain
    return Origin(Path(text), target.__qualname__) if text and Path(text).is_file() else None


def argument_without_default(kind: type, method: str) -> str | None:
    """Return the first required parameter of a method after self, or None if all have defaults."""
    function = getattr(kind, method, None)
    if function is None or function is object.__init__:
        return None
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return next((p.name for p in parameters if p.default is p.empty and p.kind not in optional), None)


def _read_signature(
    function: Function,
    mode: str,
    id: str | None,
    requirements: Sequence[str] | None,
    resources: dict[str, Any],
    sandbox: SandboxLevel | None,
) -> RewardSpec:
    name = getattr(function, "__name__", type(function).__name__)
    needed = () if requirements is None else requirements
    if not isinstance(needed, list | tuple) or not all(isinstance(text, str) for text in needed):
        raise ConfigError(
            f"reward {name!r}: requirements must be a list of strings, such as ['sympy>=1'], got {needed!r:.80}"
        )
    if mode not in _FIRST:
        raise ConfigError(f"reward {name!r}: mode {mode!r} is unknown; use 'pointwise' or 'batch'")
    if sandbox is not None and sandbox not in get_args(SandboxLevel):
        levels = " or ".join(map(repr, get_args(SandboxLevel)))
        raise ConfigError(f"reward {name!r}: sandbox {sandbox!r} is unknown; use {levels}")
    if isinstance(function, type):
        code = getattr(function, "score", None)
        kind = inspect.getattr_static(function, "score", None)
        if not inspect.isfunction(code) or isinstance(kind, staticmethod | classmethod):
            raise ConfigError(f"reward {name!r}: a reward class needs a method score(self, messages, …)")
        for method in ("__init__", "setup", "close"):
            if argument := argument_without_default(function, method):
                raise ConfigError(
                    f"reward {name!r}: {method} is called without arguments; give {argument!r} a default, or "
                    "make it a parameter of score and declare it in resources="
                )
        parameters = dict(inspect.signature(vars(function).get("score") or code).parameters)
        parameters.pop(next(iter(parameters), ""), None)  # self
    else:
        code = scoring_function(function)
        parameters = dict(inspect.signature(function).parameters)
    # All arguments are passed by name, so `*args` stays empty.
    parameters = {n: p for n, p in parameters.items() if p.kind is not inspect.Parameter.VAR_POSITIONAL}
    kinds = {p.name: p.kind for p in parameters.values()}
    for parameter, kind in kinds.items():
        if kind is inspect.Parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"reward {name!r}: parameters are passed by name, so {parameter!r} must not be positional-only"
            )
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
    first = _FIRST[mode]
    if first not in parameters and not takes_any:
        near = difflib.get_close_matches(first, parameters, n=1)
        fix = f"did you mean {first!r} instead of {near[0]!r}?" if near else f"write def {name}({first}, …)"
        raise ConfigError(f"reward {name!r}: a {mode} reward needs the parameter {first!r}; {fix}")
    if (unknown := resources.keys() - parameters.keys()) and not takes_any:
        raise ConfigError(f"reward {name!r}: the resource {sorted(unknown)[0]!r} is not a parameter of the function")
    try:
        hints = typing.get_type_hints(code, include_extras=True)
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise ConfigError(f"reward {name!r}: an annotation cannot be resolved: {error}") from error
    converted = hints.keys() & parameters.keys() & _DATA - resources.keys()
    return RewardSpec(
        function=function,
        mode="batch" if mode == "batch" else "pointwise",
        id=id or name,
        requirements=tuple(needed),
        resources=resources,
        parameters=None if takes_any else frozenset(parameters),
        required=frozenset(p.name for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD),
        is_async=inspect.iscoroutinefunction(code),
        _converters={
            key: _converter(key, hints[key], f"reward {name!r}: Input {key!r} failed Pydantic validation")
            for key in sorted(converted)
        },
        sandbox=sandbox,
        origin=function_origin(function, code),
    )


def _converter(name: str, annotation: Any, what: str) -> Callable[[Any], Any]:
    """Return a function that converts the value of a parameter to its annotation.

    Messages name the parameter and `what`.
    """
    if name in _FIRST.values() and not _mentions(annotation, Message):
        # Messages passed as dicts keep the keys of their provider, regardless of the annotation of the dict.
        return _dumped if _mentions(annotation, dict) else lambda value: value

    of_messages, of_dicts = _mentions(annotation, Message), _mentions(annotation, dict)
    is_strict = name in ("ground_truth", "ground_truths")  # a sample and a state may have additional keys
    find_adapter = functools.cache(lambda: type_adapter(annotation, is_strict=is_strict))  # built at the first call

    def convert(value: Any) -> Any:
        is_absent = value is None and not of_messages
        is_object = name == "state" and not isinstance(value, dict | list)  # such as a database
        adapter = None if is_absent or is_object else find_adapter()
        if adapter is None:
            return value
        if of_messages:
            value = _listed(value)
        elif of_dicts and isinstance(value, list) and any(isinstance(item, Message) for item in value):
            value = _dumped(value)
        try:
            return adapter.validate_python(value)
        except pydantic.ValidationError as error:
            problem = error
        if isinstance(value, str):  # a cell of a CSV file, or JSON in a text column
            with contextlib.suppress(ValueError, RecursionError):
                return adapter.validate_python(json.loads(value))
        lines = (line.removeprefix("(top level): ") for line in describe_validation_error(problem))
        raise InvalidResultError(f"{what}: {'; '.join(lines)}") from None

    return convert


def type_adapter(annotation: Any, *, is_strict: bool = False) -> pydantic.TypeAdapter[Any] | None:
    """Return an adapter that validates values and converts them to an annotation.

    Return None if pydantic does not support the annotation. If `is_strict` is true, unknown keys of dataclasses and
    TypedDicts that have no configuration are errors.
    """
    try:
        return _type_adapter(annotation, is_strict)
    except TypeError:  # unhashable annotation
        return _type_adapter.__wrapped__(annotation, is_strict)


@functools.lru_cache(maxsize=256)
def _type_adapter(annotation: Any, is_strict: bool) -> pydantic.TypeAdapter[Any] | None:
    annotation = _with_readable_dicts(annotation)
    if is_strict and (dataclasses.is_dataclass(annotation) or typing_extensions.is_typeddict(annotation)):
        annotation = annotation | None  # pydantic accepts a configuration for a union, but not for a bare dataclass
    for config in (pydantic.ConfigDict(coerce_numbers_to_str=True, extra="forbid" if is_strict else None), None):
        try:
            return pydantic.TypeAdapter(annotation, config=config)
        except pydantic.PydanticUserError:  # a model has its own configuration
            continue
    return None


def _with_readable_dicts(annotation: Any) -> Any:
    """Replace each `typing.TypedDict` with a TypedDict from typing_extensions.

    pydantic supports `typing.TypedDict` only from Python 3.12.
    """
    if typing.is_typeddict(annotation) and type(annotation).__module__ == "typing":
        fields = {}
        for name, hint in typing.get_type_hints(annotation, include_extras=True).items():
            fields[name] = _with_readable_dicts(hint)
            if typing.get_origin(hint) not in (typing.Required, typing.NotRequired):
                is_required = name in annotation.__required_keys__
                fields[name] = (typing.Required if is_required else typing.NotRequired)[fields[name]]
        make: Any = typing_extensions.TypedDict
        readable = make(annotation.__name__, fields)
        if config := getattr(annotation, "__pydantic_config__", None):
            readable.__pydantic_config__ = config
        return readable
    parts = get_args(annotation)
    replaced = tuple(map(_with_readable_dicts, parts))
    if all(map(operator.is_, parts, replaced)):
        return annotation
    if isinstance(annotation, types.UnionType):
        return typing.Union[replaced]  # noqa: UP007 - of a tuple
    return (
        annotation.copy_with(replaced) if hasattr(annotation, "copy_with") else typing.get_origin(annotation)[replaced]
    )


def _dumped(value: Any) -> Any:
    if isinstance(value, Message):
        return value.to_chat()
    value = _listed(value)
    return [_dumped(item) for item in value] if isinstance(value, list) else value


def _listed(value: Any) -> Any:
    """Convert sequences of any kind, such as the history of a step, to lists."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_listed(item) for item in value]
    return value


def _mentions(annotation: Any, target: type) -> bool:
    if annotation is target or typing.get_origin(annotation) is target:
        return True
    return any(_mentions(part, target) for part in typing.get_args(annotation))


def as_result(returned: Any, what: str) -> EvaluateResult:
    """Return `returned` as an `EvaluateResult`; `what` names the reward in messages.

    A mapping is validated as the fields of a result. A number or bool is used as the score. A tuple is read as (score,
    reason).

    Raises:
        InvalidResultError: the returned value is not a valid result.
    """
    if isinstance(returned, numbers.Real) or getattr(returned, "ndim", None) == 0:  # includes NumPy and torch scalars
        returned = {"score": returned}
    elif isinstance(returned, tuple) and len(returned) == 2:
        returned = {"score": returned[0], "reason": returned[1]}
    if isinstance(returned, EvaluateResult | Mapping):
        # Validate the result again, since fields may have been reassigned.
        kind = type(returned) if isinstance(returned, EvaluateResult) else EvaluateResult
        try:
            return kind.model_validate(returned if isinstance(returned, EvaluateResult) else dict(returned))
        except pydantic.ValidationError as error:
            problems = "; ".join(describe_validation_error(error, EvaluateResult))
            raise InvalidResultError(f"{what}: {problems}") from None
    if inspect.isawaitable(returned):
        raise InvalidResultError(f"{what} returned a coroutine; declare the function with `async def`")
    kind_returned = "nothing (None)" if returned is None else type_name(returned)
    raise InvalidResultError(f"{what} returned {kind_returned}; return a number, (score, reason) or an EvaluateResult")


def as_results(returned: Any, count: int | None, what: str) -> list[EvaluateResult | InvalidResultError]:
    """Return the results of a batch reward. Each invalid result is replaced by an error.

    Args:
        returned: the value that the reward returned.
        count: the number of rollouts; None if unknown.
        what: the name of the reward, for messages.

    Raises:
        InvalidResultError: the returned value is not a list, or has the wrong length.
    """
    if not isinstance(returned, Sequence) or isinstance(returned, str | bytes):
        raise InvalidResultError(f"{what}: a batch reward must return a list, got {type_name(returned)}")
    if count is not None and len(returned) != count:
        raise InvalidResultError(f"{what} returned {len(returned)} results for {count} rollouts")
    results: list[EvaluateResult | InvalidResultError] = []
    for index, item in enumerate(returned):
        try:
            results.append(as_result(item, f"{what}[{index}]"))
        except InvalidResultError as error:
            results.append(error)
    return results
