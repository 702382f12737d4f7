"""Test the index grammar of tracks against a list model, and lossless compact storage."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.episodes.columns import InfiniteLookbackBuffer, same_value
from reward_kit.episodes.storage import RaggedNumbers, RaggedText, compact

MISSING = object()


def model_item(data, lookback, index, as_lookback, fill):
    """Return the item at an index, as the module's docstring defines it."""
    position = (lookback if index >= 0 or as_lookback else len(data)) + index
    if 0 <= position < len(data):
        return data[position]
    return MISSING if fill is None else fill


def model_slice(data, lookback, part, as_lookback, fill):
    step = part.step or 1

    def place(bound):
        return lookback + bound if bound >= 0 or as_lookback else len(data) + bound

    if step > 0:
        start = lookback if part.start is None else place(part.start)
        stop = len(data) if part.stop is None else place(part.stop)
    else:
        start = len(data) - 1 if part.start is None else place(part.start)
        stop = lookback - 1 if part.stop is None else place(part.stop)
    if fill is not None:
        return [data[i] if 0 <= i < len(data) else fill for i in range(start, stop, step)]
    # Clipped as a list clips; a list writes "before the beginning" as None, since -1 would count from its end.
    start = max(start, 0 if step > 0 else -1)
    if step < 0 and start == -1:
        return []
    stop = max(stop, 0) if step > 0 else (None if stop < 0 else stop)
    return data[start:stop:step]


columns = st.integers(0, 8).flatmap(lambda n: st.tuples(st.just(list(range(100, 100 + n))), st.integers(0, n)))
bounds = st.none() | st.integers(-12, 12)
steps = st.none() | st.integers(-4, 4).filter(bool)
fills = st.none() | st.just(-1)


@given(columns, st.integers(-12, 12), st.booleans(), fills)
def test_int_index_matches_the_model(column, index, as_lookback, fill):
    data, lookback = column
    expected = model_item(data, lookback, index, as_lookback, fill)
    track = InfiniteLookbackBuffer(data, lookback)
    if expected is MISSING:
        with pytest.raises(IndexError, match=f"index {index} is out of range"):
            track.get(index, neg_index_as_lookback=as_lookback)
    else:
        assert track.get(index, neg_index_as_lookback=as_lookback, fill=fill) == expected


@given(columns, st.lists(st.integers(-12, 12), max_size=5), st.booleans())
def test_list_index_returns_the_list_of_items(column, indices, as_lookback):
    data, lookback = column
    expected = [model_item(data, lookback, index, as_lookback, -1) for index in indices]
    assert InfiniteLookbackBuffer(data, lookback).get(indices, neg_index_as_lookback=as_lookback, fill=-1) == expected


@given(columns, bounds, bounds, steps, st.booleans(), fills)
def test_slice_is_clipped_or_padded(column, start, stop, step, as_lookback, fill):
    data, lookback = column
    part = slice(start, stop, step)
    expected = model_slice(data, lookback, part, as_lookback, fill)
    assert InfiniteLookbackBuffer(data, lookback).get(part, neg_index_as_lookback=as_lookback, fill=fill) == expected


@given(st.lists(st.integers(), max_size=6), bounds, bounds, steps)
def test_slice_without_lookback_and_fill_equals_a_list_slice(data, start, stop, step):
    assert InfiniteLookbackBuffer(data, 0).get(slice(start, stop, step)) == data[start:stop:step]


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6), st.integers(0, 6), st.integers(-9, 9), st.booleans())
def test_both_states_of_a_track_are_equal(data, lookback, index, as_lookback):
    # RLlib's array state wraps round where its list state raises.
    plain, packed = InfiniteLookbackBuffer(list(data), lookback), InfiniteLookbackBuffer(compact(data), lookback)
    kwargs = {"neg_index_as_lookback": as_lookback, "fill": -7.0}
    assert plain.get(index, **kwargs) == packed.get(index, **kwargs)
    assert plain == packed


class TestColumn:
    track = InfiniteLookbackBuffer([10, 11, 12, 13], 2)

    def test_lookback_is_not_counted_and_reached_by_negative_indices(self):
        assert len(self.track) == 2
        assert list(self.track) == self.track.get() == [12, 13]
        assert self.track.get(-4) == 10
        assert self.track.get(-1) == 13
        assert self.track.get(-1, neg_index_as_lookback=True) == 11

    def test_index_before_the_lookback_is_an_error(self):
        with pytest.raises(IndexError, match="2 items and a lookback of 2; pass fill="):
            self.track.get(-3, neg_index_as_lookback=True)

    def test_negative_step_reverses(self):
        assert self.track.get(slice(None, None, -1)) == [13, 12]

    def test_huge_slice_is_clipped_without_cost(self):
        assert self.track.get(slice(-(10**15), 10**15)) == [10, 11, 12, 13]
        assert self.track.get(slice(10**15, -(10**15), -1)) == [13, 12, 11, 10]

    @pytest.mark.parametrize("index", [np.int64(1), np.array([0, 1]), (0, 1), range(2)])
    def test_integer_types_are_valid_indices(self, index):
        assert self.track.get(index) == ([12, 13] if np.ndim(index) else 13)

    @pytest.mark.parametrize("index", [True, "1", 1.0, [True], ["a"], b"1", np.array([True])])
    def test_non_integer_index_is_a_type_error(self, index):
        with pytest.raises(TypeError):
            self.track.get(index)

    def test_zero_step_is_rejected(self):
        with pytest.raises(ValueError, match="step of a slice must not be 0"):
            self.track.get(slice(0, 2, 0))

    def test_lookback_is_at_most_the_length(self):
        assert InfiniteLookbackBuffer([1, 2], 9).lookback == 2


floats = st.floats(allow_nan=True)
ragged_rows = st.lists(st.lists(floats, max_size=4), max_size=5)


@given(st.lists(st.text(st.characters()), max_size=6))
def test_ragged_text_returns_every_text(texts):
    column = RaggedText(texts)
    assert [column[i] for i in range(len(column))] == column[:] == texts
    assert column == RaggedText(texts)


def test_ragged_text_keeps_nul_surrogates_and_length():
    texts = ["trailing\0", "\ud800 alone", "", "é" * 1000]
    assert RaggedText(texts)[::-1] == texts[::-1]
    assert RaggedText(texts)[-1] == texts[-1]
    # NumPy would take 4 bytes for each character of the longest, for every text.
    assert len(RaggedText(["x"] * 99 + ["y" * 10_000]).blob) == 10_099


@given(ragged_rows)
def test_ragged_numbers_return_every_row(rows):
    column = RaggedNumbers("d", rows)
    assert same_value([column[i] for i in range(len(rows))], rows)
    assert column.lengths().tolist() == [len(row) for row in rows]
    assert same_value(column.flat().tolist(), [x for row in rows for x in row])


def test_number_out_of_range_is_rejected():
    with pytest.raises(OverflowError):
        RaggedNumbers("i", [[1, 2], [3, 2**40]])


@pytest.mark.parametrize("column", [RaggedText(["a"]), RaggedNumbers("i", [[1]])])
@pytest.mark.parametrize("index", [1, -2])
def test_row_out_of_range_is_an_index_error(column, index):
    with pytest.raises(IndexError, match=f"row {index} is out of range; there are 1"):
        column[index]


json_like = st.none() | st.booleans() | st.integers() | floats | st.text(max_size=4)
values = st.recursive(
    json_like, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner)
)


@given(st.lists(values, max_size=6) | st.lists(st.integers(), max_size=6) | ragged_rows | st.lists(floats, max_size=6))
def test_compact_storage_changes_no_value(items):
    stored = compact(list(items))
    assert same_value([stored[i] for i in range(len(stored))], items)


class TestCompact:
    def test_each_type_has_its_storage(self):
        assert isinstance(compact(["a", "bb"]), RaggedText)
        assert isinstance(compact([[1], [2, 3]]), RaggedNumbers)
        assert compact([1, 2]).dtype == np.int64
        assert compact([1, 2.5]).dtype == np.float64
        assert compact([np.zeros(3), np.ones(3)]).shape == (2, 3)

    @pytest.mark.parametrize(
        "items",
        [
            [],
            [{"name": "a"}, {"arguments": 1}],
            ["a", None],
            [True, 1],
            [[True]],
            [2**70, 1],
            [2**60 + 1, 0.5],
            [[2**70]],
            [np.zeros(2), np.zeros(3)],
        ],
    )
    def test_values_without_an_exact_array_form_stay_a_list(self, items):
        assert compact(items) is items


class TestSameValue:
    def test_nan_equals_nan_at_every_depth(self):
        nan = float("nan")
        assert same_value({"a": [nan, (nan,)]}, {"a": [float("nan"), (float("nan"),)]})
        assert same_value(np.array([nan]), np.array([nan]))

    def test_object_arrays_are_compared_item_by_item(self):
        left, right = (np.array([1, "x", float("nan"), None], dtype=object) for _ in range(2))
        left[3], right[3] = np.zeros(2), np.zeros(2)
        assert same_value(left, right)
        right[3] = np.ones(2)
        assert not same_value(left, right)

    @pytest.mark.parametrize(
        ("left", "right"),
        [
            (1, 2),
            ([1], (1,)),
            ([1], [1, 2]),
            ({"a": 1}, {"b": 1}),
            ({"a": np.zeros(2)}, {"a": np.ones(2)}),
            (np.zeros(2), [0.0, 0.0]),
            (np.array(["a"]), np.array(["b"])),
            (float("nan"), 1.0),
        ],
    )
    def test_different_values_are_unequal_without_errors(self, left, right):
        assert not same_value(left, right)
        assert not same_value(right, left)
