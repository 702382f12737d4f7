"""A verl plug-in that registers the CPU as an accelerator, since verl has no engine for CPUs.

With `VERL_PLATFORM=cpu` and `VERL_USE_EXTERNAL_MODULES=tests.integrations.verl.cpu_platform` in the environment.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


@PlatformRegistry.register("cpu")
class CPU(PlatformBase):
    """The CPU as an accelerator."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = SimpleNamespace(
        **dict.fromkeys(
            ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"), lambda: 0
        ),
        mem_get_info=lambda *_: (0, 0),
        empty_cache=lambda: None,
        is_available=lambda: True,
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def _nothing(self, *_: Any) -> Any:
        return None

    manual_seed_all = manual_seed
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = _nothing
    get_device_capability = visible_devices_envvar = ray_resource_name = cudart = is_ipc_supported = _nothing
    ray_noset_envvars = _nothing
