"""Test state hashes: which steps share a state under each hash, and which specifications are rejected."""

from __future__ import annotations

import datetime
import enum
import subprocess
import sys
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from uuid import UUID

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.agent.models import History, StepData
from reward_kit.credit.state_hashes import anchor_codes, check_state_hash, hash_steps, readable_keys, typed_key
from reward_kit.errors import ConfigError
from reward_kit.models import Message


def step(state: object = "s", history: list[Message] | None = None, **info: object) -> StepData:
    return StepData(
        system_step_index=0,
        observation_data=state,
        action_taken={"type": "text", "content": ""},
        resulting_messages_history=history or [],
        step_info=info,
    )


def share(one: StepData, two: StepData, state_hash: object) -> bool:
    first, second = anchor_codes([[one], [two]], np.zeros(2, dtype=np.int64), state_hash)
    assert (hash_steps([[one, two]], state_hash)[0] == hash_steps([[one, two]], state_hash)[1]) == (first == second)
    return bool(first == second)


# Keys


class Room(enum.Enum):
    HALL = 1


class Level(enum.IntEnum):
    ONE = 1


@dataclass(frozen=True)
class Place:
    room: object
    turn: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Square(Place):
    pass


APART = [1, 1.0, True, "1", None, b"1", np.int64(1), np.int32(1), [1], (1,), {1}, frozenset({1}), {"1": 1}, [["1", 1]]]
APART += [Room.HALL, Level.ONE, Place(1), Place(1.0), Place(True), Square(1), (Place(1),), frozenset({Place(1)})]
APART += [datetime.date(1, 1, 1), datetime.datetime(1, 1, 1), datetime.timedelta(1), datetime.time(1)]
APART += [Path("1"), PurePosixPath("1"), Decimal(1), Fraction(1), UUID(int=1), range(1), complex(1)]


@pytest.mark.parametrize("other", range(len(APART)))
def test_keys_of_different_types_differ(other):
    assert [typed_key(value) == typed_key(APART[other]) for value in APART].count(True) == 1


def test_equal_values_have_equal_keys():
    copies = [Room(1), Place(1, turn=5), datetime.date.fromisoformat("0001-01-01"), Path("./1"), (Place(1), Room.HALL)]
    originals = [Room.HALL, Place(1), datetime.date(1, 1, 1), Path("1"), (Place(1), Room.HALL)]
    assert list(map(typed_key, copies)) == list(map(typed_key, originals))


def test_value_without_a_hash_is_rejected():
    class Unhashable:
        __hash__ = None

    for value in (Unhashable(), (datetime.date(1, 1, 1), Unhashable()), Place(Unhashable())):
        with pytest.raises(ConfigError, match=r"a state hash returned an Unhashable; return a string.*unhashable type"):
            hash_steps([[step("s")]], lambda seen, value=value: value)


def test_array_keys_include_shape_and_type():
    square = np.array([[1, 2], [3, 4]])
    assert typed_key(square) != typed_key(square.ravel())
    assert typed_key(square) != typed_key(square.astype(np.int32))
    assert typed_key(square) == typed_key(np.asfortranarray(square))


def test_dict_key_ignores_order_and_differs_from_a_list_of_pairs():
    assert typed_key({"a": 1, "b": 2}) != typed_key([("a", 1), ("b", 2)])
    assert typed_key({"a": 1, "b": 2}) == typed_key({"b": 2, "a": 1})


def test_nan_values_have_equal_keys():
    for value in (float("nan"), np.float32("nan"), np.datetime64("NaT")):
        assert typed_key(value) == typed_key(type(value)(str(value)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensor_keys_include_type_shape_and_content(dtype):
    tensor = torch.tensor([[1, 0], [1, 1]]).to(dtype)
    assert typed_key(tensor) == typed_key(tensor.clone())
    assert typed_key(tensor) != typed_key(tensor.flatten())
    assert typed_key(tensor) != typed_key(1 - tensor.long())
    assert typed_key(tensor) != typed_key(tensor.numpy() if dtype is not torch.bfloat16 else tensor.float())


def test_tensor_with_gradients_or_sparse_layout_has_a_key():
    weights = torch.eye(2, requires_grad=True)
    assert typed_key(weights) == typed_key(torch.eye(2).to_sparse())


def test_typed_key_does_not_import_torch():
    code = "import sys, reward_kit.credit.state_hashes as h; h.typed_key([1]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unhashable_state_is_rejected():
    with pytest.raises(ConfigError, match="returned an object, which is equal only to itself; return a string"):
        typed_key([object()])
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ConfigError, match="nested too deeply"):
        typed_key(endless)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(-2, 2) | st.sampled_from(["", "1", "a"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)


def same(a: object, b: object) -> bool:
    """Return whether values are equal in type, shape and content."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return repr(a) == repr(b)


@given(st.tuples(plain, plain) | plain.map(lambda value: (value, value)))
def test_keys_are_equal_exactly_if_the_values_are(pair):
    assert (typed_key(pair[0]) == typed_key(pair[1])) == same(*pair)


# Groups


def test_states_are_never_shared_between_groups():
    batch = [[step("x"), step("y")], [step("x")], [step("x")]]
    assert anchor_codes(batch, np.array([0, 0, 0, 1])).tolist()[0] == anchor_codes(batch, np.array([0, 0, 0, 1]))[2]
    assert len(set(anchor_codes(batch, np.array([0, 0, 0, 1])).tolist())) == 3


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("xyz"), st.none() | st.sampled_from("xk")), max_size=12))
def test_anchors_agree_with_a_loop_over_pairs(rows):
    batch = [[step(text, state_key=key)] for _, text, key in rows]
    anchors = anchor_codes(batch, np.array([group for group, _, _ in rows], dtype=np.int64))
    names = [(group, key is None, text if key is None else key) for group, text, key in rows]
    for i, one in enumerate(names):
        assert [anchors[i] == anchor for anchor in anchors] == [one == other for other in names]


def test_empty_batch_has_no_anchors():
    for state_hash in (None, "similarity", str):
        assert anchor_codes([], np.zeros(0, dtype=np.int64), state_hash).tolist() == []


# Named hashes


def test_default_is_the_recorded_key_or_the_observation():
    assert share(step("a", state_key="k"), step("b", state_key="k"), None)
    assert not share(step("k"), step("other", state_key="k"), "state_key")
    assert not share(step("a", state_key="k"), step("b", state_key="k"), "observation_text")


def said(role: str, content: str, **more: object) -> Message:
    return Message(role=role, content=content, **more)


def test_last_messages_excludes_the_action_and_later_messages():
    opening = [said("system", "rules"), said("user", "go")]
    left = step(history=[*opening, said("assistant", "left"), said("user", "a wall")])
    right = step(history=[*opening, said("assistant", "right"), said("user", "a door")])
    assert share(left, right, {"name": "last_messages", "count": 2})
    other = step(history=[said("system", "no rules"), said("user", "go"), said("assistant", "left")])
    assert share(left, other, {"name": "last_messages", "count": 1})
    assert not share(left, other, {"name": "last_messages", "count": 2})


def test_last_messages_compares_calls_without_their_ids():
    def after(call_id: str, arguments: str) -> StepData:
        call = {"id": call_id, "function": {"name": "look", "arguments": arguments}}
        messages = [said("assistant", "", tool_calls=[call]), said("tool", "seen", tool_call_id=call_id)]
        return step(history=History([*messages, said("assistant", "done"), said("user", "later")], 3))

    assert share(after("c1", "{}"), after("c2", "{}"), {"name": "last_messages", "count": 2})
    assert not share(after("c1", "{}"), after("c1", '{"at": 1}'), {"name": "last_messages", "count": 2})


def test_last_messages_with_the_whole_history_shares_no_states():
    messages = [said("user", "look"), said("assistant", "a"), said("user", "look"), said("assistant", "b")]
    early, late = step(history=messages[:2]), step(history=messages)
    assert share(early, late, {"name": "last_messages", "count": 1})
    assert not share(early, late, {"name": "last_messages", "count": 9})


@pytest.mark.parametrize(
    ("one", "two", "shared"),
    [
        ('{"a": 1, "b": 2}', '{ "b":2,\n"a":1 }', True),
        ('{"a": 1}', '{"a": 1.0}', False),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 1}', {"a": 1}, True),
        ('{"a": 1', '{"a": 1', True),
        ('{"a": 1', '{"a":1', False),
        ('"x"', "x", False),
        ("[" * 100_000, "[" * 100_000, True),
        ("[" * 400 + "]" * 400, "[" * 400 + " ]" * 400, True),
    ],
)
def test_canonical_json_parses_text(one, two, shared):
    assert share(step(one), step(two), "canonical_json") == shared


def test_regex_normalizes_times_and_ids():
    spec = {"name": "regex", "replace": {r"\d\d:\d\d": "TIME", r"id=(\w)\w*": r"id=\1"}}
    assert share(step("12:30 id=a17"), step("09:15 id=a4"), spec)
    assert not share(step("12:30 id=a17"), step("09:15 id=b4"), spec)
    assert share(step({"at": ["12:30"]}), step({"at": ["09:15"]}), spec)
    assert not share(step("x", state_key="12:30"), step("y", state_key="09:15"), spec)
    assert share(step("x", state_key=("12:30", 1)), step("y", state_key=("09:15", 1)), {**spec, "of": "state_key"})


def test_similarity_joins_near_texts():
    long = "You are in the hall. " * 20
    codes = anchor_codes([[step(long + "12:30"), step(long + "09:15"), step("cellar")]], np.zeros(3, int), "similarity")
    assert codes[0] == codes[1] != codes[2]


def test_function_receives_the_conversation_before_the_action():
    history = [Message(role="user", content="go"), Message(role="assistant", content="ok")]
    history += [Message(role="tool", content="done", tool_call_id="1")]
    seen = []
    hash_steps(
        [[step("done", history), step("done", History(history, 3))]], lambda messages: seen.append(messages) or 1
    )
    assert [type(messages) for messages in seen] == [History, History]
    assert all(list(messages) == history[:1] and messages[0] is history[0] for messages in seen)


def test_function_that_returns_none_or_a_coroutine_is_rejected():
    async def late(messages): ...

    with pytest.raises(ConfigError, match="state hash 'late' returned a coroutine"):
        hash_steps([[step("a")]], late)
    with pytest.raises(ConfigError, match="returned None; to treat all states as equal, return a constant"):
        hash_steps([[step("a")]], lambda messages: None)


def test_function_with_a_step_parameter_receives_the_step():
    one, two = step("a", state_key="k", room="hall"), step("b", state_key="k", room="cellar")
    assert share(one, two, lambda step: step.step_info["state_key"])
    assert not share(one, two, lambda extra=None, *, step: step.step_info["room"])
    assert not share(one, two, ["state_key", lambda step: step.step_info["room"]])


def test_function_is_loaded_from_a_file(tmp_path):
    (tmp_path / "hash.py").write_text("def key(step):\n    return step.step_info['room']\n\nroom = 'hall'\n")
    one, two = step("a", room="hall"), step("b", room="hall")
    assert share(one, two, f"{tmp_path}/hash.py:key")
    assert not share(one, two, ["observation_text", f"{tmp_path}/hash.py:key"])
    wrong = {"hash.py:keys": "did you mean 'key'", "no.py:key": "no such file", "hash.py:room": "is a str"}
    for reference, problem in wrong.items():
        with pytest.raises(ConfigError, match=f"state hash '.*{reference}'.* {problem}"):
            check_state_hash(f"{tmp_path}/{reference}")


def test_function_receives_the_observation_of_a_step_without_messages():
    assert share(step({"room": "hall", "t": 1}), step({"room": "hall", "t": 2}), lambda seen: seen["room"])

    def room(seen):
        return seen["room"]

    with pytest.raises(ConfigError, match="the state hash 'room', step 0: KeyError"):
        hash_steps([[step({})]], room)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("state_keys", "unknown state hash 'state_keys'; did you mean 'state_key'"),
        (3, "a state hash must be a name, a mapping with a name, a function, or a list of these, got 3"),
        ({"count": 3}, "a state hash must be a name"),
        ("last_messages", "needs the option 'count': {name: last_messages, count: …}"),
        ({"name": "last_messages", "counts": 3}, "no option 'counts'; did you mean 'count'"),
        ({"name": "last_messages", "count": 0}, "count must be a positive integer, got 0"),
        ({"name": "last_messages", "count": True}, "count must be a positive integer"),
        ({"name": "state_key", "of": "x"}, "has no option 'of'"),
        ({"name": "regex", "replace": {}}, "replace must map patterns to replacement strings"),
        ({"name": "regex", "replace": {"(": ""}}, "missing \\)"),
        ({"name": "regex", "replace": {"a": r"\2"}}, "invalid group reference"),
        ({"name": "regex", "replace": {"a": 1}}, "must be strings"),
        ({"name": "regex", "replace": {"a": ""}, "of": "state"}, "did you mean 'state_key'"),
        ({"name": "last_match", "pattern": "("}, "last_match': '\\(': missing \\)"),
        ({"name": "last_match", "pattern": ""}, "pattern must be a regular expression"),
        ("last_match", "needs the option 'pattern'"),
        ([], "needs at least one"),
        ([None], "needs at least one"),
        (["state_key", ["state_key"]], "needs at least one"),
        (["state_keys"], "did you mean 'state_key'"),
        (["state_key", "similarity"], "cannot be part of a list"),
        ({"name": "similarity", "threshold": 0}, "threshold must be in"),
        ({"name": "similarity", "threshold": 95}, "threshold must be in"),
    ],
)
def test_invalid_specification_is_rejected_before_any_step(spec, message):
    with pytest.raises(ConfigError, match=message):
        check_state_hash(spec)


def test_similarity_rejects_values_that_are_not_text():
    with pytest.raises(ConfigError, match="compares strings, but step 1 of the batch has a dict"):
        anchor_codes([[step("a"), step({})]], np.zeros(2, dtype=np.int64), "similarity")


# Readable keys


def test_readable_keys_shorten_long_text_with_a_digest():
    long, other = "x" * 500, "x" * 499 + "y"
    short, first, second, data = readable_keys([[step("at the door"), step(long), step(other), step({"a": 1})]])
    assert short == "at the door"
    assert first.startswith("xxx") and len(first) <= 80 and first != second
    assert data.startswith("{'a': 1} #")


def test_readable_keys_are_equal_in_every_process():
    expected = readable_keys([[step({"b": {1, 2, 3}, "a": np.arange(3)})]])[0]
    code = (
        "import numpy as np\nfrom reward_kit.agent.models import StepData\n"
        "from reward_kit.credit.state_hashes import readable_keys\n"
        "step = StepData(system_step_index=0, observation_data={'b': {1, 2, 3}, 'a': np.arange(3)}, action_taken={})\n"
        "print(readable_keys([[step]])[0])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == expected


@given(st.lists(plain, max_size=5))
def test_readable_keys_are_equal_exactly_if_the_keys_are(values):
    batch = [[step(value) for value in values]]
    keys, readable = hash_steps(batch, "observation_text"), readable_keys(batch, "observation_text")
    assert [[a == b for b in keys] for a in keys] == [[a == b for b in readable] for a in readable]


# The last match, and several hashes together


HELD = {"name": "last_match", "pattern": r"You (take|heat) the (\w+ \d)|You put"}


def told(*answers: str) -> StepData:
    """Return a step after these observations, with an action between each two."""
    messages = [said("system", "You take the lead 1.")]
    for answer in answers:
        messages += [said("user", answer), said("assistant", "You take the mug 9.")]
    return step(answers[-1], messages)


def test_last_match_finds_the_latest_match_in_the_observations():
    assert hash_steps([[told("hall")]], HELD) == [("match", typed_key(None))]
    held, moved_on = told("hall", "You take the mug 1."), told("hall", "You take the mug 1.", "kitchen")
    assert share(held, moved_on, HELD)
    assert not share(held, told("You take the mug 2."), HELD)
    assert not share(held, told("You take the mug 1.", "You heat the mug 1."), HELD)
    assert share(told("hall"), told("You take the mug 1.", "You put it down."), HELD), "nothing held, and nothing again"
    assert share(told("You take the mug 2. You take the mug 1."), held, HELD), "the last of a message"


def test_last_match_without_groups_is_the_whole_match():
    spec = {"name": "last_match", "pattern": r"floor \d"}
    assert share(told("floor 1"), told("floor 2", "so this is floor 1, then"), spec)
    assert not share(told("floor 1"), told("floor 2"), spec)


def test_last_match_ignores_the_answer_to_the_current_action():
    messages = [said("user", "You take the mug 1."), said("assistant", "go"), said("tool", "You take the pan 1.")]
    assert share(step(history=messages), told("You take the mug 1."), HELD)


def test_list_of_hashes_shares_a_state_only_if_all_agree():
    both = ["observation_text", HELD]
    one, other = told("You take the mug 1.", "kitchen"), told("hall", "You take the mug 1.", "hall", "kitchen")
    assert share(one, other, both)
    assert not share(one, told("You take the mug 2.", "kitchen"), both)
    assert not share(one, told("You take the mug 1.", "hall"), both)
    assert share(one, told("You take the mug 1.", "hall"), [HELD]), "a list of one is that one"
    assert not share(step("a", state_key="k"), step("b", state_key="k"), ["state_key", lambda seen: seen])


WORDS = ["hall", "You take the mug 1.", "You take the pan 2.", "You heat the mug 1.", "You put it down.", "kitchen"]


@given(st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=6), max_size=8))
def test_anchors_of_combined_hashes_agree_with_a_loop(episodes):
    steps = [[told(*answers[: t + 1]) for t in range(len(answers))] for answers in episodes]
    anchors = anchor_codes(steps, np.zeros(sum(map(len, steps)), dtype=np.int64), ["observation_text", HELD])
    expected = []
    for answers in episodes:
        held = ""
        for answer in answers:
            held = " ".join(answer.split()[1:]) if "take" in answer or "heat" in answer else held
            held = "" if "put" in answer else held
            expected.append((answer, held))
    for i, one in enumerate(expected):
        assert [anchors[i] == anchor for anchor in anchors] == [one == other for other in expected]
