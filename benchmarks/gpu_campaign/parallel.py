"""The stage about several processes: FSDP2 in two processes, and in one with NCCL, against a process without a group.

NCCL refuses two ranks on one GPU. With one GPU, two processes therefore share it and communicate through gloo, which
copies tensors through the CPU, and NCCL is tested with one rank; with two GPUs, each has its own and NCCL is used.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_campaign.context import StageContext  # noqa: E402
from benchmarks.gpu_campaign.models import SHAPES, epsilon, peak_memory_gb, qwen2, random_rows  # noqa: E402
from reward_kit.rl.learner.config import PPOConfig  # noqa: E402
from reward_kit.rl.learner.sharding import whole  # noqa: E402
from reward_kit.rl.ppo import PPOLearner  # noqa: E402

UPDATES = 3


class Kind(NamedTuple):
    """A model, the type of its weights, and the precision in which the learner runs it."""

    shape: str
    dtype: str
    precision: str

    @property
    def label(self) -> str:
        """The end of the names of the figures."""
        return "float64" if self.dtype == "float64" else self.precision


class Group(NamedTuple):
    """The number of processes and the backend with which they communicate."""

    processes: int
    backend: str


def groups(device: str) -> list[Group]:
    """Return the groups that this machine can form."""
    if device == "cpu":
        return [Group(2, "gloo")]
    return [Group(2, "nccl" if torch.cuda.device_count() > 1 else "gloo"), Group(1, "nccl")]


def fsdp2(context: StageContext) -> None:
    """Compare losses and gradients with those of a single process.

    They are computed in float64, where rounding explains no difference, and in bfloat16.
    """
    large = "small" if context.is_full else "tiny"
    kinds = [Kind("tiny", "float64", "float32"), Kind(large, "float32", "bfloat16")]
    for group in groups(context.device):
        if group.backend == "nccl" and not dist.is_nccl_available():
            context.skip_part(f"{group.processes} with nccl", "torch was built without NCCL")
            continue
        device = context.device
        found = _in_processes(context, group, kinds, device)
        if not found and (device, group.backend) == ("cuda", "gloo"):
            context.skip_part(
                "two processes on one GPU", "gloo did not exchange its tensors, see the log; they use the CPU"
            )
            device = "cpu"
            found = _in_processes(context, group, kinds, device)
        context.check(bool(found), f"{group.processes} processes with {group.backend} failed; see the log")
        for kind, one in zip(kinds, found, strict=False):
            label = f"{group.processes}_{group.backend}_{device}_{kind.label}"
            _compare(context, label, kind, outcome(kind, device), one)


def _compare(context: StageContext, label: str, kind: Kind, alone: dict[str, Any], found: dict[str, Any]) -> None:
    """Check that results differ no more than by rounding.

    The processes add the gradients of micro-batches in another order, which in float64 costs some epsilons. In
    bfloat16, FSDP2 also gathers rounded weights, and activations are rounded in other shapes: independent errors of
    about half an epsilon in each of the eight operations of a layer, four standard deviations of which are allowed,
    relative to the largest gradient. A micro-batch that is missing or counted twice changes gradients by a quarter.
    """
    layers = SHAPES[kind.shape].layers
    tolerance = 4 * (8 * layers) ** 0.5 * epsilon(torch.bfloat16) / 2
    # The learner's columns, such as old log-probabilities, are float64 for a float64 module.
    tolerance = tolerance if kind.precision == "bfloat16" else 1000 * epsilon(torch.float64)
    largest = max(float(one.abs().max()) for one in alone["gradients"].values())
    gradient = max(float((alone["gradients"][name] - one).abs().max()) for name, one in found["gradients"].items())
    gradient /= largest
    loss = max(abs(a - b) for a, b in zip(alone["losses"], found["losses"], strict=True))
    loss /= max(map(abs, alone["losses"]))
    context.record(**{f"{label}_loss_difference": loss, f"{label}_gradient_difference": gradient})
    context.record(**{f"{label}_tolerance": tolerance, f"{label}_peak_memory_gb": found["peak_memory_gb"]})
    context.check(gradient <= tolerance, f"{label}: gradients differ by {gradient:.2g}")
    context.check(loss <= tolerance, f"{label}: losses differ by {loss:.2g}")


def outcome(kind: Kind, device: str) -> dict[str, Any]:
    """Return the gradients of a batch, the losses of some updates, and the peak of memory."""
    shape = SHAPES[kind.shape]
    rows = random_rows(7, 32 if kind.shape == "tiny" else 512, shape.vocabulary)
    model = qwen2(shape, device, getattr(torch, kind.dtype), is_peaked=True)
    config = PPOConfig(
        lr=1e-5,
        minibatches=2,
        max_tokens_per_micro_batch=2 * rows.batch["input_ids"].shape[1],
        precision=kind.precision,  # type: ignore[arg-type]
    )
    learner = PPOLearner(model, config, seed=3, device=device)
    # Log-probabilities of the model itself, so that ratios begin at one.
    rows.batch["logprobs"][:] = learner.logprobs(rows)
    learner.gradients(rows)
    gradients = {name: whole(one.grad).double() for name, one in learner.module.named_parameters()}
    losses = [learner.update(rows, version=version)["loss"] for version in range(UPDATES)]
    return {"gradients": gradients, "losses": losses, "peak_memory_gb": peak_memory_gb(device)}


def _in_processes(context: StageContext, group: Group, kinds: list[Kind], device: str) -> list[dict[str, Any]]:
    """Run `outcome` for each kind in several processes, and return what the first found, or [] if one failed."""
    with socket.socket() as asked:
        asked.bind(("localhost", 0))
        port = asked.getsockname()[1]
    path = context.work / f"{group.processes}_{group.backend}_{device}.pt"
    command = [sys.executable, str(Path(__file__).resolve()), group.backend, device, str(path)]
    command.append(json.dumps(kinds))
    started = []
    for rank in range(group.processes):
        local = rank if group.backend == "nccl" else 0  # through gloo, all processes share the first GPU
        place = {"RANK": str(rank), "WORLD_SIZE": str(group.processes), "LOCAL_RANK": str(local)}
        place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        started.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, **place}, stdin=subprocess.DEVNULL))
    codes: list[int | None] = []
    for process in started:
        try:
            codes.append(process.wait(max(context.left_s / 2, 1)))
        except subprocess.TimeoutExpired:
            codes.append(None)
    for process in started:
        process.kill()
    print(f"  {group.processes} processes with {group.backend}: exit statuses {codes}", flush=True)
    return torch.load(path, weights_only=True) if codes == [0] * group.processes else []


def main() -> None:
    """Take part in a group, as one of the processes that `_in_processes` starts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    for name in ("backend", "device", "path", "kinds"):
        parser.add_argument(name)
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(f"cpu:gloo,cuda:{arguments.backend}")
    else:
        dist.init_process_group("gloo")
    found = [outcome(Kind(*one), arguments.device) for one in json.loads(arguments.kinds)]
    if dist.get_rank() == 0:
        torch.save(found, arguments.path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
