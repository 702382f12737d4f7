"""Training with branching and with measured values (vine) beside GiGPO, at equal environment steps.

    .venv/bin/python benchmarks/branching.py [--out runs/branching] [--seeds 5] [--processes 2]

Runs `examples/frozen_lake_training` and `examples/alfworld_household` with the overrides of each arm. `max_env_steps`
limits every run, and the learning rate follows the share of the steps, so that each arm anneals it to the end. Arms
with the same seed start from the same weights. The last held-out evaluation is compared with that of GiGPO by paired
95% intervals over seeds. Resumable: finished runs are skipped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from learning import run_all  # noqa: E402
from learning_report import paired  # noqa: E402

from reward_kit import train  # noqa: E402

SETTINGS: dict[str, tuple[str, int, int]] = {
    "lakes": ("examples/frozen_lake_training/train.yaml", 24, 13_000),
    "household": ("examples/alfworld_household/train.yaml", 32, 60_000),
}
"""The train file, its groups per update, and the environment steps of each run."""
VINE_CONTINUATIONS = 4


def overrides(arm: str, groups: int) -> dict[str, Any]:
    """Return the overrides of an arm."""
    if arm == "branching":
        return {"rollout.samples_per_update": groups // 2, "rollout.branching": {"groups": groups // 2}}
    if arm == "vine":
        return {
            "rollout.samples_per_update": max(groups // 8, 1),
            "rollout.continuations": VINE_CONTINUATIONS,
            "credit": {"estimator": "vine"},
        }
    return {}


ARMS = ("gigpo", "branching", "vine")


def run(setting: str, arm: str, seed: int, folder: Path, steps: int) -> dict[str, Any]:
    """Train, and return the figures of the last line of `metrics.jsonl`."""
    file, groups, _ = SETTINGS[setting]
    limit = {"updates": None, "max_env_steps": steps, "evaluation.every": 1000}
    changes = {**overrides(arm, groups), **limit, "seed": seed}
    outcome = train(ROOT / file, overrides=changes, log_dir=folder)
    lines = [json.loads(line) for line in (outcome.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = next(line for line in reversed(lines) if "held_out/score" in line)
    return {
        "setting": setting,
        "arm": arm,
        "seed": seed,
        "updates": lines[-1]["update"],
        "env_steps": lines[-1]["progress/env_steps"],
        "held_out_before": lines[0].get("held_out/score"),
        "held_out": last["held_out/score"],
        "cpu_s": round(lines[-1]["time/cpu_s"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/branching"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, help="environment steps per run; default: those of the setting")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        setting, arm, seed, steps = options.one
        name = f"{setting}-{arm}-{seed}"
        result = run(setting, arm, int(seed), options.out / name, int(steps))
        (options.out / f"{name}.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
        return
    options.out.mkdir(parents=True, exist_ok=True)

    pending = []
    for seed, setting, arm in itertools.product(range(options.seeds), options.settings, ARMS):
        if not (options.out / f"{setting}-{arm}-{seed}.json").exists():
            case = [setting, arm, str(seed), str(options.steps or SETTINGS[setting][2])]
            command = [sys.executable, __file__, "--out", str(options.out), "--one", *case]
            pending.append((f"{setting} {arm} {seed}", command))
    run_all(pending, options.processes)
    for setting in options.settings:
        report(setting, options.out, options.seeds)


def report(setting: str, out: Path, seeds: int) -> None:
    """Print a line for each arm."""
    found = {
        arm: [json.loads((out / f"{setting}-{arm}-{seed}.json").read_text(encoding="utf-8")) for seed in range(seeds)]
        for arm in ARMS
    }
    for arm, results in found.items():
        differences = [one["held_out"] - base["held_out"] for one, base in zip(results, found["gigpo"], strict=True)]
        mean, (low, high), _ = paired(differences) if arm != "gigpo" else (0.0, (0.0, 0.0), None)
        line = {
            "setting": setting,
            "arm": arm,
            "seeds": seeds,
            "updates": sum(one["updates"] for one in results) / seeds,
            "env_steps": round(sum(one["env_steps"] for one in results) / seeds),
            "held_out_before": sum(one["held_out_before"] for one in results) / seeds,
            "held_out": sum(one["held_out"] for one in results) / seeds,
            "over_gigpo": mean,
            "low": low,
            "high": high,
            "cpu_s": sum(one["cpu_s"] for one in results) / seeds,
        }
        print(json.dumps(line))


if __name__ == "__main__":
    main()
