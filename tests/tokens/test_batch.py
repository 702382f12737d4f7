"""Operations on TokenBatch keep rows intact and reject incompatible input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit.episodes.columns import same_value
from reward_kit.errors import ConfigError
from reward_kit.tokens import TokenBatch, build_rows
from tests.profiles import examples
from tests.tokens.episode_strategies import PAD, PlayedEpisode, batches, play

PADDING = st.sampled_from(["right", "left", "outer"])
quick = settings(max_examples=examples(40), deadline=None)


def rows_of(made: list[PlayedEpisode], padding: Any = "right") -> TokenBatch:
    return build_rows([one.episode for one in made], [one.steps for one in made], pad_token_id=PAD, padding=padding)


def alike(first: TokenBatch, second: TokenBatch) -> bool:
    return all(
        same_value(getattr(first, name), getattr(second, name)) for name in ("batch", "non_tensor_batch", "meta_info")
    )


def small(rows: int = 3) -> TokenBatch:
    batch = {"input_ids": np.arange(2 * rows).reshape(rows, 2), "attention_mask": np.ones((rows, 2), dtype=np.int8)}
    return TokenBatch(batch, {"uid": np.array([f"u{i}" for i in range(rows)], dtype=object)}, {"pad_token_id": PAD})


@quick
@given(made=batches(), padding=PADDING, cut=st.integers(0, 4))
def test_concat_of_separate_batches_equals_one_batch(made: list[PlayedEpisode], padding: str, cut: int) -> None:
    parts = [rows_of(made[:cut], padding), rows_of(made[cut:], padding)]
    assert alike(TokenBatch.concat(parts), rows_of(made, padding))


@quick
@given(made=batches(), padding=PADDING, cut=st.integers(0, 4))
def test_trimmed_slice_equals_batch_of_the_slice(made: list[PlayedEpisode], padding: str, cut: int) -> None:
    first = rows_of(made[:cut], padding)
    assert alike(rows_of(made, padding)[: len(first)].trim(), first)


@quick
@given(made=batches(), times=st.integers(0, 3))
def test_repeat_repeats_rows_in_both_orders(made: list[PlayedEpisode], times: int) -> None:
    rows = rows_of(made)
    together, apart = rows.repeat(times), rows.repeat(times, interleave=False)
    assert len(together) == len(apart) == times * len(rows)
    if times:
        assert alike(together[::times], rows)
        assert alike(apart, TokenBatch.concat([rows] * times))


@quick
@given(made=batches(), data=st.data())
def test_reorder_can_be_undone(made: list[PlayedEpisode], data: st.DataObject) -> None:
    rows = rows_of(made)
    order = data.draw(st.permutations(range(len(rows))))
    moved = rows.reorder(order)
    assert [item.non_tensor_batch["segment"] for item in moved] == rows.non_tensor_batch["segment"][order].tolist()
    assert alike(moved.reorder(np.argsort(order)), rows)


@quick
@given(made=batches(), size=st.integers(1, 5))
def test_split_and_chunk_keep_every_row_exactly_once(made: list[PlayedEpisode], size: int) -> None:
    rows = rows_of(made)
    if not len(rows):
        assert rows.split(size) == []
        return
    assert alike(TokenBatch.concat(rows.split(size)), rows)
    chunks = rows.chunk(min(size, len(rows)))
    assert alike(TokenBatch.concat(chunks), rows)
    sizes = [len(chunk) for chunk in chunks]
    assert max(sizes) - min(sizes) <= 1


@quick
@given(made=batches(), data=st.data())
def test_indexing_by_list_mask_and_slice_agree(made: list[PlayedEpisode], data: st.DataObject) -> None:
    rows = rows_of(made)
    first = data.draw(st.integers(0, len(rows)))
    numbers = list(range(len(rows)))[first:]
    mask = np.arange(len(rows)) >= first
    assert alike(rows[first:], rows[numbers]) and alike(rows[first:], rows[mask])
    assert len(rows[np.zeros(len(rows), dtype=bool)]) == 0


def test_concat_pads_shorter_rows_with_padding_values() -> None:
    short, long = rows_of([play("r0", [([1], [2])])]), rows_of([play("r1", [([1, 2], [3, 4])])])
    joined = TokenBatch.concat([short, long]).batch
    assert joined["input_ids"].tolist() == [[1, 2, PAD, PAD], [1, 2, 3, 4]]
    assert joined["prompt_ids"].tolist() == [[1, PAD], [1, 2]]
    assert joined["policy_versions"].tolist() == [[-1, 0, -1, -1], [-1, -1, 0, 0]]
    assert joined["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_concat_rejects_different_keys_and_names_them() -> None:
    with pytest.raises(
        ConfigError, match="different keys cannot be concatenated: batch 1 has no attention_mask in batch;"
    ):
        TokenBatch.concat([small(), small().select(["input_ids"])])
    with pytest.raises(
        ConfigError, match="different keys cannot be concatenated: batch 0 has no uid in non_tensor_batch;"
    ):
        TokenBatch.concat([small().select(non_tensor_keys=[]), small()])
    with pytest.raises(ConfigError, match="no batches to concatenate"):
        TokenBatch.concat([])


def test_concat_merges_meta_info_and_rejects_contradictions() -> None:
    first, second = small(), small()
    first.meta_info["step"], second.meta_info["policy"] = 3, float("nan")
    assert TokenBatch.concat([first, second]).meta_info == first.meta_info | second.meta_info
    second.meta_info["step"] = 4
    with pytest.raises(ConfigError, match=r"meta_info\['step'\] is 3 in one batch and 4 in another"):
        TokenBatch.concat([first, second])
    with pytest.raises(ConfigError, match=r"meta_info\['padding'\] is 'left' in one batch and 'right' in another"):
        made = play("r", [([1], [2])])
        TokenBatch.concat([rows_of([made], "left"), rows_of([made], "right")])


def test_concat_names_arrays_that_cannot_be_padded() -> None:
    extra = [TokenBatch({"images": np.zeros((1, 2, size))}) for size in (2, 3)]
    with pytest.raises(ConfigError, match=r"'images' cannot be padded .* \(2, 2\), \(2, 3\)"):
        TokenBatch.concat(extra)
    same_shape = TokenBatch.concat([extra[0], extra[0]])
    assert same_shape.batch["images"].shape == (2, 2, 2)
    made = [play("r0", [([1], [2])]), play("r1", [([1, 2], [3])])]
    with pytest.raises(ConfigError, match=r"'input_ids' cannot be padded .* if padding is 'outer'"):
        TokenBatch.concat([rows_of([one], "outer").select(["input_ids"]) for one in made])


def test_union_has_keys_of_both_batches() -> None:
    values = TokenBatch({"values": np.full((3, 2), np.nan)}, {}, {"critic": "c"})
    union = small().union(values)
    assert union.batch.keys() == {"input_ids", "attention_mask", "values"}
    assert union.meta_info == {"pad_token_id": PAD, "critic": "c"}
    assert alike(union.union(values), union)


def test_union_rejects_conflicting_values() -> None:
    other = small()
    other.batch["input_ids"][1, 1] = 0
    with pytest.raises(ConfigError, match=r"batch\['input_ids'\] differs"):
        small().union(other)
    with pytest.raises(ConfigError, match=r"non_tensor_batch\['uid'\] differs"):
        small().union(TokenBatch({}, {"uid": np.array(["u0", "u1", "x"], dtype=object)}))
    with pytest.raises(ConfigError, match="the two batches in a union must have the same number of rows, got 3 and 2"):
        small().union(small(2))


def test_select_keeps_named_keys_and_rejects_unknown_keys() -> None:
    part = small().select(["input_ids"], [], ["pad_token_id"])
    assert (part.batch.keys(), part.non_tensor_batch, part.meta_info) == ({"input_ids"}, {}, {"pad_token_id": PAD})
    assert alike(small().select(), small())
    assert len(small().select([], ["uid"])) == 3
    with pytest.raises(ConfigError, match="unknown key 'input_id' in batch; did you mean 'input_ids'"):
        small().select(["input_id"])
    with pytest.raises(ConfigError, match="unknown key 'uids' in non_tensor_batch; did you mean 'uid'"):
        small().select(non_tensor_keys=["uids"])


def test_rename_renames_keys_and_rejects_collisions() -> None:
    renamed = small().rename({"input_ids": "ids", "uid": "group"})
    assert renamed.batch.keys() == {"ids", "attention_mask"} and renamed.non_tensor_batch.keys() == {"group"}
    assert alike(renamed.rename({"ids": "input_ids", "group": "uid"}), small())
    swapped = small().rename({"input_ids": "attention_mask", "attention_mask": "input_ids"})
    assert swapped.batch["attention_mask"].tolist() == small().batch["input_ids"].tolist()
    with pytest.raises(ConfigError, match="two arrays would be named 'attention_mask'"):
        small().rename({"input_ids": "attention_mask"})
    with pytest.raises(ConfigError, match="two arrays would be named 'uid'"):
        small().rename({"input_ids": "uid"})
    with pytest.raises(ConfigError, match="unknown key 'ids'"):
        small().rename({"ids": "input_ids"})


def test_batch_rejects_arrays_with_different_row_counts() -> None:
    with pytest.raises(ConfigError, match=r"same number of rows, got \{'a': 1, 'b': 2\}"):
        TokenBatch({"a": np.zeros(1)}, {"b": np.zeros(2)})


def test_invalid_counts_and_row_indices_are_rejected() -> None:
    with pytest.raises(ConfigError, match="chunks must be between 1 and 3, the number of rows, got 4"):
        small().chunk(4)
    with pytest.raises(ConfigError, match="size must be at least 1, got 0"):
        small().split(0)
    for times in (-1, 1.5):
        with pytest.raises(ConfigError, match=f"times must be an integer of at least 0, got {times}"):
            small().repeat(times)
    with pytest.raises(ConfigError, match=r"each of the 3 row indices exactly once, got \[0.2, 1.5, 2.9\]"):
        small().reorder([0.2, 1.5, 2.9])
    with pytest.raises(ConfigError, match=r"each of the 3 row indices exactly once, got \[0, 0, 1\]"):
        small().reorder([0, 0, 1])
    with pytest.raises(IndexError):
        small()[[3]]
    with pytest.raises(IndexError):
        small()[np.array([True])]


def test_trim_needs_masks() -> None:
    with pytest.raises(ConfigError, match="no 'attention_mask'"):
        small().select(["input_ids"]).trim()
    rows = rows_of([play("r", [([1], [2])])])
    with pytest.raises(ConfigError, match="no 'completion_mask'"):
        rows.select(["prompt_ids", "attention_mask"]).trim()
    assert rows.select(["attention_mask"]).trim().batch["attention_mask"].tolist() == [[1, 1]]


@pytest.mark.parametrize("index", [True, np.True_, None, 1.0, "uid", np.array([[0], [1]]), [0.0]], ids=repr)
def test_ambiguous_numpy_indices_are_rejected(index: Any) -> None:
    with pytest.raises(IndexError, match=r"an index must be an int, a slice, a list of ints or a \(B,\) mask"):
        small()[index]
