"""Memory retention and denormal handling of torch on CPU."""

from __future__ import annotations

import resource
import sys

import anyio
import anyio.to_thread
import pytest
import torch

from reward_kit.agent.policies.hf.engine import Engine
from reward_kit.agent.policies.hf.sampling import Sampling
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.ppo import PPOLearner
from reward_kit.torch_cpu import keep_freed_memory, no_denormals
from tests.agent.policies.hf.tiny_models import VOCABULARY, tiny_model
from tests.rl.learner.cases import Bigram, bigram_rows


def faults() -> int:
    """Return the page faults of ten successive tensors of 64 MiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc is told")
def test_freed_memory_is_kept() -> None:
    assert keep_freed_memory()
    faults()
    # As delivered it is 163,840 pages of 4 KiB.
    assert faults() < 20_000


def denormals_are_kept() -> bool:
    """Return whether denormal numbers are kept."""
    return bool((torch.full((1,), 1e-310, dtype=torch.float64) * 2.0 > 0.0).item())


@pytest.mark.parametrize("before", [False, True])
def test_no_denormals_restores_the_previous_mode(before: bool) -> None:
    torch.set_flush_denormal(before)
    try:
        with pytest.raises(KeyError), no_denormals():
            assert not denormals_are_kept()
            raise KeyError
        assert denormals_are_kept() is not before
    finally:
        torch.set_flush_denormal(False)


def test_learner_update_restores_the_denormal_mode() -> None:
    PPOLearner(Bigram(), PPOConfig()).update(bigram_rows([1.0]), version=0)
    assert denormals_are_kept()


async def test_engine_restores_the_denormal_mode_of_its_worker_thread() -> None:
    engine = Engine(tiny_model(), stop_ids=[VOCABULARY - 1], max_context=16, max_slots=1)
    try:
        slot = engine.open("one", seed=0)
        await engine.generate(slot, [1, 2], max_new_tokens=2, sampling=Sampling())
        assert await anyio.to_thread.run_sync(denormals_are_kept)  # the thread that lay idle, which the engine had
    finally:
        await engine.close()
