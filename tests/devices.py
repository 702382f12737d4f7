"""The device of the tests that are marked `device`.

REWARD_KIT_TEST_DEVICE names it: "cpu" (the default), a device of PyTorch such as "cuda" or "cuda:1", "standin", or
"standin32".
The stand-in is a device on the CPU with memory of its own (`standin_device.cpp`, compiled once): an operation on its
tensors and on CPU tensors fails as it does on a GPU. It finds tensors that are on the wrong device without a GPU, but
it has no kernels, streams or rounding of its own. "standin32" is the same device without float64, which MPS lacks too.
On such a device, tests use float32 instead of float64.
"""

from __future__ import annotations

import hashlib
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from reward_kit.agent.policies.hf.model import parse_device
from reward_kit.torch_cpu import float64_device

TESTS = str(Path(__file__).parent)
_FACTORIES = frozenset(
    {torch.tensor, torch.as_tensor, torch.zeros, torch.ones, torch.full, torch.empty, torch.arange, torch.eye}
)
_RANDOM = frozenset({torch.randn, torch.rand, torch.randint, torch.randperm, torch.linspace})


def _load_standin(*, has_float64: bool) -> None:
    """Compile the stand-in device and register it with PyTorch as "standin"."""
    from torch.utils.cpp_extension import load

    torch.utils.rename_privateuse1_backend("standin")
    # `Module.to` keeps parameters and their ties, as on a GPU.
    torch.__future__.set_swap_module_params_on_conversion(True)
    source = Path(__file__).with_name("standin_device.cpp")
    # Builds are stored by name for all checkouts of the repository.
    name = f"standin_device_{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}"
    load(name, [str(source)], extra_cflags=["-O0"]).register(has_float64)
    module = types.ModuleType("torch.standin")
    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        device=lambda device: nullcontext(),
        synchronize=lambda device=None: None,
        manual_seed_all=lambda seed: None,
        _is_in_bad_fork=lambda: False,
        get_rng_state=lambda device=None: torch.zeros(0, dtype=torch.uint8),  # it has no random generator
        set_rng_state=lambda state, device=None: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )
    torch._register_device_module("standin", module)


def _load() -> torch.device:
    name = os.environ.get("REWARD_KIT_TEST_DEVICE") or "cpu"
    if name in ("standin", "standin32"):
        _load_standin(has_float64=name == "standin")
        name = "standin"
    return parse_device(name)


DEVICE = _load()
WIDEST = torch.float64 if float64_device(DEVICE) == DEVICE else torch.float32


def tolerance(of_float64: float) -> float:
    """Return a tolerance for a test in `WIDEST`."""
    return of_float64 if torch.float64 == WIDEST else 1e-5


def randomize(weight: torch.Tensor, seed: int = 0) -> None:
    """Set a weight to normal random numbers, which are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, dtype=weight.dtype, generator=generator))


class _TestTensorsOnDevice(TorchFunctionMode):
    """Create the tensors of test code on `DEVICE`; code outside of `tests/` is not helped.

    Random numbers are drawn on the CPU and then moved, so that a test has the same data on every device.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not sys._getframe(1).f_code.co_filename.startswith(TESTS):
            return func(*args, **kwargs)
        if func is torch.Tensor.double and args[0].device.type == DEVICE.type:
            return args[0].to(WIDEST)
        is_made = func in _FACTORIES or func in _RANDOM
        if not is_made or "device" in kwargs:
            return func(*args, **kwargs)
        if func in _RANDOM or torch.float64 != WIDEST:
            wants_gradient = kwargs.pop("requires_grad", False)
            made = func(*args, **kwargs)
            return made.to(DEVICE, WIDEST if made.dtype == torch.float64 else None).requires_grad_(wants_gradient)
        return func(*args, **kwargs, device=DEVICE)


@contextmanager
def tests_on_device() -> Iterator[None]:
    """Run a test with its tensors on `DEVICE`, and with exact float32 products, which a GPU may shorten to TF32."""
    if DEVICE.type == "cpu":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    with _TestTensorsOnDevice():
        yield
