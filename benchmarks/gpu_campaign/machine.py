"""The stages about the machine: what is installed and measured, and the unit tests on its device."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_campaign.context import StageContext
from benchmarks.gpu_campaign.models import is_importable, matmul_rate, timed

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("transformers", "tokenizers", "numpy", "peft", "trl", "vllm", "triton", "flash_attn", "pytest")
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_WORDS = "PASSED|FAILED|ERROR|SKIPPED"
_OUTCOME = re.compile(rf"^(?:\[gw\d+\] \[ *\d+%\] (?P<of_worker>{_WORDS}) |\S+::.* (?P<alone>{_WORDS})\b)")
FEW_TESTS = ["tests/rl/learner/test_precision.py"]


def environment(context: StageContext) -> None:
    """Report the machine, and measure the rate of matrix products and attention kernels.

    Raises:
        RuntimeError: If torch cannot use the device.
    """
    device = context.device
    is_usable = device == "cpu" or torch.cuda.is_available()
    context.record(device_is_usable=is_usable)
    if not is_usable:
        raise RuntimeError(f"torch {torch.__version__} finds no GPU (torch.version.cuda is {torch.version.cuda})")
    context.record(python=platform.python_version(), cpu_cores=os.cpu_count() or 0)
    context.record(free_disk_gb=shutil.disk_usage(ROOT).free / 1e9, cuda=torch.version.cuda)
    for name in PACKAGES:
        context.record(**{name: importlib.metadata.version(name) if _is_installed(name) else "missing"})
    if device == "cuda":
        facts = torch.cuda.get_device_properties(0)
        context.record(gpu=facts.name, gpus=torch.cuda.device_count(), gpu_memory_gb=facts.total_memory / 1e9)
        context.record(capability=".".join(map(str, torch.cuda.get_device_capability(0))), driver=_driver())
        context.record(nccl=_known(torch.cuda.nccl.version), cudnn=_known(torch.backends.cudnn.version))
        context.record(bf16=torch.cuda.is_bf16_supported())
        context.check(torch.cuda.is_bf16_supported(), "the GPU does not support bfloat16")
    side = 8192 if context.is_full else 256
    for dtype in (torch.float32, torch.bfloat16):
        rate = matmul_rate(device, dtype, side if dtype == torch.bfloat16 else side // 2)
        context.record(**{f"matmul_{str(dtype).removeprefix('torch.')}_tflops": rate / 1e12})
    context.record(attention_ms=attention_times(context))


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _known(version: Callable[[], Any]) -> Any:
    """Return a version, or why it is unknown: a library that is missing must not end the stage."""
    try:
        return version()
    except (RuntimeError, ImportError, AttributeError, OSError) as error:
        return f"unknown ({error})"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"


def attention_times(context: StageContext) -> dict[str, float | str]:
    """Return the milliseconds of a causal attention, forward and backward, with each kernel, or why it cannot run."""
    batch, heads, length, width = (2, 12, 4096, 128) if context.is_full else (1, 2, 32, 16)
    shape = (batch, heads, length, width)
    dtype = torch.bfloat16 if context.device == "cuda" else torch.float32
    query, key, value = (torch.randn(shape, device=context.device, dtype=dtype, requires_grad=True) for _ in range(3))

    def attend() -> None:
        scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

    times: dict[str, float | str] = {}
    for name, kernel in KERNELS.items():
        try:
            with sdpa_kernel(kernel):
                times[name] = 1e3 * timed(attend, context.device)
        except RuntimeError as error:
            times[name] = str(error).partition("\n")[0][:80]
    return times


def unit_tests(context: StageContext) -> None:
    """Run the tests that are marked `device`, on the device that `REWARD_KIT_TEST_DEVICE` names."""
    # Other files may import packages that are not installed.
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.device" in path.read_text("utf-8")]
    command = [sys.executable, "-m", "pytest", "-m", "device", "-vv", "-rN", "--no-header"]
    command += [str(path) for path in files] if context.is_full else FEW_TESTS
    if context.is_full and is_importable("xdist"):
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    environment = {**os.environ, "REWARD_KIT_TEST_DEVICE": context.device, "PYTHONPATH": str(ROOT)}
    started = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    counts, failing = Counter[str](), list[str]()
    for line in started.stdout:
        print(line, end="")
        if (match := _OUTCOME.search(line)) is None:
            continue
        outcome = match["of_worker"] or match["alone"]
        counts[outcome] += 1
        if outcome in ("FAILED", "ERROR"):
            failing.append(line.strip()[:200])
        if counts.total() % 50 == 0:  # so that a time limit leaves figures
            _record_tests(context, counts, failing)
    code = started.wait()
    _record_tests(context, counts, failing)
    context.check(not failing, f"{len(failing)} tests failed: {', '.join(failing[:5])}")
    context.check(code in (0, 1), f"pytest ended with exit status {code}; see the log")


def _record_tests(context: StageContext, counts: Counter[str], failing: list[str]) -> None:
    failed = counts["FAILED"] + counts["ERROR"]
    context.record(passed=counts["PASSED"], failed=failed, skipped=counts["SKIPPED"], failing=failing[:50])
