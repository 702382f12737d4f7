"""Run everything that depends on the device, one stage after another, and record a verdict for each.

    python benchmarks/gpu_campaign/campaign.py --device cuda --size full --out runs/gpu [--stages engine ppo_step]

Each stage runs in its own process with a time limit. Its verdict is one line in `OUT/results.jsonl`:

    pass     every check of the stage holds
    fail     a check does not hold; `reason` says which
    skip     a requirement of the whole stage is missing
    timeout  the time limit ended the stage; the figures up to then are kept
    error    the stage raised an exception or was killed

A rerun skips the stages that already have a verdict for the same device and size; `--again STAGE` repeats them. If the
runner or a stage is killed, the next run continues with the first stage without a verdict. `OUT/campaign.log` contains
the output of all stages, and `OUT/report.md` the table that is printed at the end. The exit status is 1 if a stage
failed, and 2 if the device is missing.

This file uses only the standard library, so that it also reports which packages are missing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_campaign.context import RUNNING, SkipStageError, StageContext, write_whole  # noqa: E402

RESULTS, LOG, REPORT = "results.jsonl", "campaign.log", "report.md"
LEAST_SHARE = 0.5
"""A stage starts only if at least this share of its time limit is left of the budget."""
BAD = ("fail", "timeout", "error")


class Stage(NamedTuple):
    """A stage: the module with its function, its time limits in seconds, and its purpose."""

    module: str
    full_s: float
    tiny_s: float
    purpose: str


STAGES = {
    "environment": Stage("machine", 60, 90, "GPU, memory, versions, attention kernels, measured matmul rate"),
    "losses": Stage("correctness", 60, 120, "losses, gradients and reward managers equal those of the CPU"),
    "engine": Stage("generation", 90, 180, "batched tokens equal single ones, and their logprobs the trainer's"),
    "ppo_step": Stage("speed", 150, 180, "tokens/s and memory of an update, with TRL's beside it"),
    "fsdp2": Stage("parallel", 90, 180, "two processes compute the losses and gradients of one"),
    "resume": Stage("correctness", 60, 120, "a run resumed from a checkpoint is bit-equal"),
    "lora": Stage("correctness", 60, 120, "only adapters change, and the engine acts with the merged weights"),
    "throughput": Stage("generation", 90, 180, "sampled tokens/s beside transformers generate and vLLM"),
    "unit_tests": Stage("machine", 210, 300, "tests that depend on the device"),
    "compile": Stage("speed", 90, 240, "attention kernels and torch.compile"),
    "household": Stage("household", 480, 240, "a model learns household chores; share of time by activity"),
}
"""All stages, the most important first."""


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return all verdicts. An incomplete last line, left behind by a kill, is ignored."""
    path = folder / RESULTS
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines if line.strip()]


def append_result(folder: Path, record: dict[str, Any]) -> None:
    """Append a verdict, after removing an incomplete last line."""
    with (folder / RESULTS).open("a+b") as file:
        file.seek(0)
        complete = file.read().rfind(b"\n") + 1
        file.truncate(complete)
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def latest(folder: Path, device: str, size: str) -> dict[str, dict[str, Any]]:
    """Return the last verdict of each stage for a device and size."""
    same = [one for one in read_results(folder) if (one["device"], one["size"]) == (device, size)]
    return {one["stage"]: one for one in same}


def run_in_this_process(options: argparse.Namespace) -> None:
    """Run one stage, as the process that the runner started."""
    threading.Thread(target=_die_with_runner, daemon=True).start()
    context = StageContext(options.run, options.device, options.size, options.limit_s, options.out, Path(options.work))
    try:
        module = importlib.import_module(f"benchmarks.gpu_campaign.{STAGES[options.run].module}")
        getattr(module, options.run)(context)
    except SkipStageError as reason:
        context.end("skip", str(reason))
    except Exception as error:  # noqa: BLE001 - every failure of a stage is a verdict
        traceback.print_exc()
        context.end("error", f"{type(error).__name__}: {str(error).strip()[:500]}")
    else:
        context.end("fail" if context.failures else "pass", "; ".join(context.failures)[:1000])


def _die_with_runner() -> None:
    """End this process and its children when the runner ends, even by SIGKILL. The runner holds the pipe to stdin."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def run_stage(name: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """Run a stage in a process of its own, and return its record."""
    with suppress(FileNotFoundError):
        (options.out / RUNNING).unlink()
    began, is_late = time.monotonic(), False
    with tempfile.TemporaryDirectory(prefix="gpu-campaign-") as work, (options.out / LOG).open("ab") as log:
        log.write(f"\n== {name} ({options.device}, {options.size}, limit {limit_s:.0f} s)\n".encode())
        log.flush()
        command = [sys.executable, "-u", str(Path(__file__).resolve()), "--run", name, "--work", work]
        command += ["--device", options.device, "--size", options.size, "--out", str(options.out)]
        command += ["--limit-s", f"{limit_s:.1f}"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=_environment(options.device),
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            with suppress(ProcessLookupError):  # also ends the stage's own processes
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return _record_of(name, options, process.returncode, is_late, limit_s) | {
        "seconds": round(time.monotonic() - began, 1),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _environment(device: str) -> dict[str, str]:
    # Deterministic matrix products, which the stage `resume` needs, must be requested before CUDA starts.
    defaults = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TOKENIZERS_PARALLELISM": "false"}
    if device == "cpu":  # Models this small are faster without threads that wait for each other.
        defaults["OMP_NUM_THREADS"] = "1"
    return {**defaults, **os.environ}


def _record_of(name: str, options: argparse.Namespace, code: int, is_late: bool, limit_s: float) -> dict[str, Any]:
    try:
        state = json.loads((options.out / RUNNING).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        state = {}
    verdict, reason = state.get("verdict"), state.get("reason", "")
    if verdict is None and is_late:
        verdict, reason = "timeout", f"stopped after {limit_s:.0f} s"
    elif verdict is None:
        ending = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        verdict, reason = "error", f"the process ended without a verdict ({ending}); see {LOG}"
    if verdict in ("timeout", "error") and state.get("failures"):
        reason = "; ".join([reason, *state["failures"]])
    return {
        "stage": name,
        "verdict": verdict,
        "reason": reason,
        "figures": state.get("figures", {}),
        "skipped": state.get("skipped", []),
        "device": options.device,
        "size": options.size,
        "torch": state.get("torch", ""),
        "commit": commit(),
    }


def commit() -> str:
    """Return the commit of this checkout, with a plus sign if files differ from it.

    A copy without `.git` is identified by the file that `make gpu-wheels` wrote.
    """
    asked = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--dirty=+"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode == 0:
        return asked.stdout.strip()
    noted = ROOT / "gpu-wheels" / "COMMIT"
    return noted.read_text(encoding="utf-8").strip() if noted.is_file() else "unknown"


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the verdicts as a Markdown table, followed by the figures of each stage."""
    lines = ["| Stage | Verdict | Seconds | Reason, and parts that were skipped |", "|---|---|---:|---|"]
    for name in [name for name in STAGES if name in results]:
        one = results[name]
        notes = "; ".join(text for text in (one["reason"], *one["skipped"]) if text).replace("|", "\\|")
        lines.append(f"| `{name}` | {one['verdict']} | {one['seconds']:.0f} | {notes[:400]} |")
    for name in [name for name in STAGES if name in results and results[name]["figures"]]:
        lines += ["", f"`{name}`: {STAGES[name].purpose}", ""]
        lines += [f"- {key}: {json.dumps(value)}" for key, value in results[name]["figures"].items()]
    return "\n".join(lines) + "\n"


def run(options: argparse.Namespace) -> int:
    """Run all chosen stages that have no verdict yet, and return the exit status."""
    options.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + options.budget if options.budget else float("inf")
    repeated, not_run = set(options.again), list[str]()
    for name in options.stages:
        known = latest(options.out, options.device, options.size).get(name)
        # Later stages rely on the environment, so a machine without the device is examined again.
        is_stale = name == "environment" and known is not None and known["verdict"] in BAD
        if known is not None and name not in repeated and not is_stale:
            print(f"{name:12} {known['verdict']:8} (recorded {known['time']}; --again {name} repeats it)", flush=True)
            continue
        whole_s: float = getattr(STAGES[name], f"{options.size}_s")
        limit_s = min(whole_s, ends - time.monotonic())
        if limit_s < LEAST_SHARE * whole_s:
            not_run.append(name)
            continue
        print(f"{name:12} running, at most {limit_s:.0f} s: {STAGES[name].purpose}", flush=True)
        record = run_stage(name, options, limit_s)
        append_result(options.out, record)
        print(f"{name:12} {record['verdict']:8} {record['seconds']:6.1f} s  {record['reason']}", flush=True)
        if record["figures"].get("device_is_usable") is False:
            print(f"stopped, because the device {options.device!r} cannot be used", file=sys.stderr)
            return 2
    results = latest(options.out, options.device, options.size)
    report = table(results)
    write_whole(options.out / REPORT, report)
    print(f"\n{report}")
    if not_run:
        print(f"not run, because the budget of {options.budget:.0f} s is used up: {', '.join(not_run)}")
    chosen = [results[name]["verdict"] for name in options.stages if name in results]
    return int(any(verdict in BAD for verdict in chosen) or bool(not_run))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="the folder for results and logs")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), metavar="STAGE")
    parser.add_argument("--again", nargs="+", choices=STAGES, default=[], metavar="STAGE", help="stages to repeat")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds for all stages together; 0 is no limit")
    for hidden in ("--run", "--work"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--limit-s", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    return options


if __name__ == "__main__":
    chosen = parse()
    if chosen.run:
        run_in_this_process(chosen)
    else:
        raise SystemExit(run(chosen))
