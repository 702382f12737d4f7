"""What the signature of a `compute_score` says, and what it is given of a rollout."""

from __future__ import annotations

import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reward_kit.errors import ConfigError

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
