"""Test the conversion of rows to tensors: values, positions and dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from reward_kit.agent.rl_rollout_worker import RLRolloutWorker, collect_group
from reward_kit.agent.samples import Sample
from reward_kit.errors import ConfigError
from reward_kit.rl.learner.training_rows import to_tensors
from reward_kit.tokens import TokenBatch, build_rows, pack_rows, row_columns
from tests.rl.test_trainer import TASK
from tests.tiny_policy import PAD, TinyPolicy


async def test_real_rows_keep_every_key_shape_and_value() -> None:
    episodes = await collect_group(RLRolloutWorker(TASK, TinyPolicy()), Sample("one"), 3)
    rows = build_rows(episodes, pad_token_id=PAD)
    tensors = to_tensors(rows)
    assert tensors.keys() == rows.batch.keys()
    for key, values in rows.batch.items():
        assert tuple(tensors[key].shape) == values.shape
        np.testing.assert_allclose(tensors[key].numpy(), values, rtol=1e-6)
    integers = {key for key, values in tensors.items() if values.dtype == torch.int64}
    assert {"input_ids", "attention_mask", "action_mask", "loss_mask", "policy_versions"} <= integers
    reals = {"logprobs", "advantages", "returns", "step_rewards"}
    assert {tensors[key].dtype for key in reals} == {torch.float32}


async def test_packed_rows_become_tensors() -> None:
    episodes = await collect_group(RLRolloutWorker(TASK, TinyPolicy()), Sample("one"), 3)
    packed = pack_rows(row_columns(episodes))
    tensors = to_tensors(packed, ["input_ids", "position_ids", "row_ids", "logprobs"])
    assert {tuple(values.shape) for values in tensors.values()} == {(1, packed.cu_seqlens[-1])}
    assert (tensors["position_ids"][0] == 0).nonzero().flatten().tolist() == packed.cu_seqlens[:-1].tolist()


async def test_packed_rows_have_cu_seqlens_for_attention_kernels() -> None:
    packed = pack_rows(row_columns(await collect_group(RLRolloutWorker(TASK, TinyPolicy()), Sample("one"), 3)))
    tensors = to_tensors(packed)
    assert tensors.keys() == {*packed.batch, "cu_seqlens"}
    assert tensors["cu_seqlens"].dtype == torch.int32
    assert tensors["cu_seqlens"].tolist() == packed.cu_seqlens.tolist()
    assert to_tensors(packed, ["cu_seqlens"]).keys() == {"cu_seqlens"}


def test_only_requested_keys_are_converted() -> None:
    rows = TokenBatch({"input_ids": np.zeros((1, 2), dtype=np.int64), "returns": np.zeros((1, 2))})
    assert to_tensors(rows, keys=["input_ids"]).keys() == {"input_ids"}
    with pytest.raises(ConfigError, match="the rows have no 'input_id'; did you mean 'input_ids'"):
        to_tensors(rows, keys=["input_id"])


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.uint8, np.bool_])
def test_ids_and_masks_of_any_width_are_int64(kind: type[np.generic]) -> None:
    found = to_tensors(TokenBatch({"x": np.array([[0, 1]], dtype=kind)}))["x"]
    assert found.dtype == torch.int64 and found.tolist() == [[0, 1]]


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_real_values_have_the_requested_dtype(kind: type[np.generic], dtype: torch.dtype) -> None:
    found = to_tensors(TokenBatch({"x": np.array([[0.5, -2.0]], dtype=kind)}), dtype=dtype)["x"]
    assert found.dtype == dtype and found.tolist() == [[0.5, -2.0]]


def test_token_ids_are_not_rounded_by_the_real_dtype() -> None:
    ids = np.array([[2**24 + 1]], dtype=np.int64)
    assert to_tensors(TokenBatch({"input_ids": ids}), dtype=torch.bfloat16)["input_ids"].item() == 2**24 + 1


def test_empty_batches_give_empty_tensors() -> None:
    assert to_tensors(TokenBatch({})) == {}
    assert to_tensors(TokenBatch({"x": np.zeros((0, 3))}))["x"].shape == (0, 3)


@given(arrays.arrays(np.float64, arrays.array_shapes(min_dims=2, max_dims=2), elements=st.floats(-1e6, 1e6)))
def test_float64_round_trip_is_exact(values: np.ndarray) -> None:
    np.testing.assert_array_equal(to_tensors(TokenBatch({"x": values}), dtype=torch.float64)["x"].numpy(), values)
