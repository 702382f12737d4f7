"""Compact storage: whatever it is given comes back, from the whole, from any part, and through a pickle."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.episodes.columns import same_value
from reward_kit.episodes.compaction import compact, joined
from reward_kit.episodes.storage import MixedRecords, RaggedNumbers, RaggedText, Records, as_list, items_of, part_of

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=3)
record = (
    st.fixed_dictionaries({"name": st.text(max_size=2), "n": st.integers(0, 9)})
    | st.fixed_dictionaries({"n": st.integers(0, 9), "name": st.text(max_size=2)})
    | st.fixed_dictionaries({"content": leaves})
)
uniform = st.fixed_dictionaries({"a": leaves, "b": st.tuples(st.integers(), st.lists(st.integers(), max_size=2))})
columns = (
    st.lists(record, max_size=12)
    | st.lists(uniform, max_size=5)
    | st.lists(st.tuples(leaves, leaves), max_size=5)
    | st.lists(st.builds(np.full, st.integers(1, 2), st.integers(0, 9)), max_size=4)
)


def written(items):
    """With types and the order of keys, which equality does not see."""
    return repr(items)


@given(columns, st.integers(0, 12), st.integers(0, 12))
def test_parts_and_pickles_give_the_items_back(items, start, length):
    stored = compact(list(items), exact=True)
    assert written(as_list(stored)) == written(items)
    start = min(start, len(items))
    stop = min(start + length, len(items))
    part = part_of(stored, start, stop)
    again = pickle.loads(pickle.dumps(part))
    for each in (part, again):
        assert len(each) == stop - start
        assert written(as_list(each)) == written(items[start:stop])
    assert written(items_of(stored, start, stop)) == written(items[start:stop])


@given(columns, columns)
def test_joined_columns_are_one_after_the_other(left, right):
    assert same_value(as_list(joined(compact(list(left)), compact(list(right)))), [*left, *right])


class TestKinds:
    def test_dicts_of_one_shape_are_columns(self):
        stored = compact([{"role": "tool", "n": n} for n in range(3)])
        assert isinstance(stored, Records) and not stored.stacks
        assert isinstance(stored.columns["role"], RaggedText)
        assert stored.columns["n"].dtype == np.int64

    def test_dicts_of_several_shapes_are_one_set_for_each(self):
        stored = compact([{"x": n} if n % 2 else {"y": "a"} for n in range(6)])
        assert isinstance(stored, MixedRecords)
        assert [len(block) for block in stored.blocks] == [3, 3]

    def test_dicts_that_all_differ_stay_as_they_are(self):
        items = [{str(n): n} for n in range(6)]
        assert compact(items) is items

    def test_numbers_keep_their_kind(self):
        assert compact([True, False]).dtype == np.bool_
        assert compact([np.float32(1)] * 2).dtype == np.float32
        assert compact([[1], [2, 3]]).values.dtype == np.int32
        assert compact([[2**40]]).values.dtype == np.int64

    @pytest.mark.parametrize("items", [[1, 0.5], [np.float32(1)], [[1, 0.5]], [np.array(1)]])
    def test_exact_leaves_alone_what_would_change_its_type(self, items):
        assert compact(items, exact=True) is items
        assert compact(items) is not items

    def test_arrays_of_another_kind_are_not_converted(self):
        items = [np.zeros(2), np.zeros(2, np.float32)]
        assert compact(items) is items


def test_a_pickled_part_carries_only_itself():
    long = [{"text": "x" * 1_000, "ids": [7] * 100} if n % 2 else {"other": "y" * 1_000} for n in range(1_000)]
    for stored in (
        compact(long),
        compact(long[::2]),
        RaggedText(["z" * 1_000] * 1_000),
        RaggedNumbers("q", [[1]] * 99),
    ):
        assert len(pickle.dumps(part_of(stored, 50, 52))) < 4_000
