"""Test that an optimizer step waits for the device once, whatever the number of its micro-batches."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reward_kit.agent.policies.hf.model import PolicyWithValue
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.ppo import PPOLearner
from tests.devices import DEVICE, WIDEST
from tests.rl.learner.cases import a_model, some_rows

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(DEVICE.type == "cpu", reason="nothing waits for a CPU"),
    pytest.mark.skipif(torch.float64 != WIDEST, reason="sums are computed on the CPU, in float64"),
]
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2", "aten::unique_dim", "aten::masked_select"}
COPIES = {"aten::_to_copy", "aten::copy_"}


class Waits(TorchDispatchMode):
    """Record the place of each operation after which the CPU must wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, result = kwargs or {}, None
        name, devices = func._schema.name, {one.device.type for one in args if isinstance(one, torch.Tensor)}
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            devices.add(result.device.type)
        is_blocking_copy = name in COPIES and len(devices) > 1 and not kwargs.get("non_blocking")
        if (name in WAITS and DEVICE.type in devices) or is_blocking_copy:
            ours = [frame for frame in traceback.extract_stack() if "/reward_kit/rl/" in frame.filename]
            self.places.append(f"{name} in {ours[-1].name if ours else '?'}")
        return result


def waits_of(max_tokens: int, **options: Any) -> list[str]:
    """Return the places at which the gradient of a batch waits for the device."""
    module = PolicyWithValue(a_model())
    learner = PPOLearner(module, PPOConfig(max_tokens_per_micro_batch=max_tokens, **options))
    with Waits() as waits:
        learner.gradients(some_rows())
    return waits.places


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss": "gspo", "old_logprobs": "recomputed"},
        {"loss": "turn_gspo"},
        {"loss": "dppo_kl", "importance": "sequence"},
        {"aggregation": "seq-mean-token-mean", "entropy_coefficient": 0.1},
    ],
)
def test_micro_batches_do_not_wait(options: dict[str, Any]) -> None:
    few, many = waits_of(10_000, **options), waits_of(24, **options)
    # In each forward pass, `transformers` reads from the device whether the positions are those of packed rows.
    forward = "aten::_local_scalar_dense in _by_head"
    assert many.count(forward) >= 5 * few.count(forward) > 0, "there are several micro-batches"
    assert [one for one in many if one != forward] == [one for one in few if one != forward]
    assert few.count("aten::_to_copy in _gradients") == 1
