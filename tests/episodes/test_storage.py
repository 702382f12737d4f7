"""Test that compact storage returns its items, from the whole, from parts, and through pickle."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.episodes.columns import same_value
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.episodes.storage import (
    CategoricalText,
    MixedRecords,
    RaggedNumbers,
    RaggedText,
    Records,
    compact,
    concat_columns,
    read_items,
    read_items_at,
    read_list,
    slice_column,
)

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=3)
record = (
    st.fixed_dictionaries({"name": st.text(max_size=2), "n": st.integers(0, 9)})
    | st.fixed_dictionaries({"n": st.integers(0, 9), "name": st.text(max_size=2)})
    | st.fixed_dictionaries({"content": leaves})
)
uniform = st.fixed_dictionaries({"a": leaves, "b": st.tuples(st.integers(), st.lists(st.integers(), max_size=2))})
few = st.sampled_from(["tool", "user", "", "é\ud800", "search"])
spoken = st.fixed_dictionaries({"role": few, "content": st.text(st.characters(), max_size=3)})
columns = (
    st.lists(record, max_size=12)
    | st.lists(few, max_size=40)
    | st.lists(spoken, max_size=40)
    | st.lists(uniform, max_size=5)
    | st.lists(st.tuples(leaves, leaves), max_size=5)
    | st.lists(st.builds(np.full, st.integers(1, 2), st.integers(0, 9)), max_size=4)
)


def written(items):
    """Return the value with types and key order, which equality ignores."""
    return repr(items)


@given(columns, st.integers(0, 12), st.integers(0, 12))
def test_parts_and_pickles_return_the_items(items, start, length):
    stored = compact(list(items), exact=True)
    assert written(read_list(stored)) == written(items)
    start = min(start, len(items))
    stop = min(start + length, len(items))
    part = slice_column(stored, start, stop)
    again = pickle.loads(pickle.dumps(part))
    for each in (part, again):
        assert len(each) == stop - start
        assert written(read_list(each)) == written(items[start:stop])
    assert written(read_items(stored, start, stop)) == written(items[start:stop])
    assert written(read_items_at(part, np.arange(stop - start)[::-2])) == written(items[start:stop][::-2])


@given(columns, columns)
def test_joined_columns_are_concatenated(left, right):
    assert same_value(read_list(concat_columns(compact(list(left)), compact(list(right)))), [*left, *right])


class TestKinds:
    def test_dicts_of_one_shape_are_stored_as_columns(self):
        stored = compact([{"role": "tool", "text": f"item {n}", "n": n} for n in range(3)])
        assert isinstance(stored, Records) and not stored.stacks
        assert isinstance(stored.columns["role"], CategoricalText)
        assert isinstance(stored.columns["text"], RaggedText)
        assert stored.columns["n"].dtype == np.int64

    def test_repeated_texts_are_stored_once(self):
        stored = compact(["user", "tool"] * 500)
        assert isinstance(stored, CategoricalText)
        assert (stored.values, stored.codes) == (["user", "tool"], b"\0\1" * 500)
        assert isinstance(compact([f"item {n % 300}" for n in range(2_000)]), RaggedText)
        assert isinstance(compact(["same"] * 40 + [str(n) for n in range(40)]), RaggedText)

    def test_text_subclass_is_not_converted(self):
        items = [np.str_("tool")] * 8
        assert compact(items) is items

    @pytest.mark.parametrize("length", [3, 31, 32, 255, 256, 70_000])
    def test_texts_of_every_length_are_restored(self, length):
        items = [f"{n}é" if n % 3 else f"{n}".ljust(length, "x") for n in range(40)]
        assert compact(items)[:] == items

    def test_dicts_with_other_key_order_or_keys_are_another_shape(self):
        for other in ({"b": 1, "a": 2}, {"a": 1}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 2}):
            items = [{"a": 1, "b": 2}] * 5 + [other] * 5
            assert written(read_list(compact(items))) == written(items)
            assert isinstance(compact(items), MixedRecords)

    def test_apparently_repeating_shapes_are_detected(self):
        items = [{"a": 1, "b": 2}, {"a": 3}, {"b": 4, "a": 5}, {"b": 6}] * 2
        assert written(read_list(compact(items))) == written(items)

    def test_dicts_of_several_shapes_are_stored_in_one_block_each(self):
        stored = compact([{"x": n} if n % 2 else {"y": "a"} for n in range(6)])
        assert isinstance(stored, MixedRecords)
        assert [len(block) for block in stored.blocks] == [3, 3]

    def test_dicts_that_all_differ_stay_a_list(self):
        items = [{str(n): n} for n in range(6)]
        assert compact(items) is items

    def test_numbers_keep_their_type(self):
        assert compact([True, False]).dtype == np.bool_
        assert compact([np.float32(1)] * 2).dtype == np.float32
        assert compact([[1], [2, 3]]).values.dtype == np.int32
        assert compact([[2**40]]).values.dtype == np.int64

    @pytest.mark.parametrize("items", [[1, 0.5], [np.float32(1)], [[1, 0.5]], [np.array(1)]])
    def test_exact_storage_keeps_items_whose_type_would_change(self, items):
        assert compact(items, exact=True) is items
        assert compact(items) is not items

    def test_arrays_with_and_without_axes_stay_a_list(self):
        items = [np.ones(2), np.array(0.5)]
        assert same_value(compact(items), items)

    def test_arrays_of_another_dtype_are_not_converted(self):
        items = [np.zeros(2), np.zeros(2, np.float32)]
        assert compact(items) is items


def test_pickled_part_contains_only_itself():
    long = [{"text": "x" * 1_000, "ids": [7] * 100} if n % 2 else {"other": "y" * 1_000} for n in range(1_000)]
    for stored in (
        compact(long),
        compact(long[::2]),
        RaggedText(["z" * 1_000] * 1_000),
        RaggedNumbers("q", [[1]] * 99),
    ):
        assert len(pickle.dumps(slice_column(stored, 50, 52))) < 4_000


ITEMS = [{"role": "tool", "content": f"item {n}", "n": n} for n in range(20)]


class TestRecordsView:
    @pytest.fixture
    def view(self):
        return slice_column(compact([*ITEMS]), 5, 15)

    def test_view_equals_the_list(self, view):
        items = ITEMS[5:15]
        assert view == items and items == view and view == slice_column(compact(ITEMS), 5, 15)
        assert view != items[:-1] and view != "text"
        assert [*view] == items and len(view) == 10 and items[3] in view
        assert (view[0], view[-1]) == (items[0], items[-1])
        assert view[2:4] == items[2:4] and view[::-3] == items[::-3] and view[4:2] == []
        assert repr(view) == f"Records({items!r})"

    def test_row_out_of_range_is_an_index_error(self, view):
        for row in (10, -11):
            with pytest.raises(IndexError, match=f"row {row} is out of range; there are 10"):
                view[row]

    def test_field_of_all_rows_is_its_column(self, view):
        assert view["content"] == [f"item {n}" for n in range(5, 15)]
        assert view["n"].tolist() == list(range(5, 15))
        with pytest.raises(KeyError, match="other"):
            view["other"]

    def test_returned_items_are_independent(self, view):
        view[0]["content"] = "changed"
        assert view[0]["content"] == "item 5"

    def test_getter_returns_a_view(self):
        episode = SingleAgentEpisode(observations=ITEMS, actions=[0] * 19, rewards=[0.0] * 19)
        listed = episode.get_observations(slice(-15, -5))
        assert listed == ITEMS[5:15]
        found = episode.to_numpy().get_observations(slice(-15, -5))
        assert isinstance(found, Records)
        assert found == listed
        assert episode.get_observations([-3, -1]) == [ITEMS[-3], ITEMS[-1]]
        assert episode.get_observations(slice(500, 600)) == []
