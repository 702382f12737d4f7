"""Test the bit-exact round trip of a state through two plain files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from reward_kit.errors import ConfigError, StoreError
from reward_kit.rl.checkpoint import read_tree, write_tree
from tests.rl.checkpoint.state_values import every_kind, same

pytestmark = pytest.mark.device


def test_state_tree_round_trip_is_bit_exact(tmp_path: Path) -> None:
    tree = every_kind()
    write_tree(tmp_path, "state", tree)
    assert same(read_tree(tmp_path, "state"), tree)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.json", "state.safetensors"]


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    weights = torch.randn(1_000)
    write_tree(tmp_path, "state", {"embedding": weights, "head": weights})
    assert (tmp_path / "state.safetensors").stat().st_size < 1.5 * weights.numel() * 4


def test_unsupported_value_is_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"state\.policy\[1\] is a function"):
        write_tree(tmp_path, "state", {"policy": [1, same]})


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write_tree(tmp_path, "state", {"a": torch.ones(3)})
    file = tmp_path / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(StoreError, match=r"state\.json and its safetensors"):
        read_tree(tmp_path, "state")
