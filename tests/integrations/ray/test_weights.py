"""Test the round trip of packed weights; does not need Ray."""

from __future__ import annotations

import torch

from reward_kit.integrations.ray.training import pack_weights, unpack_weights


def test_packed_weights_round_trip_bit_for_bit() -> None:
    weights = {"a": torch.randn(3, 5), "b": torch.randn(4).bfloat16(), "c": torch.tensor(3), "d": torch.randn(2, 0)}
    found = unpack_weights(pack_weights(weights))
    assert all(torch.equal(found[name], weights[name]) and found[name].dtype == weights[name].dtype for name in weights)
    assert sum(one.data.nbytes for one in pack_weights(weights).values()) == 60 + 8 + 8


def test_packed_weights_share_memory_with_the_tensor() -> None:
    tensor = torch.zeros(4)
    found = pack_weights({"a": tensor})
    tensor += 1.0
    assert torch.equal(unpack_weights(found)["a"], torch.ones(4)), "no copy is made before the store makes its own"
