"""State hashes, which determine whether two steps have the same state."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from pydantic import BaseModel

from reward_kit.agent.models import History, SeenResults, StepData
from reward_kit.credit.step_arrays import Batch, Codes, StepArrays
from reward_kit.episodes.record import STATE_KEYS
from reward_kit.errors import ConfigError, boundary, did_you_mean, install_hint, type_name
from reward_kit.loading import load_function, reject_coroutine
from reward_kit.models import Message

_IDENTITY: Any = object.__hash__
_KEYS = (
    "return a string, plain data, an array, a tensor, a model or a hashable value such as a date or a frozen dataclass"
)


def typed_key(value: Any) -> Hashable:
    """Return `value` as a dictionary key that distinguishes types and shapes.

    For example, 1, 1.0, True and "1" have four different keys. Supported values are plain data, arrays, tensors,
    models, dataclasses, and hashable values such as dates, enum members and paths.

    Raises:
        ConfigError: If the value contains itself or an unsupported object.
    """
    if type(value) is str:
        return value
    try:
        return _key(value)
    except RecursionError as error:
        raise ConfigError(f"a state hash returned {type_name(value)}, which is nested too deeply") from error


def _key(value: Any) -> Hashable:
    kind = type(value)
    if kind is str:
        return value  # type: ignore[no-any-return]
    if isinstance(value, np.ndarray):
        content = _key(value.tolist()) if value.dtype.hasobject else value.tobytes()
        return kind, value.dtype.str, value.shape, content
    if isinstance(value, np.generic):
        # Compare bytes, since NaN and NaT are not equal to themselves.
        return kind, value.dtype.str, value.tobytes()
    if isinstance(value, float):
        return kind, value.hex()
    if value is None or isinstance(value, str | int | bytes):
        return kind, value
    if isinstance(value, bytearray):
        return kind, bytes(value)
    if isinstance(value, BaseModel):
        return kind, _key(value.model_dump())
    if kind.__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        # The key contains the dtype, shape and content, but not the device. PyTorch is not imported here.
        here = value.detach().cpu()
        if getattr(here, "is_sparse", False):
            here = here.to_dense()
        if str(here.dtype) == "torch.bfloat16":  # NumPy lacks bfloat16; float32 can represent all its values
            here = here.float()
        return kind, str(value.dtype), tuple(value.shape), here.numpy().tobytes()
    if isinstance(value, list | tuple):
        return kind, tuple(map(_key, value))
    if isinstance(value, set | frozenset):
        return kind, frozenset(map(_key, value))
    if isinstance(value, Mapping):
        return kind, frozenset((_key(key), _key(item)) for key, item in value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return kind, tuple(_key(getattr(value, field.name)) for field in fields(value) if field.compare)
    if kind.__hash__ is _IDENTITY:
        raise ConfigError(f"a state hash returned {type_name(value)}, which is equal only to itself; {_KEYS}")
    with boundary(ConfigError, f"a state hash returned {type_name(value)}; {_KEYS}"):
        hash(value)
    return kind, value


def stable_text(key: Hashable) -> str:
    """Convert a typed key to a string that is the same in every process.

    By contrast, the results of `hash` and the order of a set can differ between processes.
    """
    if isinstance(key, frozenset):
        return f"{{{','.join(sorted(map(stable_text, key)))}}}"
    if isinstance(key, tuple):
        return f"({','.join(map(stable_text, key))})"
    if isinstance(key, type):
        return f"{key.__module__}.{key.__qualname__}"
    return repr(key)


OneHash = str | Mapping[str, Any] | Callable[..., Any]
StateHash = OneHash | Sequence[OneHash] | None
Reader = Callable[[StepData], tuple[str, Any]]
_READABLE_LENGTH = 80


@dataclass(frozen=True, slots=True)
class NamedHash:
    """A named hash with fixed options.

    Attributes:
        read: a function that returns the state of a step as a pair of source and value. Two states are equal only if
            both their sources and their values are equal.
        threshold: the minimum similarity at which two strings count as the same state. If None, the strings must be
            equal.
    """

    read: Reader
    threshold: float | None = None


def check_state_hash(state_hash: StateHash) -> None:
    """Raise a ConfigError if the hash is unknown or if an option is unknown, missing or invalid."""
    _prepared(state_hash)


def anchor_codes(batch: Batch, groups_S: Codes, state_hash: StateHash = None) -> Codes:
    """Return an (S,) array of numbers, one for each step. Steps with equal numbers share an anchor state.

    Two steps share an anchor state if they belong to the same group and have the same state.

    Raises:
        ConfigError: If the hash cannot be used or returns a value that cannot be a key.
    """
    prepared = _prepared(state_hash)
    if isinstance(prepared, NamedHash) and prepared.threshold is not None:
        from reward_kit.credit.similarity import similar_groups  # requires an extra

        return similar_groups(_texts(batch, prepared), groups_S, prepared.threshold)
    keys = hash_steps(batch, state_hash)
    # Map each key to the position of its first occurrence. Each key is looked up only once because comparing long keys
    # is expensive.
    firsts: dict[Hashable, int] = {}
    states_S = np.fromiter(map(firsts.setdefault, keys, count()), dtype=np.int64, count=len(keys))
    return groups_S * len(keys) + states_S


def anchor_numbers(arrays: StepArrays, state_hash: StateHash = None) -> Codes:
    """Return an (S,) array of numbers. Two steps in one group have the same number if they have the same state.

    As in `gigpo_credit`, `state_hash` defines which states are the same.
    """
    return anchor_codes([arrays.steps], arrays.to_steps(arrays.groups_B), state_hash)


def hash_steps(batch: Batch, state_hash: StateHash = None) -> list[Hashable]:
    """Return the state key of each step (S,).

    For the hash "similarity", the key identifies the string that is compared.

    Raises:
        ConfigError: If the hash cannot be used or returns a value that cannot be a key.
    """
    prepared = _prepared(state_hash)
    if isinstance(prepared, NamedHash) and (texts := _texts_alone(batch, prepared.read)) is not None:
        return texts
    return [(source, typed_key(value)) for source, value in _read(batch, prepared)]


def _texts_alone(batch: Batch, read: Reader) -> list[Hashable] | None:
    """Return the states (S,) if all of them are strings from a single source, or None otherwise.

    This common case is handled separately because doing so is ten times as fast.
    """
    if read not in (_default, _recorded_key, _observation):
        return None
    steps = list(chain.from_iterable(batch))
    infos = [] if read is _observation else [step.step_info for step in steps]
    for key in ("state_and_results", "state_key")[read is _recorded_key :]:
        recorded: list[Any] = [info.get(key) for info in infos]
        kinds = set(map(type, recorded))
        if kinds == {str}:
            return recorded
        if not kinds <= {type(None)}:
            return None
    seen: list[Any] = [step.observation_data for step in steps]
    return seen if set(map(type, seen)) == {str} else None


def readable_keys(batch: Batch, state_hash: StateHash = None) -> list[str]:
    """Return a readable key for each step (S,). Two readable keys are equal if and only if the state keys are equal.

    Short strings are unchanged. Long strings are truncated and followed by a digest. Any other value is followed by the
    digest of its typed key. For the hash "similarity", a step's key is the key of its string, because similar strings
    have no key in common.
    """
    known: dict[tuple[str, Hashable], str] = {}
    readable = []
    for source, value in _read(batch, _prepared(state_hash)):
        key = (source, typed_key(value))
        if key not in known:
            known[key] = _readable(value, key)
        readable.append(known[key])
    return readable


def _readable(value: Any, key: tuple[str, Hashable]) -> str:
    is_short = isinstance(value, str) and len(value) <= _READABLE_LENGTH and " #" not in value
    if is_short:
        return str(value)
    text = value if isinstance(value, str) else repr(value)
    digest = hashlib.sha256(stable_text(key).encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{text[: _READABLE_LENGTH - 16]}… #{digest}" if len(text) > _READABLE_LENGTH else f"{text} #{digest}"


def describe_state_hash(state_hash: StateHash, infos: Iterable[Mapping[str, Any]]) -> str:
    """Return the name of a state hash, including its options.

    For the default hash, the name depends on the keys that the steps record. `infos` contains a mapping with these keys
    for each step, such as its `step_info`.
    """
    if state_hash is None:
        recorded = {key for info in infos for key in STATE_KEYS if info.get(key) is not None}
        return next((key for key in reversed(STATE_KEYS) if key in recorded), "observation_text")
    if isinstance(state_hash, list | tuple):
        return ", ".join(describe_state_hash(one, ()) for one in state_hash)
    if isinstance(state_hash, Mapping):
        options = ", ".join(f"{key} {value}" for key, value in state_hash.items() if key != "name")
        return f"{state_hash.get('name')} ({options})" if options else str(state_hash.get("name"))
    if isinstance(state_hash, str):  # a function of a file is located by an absolute path
        return state_hash.rpartition("/")[2] if _is_reference(state_hash) else state_hash
    return getattr(state_hash, "__name__", type(state_hash).__name__)


# Reading a specification


def _prepared(state_hash: StateHash) -> NamedHash | Callable[..., Any]:
    if callable(state_hash):
        return state_hash
    if isinstance(state_hash, list | tuple):
        return _all_of(state_hash)
    if state_hash is None:
        return NamedHash(_default)
    options = dict(state_hash) if isinstance(state_hash, Mapping) else {"name": state_hash}
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(
            f"a state hash must be a name, a mapping with a name, a function, or a list of these, got {state_hash!r}"
        )
    if name not in STATE_HASHES:
        if _is_reference(state_hash):
            return load_function(name, "state hash")
        near = did_you_mean(name, STATE_HASHES)
        hint = "" if near.endswith("?") else "; to use your own function, write file.py:function"
        raise ConfigError(f"unknown state hash {name!r}{near}{hint}")
    maker = STATE_HASHES[name]
    known = inspect.signature(maker).parameters
    for option in options:
        if option not in known:
            raise ConfigError(f"state hash {name!r} has no option {option!r}{did_you_mean(str(option), known)}")
    missing = [key for key, item in known.items() if item.default is item.empty and key not in options]
    if missing:
        raise ConfigError(f"state hash {name!r} needs the option {missing[0]!r}: {{name: {name}, {missing[0]}: …}}")
    return maker(**options)


def _is_reference(one: Any) -> TypeGuard[str]:
    """Return True if the value has the form "file.py:function" or "package.module:function"."""
    return isinstance(one, str) and ":" in one


def hash_references(state_hash: Any) -> list[str]:
    """Return the function references in a state hash: `file.py:function` or `package.module:function`."""
    return list(filter(_is_reference, state_hash if isinstance(state_hash, list | tuple) else [state_hash]))


def locate_references(state_hash: Any, folder: Path) -> Any:
    """Return the state hash with the paths in its function references made absolute, relative to `folder`."""
    if isinstance(state_hash, list | tuple):
        return [locate_references(one, folder) for one in state_hash]
    is_file = _is_reference(state_hash) and state_hash.rpartition(":")[0].endswith(".py")
    return str((folder / state_hash).resolve()) if is_file else state_hash


def _all_of(hashes: Sequence[OneHash]) -> NamedHash:
    """Combine multiple hashes into one."""
    if not hashes or any(one is None or isinstance(one, list | tuple) for one in hashes):
        raise ConfigError(
            f"a list of state hashes needs at least one item, and only names, mappings or functions; got {hashes!r}"
        )
    prepared = [_prepared(one) for one in hashes]
    if any(isinstance(one, NamedHash) and one.threshold is not None for one in prepared):
        raise ConfigError("state hash 'similarity' compares strings approximately, so it cannot be part of a list")
    readers = [_reader_of(one) for one in prepared]
    return NamedHash(lambda step: ("all", [read(step) for read in readers]))


def _reader_of(prepared: NamedHash | Callable[..., Any]) -> Reader:
    if isinstance(prepared, NamedHash):
        return prepared.read
    name = getattr(prepared, "__name__", type(prepared).__name__)
    takes_step = _takes_step(prepared)

    def call(step: StepData) -> tuple[str, Any]:
        with boundary(ConfigError, f"the state hash {name!r}, step {step.system_step_index}"):
            key = prepared(step=step) if takes_step else prepared(_seen(step))
            if key is None:
                raise ConfigError(
                    f"the state hash {name!r} returned None; to treat all states as equal, return a constant"
                )
            reject_coroutine(key, f"the state hash {name!r}")
            return "function", key

    return call


def _takes_step(function: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(function).parameters.get("step")
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False
    return parameter is not None and parameter.kind is not parameter.POSITIONAL_ONLY


def _seen(step: StepData) -> Any:
    """Return the conversation before the action, or the observation if the step has no messages."""
    messages = step.resulting_messages_history
    return History(messages, _before_action(step)) if messages else step.observation_data


def _read(batch: Batch, prepared: NamedHash | Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield the state of each step (S,) as a (source, value) pair."""
    return map(_reader_of(prepared), chain.from_iterable(batch))


# The named hashes


def _recorded_key(step: StepData) -> tuple[str, Any]:
    recorded = step.step_info.get("state_key")
    # The source distinguishes the two kinds of key, so that an observation never equals a recorded key.
    return ("state_key", recorded) if recorded is not None else ("observation", step.observation_data)


def _default(step: StepData) -> tuple[str, Any]:
    recorded = step.step_info.get("state_and_results")
    return ("state_and_results", recorded) if recorded is not None else _recorded_key(step)


def _state_and_results() -> NamedHash:
    """Read the state key and the set of tool results before the action.

    If the state key does not cover the results, the worker records both as a single key. Otherwise, the results are
    read from the conversation. Steps that share an episode's messages are read in order, so each message is read only
    once.
    """
    messages: Sequence[Message] | None = None
    begin, seen = 0, SeenResults()

    def read(step: StepData) -> tuple[str, Any]:
        nonlocal messages, begin, seen
        recorded = step.step_info.get("state_and_results")
        if recorded is None:
            history, end = step.resulting_messages_history, _before_action(step)
            shared = history.messages if isinstance(history, History) else history
            if shared is not messages or end < begin:
                messages, begin, seen = shared, 0, SeenResults()
            seen.add(shared[i] for i in range(begin, end))
            begin, key = end, step.step_info.get("state_key")
            recorded = seen.key_with(key if isinstance(key, str) else stable_text(typed_key(key)))
        return "state_and_results", recorded

    return NamedHash(read)


def _observation(step: StepData) -> tuple[str, Any]:
    return "observation", step.observation_data


_READERS: Mapping[str, Reader] = {"observation_text": _observation, "state_key": _recorded_key}


def _reader(name: str, of: Any) -> Reader:
    if not isinstance(of, str) or of not in _READERS:
        raise ConfigError(f"state hash {name!r}: unknown source of={of!r}{did_you_mean(str(of), _READERS)}")
    return _READERS[of]


def _last_messages(*, count: int) -> NamedHash:
    """Read the last `count` messages before the action.

    Each message is represented by its role, name, content and tool calls. Tool call ids are ignored because they always
    differ.
    """
    if type(count) is not int or count < 1:
        raise ConfigError(f"state hash 'last_messages': count must be a positive integer, got {count!r}")

    def read(step: StepData) -> tuple[str, Any]:
        messages, end = [], _before_action(step)
        for i in range(max(end - count, 0), end):
            message = step.resulting_messages_history[i]
            calls = [call.function for call in message.tool_calls or ()]
            calls += [message.function_call] if message.function_call is not None else []
            written = [[call.name, call.arguments] for call in calls]
            messages.append([message.role, message.name, message.content, written])
        return "messages", messages

    return NamedHash(read)


def _before_action(step: StepData) -> int:
    """Return the number of messages in the history that precede the action."""
    history = step.resulting_messages_history
    messages = history.messages if isinstance(history, History) else history
    # Each action is one assistant message, followed by the results, so the last assistant message is this action.
    return next((i for i in range(len(history) - 1, -1, -1) if messages[i].role == "assistant"), len(history))


def _last_match(*, pattern: str) -> NamedHash:
    """Read the last match of `pattern` in the messages that the policy received before the action.

    The value consists of the groups of the match or, if the pattern has no groups, of the whole match. The system
    message and the policy's messages are ignored. A match in which no group participated counts as no match.
    """
    if not isinstance(pattern, str) or not pattern:
        raise ConfigError(f"state hash 'last_match': pattern must be a regular expression, got {pattern!r}")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"state hash 'last_match': {pattern!r}: {error}") from error

    @lru_cache(maxsize=1024)
    def search(text: str) -> tuple[Any, ...]:
        matches = list(compiled.finditer(text))
        return (matches[-1].groups() or (matches[-1].group(),)) if matches else ()

    def read(step: StepData) -> tuple[str, Any]:
        history = step.resulting_messages_history
        messages = history.messages if isinstance(history, History) else history
        for i in range(_before_action(step) - 1, -1, -1):
            message = messages[i]
            if message.role not in ("assistant", "system") and (groups := search(message.text)):
                return "match", list(groups) if any(one is not None for one in groups) else None
        return "match", None

    return NamedHash(read)


def _read_json(step: StepData) -> tuple[str, Any]:
    """Parse the observation if it is a JSON string.

    Whitespace and key order are ignored, but number types are not. A string that is not valid JSON is used unchanged.
    """
    observation = step.observation_data
    if not isinstance(observation, str):
        return "json", observation
    try:
        value = json.loads(observation)
        typed_key(value)
    except (ValueError, RecursionError, ConfigError):  # not JSON or too deeply nested: use the string
        return "observation", observation
    return "json", value


def _regex(*, replace: Mapping[str, str], of: str = "observation_text") -> NamedHash:
    """Read the source `of`, and replace all matches of each pattern. Patterns are applied in order.

    This hash is meant for observations that contain times, ids or counters.
    """
    if not isinstance(replace, Mapping) or not replace:
        raise ConfigError(f"state hash 'regex': replace must map patterns to replacement strings, got {replace!r}")
    rules: list[tuple[re.Pattern[str], str]] = []
    pairs: list[tuple[Any, Any]] = [*replace.items()]
    for pattern, text in pairs:
        if not isinstance(pattern, str) or not isinstance(text, str):
            raise ConfigError(f"state hash 'regex': pattern and replacement must be strings, got {pattern!r}: {text!r}")
        try:
            rules.append((re.compile(pattern), text))
            rules[-1][0].sub(text, "")  # fails if the text refers to a missing group
        except (re.error, IndexError) as error:
            raise ConfigError(f"state hash 'regex': {pattern!r}: {text!r}: {error}") from error
    read_original = _reader("regex", of)

    def read(step: StepData) -> tuple[str, Any]:
        source, value = read_original(step)
        return source, _replaced(value, rules)

    return NamedHash(read)


def _replaced(value: Any, rules: list[tuple[re.Pattern[str], str]]) -> Any:
    """Apply the rules to every string in `value`, except for the keys of mappings."""
    if isinstance(value, str):
        for pattern, text in rules:
            value = pattern.sub(text, value)
        return value
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_replaced(item, rules) for item in value)
    if isinstance(value, dict):
        return {key: _replaced(item, rules) for key, item in value.items()}
    return value


def _similarity(*, threshold: float = 0.95, of: str = "observation_text") -> NamedHash:
    """Read the source `of`.

    Strings whose similarity is at least `threshold` count as equal; see `credit.similarity`.
    """
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0.0 < threshold <= 1.0:
        raise ConfigError(f"state hash 'similarity': threshold must be in (0, 1], got {threshold!r}")
    if importlib.util.find_spec("rapidfuzz") is None:
        raise ConfigError(f"state hash 'similarity' needs rapidfuzz; {install_hint('similarity')}")
    return NamedHash(_reader("similarity", of), float(threshold))


def _texts(batch: Batch, prepared: NamedHash) -> list[str]:
    texts: list[str] = []
    for source, value in _read(batch, prepared):
        if not isinstance(value, str):
            raise ConfigError(
                f"state hash 'similarity' compares strings, but step {len(texts)} of the batch has {type_name(value)} "
                f"({source}); use 'observation_text', 'canonical_json' or a function that returns a string"
            )
        texts.append(value)
    return texts


STATE_HASHES: Mapping[str, Callable[..., NamedHash]] = {
    "state_and_results": _state_and_results,
    "state_key": lambda: NamedHash(_recorded_key),
    "observation_text": lambda: NamedHash(_observation),
    "last_messages": _last_messages,
    "last_match": _last_match,
    "canonical_json": lambda: NamedHash(_read_json),
    "regex": _regex,
    "similarity": _similarity,
}
"""A mapping from names to factories that create a state hash from its options.

"state_and_results" reads the state key and the set of tool results before the action. It is the default for resources
whose state key does not cover the results; the default for other steps is "state_key".
"state_key" reads the key that the resource recorded before the action, or the observation if no key was recorded.
"observation_text" reads the new observation that the policy received in this step.
"""
